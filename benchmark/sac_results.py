"""What sac_hybrid.py makes of a clumsy human, and what imitation makes of him: success, and steps to success.

Five seeds that nothing was tuned on (tuning: 101), the frozen policy without human on 100 fresh episodes. A run that is
in the CSV is not run again, so that the study can be stopped; curves are of the 50 episodes that choose the policy.

    python benchmark/sac_results.py                     # every arm, 31-35: about two hours of one core
    python benchmark/sac_results.py --arms "HG-DAgger"  # this one
    python benchmark/sac_results.py --table             # the table of docs/sac_hybrid.md, from the CSV
    python benchmark/sac_results.py --plot              # docs/sac_ablation.png, from both
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
RESULTS, CURVES = (ROOT / "benchmark" / name for name in ("sac_results.csv", "sac_curves.csv"))
ARMS = {  # name -> flags of sac_hybrid.py
    "demos + interventions": "",
    "HG-DAgger": "--algorithm bc --max-steps 4000",  # the human is gone after 3000: no new data
    "demos only": "--intervention-steps 0",
    "cloning": "--algorithm bc --intervention-steps 0 --max-steps 2000",
    "human": None,
    "single-arm-fixed-gripper": "--setup-mode single-arm-fixed-gripper --human expert",
    "dual-arm-fixed-gripper": "--setup-mode dual-arm-fixed-gripper --human expert",
    "dual-arm-learned-gripper": "--setup-mode dual-arm-learned-gripper --human expert",
}
FIELDS = ("arm", "seed", "success_rate", "steps_to_success", "cpu_seconds", "command")
CURVE_FIELDS = ("arm", "seed", "global_step", "success_rate", "steps_to_success", "intervention_rate")


def read(path):
    """-> list of dicts, numbers as numbers, what is empty as NaN"""
    if not path.exists():
        return []
    text = ("arm", "command")
    rows = list(csv.DictReader(open(path)))
    return [{k: v if k in text else float(v or "nan") for k, v in row.items()} for row in rows]


def append(path, fields, rows):
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def play_human(seed: int):
    """The built-in human alone, 100 episodes. -> success rate, steps to success"""
    sys.path.insert(0, str(ROOT))
    from sac_hybrid import BarWorld

    env, lengths = BarWorld(), []
    for episode in range(100):
        env.reset(seed=1_000_000 + 1_000 * seed + episode)
        terminated = truncated = False
        while not (terminated or truncated):
            *_, terminated, truncated, _ = env.step(env.human())
        lengths += [env.steps] if terminated else []
    return len(lengths) / 100, float(np.mean(lengths))


def run(arm: str, seed: int):
    if ARMS[arm] is None:
        success, steps = play_human(seed)
        append(RESULTS, FIELDS, [dict(arm=arm, seed=seed, success_rate=success, steps_to_success=steps)])
        return
    flags = f"--seed {seed} {ARMS[arm]}".strip()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "sac_hybrid.py"), *flags.split(), "--run-dir", f"{folder}/run"]
        before = os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        after = os.times()
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    names = {name: f"eval/{name}" for name in ("success_rate", "steps_to_success")}
    names["intervention_rate"] = "charts/intervention_rate"
    *curve, last = [row for row in rows if "eval/success_rate" in row]
    points = [{name: row.get(key) for name, key in names.items()} for row in curve]
    at = [dict(arm=arm, seed=seed, global_step=row["global_step"]) for row in curve]
    append(CURVES, CURVE_FIELDS, [own | point for own, point in zip(at, points, strict=True)])
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    result = dict(success_rate=last["eval/success_rate"], steps_to_success=last["eval/steps_to_success"])
    command = f"python sac_hybrid.py {flags}"
    append(RESULTS, FIELDS, [dict(arm=arm, seed=seed, cpu_seconds=round(cpu), command=command) | result])
    print(f"{arm}, seed {seed}: {result}, {cpu:.0f} CPU seconds", flush=True)


def table(rows) -> str:
    """Markdown, from the CSV: mean, and lowest to highest of the seeds"""
    lines = ["| | success | steps to success | seeds | CPU s |", "|---|---|---|---|---|"]
    for arm in ARMS:
        own = [row for row in rows if row["arm"] == arm]
        if own:
            success, steps, cpu = (
                np.array([row[k] for row in own]) for k in ("success_rate", "steps_to_success", "cpu_seconds")
            )
            spread = f"{success.mean():.3f} ({success.min():.2f} to {success.max():.2f})"
            steps = steps[np.isfinite(steps)]
            pace = f"{steps.mean():.1f} ({steps.min():.1f} to {steps.max():.1f})" if len(steps) else "–"
            took = "–" if np.isnan(cpu).any() else f"{cpu.mean():.0f}"
            lines.append(f"| {arm} | {spread} | {pace} | {len(own)} | {took} |")
    return "\n".join(lines)


def plot():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, curves = read(RESULTS), read(CURVES)
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    keys = {"success_rate": "success of the frozen policy", "steps_to_success": "steps to success"}
    keys["intervention_rate"] = "share of steps by the human"
    styles = {"demos + interventions": "C0", "HG-DAgger": "C3", "demos only": "C2", "cloning": "C7"}
    styles = {arm: colour for arm, colour in styles.items() if any(row["arm"] == arm for row in curves)}
    for axis, (key, title) in zip(axes, keys.items(), strict=True):
        for arm, colour in styles.items():
            own = [row for row in curves if row["arm"] == arm]
            steps = sorted({row["global_step"] for row in own})
            values = [[row[key] for row in own if row["global_step"] == step] for step in steps]
            values = [[v for v in at if np.isfinite(v)] or [np.nan] for at in values]
            label = f"SAC, {arm}" if arm.startswith("demos") else arm
            axis.plot(steps, [np.mean(at) for at in values], ".-", color=colour, label=label)
            axis.fill_between(steps, [min(at) for at in values], [max(at) for at in values], color=colour, alpha=0.12)
        human = [row[key] for row in rows if row["arm"] == "human" and key in row]
        if human:
            axis.axhline(np.mean(human), color="black", linestyle="--", label="the human who teaches")
        axis.set(title=title, xlabel="environment steps")
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[2].legend(*axes[0].get_legend_handles_labels(), loc="upper right")
    arms = ("demos + interventions", "human")
    robot, human = (np.mean([row["steps_to_success"] for row in rows if row["arm"] == arm]) for arm in arms)
    pace = f"{robot:.1f} steps against {human:.1f}"
    figure.suptitle(f"The robot ends faster than its teacher, {pace}; imitation does not")
    FigureCanvasAgg(figure).print_png(ROOT / "docs" / "sac_ablation.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[31, 32, 33, 34, 35])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(table(read(RESULTS)))
    elif args.plot:
        plot()
    else:
        for seed in args.seeds:
            for arm in args.arms:
                if not any(row["arm"] == arm and row["seed"] == seed for row in read(RESULTS)):
                    run(arm, seed)
