"""What an update costs as the work grows: a curve each, and how steep it is at its end.

    python benchmark/growth.py            # measures, writes growth.csv, draws docs/growth.png: three minutes
    python benchmark/growth.py --table    # table and picture from the CSV

The tiny Llama of the PPO trio, one thread, CPU time, median of five, each point in a process of its own, whose memory
is counted beyond what it began with. Steepness is the exponent between the last two points: 1 is linear, 2 quadratic.
"""

import argparse
import csv
import math
import multiprocessing
import resource
import statistics
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import ppo_v2
import sac_hybrid
import wsrl_warmup

PATH = HERE / "growth.csv"
COLUMNS = ["work", "size", "milliseconds", "megabytes"]


def make_policy(vocabulary=98):
    sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.LlamaConfig(**sizes, vocab_size=vocabulary, bos_token_id=None)
    return ppo_v2.PolicyWithValue(
        transformers.LlamaForCausalLM(config), torch.tensor([vocabulary]), 1.0
    )


def update(batch=32, length=8, vocabulary=98):
    """Loss and gradients of a minibatch, prompts of 8 tokens"""
    policy, args = make_policy(vocabulary), ppo_v2.Args()
    ids = {
        name: torch.randint(90, (batch, size))
        for name, size in (("prompt", 8), ("response", length))
    }
    rows = {f"{name}_ids": x for name, x in ids.items()} | {
        f"{name}_mask": x >= 0 for name, x in ids.items()
    }
    rows = {name: x.long() for name, x in rows.items()}
    floats = "logprobs mu_logprobs values returns advantages".split()
    rows |= {name: torch.zeros(batch, length) for name in floats}
    rows |= dict(weights=torch.ones(batch, 1), replayed=torch.zeros(batch, 1))
    return lambda: ppo_v2.ppo_loss(policy, rows, batch * length, args)[0].backward()


def generate(length):
    """32 answers that never end"""
    policy, ids = make_policy(), torch.randint(90, (32, 8))
    return lambda: ppo_v2.generate(
        policy, ids, torch.ones_like(ids), length, torch.rand(32, length)
    )


def draw(size):
    """64 of so many rollouts, by priority and age, and 64 new ones into a full buffer"""
    buffer = ppo_v2.ReplayBuffer(
        ppo_v2.Args(use_replay_buffer=True, replay_buffer_size=size, max_replay_reuse=10**9)
    )
    one = dict.fromkeys(ppo_v2.STORED, torch.ones(size, 8)) | dict.fromkeys(
        ("scores", "ended"), torch.ones(size)
    )
    buffer.add(one, 49)
    new = {name: x[:64] for name, x in one.items()}
    return lambda: (buffer.draw(50), buffer.add(new, 49))


def draw_transitions(size):
    """256 transitions of the warm-up's prioritized buffer, and their errors back"""
    spaces = dict(
        observation_space=types.SimpleNamespace(shape=(17,)),
        action_space=types.SimpleNamespace(shape=(6,)),
    )
    rows = np.zeros(size, wsrl_warmup.row_dtype(types.SimpleNamespace(**spaces)))
    rb, rng = (
        wsrl_warmup.PrioritizedReplayBuffer(size, rows.dtype, rows=rows),
        np.random.default_rng(0),
    )

    def work():
        inds, _ = rb.sample(256, 0.4, rng)
        rb.update_priorities(inds, rng.normal(size=256))

    return work


def draw_frames(size):
    """256 transitions of the arm's frame buffer, half of it demos"""
    args = sac_hybrid.Args(buffer_size=2 * size + 2, batch_size=256)
    robot = sac_hybrid.Robot(args)
    buffers = [sac_hybrid.FrameBuffer(2 * size + 2, robot.record_dtype) for _ in range(2)]
    row = np.zeros((), robot.record_dtype)
    for rb in buffers:
        for _ in range(size):
            rb.insert(row)
    return lambda: sac_hybrid.sample_batch(args, *buffers, robot.layout, 0, "cpu")


WORKS = {  # title: what is measured, its sizes
    "update: tokens of an answer": (lambda n: update(length=n), (8, 32, 128, 512)),
    "update: answers of a batch": (lambda n: update(batch=n), (16, 64, 256, 1024)),
    "update: words of the vocabulary": (
        lambda n: update(vocabulary=n),
        (100, 1_000, 10_000, 50_000),
    ),
    "sampling: tokens of an answer": (generate, (8, 32, 128, 512)),
    "draw 64 rollouts, add 64: rollouts in the buffer": (draw, (10**3, 10**4, 10**5, 10**6)),
    "draw 256 transitions by priority: rows": (draw_transitions, (10**3, 10**4, 10**5, 10**6)),
    "draw 256 with images: transitions": (draw_frames, (10**3, 10**4, 10**5)),
}


def measure(job):
    title, size = job
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work, times = WORKS[title][0](size), []
    for _ in range(6):
        start = time.process_time()
        work()
        times.append(1000 * (time.process_time() - start))
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return [
        title,
        size,
        round(statistics.median(times[1:]), 2),
        round(memory, 1),
    ]  # the first one warms up


def read():
    """{title: (sizes, milliseconds, megabytes)}"""
    rows = list(csv.DictReader(open(PATH)))
    points = {title: [row for row in rows if row["work"] == title] for title in WORKS}
    return {
        title: [[float(row[name]) for row in mine] for name in COLUMNS[1:]]
        for title, mine in points.items()
    }


def table(found):
    lines = [
        "| what grows | from, to | CPU ms | steepness at the end | MB at the end |",
        "|---|---|---|---|---|",
    ]
    for title, (sizes, times, memory) in found.items():
        steep = math.log(times[-1] / times[-2]) / math.log(sizes[-1] / sizes[-2])
        ends = f"{sizes[0]:,.0f} to {sizes[-1]:,.0f} | {times[0]:.2f} to {times[-1]:.2f}"
        lines.append(f"| {title} | {ends} | {steep:.2f} | {memory[-1]:.0f} |")
    return "\n".join(lines)


def draw_curves(found, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6), layout="constrained")
    axes = figure.subplots(2, 4).flat
    for axis, (title, (sizes, times, _)) in zip(axes, found.items(), strict=False):
        axis.loglog(sizes, times, "o-")
        axis.loglog(sizes, [times[-1] * size / sizes[-1] for size in sizes], ":", color="gray")
        axis.set(title=title.partition(": ")[0], xlabel=title.partition(": ")[2])
        axis.grid(alpha=0.3)
    axes[-1].axis("off")
    axes[-1].text(0, 0.5, "dotted: linear growth\nthrough the last point", fontsize=11)
    figure.supylabel("CPU milliseconds")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="no measuring")
    if not parser.parse_args().table:
        transformers.LlamaForCausalLM  # imported now, or every process below would do it again  # noqa: B018
        jobs = [(title, size) for title, (_, sizes) in WORKS.items() for size in sizes]
        with (
            multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as workers,
            open(PATH, "w") as file,
        ):
            csv.writer(file, lineterminator="\n").writerow(COLUMNS)
            for row in workers.imap(measure, jobs, chunksize=1):
                csv.writer(file, lineterminator="\n").writerow(row)
                print(*row, flush=True)
    print(table(read()))
    draw_curves(read(), HERE.parent / "docs" / "growth.png")
