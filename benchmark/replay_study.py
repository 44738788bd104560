"""Does replay help? Plain PPO with 1 to 32 epochs, each at its best learning rate, against replay, per rollout.

    python benchmark/replay_study.py                     # everything that is not in the CSV yet, then table and picture
    python benchmark/replay_study.py --only rare --tune  # learning rates, on seeds that are not reported
    python benchmark/replay_study.py --plot              # table and picture from the CSV

Two tasks: `rare`, sorting 5 or 6 digits, where the start policy is right in about 1 of 50 answers, and `default`, the
built-in task. Every run is `ppo_v2.py` with the flags of its arm; accuracy is greedy, on held-out prompts.
"""

import argparse
import csv
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
COLUMNS = ["task", "arm", "learning_rate", "seed", "global_step", "seconds", "train_score", "eval_score"]
SEEDS, TUNING_SEEDS = (1, 2, 3, 4, 5), (101, 102)
COMMON = dict(device="cpu", early_stopping_patience=0, save_every=0)
TASKS = {
    "rare": dict(min_digits=5, max_digits=6, batch_size=32, num_iterations=160, eval_every=10, **COMMON),
    "default": dict(eval_every=5, **COMMON),
}
REPLAY = dict(use_replay_buffer=True, max_replay_reuse=8, min_replay_size=32)
PER = dict(use_priority_sampling=True)
GREEDY = PER | dict(priority_alpha=1.0, priority_beta=0.0, priority_beta_increment=0.0)  # no weight undoes the priority
BEST = REPLAY | GREEDY | dict(priority_age_tau=50.0)
PLAIN = {f"plain, {n} epochs" if n > 1 else "plain, 1 epoch": dict(update_epochs=n) for n in (4, 8, 2, 1, 16, 32)}
ARMS = {
    "rare": PLAIN
    | {
        "plain, 4 epochs, 2.5x the rollouts": dict(num_iterations=400),
        "replay, uniform": REPLAY,
        "replay, PER": REPLAY | PER,
        "replay, PER, age": REPLAY | PER | dict(priority_age_tau=50.0),
        "replay, greedy PER, age": BEST,
        "replay, greedy PER, age, behaviour": BEST | dict(replay_correction="behaviour"),
        "replay, greedy PER, age, none": BEST | dict(replay_correction="none"),
        "replay, greedy PER, age, reuse 2": BEST | dict(max_replay_reuse=2),
        "replay, greedy PER, age, reuse 4": BEST | dict(max_replay_reuse=4),
    },
    "default": {
        "plain, 4 epochs": {},
        "replay, uniform": dict(use_replay_buffer=True),
        "replay, PER": dict(use_replay_buffer=True) | PER,
        "replay, greedy PER, age": BEST,
    },
}
RATES = {"rare": (1e-4, 3e-4, 3e-5), "default": (3e-4,)}

def run(job):
    """One training run -> rows for the CSV."""
    import torch

    torch.set_num_threads(1)
    import ppo_v2

    # CPU seconds of this process: other load on the machine must not count
    ppo_v2.time = types.SimpleNamespace(time=time.process_time, strftime=time.strftime)
    task, arm, rate, seed = job
    with tempfile.TemporaryDirectory() as folder:
        options = TASKS[task] | ARMS[task][arm] | dict(learning_rate=rate, seed=seed, run_dir=f"{folder}/run")
        sys.stdout = open("/dev/null", "w")
        ppo_v2.main(ppo_v2.Args(**options))
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    rows = [row for row in rows if "eval/score" in row]
    values = [(r["global_step"], r["time"], r.get("charts/score", ""), r["eval/score"]) for r in rows]
    return [[task, arm, rate, seed, *value] for value in values]


def read(path):
    """{(task, arm, learning rate, seed): [(global_step, seconds, eval score), ...]}"""
    curves = {}
    if path.exists():
        for row in csv.DictReader(open(path)):
            key = row["task"], row["arm"], float(row["learning_rate"]), int(row["seed"])
            point = int(row["global_step"]), float(row["seconds"]), float(row["eval_score"])
            curves.setdefault(key, []).append(point)
    return curves


def reach(curve, threshold, column=0):
    """Rollouts (or seconds) until the accuracy first reaches the threshold; None if it never does."""
    return next((point[column] for point in curve if point[2] >= threshold), None)


def area(curve):
    """Mean accuracy over the run, by rollouts."""
    return statistics.mean(point[2] for point in curve[1:])


def best_rates(tuning):
    """The learning rate with the highest mean accuracy over the run on the tuning seeds, per arm."""
    found = {}
    for (task, arm, rate, _), curve in tuning.items():
        found.setdefault((task, arm), {}).setdefault(rate, []).append(area(curve))
    return {key: max(rates, key=lambda r: statistics.mean(rates[r])) for key, rates in found.items()}


def table(task, curves, threshold):
    """Markdown rows: arm, learning rate, accuracy at the end and over the run, rollouts and seconds to it."""
    lines = []
    for arm in ARMS[task]:
        mine = {key: curve for key, curve in curves.items() if key[:2] == (task, arm)}
        if not mine:
            continue
        last, mean = ([f(curve) for curve in mine.values()] for f in (lambda c: c[-1][2], area))
        spent = [[reach(curve, threshold, column) for curve in mine.values()] for column in (0, 1)]
        median = []
        for values, worst in zip(spent, (max(c[-1][0] for c in mine.values()), None), strict=True):
            done = sorted(v if v is not None else float("inf") for v in values)[len(values) // 2]
            median.append(f"{done:.0f}" if done < float("inf") else f"> {worst}" if worst else "–")
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        rate = next(iter(mine))[2]
        lines.append(
            f"| {arm} | {rate:g} | {statistics.mean(last):.2f} ± {spread:.2f} | {statistics.mean(mean):.3f} "
            f"| {median[0]} | {median[1]} | {sum(v is not None for v in spent[0])}/{len(mine)} |"
        )
    return "\n".join(lines)


def plot(curves, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [("rare", 0, "generated rollouts"), ("rare", 1, "CPU seconds"), ("default", 0, "generated rollouts")]
    panels = [panel for panel in panels if any(key[0] == panel[0] for key in curves)]
    figure = Figure(figsize=(4 * len(panels), 4), layout="tight")
    for i, (task, column, label) in enumerate(panels, 1):
        axis = figure.add_subplot(1, len(panels), i)
        for arm in ARMS[task]:
            mine = [curve for key, curve in curves.items() if key[:2] == (task, arm)]
            if mine:
                x = [statistics.mean(points) for points in zip(*[[p[column] for p in c] for c in mine], strict=True)]
                y = [statistics.mean(points) for points in zip(*[[p[2] for p in c] for c in mine], strict=True)]
                axis.plot(x, y, label=arm, linestyle="--" if arm.startswith("plain") else "-")
        axis.set_xlabel(label)
        axis.set_title(f"{'5-6 digits, success rare at the start' if task == 'rare' else 'default task'}", fontsize=10)
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        if column == 0:
            axis.set_ylabel("greedy accuracy, held-out prompts")
            axis.legend(fontsize=6)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(TASKS), help="one of the two tasks")
    parser.add_argument("--arms", nargs="*", help="these arms only")
    parser.add_argument(
        "--tune", action="store_true", help="learning rates on the tuning seeds, into replay_tuning.csv"
    )
    parser.add_argument("--plot", action="store_true", help="no training")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    tuning_path, study_path = HERE / "replay_tuning.csv", HERE / "replay_study.csv"
    path = tuning_path if options.tune else study_path
    rates, done = best_rates(read(tuning_path)), read(path)
    jobs = []
    for task in [options.only] if options.only else TASKS:
        for seed in TUNING_SEEDS if options.tune else SEEDS:
            for arm in options.arms or ARMS[task]:
                own = RATES[task] if options.tune else [rates.get((task, arm), RATES[task][0])]
                jobs += [(task, arm, rate, seed) for rate in own if (task, arm, rate, seed) not in done]
    if not options.plot:
        new = not path.exists()
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool, open(path, "a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(COLUMNS)
            for i, rows in enumerate(pool.imap_unordered(run, jobs), 1):
                writer.writerows(rows)
                file.flush()
                print(
                    f"[{i}/{len(jobs)}] {rows[-1][1]}, lr {rows[-1][2]}, seed {rows[-1][3]}: {rows[-1][-1]:.3f}",
                    flush=True,
                )
    curves = read(path)
    for task, threshold in (("rare", 0.5), ("default", 0.9)):
        print(f"\n{task}: accuracy at the end, mean over the run, rollouts and seconds to {threshold}")
        print(table(task, curves, threshold))
    if not options.tune:
        plot(curves, HERE.parent / "docs" / "replay_study.png")
