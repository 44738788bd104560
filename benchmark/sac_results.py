"""What sac_hybrid.py learns from a clumsy human, and what imitation learns from the same human.

Each run evaluates the frozen policy, without the human, on 100 episodes that did not select it. The seeds were not used
for tuning. The tuning grid (--tune) is for the strongest imitator, on seed 101. The default
options of SAC come from four runs on seeds 101 and 102 in an earlier version of the environment.
A run that is in the CSV is not repeated, so that the study can be stopped. The curves are of the 50 episodes that
select the policy.

    python benchmark/sac_results.py                     # every arm and mode: about an hour of one core
    python benchmark/sac_results.py --arms "HG-DAgger"  # one arm
    python benchmark/sac_results.py --tune              # the grid, seed 101: five minutes
    python benchmark/sac_results.py --table             # the tables of docs/sac_hybrid.md, from the CSVs
    python benchmark/sac_results.py --plot              # docs/sac_ablation.png, from the CSVs
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))
from panels import METHOD, RIVAL, SECOND_RIVAL, SIZE, VARIANT, WIDTH, name_lines, show_lines

NAMES = ("sac_results.csv", "sac_curves.csv", "sac_tuning.csv")
RESULTS, CURVES, TUNING = (ROOT / "benchmark" / name for name in NAMES)
BC = "--algorithm bc --batch-size 64"
ALONE = "--intervention-steps 0"  # the human gives demonstrations and then leaves
ARMS = {  # name -> flags of sac_hybrid.py
    "demos + interventions": "",
    "HG-DAgger": f"{BC} --max-steps 4000",  # interventions end at step 3000: no new data
    "cloning": f"{BC} {ALONE} --max-steps 2000",
    "human": None,
    "demos only": ALONE,
}
EXPERT = "--human expert --bc-weight 0.5 --batch-size 64"
ONE_ARM = f"{EXPERT} --num-demos 50 --intervention-steps 2000"
TWO_ARMS = f"{EXPERT} --num-demos 200 --intervention-steps 3000 --max-steps 4000"
MODES = {
    "single-arm-fixed-gripper": f"{ONE_ARM} --max-steps 2000",
    "single-arm-learned-gripper": f"{ONE_ARM} --max-steps 3000",
    "dual-arm-fixed-gripper": TWO_ARMS,
    "dual-arm-learned-gripper": TWO_ARMS,
}
for mode in MODES:
    MODES[mode] = f"--setup-mode {mode} {MODES[mode]}"
GRID = {  # arm -> what was tried: seed and flags
    "HG-DAgger": [
        f"101 {BC} --max-steps 4000",
        f"101 {BC} --max-steps 4000 --lr 3e-4",
        f"101 {BC} --max-steps 4000 --utd 4",
        "101 --algorithm bc --batch-size 256 --max-steps 4000",
    ],
}
FIELDS = ("arm", "seed", "success_rate", "steps_to_success", "cpu_seconds", "command")
CURVE_FIELDS = (
    "arm",
    "seed",
    "global_step",
    "success_rate",
    "steps_to_success",
    "intervention_rate",
)


def read(path):
    """-> list of dicts, numbers as numbers, what is empty as NaN"""
    if not path.exists():
        return []
    text = ("arm", "command")
    rows = list(csv.DictReader(open(path)))
    return [{k: v if k in text else float(v or "nan") for k, v in row.items()} for row in rows]


def append(path, fields, rows):
    """Numbers are rounded to four digits after the point."""
    new = not path.exists()
    for row in rows:
        for name, value in row.items():
            if isinstance(value, float):
                row[name] = round(value, 4)
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def play_human(seed: int):
    """The built-in human alone, 100 episodes. -> success rate, steps to success"""
    sys.path.insert(0, str(ROOT))
    from sac_hybrid import BarWorld

    env = BarWorld()
    lengths = []
    for episode in range(100):
        env.reset(seed=1_000_000 + 1_000 * seed + episode)
        terminated = truncated = False
        while not (terminated or truncated):
            *_, terminated, truncated, _ = env.step(env.human())
        if terminated:
            lengths.append(env.num_steps)
    return len(lengths) / 100, float(np.mean(lengths))


def run(arm: str, flags: str, results: Path):
    """One run of sac_hybrid.py; its row goes to `results`, its curve to CURVES unless it is a tuning run."""
    seed = int(flags.split()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "sac_hybrid.py"),
            *flags.split(),
            "--run-dir",
            f"{folder}/run",
        ]
        before = os.times()
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        after = os.times()
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    report = rows[-1]
    result = {name: report.get(f"report/{name}") for name in ("success_rate", "steps_to_success")}
    curve = []
    for row in rows:
        if "charts/intervention_rate" in row:
            intervention_rate = row["charts/intervention_rate"]
        if "eval/success_rate" in row:
            point = dict(arm=arm, seed=seed, global_step=500 * round(row["global_step"] / 500))
            point["success_rate"] = row["eval/success_rate"]
            point["steps_to_success"] = row.get("eval/steps_to_success")
            if point["global_step"]:
                point["intervention_rate"] = intervention_rate
            curve.append(point)
    if results == RESULTS:
        append(CURVES, CURVE_FIELDS, curve)
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    command = f"python sac_hybrid.py {flags}"
    append(
        results,
        FIELDS,
        [dict(arm=arm, seed=seed, cpu_seconds=round(cpu), command=command) | result],
    )
    print(f"{arm}, {flags}: {result}, {cpu:.0f} CPU seconds", flush=True)


def table(rows, arms) -> str:
    """Markdown, from the CSV: mean, and lowest to highest of the seeds"""
    lines = ["| | success | steps to success | seeds | CPU s |", "|---|---|---|---|---|"]
    for arm in arms:
        own = [row for row in rows if row["arm"] == arm]
        if own:
            success, steps, cpu = (
                np.array([row[k] for row in own])
                for k in ("success_rate", "steps_to_success", "cpu_seconds")
            )
            spread = f"{success.mean():.3f} ({success.min():.2f} to {success.max():.2f})"
            steps = steps[np.isfinite(steps)]
            pace = (
                f"{steps.mean():.1f} ({steps.min():.1f} to {steps.max():.1f})"
                if len(steps)
                else "–"
            )
            took = "–" if np.isnan(cpu).any() else f"{cpu.mean():.0f}"
            lines.append(f"| {arm} | {spread} | {pace} | {len(own)} | {took} |")
    return "\n".join(lines)


def grid(rows) -> str:
    """Markdown: every tuning run"""
    lines = ["| arm | setting | success | steps to success |", "|---|---|---|---|"]
    for row in rows:
        flags = row["command"].removeprefix("python sac_hybrid.py --seed ")
        lines.append(
            f"| {row['arm']} | `{flags}` | {row['success_rate']:.2f} | {row['steps_to_success']:.1f} |"
        )
    return "\n".join(lines)


COLORS = {
    "demos + interventions": METHOD,
    "demos only": VARIANT,
    "HG-DAgger": RIVAL,
    "cloning": SECOND_RIVAL,
}
KEYS = {
    "success_rate": "success of the frozen policy",
    "steps_to_success": "steps to success",
}


def plot():
    """The median of the seeds, with every seed as a thin line."""
    from matplotlib.figure import Figure

    rows, curves = read(RESULTS), read(CURVES)
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(1, 2), KEYS.items(), strict=True):
        lines = {}
        for arm, color in COLORS.items():
            seeds = {}
            for row in curves:
                if row["arm"] == arm:  # a policy without a success has no steps to it
                    value = row[key] if np.isfinite(row[key]) else None
                    seeds.setdefault(row["seed"], []).append((row["global_step"], value))
            if seeds:
                name = f"SAC, {arm}".replace("demos + interventions", "corrected")
                name = name if arm.startswith("demos") else arm
                lines[name] = (color, list(seeds.values()))
        ends = show_lines(axis, lines)
        human = [row[key] for row in rows if row["arm"] == "human" and key in row]
        if human:
            axis.axhline(np.mean(human), color="black", linestyle="--", lw=1.2)
            ends.append((np.mean(human), ends[0][1], "the human", "black"))
        axis.set_title(title, fontsize=14, loc="left")
        axis.set_xlabel("environment steps", fontsize=12)
        axis.set_ylim(bottom=0)
        name_lines(axis, ends)
    arms = ("demos + interventions", "human")
    robot, human = (
        np.mean([row["steps_to_success"] for row in rows if row["arm"] == arm]) for arm in arms
    )
    pace = f"{robot:.1f} steps against {human:.1f}"
    figure.suptitle(f"The policy is faster than the human, {pace}; imitation is not", fontsize=15)
    figure.supxlabel("thick: median · thin: each seed", fontsize=12)
    figure.savefig(ROOT / "docs" / "sac_ablation.png", **SIZE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", default=[*ARMS, *MODES], choices=[*ARMS, *MODES])
    parser.add_argument("--seeds", nargs="+", type=int, default=[41, 42, 43, 44, 45])
    for flag in ("--tune", "--table", "--plot"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    if args.table:
        print(
            table(read(RESULTS), ARMS), table(read(RESULTS), MODES), grid(read(TUNING)), sep="\n\n"
        )
    elif args.plot:
        plot()
    elif args.tune:
        known = {row["command"] for row in read(TUNING)}
        for arm, settings in GRID.items():
            for flags in (f"--seed {setting}" for setting in settings):
                if f"python sac_hybrid.py {flags}" not in known:
                    run(arm, flags, TUNING)
    else:
        for arm in args.arms:
            for seed in args.seeds:
                if any(row["arm"] == arm and row["seed"] == seed for row in read(RESULTS)):
                    continue
                if arm == "human":
                    success, steps = play_human(seed)
                    row = dict(arm=arm, seed=seed, success_rate=success, steps_to_success=steps)
                    append(RESULTS, FIELDS, [row])
                else:
                    run(arm, f"--seed {seed} {(ARMS | MODES)[arm]}".strip(), RESULTS)
