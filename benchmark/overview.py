"""The picture of the README: first the question itself, then a panel a method, each beside its simplest rival.

python benchmark/overview.py    # docs/overview.png, from the CSVs of the studies
"""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
REPLAY = {"plain PPO": "plain PPO", "rejection sampling": "imitation", "replay": "PPO + replay"}
PANELS = [  # csv, rows to take, columns of arm, x and y, {arm: label}, message, labels of the axes
    ("lag_study.csv", dict(part="default", learning_rate="0.0003"), "correction", "lag", "end",
     {name: name for name in ("none", "behaviour", "decoupled", "dppo", "m2po")},
     "Stale samples at a high learning rate:\nonly a tie to the sampler survives", "lag, iterations", "accuracy"),
    ("replay_study.csv", dict(task="rare"), "arm", "responses", "accuracy", REPLAY,
     "1 answer in 100 is right: replay and\nimitation are sooner than plain PPO", "responses generated", "accuracy"),
    ("replay_study.csv", dict(task="noisy"), "arm", "responses", "accuracy", REPLAY,
     "1 verdict in 10 is wrong:\nimitation copies luck", "responses generated", "accuracy"),
    ("het_study.csv", dict(game="lock"), "arm", "global_step", "unguided",
     {"baseline": "GRPO", "sft": "imitation", "HET": "HET"},
     "Advice for agents: HET beats GRPO,\nimitation gets there sooner", "rollouts", "success without advice"),
    ("sac_curves.csv", {}, "arm", "global_step", "success_rate",
     {"cloning": "cloning", "HG-DAgger": "HG-DAgger", "demos + interventions": "SAC + human"},
     "A clumsy human: SAC goes beyond,\ncloning cannot", "environment steps", "success"),
    ("wsrl_study.csv", dict(task="no demos"), "arm", "env_steps", "return",
     {"scratch": "scratch", "bc then SAC": "clone, then SAC", "design": "design", "SAC then SAC": "SAC, then SAC"},
     "Offline warm-up from poor data:\nthe plainest is as good as any", "online steps", "return"),
]  # fmt: skip


def curves(name, where, arm_column, x, y):
    """{arm: [(x, y of each seed), ...]}"""
    found = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(open(HERE / name, encoding="utf-8")):
        if all(row[key] == value for key, value in where.items()) and row[y]:
            found[row[arm_column]][float(row[x])].append(float(row[y]))
    return {arm: sorted(points.items()) for arm, points in found.items()}


def draw(path):
    figure = Figure(figsize=(15, 8), layout="constrained")
    for axis, (name, where, arm_column, x, y, arms, title, *labels) in zip(
        figure.subplots(2, 3).flat, PANELS, strict=True
    ):
        found, ends = curves(name, where, arm_column, x, y), []
        for i, (arm, label) in enumerate(arms.items()):
            points = (
                found[arm] if x != "lag" or arm == "none" else found["none"][:1] + found[arm]
            )  # lag 0 is one run
            seeds = max(len(values) for _, values in points)
            points = [(step, values) for step, values in points if len(values) == seeds]
            steps, middle = (
                [step for step, _ in points],
                [statistics.mean(values) for _, values in points],
            )
            steps = steps if x != "lag" else list(range(len(steps)))  # 0, 1, 2, 4, .. evenly
            low, high = ([f(values) for _, values in points] for f in (min, max))
            axis.plot(steps, middle, color=f"C{i}", linewidth=2)
            axis.fill_between(steps, low, high, color=f"C{i}", alpha=0.1)
            ends.append((middle[-1], steps[-1], label, f"C{i}"))
            if x == "lag":
                axis.set_xticks(steps, [f"{step:g}" for step, _ in points])
        bottom, top = axis.get_ylim()
        height = top + 1
        for end, step, label, colour in sorted(
            ends, reverse=True
        ):  # names keep a distance from each other
            height = min(end, height - 0.055 * (top - bottom))
            axis.text(step, height, "  " + label, color=colour, va="center", fontsize=10)
        left, right = axis.get_xlim()
        axis.set_xlim(right=right + 0.32 * (right - left))
        axis.set_title(title, fontsize=11)
        axis.set(xlabel=labels[0], ylabel=labels[1])
        axis.grid(alpha=0.3)
    figure.supxlabel(
        "lines: means over five seeds (HET on the locks: ten); bands: their range", fontsize=10
    )
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    draw(HERE.parent / "docs" / "overview.png")
