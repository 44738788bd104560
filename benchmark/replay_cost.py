"""What the buffer of ppo_v2.py costs: a prioritized draw from 100 000 rollouts in parts of an update, and memory.

    python benchmark/replay_cost.py

CPU milliseconds, medians, one thread; the update is that of the default task (64 fresh + 32 drawn answers, 4 epochs).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ppo_v2

NUM_ROLLOUTS, PROMPT_TOKENS, RESPONSE_TOKENS = 100_000, 5, 5


def fill(num_rollouts, prompt_tokens, response_tokens):
    """A buffer of random rollouts, a hundred iterations old."""
    buffer = ppo_v2.ReplayBuffer(priority_alpha=0.6, priority_age_tau=50.0, use_priority_sampling=True)
    torch.manual_seed(0)
    for iteration in range(100):
        rows = num_rollouts // 100
        floats = {name: torch.randn(rows, response_tokens) for name in ("logprobs", "ref_logprobs", "values")}
        floats |= {"advantages": torch.randn(rows, response_tokens), "scores": torch.zeros(rows)}
        ids = {"prompt_ids": torch.ones(rows, prompt_tokens).long(), "response_ids": torch.ones(rows, response_tokens)}
        mask = torch.ones(rows, response_tokens)
        buffer.add(floats | ids, mask, torch.ones(rows, prompt_tokens).long(), iteration)
    return buffer


def megabytes(buffer):
    """What checkpoints hold of it, which is what it holds."""
    rows = sum(x.nbytes for sample in buffer.samples.values() for x in sample.values())
    return (rows + sum(x.nbytes for x in (buffer.uids, buffer.births, buffer.reuses, buffer.priorities))) / 1e6


def time_draws(buffer, repeats=50):
    rng, spent = np.random.default_rng(0), []
    for _ in range(repeats):
        start = time.process_time()
        uids, _ = buffer.draw(32, 100, 10**9, 0.4, rng)
        buffer.refresh(uids, torch.rand(32, RESPONSE_TOKENS), torch.ones(32, RESPONSE_TOKENS))
        spent.append(1000 * (time.process_time() - start))
    return statistics.median(spent)


def time_update():
    ppo_v2.time = type("Clock", (), {"time": staticmethod(time.process_time), "strftime": staticmethod(time.strftime)})
    with tempfile.TemporaryDirectory() as folder:
        options = dict(use_replay_buffer=True, num_iterations=20, device="cpu", eval_every=0, save_every=0)
        ppo_v2.main(ppo_v2.Args(**options, run_dir=f"{folder}/run"))
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    return 1000 * statistics.median(row["time/update"] for row in rows[5:])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    print(f"1000 rollouts of 128 + 128 tokens: {megabytes(fill(1_000, 128, 128)):.1f} MB")
    draw, update = time_draws(fill(NUM_ROLLOUTS, PROMPT_TOKENS, RESPONSE_TOKENS)), time_update()
    print(f"draw of 32 from {NUM_ROLLOUTS}: {draw:.2f} ms; update: {update:.0f} ms; {100 * draw / update:.2f} %")
