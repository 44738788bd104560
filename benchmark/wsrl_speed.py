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
from wsrl_warmup import Args, PrioritizedReplayBuffer, WarmupAgent, row_dtype, sample_mixed


def median_ms(work, rounds):
    times = []
    for i in range(rounds + 2):
        start = time.process_time()
        work(np.random.default_rng(i))
        times.append(1000 * (time.process_time() - start))
    return round(float(np.median(times[2:])), 2)  # the first two warm up


def dtype(obs_dim, action_dim):
    spaces = dict(observation_space=Box(-1, 1, (obs_dim,)), action_space=Box(-1, 1, (action_dim,)))
    return row_dtype(types.SimpleNamespace(**spaces))


def draw(size):
    rb = PrioritizedReplayBuffer(size, dtype(1, 1), rows=np.zeros(size, dtype(1, 1)))

    def work(rng):
        inds, _ = rb.sample(256, 0.4, rng)
        rb.update_priorities(inds, rng.normal(size=256))

    return work


def update(preset):
    args = Args(preset=preset, hidden_size=256, device="cpu")
    rows = np.zeros(10_000, dtype(17, 6))
    rows["obs"], rows["weights"], rows["masks"] = (
        np.random.default_rng(0).normal(size=(10_000, 17)),
        1,
        1,
    )
    alpha = args.priority_alpha if args.use_prioritized_replay else 0.0
    agent = WarmupAgent(args, np.ones(6), np.zeros(17), np.ones(17))
    rb = PrioritizedReplayBuffer(10_000, rows.dtype, alpha, rows)

    def work(rng):
        batch, ((_, inds, place),) = sample_mixed(args, (rb, None), (256, 0), 0.4, rng, "cpu")
        rb.update_priorities(inds, agent.update(batch)["td_errors"].numpy()[place])

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
