"""The picture of the README: one panel a method, each beside its simplest rival, from the CSVs of the studies.

python benchmark/overview.py    # docs/overview.png
"""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
PANELS = [  # csv, rows to take, columns of x and y, {arm: label}, title, labels of the axes
    ("replay_study.csv", dict(task="rare"), "answers", "accuracy",
     {"plain PPO": "plain PPO", "rejection sampling": "imitation", "replay": "PPO + replay"},
     "ppo_v2.py: 1 answer in 100 is right", "answers generated", "accuracy"),
    ("replay_study.csv", dict(task="noisy"), "answers", "accuracy",
     {"plain PPO": "plain PPO", "rejection sampling": "imitation", "replay": "PPO + replay"},
     "ppo_v2.py: 1 verdict in 10 is wrong", "answers generated", "accuracy"),
    ("het_study.csv", dict(game="lock"), "global_step", "unguided",
     {"baseline": "GRPO", "sft": "imitation", "HET": "HET"},
     "het_grpo.py: locks, without advice", "rollouts", "success"),
    ("sac_curves.csv", {}, "global_step", "success_rate",
     {"cloning": "cloning", "HG-DAgger": "HG-DAgger", "demos + interventions": "SAC + human"},
     "sac_hybrid.py: a clumsy human, 10 demos", "environment steps", "success"),
    ("wsrl_study.csv", dict(task="no demos"), "env_steps", "return",
     {"scratch": "scratch", "bc then SAC": "clone, then SAC", "design": "design", "SAC then SAC": "SAC, then SAC"},
     "wsrl_warmup.py: poor data, no demos", "online steps", "return"),
]  # fmt: skip


def curves(name, where, x, y, arm_column="arm"):
    """{arm: [(x, y of each seed), ...]}"""
    found = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(open(HERE / name)):
        if all(row[key] == value for key, value in where.items()) and row[y]:
            found[row[arm_column]][float(row[x])].append(float(row[y]))
    return {arm: sorted(points.items()) for arm, points in found.items()}


def draw(path):
    figure = Figure(figsize=(15, 7.6), layout="constrained")
    axes = figure.subplots(2, 3).flat
    for axis, (name, where, x, y, arms, title, xlabel, ylabel) in zip(axes, PANELS, strict=False):
        found = curves(name, where, x, y)
        for i, (arm, label) in enumerate(arms.items()):
            seeds = max(len(values) for _, values in found[arm])
            points = [(step, values) for step, values in found[arm] if len(values) == seeds]
            steps, middle = [step for step, _ in points], [statistics.mean(values) for _, values in points]
            axis.plot(steps, middle, color=f"C{i}", label=label, linewidth=2)
            low, high = ([f(values) for _, values in points] for f in (min, max))
            axis.fill_between(steps, low, high, color=f"C{i}", alpha=0.12)
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axis.legend(loc="lower right")
        axis.grid(alpha=0.3)
    text = "Lines are means over five seeds,\nbands their range; every arm is\nexplained on its page in docs/."
    last = figure.axes[-1]
    last.text(0.5, 0.5, text, ha="center", va="center", fontsize=11)
    last.axis("off")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    draw(HERE.parent / "docs" / "overview.png")
