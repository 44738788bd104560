"""What does a warm-up buy? Online steps to a threshold, from the same offline data for every arm, frozen policies.

    python benchmark/wsrl_study.py                          # everything that is not in the CSV yet, then the tables
    python benchmark/wsrl_study.py --only MountainCarContinuous-v0 --arms scratch design --seeds 1 2
    python benchmark/wsrl_study.py --plot                   # tables and picture from the CSV

Every run is `wsrl_warmup.py` with the flags of its arm, on data made once per task and seed. Rows of wsrl_study.csv are
evaluations: the mean action on 5 fixed episodes, at `env_steps` after the warm-up (0: the offline policy).
"""

import argparse
import contextlib
import csv
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
PATH = HERE / "wsrl_study.csv"
COLUMNS = [
    "task",
    "arm",
    "seed",
    "env_steps",
    "return",
    "success",
    "q_values",
    "alpha",
    "retained_bytes",
    "cpu_seconds",
]
SEEDS = (1, 2, 3, 4, 5)  # tuned on 101 and 102
COMMON = dict(device="cpu", eval_every=100, eval_episodes=5, save_every=0, offline_steps=1_500, online_steps=1_000)
TASKS = {  # name -> return that counts as solved
    "MountainCarContinuous-v0": 90.0,
    "Pendulum-v1": -200.0,
    "Reacher-v5": -7.0,  # its demos have -8.3
}
OWN = {
    "MountainCarContinuous-v0": dict(offline_steps=5_000),  # after 1500 the policy is good, but does not last
    "Reacher-v5": dict(eval_episodes=20),  # episodes of 50 steps
}
NO_WARM_UP = dict(offline_steps=0, learning_starts=200)
DOCUMENT = dict(retention_ratio=0.2, retention_by="quality", online_cql_alpha=0.0)
ARMS = {
    "scratch": dict(preset="scratch", online_steps=5_000, eval_every=250) | NO_WARM_UP,
    "rlpd": dict(preset="rlpd") | NO_WARM_UP,
    # the paper's 5000 frozen steps would be longer than these runs
    "wsrl": dict(preset="wsrl", warmup_rollout_steps=500),
    "design": dict(),
    "design - PER": dict(use_prioritized_replay=False),
    "design - weights": dict(weighted_loss="none"),
    "design - retention": dict(retention_ratio=1.0),
    "design - decay": dict(offline_decay_rate=1.0, min_offline_ratio=0.5, initial_offline_ratio=0.5),
    "design, 1500 offline updates": dict(offline_steps=1_500),
    "wsrl, 1500 offline updates": dict(preset="wsrl", warmup_rollout_steps=500, offline_steps=1_500),
    "design, batch 128": dict(batch_size=128),
    "design, plain SAC": dict(offline_objective="sac"),
    "design, Cal-QL": dict(offline_objective="calql"),
    "design, Cal-QL offline only": dict(offline_objective="calql", online_cql_alpha=0.0),
    "design, its document's values": DOCUMENT,
}
SWEEPS = {
    "floor 0": dict(min_offline_ratio=0.0),
    "floor 0.9": dict(min_offline_ratio=0.9),
    "decay 0.99": dict(offline_decay_rate=0.99),
    "decay 0.9999": dict(offline_decay_rate=0.9999),
    "retention 0.05": dict(retention_ratio=0.05),
    "retention 0.2": dict(retention_ratio=0.2),
    "retention 0.5 by quality": dict(retention_by="quality"),
    "retention 0.5 by reward": dict(retention_by="reward"),
}
SKIPPED = {("MountainCarContinuous-v0", "design, Cal-QL")}  # the design itself, as are the next ones on the others
DESIGN = ("design, plain SAC", "design, 1500 offline updates", "wsrl, 1500 offline updates")
SKIPPED |= {(task, arm) for task in ("Pendulum-v1", "Reacher-v5") for arm in DESIGN}
SKIPPED |= {
    (task, arm) for task in ("MountainCarContinuous-v0", "Reacher-v5") for arm in (*SWEEPS, "design, batch 128")
}


def run(task, arm, seed):
    """One training run -> rows for the CSV."""
    import wsrl_warmup

    data = HERE.parent / "runs" / "wsrl_data" / task / str(seed)
    start = time.process_time()  # CPU seconds of this process: other load on the machine must not count
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = (
            COMMON | OWN.get(task, {}) | (ARMS | SWEEPS)[arm] | dict(env_id=task, seed=seed, run_dir=f"{folder}/run")
        )
        wsrl_warmup.main(wsrl_warmup.Args(**options, data_dir=str(data)))
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
        kept = json.loads(Path(f"{folder}/run/summary.json").read_text())["retained_bytes"]
    found, last = [], {}
    for row in rows:
        last |= {key: row[key] for key in ("losses/q_values", "losses/alpha") if key in row}
        if "eval/episodic_return" in row:
            q, alpha = (round(last.get(f"losses/{name}", 0.0), 4) for name in ("q_values", "alpha"))
            point = (row["charts/env_steps"], round(row["eval/episodic_return"], 2), round(row["eval/success_rate"], 2))
            found.append([task, arm, seed, *point, q, alpha, kept, round(time.process_time() - start, 1)])
    # before the warm-up every row says 0 steps: the last of them is the policy that goes online
    first = max(i for i, row in enumerate(found) if row[3] == 0)
    return found[first:]


def read():
    """{(task, arm, seed): [(env_steps, return, q_values, alpha, retained bytes), ...]}"""
    curves = {}
    if PATH.exists():
        for row in csv.DictReader(open(PATH)):
            numbers = [float(row[name]) for name in ("return", "q_values", "alpha", "retained_bytes")]
            key = row["task"], row["arm"], int(row["seed"])
            curves.setdefault(key, []).append((int(row["env_steps"]), *numbers))
    return curves


def reach(curve, threshold):
    """Environment steps until the frozen policy reaches the threshold and still has it at the next evaluation.

    Once is not enough: on MountainCarContinuous some untrained networks swing the car up. None if it never does.
    """
    good = [point[1] >= threshold for point in curve]
    return next((curve[i][0] for i in range(len(good) - 1) if good[i] and good[i + 1]), None)


def table(task, curves):
    """Markdown: arm, steps to the threshold, offline policy, mean and lowest return to step 1000, the end."""
    lines = []
    for arm in ARMS | SWEEPS:
        mine = [curve for key, curve in curves.items() if key[:2] == (task, arm)]
        if not mine:
            continue
        reached = [reach(curve, TASKS[task]) for curve in mine]
        median = sorted(x if x is not None else float("inf") for x in reached)[len(reached) // 2]
        steps = f"{median:.0f}" if median < float("inf") else f"> {mine[0][-1][0]}"
        first = [[point[1] for point in curve if point[0] <= 1000] for curve in mine]
        columns = [statistics.mean(values) for values in ([c[0] for c in first], map(statistics.mean, first))]
        columns += [statistics.mean(map(min, first)), statistics.mean(curve[-1][1] for curve in mine)]
        numbers = " | ".join(f"{x:.1f}" for x in columns)
        done = f"{sum(x is not None for x in reached)}/{len(mine)}"
        lines.append(f"| {arm} | {steps} | {done} | {numbers} | {mine[0][0][4] / 1e6:.2f} |")
    return "\n".join(lines)


def plot(curves, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if any(key[0] == task for key in curves)]
    figure = Figure(figsize=(5 * len(tasks), 4), layout="tight")
    for i, task in enumerate(tasks, 1):
        axis = figure.add_subplot(1, len(tasks), i)
        for arm in list(ARMS)[:4]:
            mine = [curve for key, curve in curves.items() if key[:2] == (task, arm)]
            if mine:
                x = [point[0] for point in min(mine, key=len)]
                y = [statistics.mean(curve[j][1] for curve in mine) for j in range(len(x))]
                axis.plot(x, y, label=f"{arm} ({len(mine)} seeds)")
        axis.axhline(TASKS[task], color="gray", linewidth=0.7)
        axis.set(title=task, xlabel="online environment steps", ylabel="return of the frozen policy")
        axis.set_xlim(-50, 3000)  # scratch goes on to 5000
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(TASKS), help="one of the tasks")
    parser.add_argument("--arms", nargs="*", default=list(ARMS | SWEEPS), help="these arms only")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--plot", action="store_true", help="no training")
    options = parser.parse_args()
    done = read()
    jobs = [(t, a, s) for s in options.seeds for t in TASKS for a in options.arms if options.only in (None, t)]
    jobs = [job for job in jobs if job not in done and job[:2] not in SKIPPED]
    for job in [] if options.plot else jobs:
        rows = run(*job)
        new = not PATH.exists()
        with open(PATH, "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows] if new else rows)
        print(f"{job}: {rows[0][4]} -> {rows[-1][4]}, {rows[-1][-1]} CPU seconds", flush=True)
    curves = read()
    for task in TASKS:
        head = "arm | steps | seeds | offline policy | mean to 1000 | lowest to 1000 | end | MB kept"
        print(f"\n{task}, threshold {TASKS[task]:g}\n| {head} |\n|{'---|' * 8}\n{table(task, curves)}")
    if curves:
        (HERE.parent / "docs").mkdir(exist_ok=True)
        plot(curves, HERE.parent / "docs" / "wsrl_study.png")
