"""The picture of the README: first the question itself, then a panel a method, each beside its simplest rival.

python benchmark/overview.py    # docs/overview.png, from the CSVs of the studies
"""

import csv
import statistics
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
METHOD, RIVAL, PLAIN, FOURTH, FIFTH = "tab:green", "tab:orange", "tab:blue", "tab:red", "tab:gray"
REPLAY = {
    "plain PPO": ("plain PPO", PLAIN),
    "rejection sampling": ("imitation", RIVAL),
    "replay": ("replay", METHOD),
}
PANELS = [  # csv, rows to take, columns of arm, x and y, {arm: (label, color)}, message, labels of the axes
    ("lag_study.csv", dict(part="default", learning_rate="0.0003"), "correction", "lag", "end",
     {"none": ("none", FIFTH), "behaviour": ("behaviour", PLAIN), "decoupled": ("decoupled", RIVAL),
      "cispo": ("cispo", FOURTH), "dppo": ("dppo", METHOD)},
     "Stale samples, high learning rate:\nonly a tie to the sampler works", "lag (iterations)", "accuracy"),
    ("replay_study.csv", dict(task="rare"), "arm", "responses", "accuracy", REPLAY,
     "1 response in 100 is right: replay\nand imitation are faster", "responses", "accuracy"),
    ("replay_study.csv", dict(task="noisy"), "arm", "responses", "accuracy", REPLAY,
     "1 verdict in 10 is wrong:\nimitation copies luck", "responses", "accuracy"),
    ("het_study.csv", dict(game="lock"), "arm", "global_step", "unguided",
     {"baseline": ("GRPO", PLAIN), "sft": ("imitation", RIVAL), "HET": ("HET", METHOD)},
     "Advice for agents: HET outperforms\nGRPO, imitation is faster", "rollouts", "success without advice"),
    ("sac_curves.csv", {}, "arm", "global_step", "success_rate",
     {"cloning": ("cloning", PLAIN), "HG-DAgger": ("HG-DAgger", RIVAL),
      "demos + interventions": ("SAC + human", METHOD)},
     "A clumsy human: SAC outperforms\ncloning", "environment steps", "success"),
    ("wsrl_study.csv", dict(task="no demos"), "arm", "env_steps", "return",
     {"scratch": ("scratch", PLAIN), "bc then SAC": ("clone, SAC", RIVAL), "design": ("design", METHOD),
      "SAC then SAC": ("SAC, SAC", FOURTH)},
     "Offline warm-up from poor data:\nplain SAC is as good as the design", "online steps", "return"),
]  # fmt: skip


SETTINGS = {"HET": dict(learning_rate="0.001", epochs="2")}  # of arms that were run with several


def curves(name, where, arm_column, x, y):
    """{arm: {seed: [(x, y), ...]}}"""
    found = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(open(HERE / name, encoding="utf-8")):
        wanted = where | SETTINGS.get(row[arm_column], {})
        if all(row[key] == value for key, value in wanted.items()) and row[y]:
            found[row[arm_column]][row["seed"]].append((float(row[x]), float(row[y])))
    return found


def draw_panel(axis, name, where, arm_column, x, y, arms, title, x_label, y_label):
    found = curves(name, where, arm_column, x, y)
    if x == "lag":  # without a lag there is one policy for all corrections
        for arm in arms:
            for seed, points in found["none"].items():
                if arm != "none":
                    found[arm][seed] += [point for point in points if point[0] == 0]
    ends = []
    for arm, (label, color) in arms.items():
        seeds = [sorted(points) for points in found[arm].values()]
        num_points = min(len(points) for points in seeds)
        steps = [step for step, _ in seeds[0][:num_points]]
        ticks = list(range(num_points)) if x == "lag" else steps  # 0, 2, 8, .. at equal distances
        for points in seeds:
            heights = [height for _, height in points[:num_points]]
            axis.plot(ticks, heights, color=color, linewidth=0.8, alpha=0.3)
        # a collapse on two seeds of five would be invisible in the median
        middle = statistics.mean if x == "lag" else statistics.median
        heights = [middle(points[i][1] for points in seeds) for i in range(num_points)]
        axis.plot(ticks, heights, color=color, linewidth=3)
        ends.append((heights[-1], ticks[-1], label, color))
        if x == "lag":
            axis.set_xticks(ticks, [f"{step:g}" for step in steps])
    bottom, top = axis.get_ylim()
    height = top + 1
    for end, tick, label, color in sorted(ends, reverse=True):  # names keep a distance
        height = min(end, height - 0.09 * (top - bottom))
        axis.text(tick, height, "  " + label, color=color, va="center", fontsize=13)
    left, right = axis.get_xlim()
    axis.set_xlim(right=right + 0.42 * (right - left))
    axis.set_title(title, fontsize=14)
    axis.set_xlabel(x_label, fontsize=12)
    axis.set_ylabel(y_label, fontsize=12)
    axis.grid(alpha=0.3)


def draw(path):
    figure = Figure(figsize=(15, 8.5), layout="constrained", facecolor="white")
    for axis, panel in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        draw_panel(axis, *panel)
    note = "thick: median of the seeds (first panel: mean); thin: every seed; "
    note += "green: the method, orange: the simplest rival, blue: plain"
    figure.supxlabel(note, fontsize=12)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    draw(HERE.parent / "docs" / "overview.png")
