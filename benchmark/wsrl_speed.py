"""What prioritized draws cost, and an update of each preset, in CPU milliseconds; one thread, medians.

    python benchmark/wsrl_speed.py            # prints a table and writes benchmark/wsrl_speed.csv

17 observations, 6 actions, 256x256 networks with LayerNorm (the default), batches of 256; every update is full:
critic, actor, temperature, targets, and drawing the batch.
"""

import csv
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import Box

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from wsrl_warmup import (
    Args,
    PrioritizedReplayBuffer,
    WarmupAgent,
    default_options,
    make_row_dtype,
    sample_mixed,
)


def median_ms(work, rounds):
    times = []
    for i in range(rounds + 2):
        start = time.process_time()
        work(np.random.default_rng(i))
        times.append(1000 * (time.process_time() - start))
    return round(float(np.median(times[2:])), 2)  # the first two warm up


def make_buffer(rows, obs_dim, action_dim, alpha):
    spaces = dict(observation_space=Box(-1, 1, (obs_dim,)), action_space=Box(-1, 1, (action_dim,)))
    buffer = PrioritizedReplayBuffer(rows, make_row_dtype(types.SimpleNamespace(**spaces)), alpha)
    new_rows = np.zeros(rows, buffer.rows.dtype)
    new_rows["obs"] = np.random.default_rng(0).normal(size=(rows, obs_dim))
    new_rows["weights"] = new_rows["masks"] = 1
    buffer.extend(new_rows)
    return buffer


def draw(size):
    buffer = make_buffer(size, 1, 1, 0.6)

    def work(rng):
        slots, _ = buffer.sample(256, 0.4, rng)
        buffer.update_priorities(slots, rng.normal(size=256))

    return work


def update(preset):
    args = Args(**default_options("Own-v0", preset))
    alpha = args.priority_alpha if args.use_prioritized_replay else 0.0
    agent = WarmupAgent(np.zeros(17), np.ones(17), 6, args=args)
    buffer = make_buffer(10_000, 17, 6, alpha)
    empty = PrioritizedReplayBuffer(0, buffer.rows.dtype, alpha)

    def work(rng):
        batch, slots, _ = sample_mixed(agent, buffer, empty, 1.0, 0.4)
        stats = agent.update(batch, method=args.offline_objective)
        if args.use_prioritized_replay:
            buffer.update_priorities(slots, stats["td_errors"].numpy())

    return work


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = [
        (f"PER: draw 256 of {size} rows, give back their errors", median_ms(draw(size), 40))
        for size in (10**4, 10**5, 10**6)
    ]
    found += [
        (f"warm-up update, {preset}", median_ms(update(preset), 15))
        for preset in ("design", "bc", "wsrl")
    ]
    with open(Path(__file__).with_suffix(".csv"), "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("what", "cpu_ms"), *found])
    for what, cost in found:
        print(f"{what:55s} {cost:8.2f} ms")
