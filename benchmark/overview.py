"""The picture of the README: a panel per idea, each method beside its simplest rival and plain training.

python benchmark/overview.py    # docs/overview.png, from the CSVs of the studies
"""

import csv
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure
from panels import METHOD, PLAIN, RIVAL, SIZE, VARIANT, name_lines, show_lines

HERE = Path(__file__).resolve().parent
REPLAY = {
    "plain PPO": ("plain", PLAIN),
    "rejection sampling": ("imitation", RIVAL),
    "replay": ("replay", METHOD),
}
PANELS = [  # title, csv, its columns of arm, x and y, rows to take, {arm: (name, color)}, labels of the axes
    (
        "1 response in 100 is right:\nreplay and imitation outperform PPO",
        ("replay_study.csv", "arm", "responses", "accuracy"),
        dict(task="rare"),
        REPLAY,
        ("responses", "accuracy"),
    ),
    (
        "1 verdict in 10 is wrong:\nimitation copies the errors",
        ("replay_study.csv", "arm", "responses", "accuracy"),
        dict(task="noisy"),
        REPLAY,
        ("responses", "accuracy"),
    ),
    (
        "Notes for agents: HET outperforms\nGRPO, imitation is faster",
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
        "A clumsy human: SAC outperforms\nimitation, and needs the human",
        ("sac_curves.csv", "arm", "global_step", "success_rate"),
        {},
        {
            "demos only": ("SAC, no human", PLAIN),
            "HG-DAgger": ("imitation", RIVAL),
            "demos + interventions": ("SAC", METHOD),
        },
        ("environment steps", "success"),
    ),
    (
        "Poor offline data: a warm-up helps,\nits extras do not",
        ("wsrl_study.csv", "arm", "env_steps", "return"),
        dict(task="no demos"),
        {
            "scratch": ("no data", PLAIN),
            "bc then SAC": ("clone first", RIVAL),
            "SAC then SAC": ("no extras", VARIANT),
            "design": ("warm-up", METHOD),
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
    """Accuracy without a lag and with one of 8 iterations; the simple rival is a lower learning rate."""
    arms = {  # name: (color, correction, learning rate)
        "dppo": (METHOD, "dppo", "0.0003"),
        "lower rate": (RIVAL, "none", "0.0001"),
        "plain": (PLAIN, "none", "0.0003"),
    }
    rows = [row for row in read("lag_study.csv") if row["part"] == "default"]
    lines = {}
    for name, (color, correction, rate) in arms.items():
        seeds = defaultdict(list)
        for row in rows:
            # without a lag nothing is stale, and the corrections do nothing
            asked = correction if row["lag"] == "8" else "none"
            if row["lag"] in ("0", "8") and row["correction"] == asked:
                if row["learning_rate"] == rate:
                    seeds[row["seed"]].append((int(row["lag"]), float(row["end"])))
        lines[name] = (color, [sorted(points) for points in seeds.values()])
    ends = show_lines(axis, lines)
    axis.set_title(
        "Samples that are 8 iterations old:\ncorrect them, or learn more slowly",
        fontsize=15,
        loc="left",
    )
    axis.set_xlabel("age of samples (iterations)", fontsize=13)
    axis.set_ylabel("accuracy", fontsize=13)
    axis.set_xticks([0, 8])
    axis.set_ylim(-0.03, 1.12)
    name_lines(axis, ends, size=14)


def draw(path):
    figure = Figure(figsize=(15, 9), layout="constrained")
    first, *others = figure.subplots(2, 3).flat
    show_lag(first)
    for axis, panel in zip(others, PANELS, strict=True):
        show_learning(axis, *panel)
    for axis in figure.axes:
        axis.tick_params(labelsize=12)
    figure.supxlabel(
        "green: the method · orange: its simplest rival · blue: plain · thick: median · thin: each seed",
        fontsize=14,
    )
    figure.savefig(path, **SIZE)


if __name__ == "__main__":
    draw(HERE.parent / "docs" / "overview.png")
