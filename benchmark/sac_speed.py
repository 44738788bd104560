"""Updates per second of our two SAC scripts, of stable-baselines3 and of SBX, in the same process, alternating.

    pip install -e .[peers]
    python benchmark/sac_speed.py            # measures, writes benchmark/sac_speed.csv, prints the table of the page
    python benchmark/sac_speed.py --table    # only prints

State observations (17 numbers, 6 actions), 2 critics, batch 256, one thread, automatic temperature, a buffer of 10000
transitions, every update full: critic, actor, temperature, targets. Sampling the batch counts on every side, compiling
(SBX) on none; both libraries get ten updates in one call. LayerNorm is our default; stable-baselines3 has none. With
`critic-only`, as sac_hybrid.py is used, every second update leaves the actor out. `matrix products alone` are torch's:
those of a full update and nothing else. CPU seconds of the process: other load must not count.
"""

import argparse
import csv
import ctypes
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
import gymnasium as gym
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sac_hybrid
import wsrl_warmup

PATH, COLUMNS = (
    Path(__file__).with_suffix(".csv"),
    ["round", "width", "layer_norm", "script", "updates_per_second"],
)
OBS, ACTIONS, BATCH, UPDATES, ROUNDS, WIDTHS = 17, 6, 256, 10, 21, (256, 64)
SB3, FLOOR = "stable-baselines3", "matrix products alone"
SCRIPTS = (
    SB3,
    "SBX",
    "sac_hybrid.py",
    "sac_hybrid.py, every second critic-only",
    "wsrl_warmup.py",
    FLOOR,
)


class Blank(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (ACTIONS,), np.float32)

    def reset(self, seed=None, options=None):
        return np.zeros(OBS, np.float32), {}

    def step(self, action):
        return np.zeros(OBS, np.float32), 0.0, False, False, {}


def floor(width):
    """The products of one update: 2 critics in one, as we compute them; weights' and inputs' gradients where needed."""

    def layers(critics, in_dim, out_dim):
        shapes = [(in_dim, width), (width, width), (width, out_dim)]
        return [
            [torch.randn(critics, *size) for size in ((BATCH, m), (m, n), (BATCH, n))]
            for m, n in shapes
        ]

    actor, critic = layers(1, OBS, 2 * ACTIONS), layers(2, OBS + ACTIONS, 1)

    def forward(net):
        for x, weight, _ in net:
            torch.bmm(x, weight)

    def gradients(net, weights=True, inputs=True, first=False):
        for i, (x, weight, y) in enumerate(net):
            if weights:
                torch.bmm(x.mT, y)
            if inputs and (i or first):
                torch.bmm(y, weight.mT)

    def run():
        for _ in range(UPDATES):
            for net in (
                actor,
                critic,
                critic,
            ):  # the next action, its target, the value of this one
                forward(net)
            gradients(critic)
            for net in (actor, critic):  # what the policy would do now, and what it is worth
                forward(net)
            gradients(critic, weights=False, first=True)
            gradients(actor)

    return run


def sides(width):
    """{(script, layer_norm): UPDATES updates}"""
    import sbx
    import stable_baselines3
    from stable_baselines3.common.logger import configure

    peers, rng = {}, np.random.default_rng(0)
    for name, layer_norm in ((SB3, 0), ("SBX", 0), ("SBX", 1)):
        options = dict(batch_size=BATCH, buffer_size=10_000, device="cpu", seed=0)
        options["policy_kwargs"] = dict(net_arch=[width, width]) | (
            dict(layer_norm=True) if layer_norm else {}
        )
        peer = (stable_baselines3 if name == SB3 else sbx).SAC("MlpPolicy", Blank(), **options)
        peer.set_logger(configure(format_strings=[]))
        peers[name, layer_norm] = peer
    hybrid = dict(
        env_id="Blank-v0",
        setup_mode="single-arm-fixed-gripper",
        batch_size=BATCH,
        backup_entropy=True,
        hidden_size=width,
    )
    robot = sac_hybrid.Robot(sac_hybrid.Args(**hybrid))
    online_rb = sac_hybrid.FrameBuffer(20_001, robot.record_dtype)
    demo_rb, record = (
        sac_hybrid.FrameBuffer(2, robot.record_dtype),
        np.zeros((), robot.record_dtype),
    )
    env = wsrl_warmup.make_gym_env("Blank-v0")
    rows = np.zeros(10_000, wsrl_warmup.make_row_dtype(env))
    rows["weights"] = rows["masks"] = 1
    for row in rows:
        obs, next_obs = rng.normal(size=(2, OBS)).astype(np.float32)
        action, reward = rng.uniform(-1, 1, ACTIONS).astype(np.float32), float(rng.normal())
        for peer in peers.values():
            peer.replay_buffer.add(
                obs[None], next_obs[None], action[None], np.array([reward]), np.array([False]), [{}]
            )
        record["obs"]["state"], record["next_obs"]["state"], record["actions"] = (
            obs,
            next_obs,
            action,
        )
        record["rewards"], record["masks"] = reward, 1.0
        online_rb.insert(record)
        row["obs"], row["next_obs"], row["actions"], row["rewards"] = obs, next_obs, action, reward

    def ours(layer_norm, cta_ratio):
        args = sac_hybrid.Args(**hybrid, layer_norm=bool(layer_norm))
        robot.args = args
        agent = robot.make_agent("cpu")

        def run():
            for i in range(UPDATES):
                batch = sac_hybrid.sample_batch(agent, online_rb, demo_rb)
                agent.update(batch, train_actor=(i + 1) % cta_ratio == 0)

        return run

    def warm_up(layer_norm):
        options = wsrl_warmup.PRESETS["scratch"] | dict(hidden_size=width, batch_size=BATCH)
        args = wsrl_warmup.Args(**options, layer_norm=bool(layer_norm), device="cpu")
        args.backup_entropy = True
        agent = wsrl_warmup.WarmupAgent(np.zeros(OBS), np.ones(OBS), np.ones(ACTIONS), "cpu", args)
        offline_rb = wsrl_warmup.PrioritizedReplayBuffer(len(rows), rows.dtype, 0.0)
        online_rb = wsrl_warmup.PrioritizedReplayBuffer(1, rows.dtype, 0.0)
        offline_rb.extend(rows)

        def run():
            for _ in range(UPDATES):
                batch, _, _ = wsrl_warmup.sample_mixed(agent, offline_rb, online_rb, 1.0, 1.0)
                agent.update(batch)

        return run

    found = {key: lambda peer=peer: peer.train(UPDATES, BATCH) for key, peer in peers.items()}
    for layer_norm in (0, 1):
        found["sac_hybrid.py", layer_norm] = ours(layer_norm, 1)
        found["sac_hybrid.py, every second critic-only", layer_norm] = ours(layer_norm, 2)
        found["wsrl_warmup.py", layer_norm] = warm_up(layer_norm)
    return found | {(FLOOR, 0): floor(width)}


def measure():
    torch.set_num_threads(1)
    mallopt = getattr(
        ctypes.CDLL(None), "mallopt", lambda *_: None
    )  # glibc's: other C libraries have none
    mallopt(-3, 2**28)  # M_MMAP_THRESHOLD: freed blocks are kept, for all: it is the same process
    mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
    gym.register("Blank-v0", Blank)
    rows = []
    for width in WIDTHS:
        runs = sides(width)
        for i in range(ROUNDS + 1):
            for (name, layer_norm), run in runs.items():
                start = time.process_time()
                run()
                if i:  # the first round warms up, and compiles
                    rows.append(
                        (
                            i,
                            width,
                            layer_norm,
                            name,
                            round(UPDATES / (time.process_time() - start), 2),
                        )
                    )
    with open(PATH, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def rates(rows, name, width, layer_norm):
    key = (name, str(width), str(layer_norm))
    found = [row for row in rows if (row["script"], row["width"], row["layer_norm"]) == key]
    return [float(row["updates_per_second"]) for row in found]


def times(rows, name, width, layer_norm):
    """How many times as many as stable-baselines3, round by round: a machine that slows down slows all."""
    pairs = zip(rates(rows, name, width, layer_norm), rates(rows, SB3, width, 0), strict=True)
    return statistics.median(x / y for x, y in pairs)


def table(rows):
    """Markdown: median updates a second, and how many times stable-baselines3's"""
    columns = [(width, layer_norm) for width in WIDTHS for layer_norm in (0, 1)]
    heads = [f"{width}x{width}{', LayerNorm' * layer_norm}" for width, layer_norm in columns]
    lines = [f"| updates a second (times SB3) | {' | '.join(heads)} |", "|---" * 5 + "|"]
    for name in SCRIPTS:
        row = []
        for key in columns:
            own = rates(rows, name, *key)
            row.append(
                f"{statistics.median(own):.0f} ({times(rows, name, *key):.2f})" if own else "–"
            )
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="no measuring")
    if not parser.parse_args().table:
        measure()
    print(table(list(csv.DictReader(open(PATH)))))
