"""The picture of the README: a panel per idea, each method beside its simplest rival and plain training.

python benchmark/overview.py    # docs/overview.png, from the CSVs of the studies
"""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure
from panels import METHOD, PLAIN, RIVAL, SIZE, name_lines, show_lines

HERE = Path(__file__).resolve().parent
REPLAY = {
    "plain PPO": ("plain", PLAIN),
    "rejection sampling": ("imitation", RIVAL),
    "replay": ("replay", METHOD),
}
PANELS = [  # title, csv, its columns of arm, x and y, rows to take, {arm: (name, color)}, labels of the axes
    (
        "Sorting, 1 response in 100 is right:\nreplay and imitation are faster",
        ("replay_study.csv", "arm", "responses", "accuracy"),
        dict(task="rare"),
        REPLAY,
        ("responses", "accuracy"),
    ),
    (
        "Sorting, 1 verdict in 10 is wrong:\ndo not imitate",
        ("replay_study.csv", "arm", "responses", "accuracy"),
        dict(task="noisy"),
        REPLAY,
        ("responses", "accuracy"),
    ),
    (
        "Opening locks with notes: better\nthan GRPO, imitation is faster",
        ("het_study.csv", "arm", "global_step", "unguided"),
        dict(game="lock"),
        {
            "baseline": ("GRPO", PLAIN),
            "sft": ("imitation", RIVAL),
            "HET": ("HET", METHOD),
        },
        ("episodes", "success without notes"),
    ),
    (
        "Lifting a bar with a clumsy human:\nSAC outperforms imitation",
        ("sac_curves.csv", "arm", "global_step", "success_rate"),
        {},
        {
            "demos only": ("no corrections", PLAIN),
            "HG-DAgger": ("imitation", RIVAL),
            "demos + interventions": ("SAC", METHOD),
        },
        ("environment steps", "success"),
    ),
    (
        "Pendulum from poor data: with a\nwarm-up no bad first steps",
        ("wsrl_study.csv", "arm", "env_steps", "return"),
        dict(task="no demos"),
        {
            "scratch": ("no data", PLAIN),
            "bc then SAC": ("clone first", RIVAL),
            "SAC then SAC": ("warm-up", METHOD),
        },
        ("online steps", "return"),
    ),
]
SETTINGS = {"HET": dict(learning_rate="0.001", epochs="2")}  # of an arm that was run with several


def read(name):
    return list(csv.DictReader(open(HERE / name, encoding="utf-8")))


def show_learning(axis, title, columns, where, arms, labels):
    """Curves of one study over the steps of training."""
    name, arm_column, x, y = columns
    found = defaultdict(lambda: defaultdict(list))
    for row in read(name):
        wanted = where | SETTINGS.get(row[arm_column], {})
        if all(row[key] == value for key, value in wanted.items()) and row[y]:
            found[row[arm_column]][row["seed"]].append((float(row[x]), float(row[y])))
    lines = {
        label: (color, [sorted(points) for points in found[arm].values()])
        for arm, (label, color) in arms.items()
    }
    ends = show_lines(axis, lines)
    axis.set_title(title, fontsize=15, loc="left")
    axis.set_xlabel(labels[0], fontsize=13)
    axis.set_ylabel(labels[1], fontsize=13)
    axis.set_ylim(*((-1600, 60) if y == "return" else (-0.03, 1.12)))
    name_lines(axis, ends, size=14)


def show_lag(axis):
    """Accuracy with samples that are 8 iterations old: a bar per arm, a dot per seed"""
    arms = {  # name: (color, correction, learning rate)
        "plain": (PLAIN, "none", "0.0003"),
        "lower\nlearning rate": (RIVAL, "none", "0.0001"),
        "dppo": (METHOD, "dppo", "0.0003"),
    }
    rows = [row for row in read("lag_study.csv") if row["part"] == "default" and row["lag"] == "8"]
    for height, (color, correction, rate) in enumerate(arms.values()):
        ends = [
            float(row["end"])
            for row in rows
            if (row["correction"], row["learning_rate"]) == (correction, rate)
        ]
        axis.barh(height, statistics.median(ends), height=0.5, color=color, alpha=0.35)
        heights = [height + 0.09 * (i - 2) for i in range(len(ends))]
        axis.plot(ends, heights, "o", color=color, ms=8, alpha=0.8)
    axis.set_yticks(range(len(arms)), arms, weight="bold")
    for label, (color, _, _) in zip(axis.get_yticklabels(), arms.values(), strict=True):
        label.set_color(color)
    axis.set_title(
        "Sorting, samples are 8 iterations\nold: learn more slowly, or use dppo",
        fontsize=15,
        loc="left",
    )
    axis.set_xlabel("accuracy", fontsize=13)
    axis.set_xlim(-0.03, 1.05)
    axis.grid(alpha=0.25, axis="x")
    axis.spines[["top", "right"]].set_visible(False)


def draw(path):
    figure = Figure(figsize=(14.5, 9), layout="constrained")
    first, *others = figure.subplots(2, 3).flat
    show_lag(first)
    for axis, panel in zip(others, PANELS, strict=True):
        show_learning(axis, *panel)
    for axis in figure.axes:
        axis.tick_params(labelsize=12)
    roles = "green: the method · orange: its simplest rival · blue: plain"
    marks = "thick line, bar: median · thin line, dot: a seed"
    figure.supxlabel(f"{roles} · {marks}", fontsize=14)
    figure.savefig(path, **SIZE)


if __name__ == "__main__":
    draw(HERE.parent / "docs" / "overview.png")
