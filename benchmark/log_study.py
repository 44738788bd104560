"""What is the log of another run worth? Replay from it, against nothing, and against supervised learning on it.

    python benchmark/log_study.py             # what log_study.csv lacks (ten CPU minutes)
    python benchmark/log_study.py --tables    # the table from the CSV; no training

5-6 digits. A run with another seed (100 + seed) writes rollouts.jsonl with `--log-rollouts`. A new run starts from all
of its 5120 responses with `--replay-from`, or from the first 1280, which are mostly wrong. The simplest rival takes
supervised steps on the right responses of the log and samples nothing. Accuracy is greedy, on held-out prompts.
"""

import argparse
import csv
import functools
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from replay_study import Silent, append, prepare, read_metrics, short, show

import ppo_v2

PATH = HERE / "log_study.csv"
SEEDS, TUNING_SEEDS = (301, 302, 303, 304, 305), (101, 102)
LOGS = {"early": 1280, "whole": 5120}  # responses of the log that are used
POINTS = (0, 640, 1280, 2560)  # responses of the new run after which it is evaluated
TASK = dict(
    min_digits=5,
    max_digits=6,
    batch_size=64,
    use_replay_buffer=True,
    device="cpu",
)
GRID = [(rate, steps) for rate in (2e-4, 5e-4) for steps in (100, 400)]  # of supervised learning
ARMS = ("nothing", "replay", "supervised")
COLUMNS = ["log", "arm", "setting", "seed", *map(str, POINTS)]


def train(folder, **options):
    """-> {responses: accuracy}"""
    restore = prepare(ppo_v2, "rare")
    try:
        with Silent():
            ppo_v2.main(ppo_v2.Args(**TASK | options, run_dir=f"{folder}/run", eval_every=10))
    finally:
        restore()
    rows = read_metrics(f"{folder}/run")
    return {row["global_step"]: row["eval/score"] for row in rows if "eval/score" in row}


def supervised(path, seed, rate, steps):
    """Cross-entropy on the log's right responses, 64 at a time. -> accuracy"""
    restore = prepare(ppo_v2, "rare")
    try:
        args = ppo_v2.Args(**TASK, seed=seed)
        torch.manual_seed(seed)
        pairs, held_out, scorer = ppo_v2.make_task(args)
        lm, tokenizer, eos_ids = ppo_v2.load_lm(args)
        policy = ppo_v2.PolicyWithValue(lm, eos_ids, args.temperature)
        with Silent():
            ppo_v2.warm_start(lm, pairs, tokenizer, args)
        logged = ppo_v2.read_rollouts(path, policy, args)
        right = (logged["scores"] > 0).nonzero().flatten().tolist()
        optimizer = torch.optim.AdamW(lm.parameters(), rate, eps=1e-5, weight_decay=0.0, fused=True)
        rng = random.Random(seed)
        for _ in range(steps):
            chosen = rng.choices(right, k=64)
            rows = {name: x[chosen] for name, x in logged.items()}
            logprobs, _, _ = ppo_v2.logprobs_and_values(policy, rows)
            loss = -ppo_v2.masked_mean(logprobs, rows["response_mask"])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lm.parameters(), args.max_grad_norm)
            optimizer.step()
        metrics, _ = ppo_v2.evaluate(policy, held_out, tokenizer, scorer, args)
        return metrics["eval/score"]
    finally:
        restore()


@functools.cache
def logged(seed):
    """The lines that another run wrote."""
    with tempfile.TemporaryDirectory() as folder:
        train(folder, seed=100 + seed, num_iterations=80, log_rollouts=True)
        text = Path(f"{folder}/run/rollouts.jsonl").read_text(encoding="utf-8")
        return text.splitlines()


def measure(log, arm, setting, seed):
    """-> accuracy at POINTS"""
    with tempfile.TemporaryDirectory() as folder:
        options = dict(seed=seed, num_iterations=POINTS[-1] // TASK["batch_size"])
        path = f"{folder}/log.jsonl"
        if log != "none":
            Path(path).write_text("\n".join(logged(seed)[: LOGS[log]]), encoding="utf-8")
            options |= dict(replay_from=path)
        if arm == "supervised":
            return [supervised(path, seed, *json.loads(setting))]
        scores = train(folder, **options)
        return [scores[point] for point in POINTS]


def read():
    """{(log, arm, setting, seed): [accuracy, ...]}"""
    rows = []
    if PATH.exists():
        rows = list(csv.DictReader(open(PATH, encoding="utf-8")))
    return {
        (row["log"], row["arm"], row["setting"], int(row["seed"])): [
            float(row[k]) for k in COLUMNS[4:] if row[k]
        ]
        for row in rows
    }


def jobs(done):
    for log in LOGS:
        yield from (
            (log, "supervised", json.dumps(setting), seed)
            for setting in GRID
            for seed in TUNING_SEEDS
        )
    for seed in SEEDS:
        yield "none", "nothing", "", seed
        for log in LOGS:
            yield log, "replay", "", seed
            yield log, "supervised", best(done, log), seed


def best(done, log):
    ends = {}
    for (where, arm, setting, seed), scores in done.items():
        if (where, arm) == (log, "supervised") and seed in TUNING_SEEDS:
            ends.setdefault(setting, []).append(scores[-1])
    return max(ends, key=lambda setting: statistics.mean(ends[setting]))


def table(done):
    lines = [
        "| start from | 0 responses | 640 | 1280 | 2560 | 2560, by seed |",
        "|---|---|---|---|---|---|",
    ]
    for log, arm in [("none", "nothing"), *((log, arm) for log in LOGS for arm in ARMS[1:])]:
        mine = [done[key] for key in sorted(done) if key[:2] == (log, arm) and key[3] in SEEDS]
        if mine:
            means = [short(statistics.mean(scores)) for scores in zip(*mine, strict=True)]
            name = {
                "none": "nothing",
                "early": f"first {LOGS['early']} of a log",
                "whole": f"a log of {LOGS['whole']}",
            }
            name = name[log] if log == "none" else f"{name[log]}: {arm}"
            ends = " ".join(short(scores[-1]) for scores in mine)
            lines.append(
                f"| {name} | "
                + " | ".join(means + ["–"] * (len(POINTS) - len(means)))
                + f" | {ends} |"
            )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="no training")
    options, done = parser.parse_args(), read()
    torch.set_num_threads(1)
    for key in jobs(done) if not options.tables else ():
        if key not in done:
            done[key] = [round(score, 4) for score in measure(*key)]
            numbers = done[key] + [""] * (len(POINTS) - len(done[key]))
            append(PATH, [[*key, *numbers]], COLUMNS)
            print(*key, done[key], flush=True)
    show("a log of another run", table(done))


if __name__ == "__main__":
    main()
