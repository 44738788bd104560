"""Does replay help? Plain PPO with 1 to 32 epochs, each at its best learning rate, against replay, per rollout.

    python benchmark/replay_study.py                     # everything that is not in the CSV yet, then table and picture
    python benchmark/replay_study.py --only rare --tune  # learning rates, on seeds that are not reported
    python benchmark/replay_study.py --plot              # table and picture from the CSV

Three tasks: `rare`, sorting 5 or 6 digits, where the start policy is right in about 1 of 100 answers; `default`, the
built-in task; `long`, the built-in task with answers of 33 tokens, where generating takes most of the time. Every run
is `ppo_v2.py` with the flags of its arm; accuracy is greedy, on held-out prompts; seconds are CPU time.
"""

import argparse
import csv
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
COLUMNS = ["task", "arm", "learning_rate", "seed", "global_step", "seconds", "train_score", "eval_score", "share"]
SEEDS, TUNING_SEEDS = (1, 2, 3, 4, 5), (101, 102)
COMMON = dict(device="cpu", early_stopping_patience=0, save_every=0)
TASKS = {
    "rare": dict(min_digits=5, max_digits=6, batch_size=32, num_iterations=160, eval_every=10, **COMMON),
    "default": dict(eval_every=5, **COMMON),
    "long": dict(max_response_length=33, sft_steps=600, num_iterations=100, eval_every=5, **COMMON),
}
THRESHOLDS = {"rare": 0.5, "default": 0.9, "long": 0.5}
REPEATS = 8  # long: the sorted digits, this many times over
GUIDE = dict(use_replay_buffer=True, use_priority_sampling=False, priority_alpha=0.6, priority_beta=0.4)
GUIDE |= dict(priority_beta_increment=0.001, priority_age_tau=None, max_replay_reuse=4, min_replay_size=100)
GUIDE |= dict(replay_advantages="all")
REPLAY = GUIDE | dict(max_replay_reuse=8, min_replay_size=32)
PER = dict(use_priority_sampling=True)
BEST = dict(use_replay_buffer=True)  # the defaults
ALL = BEST | dict(replay_advantages="all")
MORE = dict(num_iterations=400)
EPOCHS = {n: f"plain, {n} epochs" if n > 1 else "plain, 1 epoch" for n in (1, 2, 4, 8, 16, 32)}
ARMS = {
    "rare": {EPOCHS[n]: dict(update_epochs=n) for n in EPOCHS}
    | {f"{EPOCHS[n]}, 2.5x the answers": MORE | dict(update_epochs=n) for n in EPOCHS}
    | {
        "plain, 4 epochs, 2.5x the answers, std floor": MORE | dict(floor=0.2),
        "replay": BEST,
        "replay, 2.5x the answers": BEST | MORE,
        "replay, all advantages, 2.5x the answers": ALL | MORE,
        "replay, std floor": BEST | dict(floor=0.2),
        "replay, all advantages": ALL,
        "replay, uniform": BEST | dict(use_priority_sampling=False, priority_age_tau=None),
        "replay, no age decay": BEST | dict(priority_age_tau=None),
        "replay, behaviour": BEST | dict(replay_correction="behaviour"),
        "replay, none": BEST | dict(replay_correction="none"),
        "replay, reuse 2": BEST | dict(max_replay_reuse=2),
        "replay, reuse 4": BEST | dict(max_replay_reuse=4),
        "all advantages, uniform": REPLAY,
        "all advantages, PER": REPLAY | PER,
        "all advantages, PER, age": REPLAY | PER | dict(priority_age_tau=50.0),
        "all advantages, behaviour": ALL | dict(replay_correction="behaviour"),
        "all advantages, none": ALL | dict(replay_correction="none"),
        "all advantages, reuse 2": ALL | dict(max_replay_reuse=2),
        "all advantages, reuse 4": ALL | dict(max_replay_reuse=4),
        "replay, the guide's values": GUIDE,
    },
    "default": {
        EPOCHS[4]: {},
        "replay": BEST,
        "replay, all advantages": ALL,
        "replay, the guide's values, PER": GUIDE | PER,
        "replay, the guide's values": GUIDE,
    },
    "long": {EPOCHS[1]: dict(update_epochs=1), EPOCHS[4]: {}, "replay": BEST, "replay, all advantages": ALL},
}
RATES = {"rare": (1e-4, 3e-4, 3e-5), "default": (1e-4, 3e-4), "long": (1e-4, 3e-4)}


def rate_of(task, arm, rates):
    """The arm's tuned learning rate, or that of the arm it comes from."""
    kin = [arm, f"{arm}, 2.5x the answers", arm.replace(", std floor", ""), "replay"]
    return next((rates[task, name] for name in kin if (task, name) in rates), RATES[task][0])


def run(job):
    """One training run -> rows for the CSV."""
    import torch

    torch.set_num_threads(1)
    import ppo_v2

    # CPU seconds of this process: other load on the machine must not count
    ppo_v2.time = types.SimpleNamespace(time=time.process_time, strftime=time.strftime)
    task, arm, rate, seed = job
    flags = TASKS[task] | ARMS[task][arm]
    if floor := flags.pop("floor", 0):  # an experiment about the cause, not an option: noise is not blown up to 1

        def whiten(x, mask):
            centred = (x - ppo_v2.masked_mean(x, mask)) * mask
            return centred / ppo_v2.masked_mean(centred**2, mask).sqrt().clamp(min=floor)

        ppo_v2.whiten = whiten
    if task == "long":  # generating is sequential: eight times the tokens cost it more than they cost the update
        plain = ppo_v2.make_generated_task

        def repeated(args):
            task = plain(args)
            evaluation = [(prompt, answer * REPEATS) for prompt, answer in task.evaluation]
            train = lambda position: (task.train(position)[0], task.train(position)[1] * REPEATS)  # noqa: E731
            scramble = lambda rng, answer: task.scramble(rng, answer[: len(answer) // REPEATS]) * REPEATS  # noqa: E731
            return ppo_v2.Task(train, evaluation, task.score, scramble)

        ppo_v2.make_generated_task = repeated
    with tempfile.TemporaryDirectory() as folder:
        options = flags | dict(learning_rate=rate, seed=seed, run_dir=f"{folder}/run")
        sys.stdout = open("/dev/null", "w")
        ppo_v2.main(ppo_v2.Args(**options))
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    generating = sum(row.get("time/rollout", 0) for row in rows)
    share = round(generating / (generating + sum(row.get("time/update", 0) for row in rows)), 3)
    rows = [row for row in rows if "eval/score" in row]
    values = [(r["global_step"], r["time"], r.get("charts/score", ""), r["eval/score"], share) for r in rows]
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


def table(task, curves):
    """Markdown rows: arm, learning rate, accuracy at the end and over the run, rollouts and seconds to it."""
    lines = []
    rates = sorted({key[2] for key in curves})
    for arm, rate in ((arm, rate) for arm in ARMS[task] for rate in rates):
        mine = {key: curve for key, curve in curves.items() if key[:3] == (task, arm, rate)}
        if not mine:
            continue
        last, mean = ([f(curve) for curve in mine.values()] for f in (lambda c: c[-1][2], area))
        spent = [[reach(curve, THRESHOLDS[task], column) for curve in mine.values()] for column in (0, 1)]
        median = []
        for values, worst in zip(spent, (max(c[-1][0] for c in mine.values()), None), strict=True):
            done = sorted(v if v is not None else float("inf") for v in values)[len(values) // 2]
            median.append(f"{done:.0f}" if done < float("inf") else f"> {worst}" if worst else "–")
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        lines.append(
            f"| {arm} | {rate:g} | {statistics.mean(last):.2f} ± {spread:.2f} | {statistics.mean(mean):.3f} "
            f"| {median[0]} | {median[1]} | {sum(v is not None for v in spent[0])}/{len(mine)} |"
        )
    return "\n".join(lines)


def plot(curves, path):
    """Means over seeds, with the range of all seeds behind the two arms that matter most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    more = [f"{EPOCHS[4]}, 2.5x the answers", "replay, 2.5x the answers"]
    rare = [*more, EPOCHS[16], EPOCHS[32], "replay, all advantages, 2.5x the answers", "replay, uniform"]
    rare += ["all advantages, uniform", "replay, the guide's values"]
    panels = [  # task, column of the curve, arms, title
        ("rare", 0, rare, "success is rare at the start (5-6 digits)"),
        ("rare", 1, rare, "the same, by time"),
        ("default", 0, list(ARMS["default"]), "default task"),
        ("long", 1, list(ARMS["long"]), "longer answers (33 tokens)"),
    ]
    panels = [panel for panel in panels if any(key[0] == panel[0] for key in curves)]
    figure, colours = Figure(figsize=(10, 3.4 * math.ceil(len(panels) / 2) + 0.6), layout="constrained"), {}
    for i, (task, column, arms, title) in enumerate(panels, 1):
        axis = figure.add_subplot(math.ceil(len(panels) / 2), 2, i)
        for arm in arms:
            mine = [curve for key, curve in curves.items() if key[:2] == (task, arm)]
            if mine:
                x = [statistics.mean(points) for points in zip(*[[p[column] for p in c] for c in mine], strict=True)]
                y = list(zip(*[[p[2] for p in c] for c in mine], strict=True))
                name = arm.removesuffix(", 2.5x the answers")  # one colour and one entry in the legend for both lengths
                new = name not in colours
                colour = colours.setdefault(name, f"C{len(colours)}")
                look = dict(color=colour, linestyle="--" if arm.startswith("plain") else "-")
                axis.plot(x, [statistics.mean(points) for points in y], label=name if new else None, **look)
                if name in (EPOCHS[4], "replay"):
                    axis.fill_between(x, list(map(min, y)), list(map(max, y)), color=colour, alpha=0.12)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("CPU seconds" if column else "generated answers")
        axis.set_ylabel("greedy accuracy, held-out")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(TASKS), help="one of the tasks")
    parser.add_argument("--arms", nargs="*", help="these arms only")
    parser.add_argument("--seeds", nargs="*", type=int, help="these seeds only")
    parser.add_argument("--rates", nargs="*", type=float, help="learning rates to tune over")
    parser.add_argument("--tune", action="store_true", help="rates on the tuning seeds, into replay_tuning.csv")
    parser.add_argument("--plot", action="store_true", help="no training")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    tuning_path, study_path = HERE / "replay_tuning.csv", HERE / "replay_study.csv"
    path = tuning_path if options.tune else study_path
    rates, done = best_rates(read(tuning_path)), read(path)
    jobs = []
    for task in [options.only] if options.only else TASKS:
        for seed in options.seeds or (TUNING_SEEDS if options.tune else SEEDS):
            for arm in options.arms or ARMS[task]:
                own = options.rates or RATES[task] if options.tune else [rate_of(task, arm, rates)]
                jobs += [(task, arm, rate, seed) for rate in own if (task, arm, rate, seed) not in done]
    if not options.plot:
        new = not path.exists()
        spawn = multiprocessing.get_context("spawn")  # one process a job: run() changes the module it imports
        with spawn.Pool(options.workers, maxtasksperchild=1) as pool, open(path, "a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(COLUMNS)
            for i, rows in enumerate(pool.imap_unordered(run, jobs), 1):
                writer.writerows(rows)
                file.flush()
                print(
                    f"[{i}/{len(jobs)}] {rows[-1][1]}, lr {rows[-1][2]}, seed {rows[-1][3]}: {rows[-1][-2]:.3f}",
                    flush=True,
                )
    curves = read(path)
    for task in TASKS:
        print(f"\n{task}: accuracy at the end, mean over the run, answers and CPU seconds to {THRESHOLDS[task]}")
        print(table(task, curves))
    if not options.tune:
        plot(curves, HERE.parent / "docs" / "replay_study.png")
