"""Every learning result of sac_hybrid.py: four modes, and the ablation of the default one, seeds 11 to 15.

    python benchmark/sac_results.py                  # about three hours on one core; skips what the CSV has already
    python benchmark/sac_results.py --draw-only      # CSV and picture from the runs that are there

Each row of sac_results.csv is one run: success of the frozen policy, without human, on 100 episodes that were not used
to choose it. sac_curves.csv holds what docs/sac_ablation.png shows.
"""

import csv
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
LEARNED = "single-arm-learned-gripper"
ARMS = {  # name -> mode, flags
    "demos + interventions": (LEARNED, []),
    "demos only": (LEARNED, ["--intervention-steps", "0"]),
    "neither": (LEARNED, ["--intervention-steps", "0", "--num-demos", "0"]),
    "behaviour cloning only": (LEARNED, ["--intervention-steps", "0", "--algorithm", "bc"]),
    "10 demos + interventions": (LEARNED, ["--num-demos", "10"]),
    "10 demos only": (LEARNED, ["--num-demos", "10", "--intervention-steps", "0"]),
    "behaviour cloning only, 10 demos": (
        LEARNED,
        ["--num-demos", "10", "--intervention-steps", "0", "--algorithm", "bc"],
    ),
    "single fixed": ("single-arm-fixed-gripper", []),
    "dual fixed": ("dual-arm-fixed-gripper", []),
    "dual learned": ("dual-arm-learned-gripper", []),
}
PANELS = {  # of the picture: title -> metric, arms
    "50 demos: success, frozen policy, no human": ("eval/success_rate", list(ARMS)[:4]),
    "10 demos: success, frozen policy, no human": ("eval/success_rate", [*list(ARMS)[4:7], "neither"]),
    "intervention rate": ("charts/intervention_rate", ["demos + interventions", "10 demos + interventions"]),
}


@dataclass
class Options:
    runs: Path = ROOT / "runs" / "sac_results"
    """where the run folders are"""
    seeds: tuple[int, ...] = (11, 12, 13, 14, 15)
    """seeds of every arm"""
    arms: tuple[str, ...] = tuple(ARMS)
    """train these only; what is there of the others stays"""
    draw_only: bool = False
    """train nothing"""


def read(name: str) -> dict:
    """(arm, seed) -> rows of a CSV that an earlier run of this script wrote."""
    path, found = ROOT / "benchmark" / f"{name}.csv", {}
    for row in list(csv.reader(open(path)))[1:] if path.exists() else []:
        arm, seed, *rest = row
        numbers = [float(cell) if cell.replace(".", "").isdigit() else cell for cell in rest]
        numbers = [int(x) if isinstance(x, float) and x.is_integer() else x for x in numbers]
        found.setdefault((arm, int(seed)), []).append((arm, int(seed), *numbers))
    return found


def main(options: Options):
    results, curves = [], []
    old_results, old_curves = read("sac_results"), read("sac_curves")
    for arm, (mode, flags) in ARMS.items():
        for seed in options.seeds:
            folder = options.runs / f"{arm.replace(' ', '_')}__{seed}"
            if not (folder / "summary.json").exists() and (arm, seed) in old_results:
                results += old_results[arm, seed]
                curves += old_curves[arm, seed]
                continue
            if not (folder / "summary.json").exists() and arm in options.arms and not options.draw_only:
                command = [sys.executable, str(ROOT / "sac_hybrid.py"), "--setup-mode", mode, "--seed", str(seed)]
                subprocess.run([*command, *flags, "--run-dir", str(folder)], check=True)
            if not (folder / "summary.json").exists():
                continue
            summary = json.loads((folder / "summary.json").read_text())
            command = " ".join(["python sac_hybrid.py", "--setup-mode", mode, *flags, "--seed", str(seed)])
            numbers = [summary[key] for key in ("global_step", "updates", "seconds")]
            results.append((arm, seed, *numbers, round(summary["eval/success_rate"], 4), command))
            for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
                for key in ("eval/success_rate", "charts/intervention_rate"):
                    if key in row:
                        curves.append((arm, seed, row["global_step"], key, round(row[key], 4)))
    header = ("arm", "seed", "env_steps", "updates", "seconds", "success_rate", "command")
    for name, rows in (("sac_results", [header, *results]),
                       ("sac_curves", [("arm", "seed", "env_steps", "metric", "value"), *curves])):  # fmt: skip
        with open(ROOT / "benchmark" / f"{name}.csv", "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    print(table(results))
    draw(curves)


def table(results) -> str:
    """Markdown: success of each seed, mean, seconds and steps of a run, command."""
    lines = []
    for arm, (mode, flags) in ARMS.items():
        mine = [row for row in results if row[0] == arm]
        if mine:
            rates, seconds = [row[5] for row in mine], np.mean([row[4] for row in mine])
            cells = [arm, " ".join(f"{rate:.2f}".lstrip("0") for rate in rates), f"{np.mean(rates):.3f}"]
            cells += [f"{seconds:.0f} s, {mine[0][2]:.0f} steps"]
            flags = ([] if mode == LEARNED else ["--setup-mode", mode]) + flags
            lines.append("| " + " | ".join([*cells, f"`{' '.join(['python sac_hybrid.py', *flags])}`"]) + " |")
    return "\n".join(lines)


def draw(curves):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    there = {row[0] for row in curves}
    panels = {title: panel for title, panel in PANELS.items() if panel[1][0] in there}
    figure = Figure(figsize=(4.7 * len(panels), 3.6), layout="tight")
    for i, (title, (key, arms)) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(1, len(panels), i)
        for arm in arms:
            points = {}
            for name, _, step, metric, value in curves:
                if name == arm and metric == key:
                    points.setdefault(step, []).append(value)
            steps = sorted(points)
            if not steps:
                continue
            means = np.array([np.mean(points[step]) for step in steps])
            low, high = ([f(points[step]) for step in steps] for f in (min, max))
            axis.plot(steps, means, label=arm)
            axis.fill_between(steps, low, high, alpha=0.15)
        axis.set(title=title, xlabel="environment steps", ylim=(-0.03, 1.03))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    (ROOT / "docs").mkdir(exist_ok=True)
    FigureCanvasAgg(figure).print_png(ROOT / "docs" / "sac_ablation.png")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
