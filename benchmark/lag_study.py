"""How stale is too stale? Accuracy against the lag of the sampler, for six corrections of stale tokens.

    python benchmark/lag_study.py             # what lag_study.csv lacks (40 CPU minutes)
    python benchmark/lag_study.py --tables    # tables and picture from the CSV; no training

Every run is `ppo_v2.py` with the flags of PARTS. With a lag: 160 iterations of 64 responses, at one learning rate for
all corrections, with the limits that are the defaults of the script. Accuracy is greedy, on held-out prompts. Seconds
are CPU time of sampling and updating.
"""

import argparse
import csv
import statistics
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from panels import METHOD, PLAIN, RIVAL, SIZE, WIDTH
from replay_study import TASKS, Silent, append, prepare, read_metrics, short, show

import ppo_v2

PATH = HERE / "lag_study.csv"
SEEDS = (301, 302, 303, 304, 305)
CORRECTIONS = list(ppo_v2.CORRECTIONS)
LAGS = (0, 2, 8, 32)
RATES = (1e-4, 3e-4)
LAGGED = dict(num_iterations=160, batch_size=64, eval_every=10)
REPLAY = dict(num_iterations=80, batch_size=64, eval_every=4, use_replay_buffer=True)
PARTS = {  # part: task, options
    "default": ("default", LAGGED),
    "rare": ("rare", LAGGED),
    "replay": ("rare", REPLAY),
}
CELLS = [  # part, lag, learning rate: the most important ones first
    *[("default", lag, rate) for lag in (8, 0, 2, 32) for rate in (3e-4, 1e-4)],
    *[("rare", lag, rate) for lag in (0, 8) for rate in RATES],
    *[("replay", 0, rate) for rate in (5e-4, 1e-3)],
    *[("default", lag, rate) for lag in (8, 32) for rate in (3e-5, 1e-3)],
]
KEYS = ["part", "correction", "lag", "learning_rate", "seed"]
NUMBERS = ["end", "mean", "best", "kl", "dropped", "ess", "entropy", "seconds"]


def run(part, correction, lag, rate, seed):
    """One training run -> NUMBERS; kl, dropped, ess and entropy are means over its second half"""
    torch.set_num_threads(1)
    task, flags = PARTS[part]
    flags = TASKS[task][0] | flags | dict(seed=seed, learning_rate=rate, device="cpu")
    if lag or part == "replay":
        flags |= dict(rollout_lag=lag, correction=correction)
    restore = prepare(ppo_v2, task)
    try:
        with Silent(), tempfile.TemporaryDirectory() as folder:
            ppo_v2.main(ppo_v2.Args(**flags, run_dir=f"{folder}/run"))
            rows = read_metrics(f"{folder}/run")
    finally:
        restore()
    scores = [row["eval/score"] for row in rows if "eval/score" in row]
    stale, dropped = ("lag", "clipfrac") if lag else ("replay", "clipfrac_replay")
    keys = [f"{stale}/kl_behaviour", f"losses/{dropped}", f"{stale}/ess", "losses/entropy"]
    half = rows[len(rows) // 2 :]
    means = [statistics.mean(row.get(key) or 0.0 for row in half) for key in keys]
    seconds = sum(row.get("time/rollout", 0) + row.get("time/update", 0) for row in rows)
    numbers = [scores[-1], statistics.mean(scores[1:]), max(scores), *means, seconds]
    return [round(number, 4) for number in numbers]


def read():
    """{(part, correction, lag, learning rate, seed): {column: number}}"""
    found = {}
    if not PATH.exists():
        return found
    for row in csv.DictReader(open(PATH, encoding="utf-8")):
        key = row["part"], row["correction"], int(row["lag"]), float(row["learning_rate"])
        found[*key, int(row["seed"])] = {name: float(row[name]) for name in NUMBERS}
    return found


def jobs(first, last):
    for part, lag, rate in CELLS[first:last]:
        for seed in SEEDS:
            # without a lag and without replay there is nothing to correct
            for correction in CORRECTIONS if lag or part == "replay" else ["none"]:
                yield part, correction, lag, rate, seed


# --- tables ---
def rows_of(done, part, correction, lag, rate):
    """The rows of five seeds; without a lag there is one policy for all."""
    if not lag and part != "replay":
        correction = "none"
    keys = [(part, correction, lag, rate, seed) for seed in SEEDS]
    return [done[key] for key in keys if key in done]


def cell(rows, column="end"):
    """The mean of the seeds, and the worst one where it is more than five points below."""
    values = [row[column] for row in rows]
    if not values:
        return ""
    mean = statistics.mean(values)
    worst = min(values)
    return short(mean) + (f" ({short(worst)})" if mean - worst > 0.05 else "")


def lag_table(done, part, lags, rates):
    columns = [(rate, lag) for rate in rates for lag in lags]
    columns = [(rate, lag) for rate, lag in columns if rows_of(done, part, "none", lag, rate)]
    heads = [f"{rate:g}, lag {lag}" for rate, lag in columns]
    lines = ["| correction | " + " | ".join(heads) + " |", "|---" * (1 + len(columns)) + "|"]
    for name in CORRECTIONS if columns else ():
        cells = [cell(rows_of(done, part, name, lag, rate)) for rate, lag in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def why_table(done, part, lag, rate):
    lines = [
        "| correction | accuracy at the end | best in the run | KL(μ, π_prox) | tokens dropped "
        "| effective share | entropy |",
        "|---" * 7 + "|",
    ]
    for name in CORRECTIONS:
        rows = rows_of(done, part, name, lag, rate)
        if rows:
            means = {column: statistics.mean(row[column] for row in rows) for column in NUMBERS}
            cells = [
                cell(rows),
                cell(rows, "best"),
                f"{means['kl']:.3f}",
                f"{means['dropped']:.0%}",
                short(means["ess"]),
                short(means["entropy"]),
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replay_table(done, rates):
    rates = [rate for rate in rates if rows_of(done, "replay", "none", 0, rate)]
    heads = [f"{rate:g}: {what}" for rate in rates for what in ("end", "mean over the run")]
    lines = ["| correction | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
    for name in CORRECTIONS if rates else ():
        cells = []
        for rate in rates:
            rows = rows_of(done, "replay", name, 0, rate)
            cells += [cell(rows), cell(rows, "mean")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- picture ---
PICTURE_LAG = 8
FAMILY = dict(dppo=METHOD, m2po=METHOD, behaviour=METHOD, none=PLAIN)  # the others are rivals


def draw(done, path):
    """A row per correction at one lag: a dot per seed, a bar at their mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    messages = ["all rules work", "three rules work"]
    axes = figure.subplots(1, 2, sharey=True)
    for axis, rate, message in zip(axes, RATES, messages, strict=True):
        names = list(dict.fromkeys([*FAMILY, *CORRECTIONS]))[::-1]
        for height, name in enumerate(names):
            rows = rows_of(done, "default", name, PICTURE_LAG, rate)
            ends = [row["end"] for row in rows]
            if not ends:
                continue
            color = FAMILY.get(name, RIVAL)
            axis.barh(height, statistics.mean(ends), height=0.62, color=color, alpha=0.3)
            axis.plot(ends, [height] * len(ends), "o", color=color, ms=6, alpha=0.8)
        axis.set_yticks(range(len(names)), names, fontsize=13)
        axis.set_title(f"learning rate {rate:g}: {message}", fontsize=14, loc="left")
        axis.set_xlim(-0.02, 1.03)
        axis.set_xlabel("accuracy at the end", fontsize=12)
        axis.grid(alpha=0.25, axis="x")
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        f"samples are {PICTURE_LAG} iterations old · dot: a seed · bar: mean · "
        "green: compares with the policy that sampled",
        fontsize=12,
    )
    figure.savefig(path, **SIZE)


def print_tables(done):
    for part in ("default", "rare"):
        show(part, lag_table(done, part, LAGS, RATES))
    for lag in (8, 32):
        show(f"lag {lag} at 0.0003", why_table(done, "default", lag, 3e-4))
    show("other learning rates", lag_table(done, "default", (8, 32), (3e-5, 1e-3)))
    show("replay", replay_table(done, (5e-4, 1e-3)))
    draw(done, HERE.parent / "docs" / "lag_study.png")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="no training")
    parser.add_argument("--cells", nargs=2, type=int, default=(0, len(CELLS)), help="of CELLS")
    options = parser.parse_args()
    done = read()
    for key in jobs(*options.cells) if not options.tables else ():
        if key not in done:
            numbers = run(*key)
            append(PATH, [[*key, *numbers]], [*KEYS, *NUMBERS])
            done[key] = dict(zip(NUMBERS, numbers, strict=True))
            print(*key, numbers, flush=True)
    print_tables(done)


if __name__ == "__main__":
    main()
