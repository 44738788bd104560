"""How stale is too stale? Accuracy against the lag of the sampler, for six corrections of stale tokens.

    python benchmark/lag_study.py             # what lag_study.csv lacks: tuning, then the study (100 CPU minutes)
    python benchmark/lag_study.py --tables    # tables and picture from the CSV; no training

Every run is `ppo_v2.py` with the flags of PARTS. With a lag: 160 iterations of 64 answers; each correction has the
learning rate that did best on two other seeds at lags 8 and 32 and the threshold that did best at lag 32. In
replay: the learning rate that did best on 5-6 digits on two other seeds, thresholds as they are. Accuracy is greedy,
on held-out prompts; seconds are CPU time without warm start and evaluation.
"""

import argparse
import csv
import json
import math
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from replay_study import TASKS, prepare, short

import ppo_v2

PATH = HERE / "lag_study.csv"
LAGS, SEEDS = (0, 1, 2, 4, 8, 16, 32, 64), (1, 2, 3, 4, 5)
TUNING_LAGS, TUNING_SEEDS, RATES = (8, 32), (101, 102), (3e-5, 1e-4, 3e-4, 1e-3)
CORRECTIONS = {  # name: its threshold, what is tried, the script's own first
    "none": ("clip_coef", (0.2, 0.1, 0.4)),
    "behaviour": ("clip_coef", (0.2, 0.1, 0.4)),
    "decoupled": ("correction_limit", (2.0, 1.0, 5.0)),
    "cispo": ("correction_limit", (4.0, 1.0, 9.0)),
    "dppo": ("correction_limit", (0.2, 0.1, 0.4)),
    "m2po": ("correction_limit", (0.04, 0.01, 0.16)),
}
LAGGED = dict(num_iterations=160, batch_size=64, eval_every=10)
REPLAY = dict(use_replay_buffer=True, batch_size=64, eval_every=4)
PARTS = {  # part: task, lags, options
    "tuning": ("default", TUNING_LAGS, LAGGED),
    "study": ("default", LAGS, LAGGED),
    "fast": (
        "default",
        (0, 2, 8, 32),
        LAGGED,
    ),  # all at one learning rate, three times the best of most
    "rare": ("rare", (0, 8, 32), LAGGED),
    "whitened": ("default", (16,), LAGGED | dict(norm_adv=True)),
    "replay tuning": ("rare", (0,), REPLAY | dict(num_iterations=80)),
    "replay": ("rare", (0,), REPLAY | dict(num_iterations=80)),
    "replay long": ("long", (0,), REPLAY | dict(num_iterations=40)),
}
REPLAY_RATES = (2e-4, 5e-4, 1e-3)
FAST = 3e-4
KEYS = ["part", "correction", "lag", "learning_rate", "threshold", "seed"]
COLUMNS = [*KEYS, "end", "mean", "kl", "masked", "ess", "entropy", "seconds"]


def run(part, correction, lag, rate, threshold, seed):
    """One training run -> end, mean over the run, what the last half of it looked like, CPU seconds"""
    torch.set_num_threads(1)
    task, _, flags = PARTS[part]
    flags = flags | dict(seed=seed, learning_rate=rate, device="cpu", save_every=10**6)
    flags |= {name: value for name, value in TASKS[task][0].items() if name != "answers"}
    if lag or "replay" in part:
        flags |= {
            "rollout_lag": lag,
            "correction": correction,
            CORRECTIONS[correction][0]: threshold,
        }
    stale, share = ("lag", "clipfrac") if lag else ("replay", "clipfrac_replay")
    restore = prepare(ppo_v2, task)
    ppo_v2.time = types.SimpleNamespace(
        time=time.process_time
    )  # other load on the machine must not count
    ppo_v2.catch_signals = list  # a signal ends the study, not one run of it
    stdout, sys.stdout = sys.stdout, open("/dev/null", "w")
    try:
        with tempfile.TemporaryDirectory() as folder:
            ppo_v2.main(ppo_v2.Args(**flags, run_dir=f"{folder}/run"))
            rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    finally:
        sys.stdout = stdout
        restore()
    scores = [row["eval/score"] for row in rows if "eval/score" in row]
    seen = [
        statistics.mean(row.get(key) or 0.0 for row in rows[len(rows) // 2 :])
        for key in (f"{stale}/kl_behaviour", f"losses/{share}", f"{stale}/ess", "losses/entropy")
    ]
    seconds = sum(row.get("time/rollout", 0) + row.get("time/update", 0) for row in rows)
    return [round(x, 4) for x in (scores[-1], statistics.mean(scores[1:]), *seen, seconds)]


def read():
    """{(part, correction, lag, rate, threshold, seed): {column: number}}"""
    found = {}
    for row in csv.DictReader(open(PATH)) if PATH.exists() else ():
        key = row["part"], row["correction"], *(float(row[name]) for name in KEYS[2:])
        found[key] = {name: float(row[name]) for name in COLUMNS[len(KEYS) :]}
    return found


def tuned(done, correction, column, part="tuning"):
    """The best learning rate (column 3) at the script's own threshold, or the best threshold (4) at that rate."""
    own = CORRECTIONS[correction][1][0]
    kin = {key: row["end"] for key, row in done.items() if key[:2] == (part, correction)}
    if column == 3:
        kin = {key: end for key, end in kin.items() if key[4] == own}
    else:
        rate, lag = tuned(done, correction, 3, part), max(key[2] for key in kin)
        kin = {key: end for key, end in kin.items() if key[3] == rate and key[2] == lag}
    values = sorted({key[column] for key in kin}, key=lambda value: (value != own, value))
    return max(
        values,
        key=lambda value: statistics.mean(end for key, end in kin.items() if key[column] == value),
    )


def jobs(done):
    """What comes next needs what came before: rates, then thresholds, then the study."""
    pairs = [(lag, seed) for lag in TUNING_LAGS for seed in TUNING_SEEDS]
    for correction, (_, thresholds) in CORRECTIONS.items():
        for rate in RATES:
            yield from (
                ("tuning", correction, lag, rate, thresholds[0], seed) for lag, seed in pairs
            )
    for correction, (_, thresholds) in CORRECTIONS.items():
        rate = tuned(done, correction, 3)
        for threshold in thresholds[1:]:
            yield from (
                ("tuning", correction, TUNING_LAGS[1], rate, threshold, seed)
                for seed in TUNING_SEEDS
            )
    pairs = [(seed, part) for seed in SEEDS for part in ("study", "fast")]
    pairs += [(seed, "rare") for seed in SEEDS] + [(seed, "whitened") for seed in SEEDS[:2]]
    for seed, part in pairs:
        for lag in PARTS[part][1]:
            for correction in (
                CORRECTIONS if lag else ["none"]
            ):  # without a lag there is nothing to correct
                setting = [tuned(done, correction, column) for column in (3, 4)]
                setting = (FAST, CORRECTIONS[correction][1][0]) if part == "fast" else setting
                yield part, correction, lag, *setting, seed
    for correction, (_, thresholds) in CORRECTIONS.items():
        for rate in REPLAY_RATES:
            yield from (
                ("replay tuning", correction, 0, rate, thresholds[0], seed) for seed in TUNING_SEEDS
            )
    for part, seeds in (("replay", SEEDS), ("replay long", SEEDS[:3])):
        for seed in seeds:
            for correction in CORRECTIONS:
                setting = [tuned(done, correction, column, "replay tuning") for column in (3, 4)]
                yield part, correction, 0, *setting, seed


def write(key, numbers):
    new = not PATH.exists()
    with open(PATH, "a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            ([COLUMNS] if new else []) + [[*key, *numbers]]
        )


# --- tables ---
def cell(rows, column="end"):
    """Mean, and the worst seed where that is another story."""
    values = [row[column] for row in rows]
    if not values:
        return ""
    mean, worst = statistics.mean(values), min(values)
    return short(mean) + (f" ({short(worst)})" if mean - worst > 0.05 else "")


def lag_table(done, part):
    lags = PARTS[part][1]
    lines = [
        "| correction | flags | " + " | ".join(f"lag {lag}" for lag in lags) + " |",
        "|---|---|" + "---|" * len(lags),
    ]
    for name in CORRECTIONS:
        rate, threshold = (tuned(done, name, column) for column in (3, 4))
        rate, threshold = (FAST, CORRECTIONS[name][1][0]) if part == "fast" else (rate, threshold)
        flag = CORRECTIONS[name][0].replace("_", "-")
        cells = [cell(ends(done, part, name, lag)) for lag in lags]
        lines.append(
            f"| {name} | `--learning-rate {rate:g} --{flag} {threshold:g}` | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(lines)


def ends(done, part, correction, lag):
    """The rows of five seeds; without a lag there is one policy for all."""
    correction = correction if lag or "replay" in part else "none"
    return [row for key, row in done.items() if key[:3] == (part, correction, lag)]


def why_table(done, part, lag):
    lines = [
        "| correction | accuracy | KL(mu, pi) | tokens held back | effective share | entropy |",
        "|---|---|---|---|---|---|",
    ]
    for name in CORRECTIONS:
        rows = ends(done, part, name, lag)
        if rows:
            means = {
                column: statistics.mean(row[column] for row in rows)
                for column in COLUMNS[len(KEYS) :]
            }
            cells = [
                cell(rows),
                f"{means['kl']:.3f}",
                f"{means['masked']:.0%}",
                short(means["ess"]),
                short(means["entropy"]),
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rate_table(done):
    lines = [
        "| correction | "
        + " | ".join(f"{rate:g}, lag {lag}" for lag in TUNING_LAGS for rate in RATES)
        + " |"
    ]
    lines.append("|---|" + "---|" * len(TUNING_LAGS) * len(RATES))
    for name, (_, thresholds) in CORRECTIONS.items():
        cells = []
        for lag in TUNING_LAGS:
            for rate in RATES:
                keys = [("tuning", name, lag, rate, thresholds[0], seed) for seed in TUNING_SEEDS]
                cells.append(cell([done[key] for key in keys if key in done]))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def threshold_table(done):
    lines = [
        f"| correction | threshold: accuracy at lag {TUNING_LAGS[1]} | | |",
        "|---|---|---|---|",
    ]
    for name, (option, thresholds) in CORRECTIONS.items():
        cells, rate = [], tuned(done, name, 3)
        for threshold in sorted(thresholds):
            keys = [
                ("tuning", name, TUNING_LAGS[1], rate, threshold, seed) for seed in TUNING_SEEDS
            ]
            found = cell([done[key] for key in keys if key in done])
            cells.append(f"`--{option.replace('_', '-')} {threshold:g}`: {found}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replay_table(done):
    lines = [
        "| correction | learning rate | 5–6 digits, end | mean over the run | long answers, end | mean over the run |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for name in CORRECTIONS:
        parts = [ends(done, part, name, 0) for part in ("replay", "replay long")]
        cells = [cell(rows, column) for rows in parts for column in ("end", "mean")]
        rate = tuned(done, name, 3, "replay tuning") if parts[0] else math.nan
        lines.append(f"| {name} | {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


COLOURS = dict(
    none="tab:gray", behaviour="tab:blue", decoupled="tab:orange", cispo="tab:red", dppo="tab:green"
)
COLOURS |= dict(m2po="tab:purple")


def draw(done, path):
    """Accuracy against the lag, tuned and at one learning rate, and how wide the working range of rates is."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.2), layout="constrained")
    panels = [("study", "each correction at its own\nlearning rate and threshold")]
    panels += [("fast", f"all at a learning rate of {FAST:g}")]
    axes = figure.subplots(1, 3)
    for axis, (part, title) in zip(axes, panels, strict=False):
        lags, labels = PARTS[part][1], []
        for name in CORRECTIONS:
            found = [[row["end"] for row in ends(done, part, name, lag)] for lag in lags]
            points = [(i, statistics.mean(x), min(x), max(x)) for i, x in enumerate(found) if x]
            if points:
                x, middle, low, high = zip(*points, strict=True)
                axis.plot(x, middle, ".-", color=COLOURS[name])
                axis.fill_between(x, low, high, color=COLOURS[name], alpha=0.07)
                labels.append((middle[-1], x[-1], name))
        label(axis, labels)
        axis.set_xticks(range(len(lags)), lags)
        axis.set(
            title=title, xlabel="lag: iterations between sampler and learner", ylim=(-0.03, 1.05)
        )
    labels = []
    for name, (_, thresholds) in CORRECTIONS.items():
        found = []
        for rate in RATES:
            keys = [
                ("tuning", name, TUNING_LAGS[1], rate, thresholds[0], seed) for seed in TUNING_SEEDS
            ]
            found.append([done[key]["end"] for key in keys if key in done])
        points = [(i, statistics.mean(x)) for i, x in enumerate(found) if x]
        axes[2].plot(*zip(*points, strict=True), ".-", color=COLOURS[name])
        labels.append(
            (points[-2][1], points[-2][0] + 0.05, name)
        )  # at the last rate everything is lost
    label(axes[2], labels)
    axes[2].set_xticks(range(len(RATES)), [f"{rate:g}" for rate in RATES])
    title = f"lag {TUNING_LAGS[1]}: the learning rate matters\nas much as the correction"
    axes[2].set(title=title, xlabel="learning rate", ylim=(-0.03, 1.05))
    axes[0].set_ylabel("accuracy at the end, greedy, held-out")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_xlim(right=axis.get_xlim()[1] * 1.22)
    figure.savefig(path, dpi=90)


def label(axis, labels):
    height = 2.0
    for end, x, name in sorted(labels, reverse=True):  # names keep a distance from each other
        height = min(end, height - 0.06)
        axis.text(x, height, "  " + name, color=COLOURS[name], fontsize=9, va="center")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="no training")
    options = parser.parse_args()
    done = read()
    for key in jobs(done) if not options.tables else ():
        if key not in done:
            numbers = run(*key)
            write(key, numbers)
            done[key] = dict(zip(COLUMNS[len(KEYS) :], numbers, strict=True))
            print(*key, numbers, flush=True)
    print(
        f"\nlearning rates, two tuning seeds\n\n{rate_table(done)}\n\nthresholds\n\n{threshold_table(done)}"
    )
    print(f"\nlag 32, all at {FAST}\n\n{why_table(done, 'fast', 32)}")
    for part in ("study", "fast", "rare", "whitened"):
        if any(key[0] == part for key in done):
            print(f"\n{part}\n\n{lag_table(done, part)}")
    if any(key[0] == "replay" for key in done):
        print(f"\nreplay\n\n{replay_table(done)}")
    draw(done, HERE.parent / "docs" / "lag_study.png")


if __name__ == "__main__":
    main()
