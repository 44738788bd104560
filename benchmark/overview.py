"""The picture of the README: one panel a method, each beside its simplest rival, from the CSVs of the studies.

    python benchmark/overview.py    # docs/overview.png
"""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
PANELS = [  # csv, rows to take, column of x and y, {arm: label}, title, x label, y label
    (
        "replay_study.csv", dict(task="rarer"), "answers", "accuracy",
        {"plain PPO": "plain PPO", "rejection sampling": "imitate successes", "replay": "PPO + replay"},
        "ppo_v2.py: one answer in 1000 is right at first", "answers generated", "accuracy",
    ),
]  # fmt: skip


def curves(name, where, x, y, arm_column="arm"):
    """{arm: [(x, y of each seed), ...]}"""
    found = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(open(HERE / name)):
        if all(row[key] == value for key, value in where.items()) and row[y]:
            found[row[arm_column]][float(row[x])].append(float(row[y]))
    return {arm: sorted(points.items()) for arm, points in found.items()}


def draw(path):
    figure = Figure(figsize=(4.3 * len(PANELS), 3.6), layout="constrained")
    axes = figure.subplots(1, len(PANELS), squeeze=False)[0]
    for axis, (name, where, x, y, arms, title, xlabel, ylabel) in zip(axes, PANELS, strict=True):
        for i, (arm, label) in enumerate(arms.items()):
            points = curves(name, where, x, y).get(arm, [])
            if points:
                steps, middle = [step for step, _ in points], [statistics.mean(values) for _, values in points]
                axis.plot(steps, middle, color=f"C{i}")
                axis.fill_between(steps, [min(v) for _, v in points], [max(v) for _, v in points], alpha=0.12)
                axis.annotate(label, (steps[-1], middle[-1]), color=f"C{i}", fontsize=8, ha="right", va="bottom")
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    draw(HERE.parent / "docs" / "overview.png")
