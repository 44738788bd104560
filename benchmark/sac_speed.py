"""Updates per second of sac_hybrid.py and of stable-baselines3's SAC, in the same run, alternating.

State observations (17 numbers, 6 actions), 256x256 networks, 2 critics, batch 256, one thread, automatic temperature, a
buffer of 10000 transitions, every update full: critic, actor, temperature, targets. Sampling the batch counts on both
sides. Ours is measured as it is by default, with LayerNorm, which the other has not; without it for equal terms; and
with `cta 2`, as it is used: every second update is critic-only. CPU seconds of the process: other load must not count.
Ratios are medians over short rounds.

    pip install stable-baselines3
    python benchmark/sac_speed.py            # writes benchmark/sac_speed.csv
"""

import argparse
import csv
import ctypes
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sac_hybrid import Args, FrameBuffer, Robot, SACHybridAgent, sample_batch

OBS, ACTIONS, BATCH, UPDATES, ROUNDS = 17, 6, 256, 10, 21


class Blank(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (ACTIONS,), np.float32)

    def reset(self, seed=None, options=None):
        return np.zeros(OBS, np.float32), {}

    def step(self, action):
        return np.zeros(OBS, np.float32), 0.0, False, False, {}


def main():
    try:
        import stable_baselines3
        from stable_baselines3.common.logger import configure
    except ImportError:
        raise SystemExit("benchmark/sac_speed.py: needs an optional package: pip install stable-baselines3") from None
    torch.set_num_threads(1)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)  # glibc's: other C libraries have none
    mallopt(-3, 2**28)  # M_MMAP_THRESHOLD: freed blocks are kept, for both: it is the same process
    mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
    rng = np.random.default_rng(0)
    peer = stable_baselines3.SAC("MlpPolicy", Blank(), batch_size=BATCH, buffer_size=10_000, device="cpu", seed=0)
    peer.set_logger(configure(format_strings=[]))
    options = dict(env_id="Blank-v0", setup_mode="single-arm-fixed-gripper", batch_size=BATCH, backup_entropy=True)
    gym.register("Blank-v0", Blank)
    robot = Robot(Args(**options), human=False)
    online_rb, demo_rb = FrameBuffer(20_001, robot.record), FrameBuffer(2, robot.record)
    record = np.zeros((), robot.record)
    for _ in range(10_000):
        obs, next_obs = rng.normal(size=(2, OBS)).astype(np.float32)
        action, reward = rng.uniform(-1, 1, ACTIONS).astype(np.float32), float(rng.normal())
        peer.replay_buffer.add(obs[None], next_obs[None], action[None], np.array([reward]), np.array([False]), [{}])
        record["obs"]["state"], record["next_obs"]["state"], record["actions"] = obs, next_obs, action
        record["rewards"], record["masks"] = reward, 1.0
        online_rb.insert(record)

    def ours(layer_norm, cta_ratio):
        args = Args(**options, layer_norm=layer_norm)
        agent = SACHybridAgent(*robot.dims, "cpu", args, *robot.sizes)

        def run():
            for i in range(UPDATES):
                batch = sample_batch(args, online_rb, demo_rb, robot.layout, agent.updates, "cpu")
                agent.update(batch, full=(i + 1) % cta_ratio == 0)

        return run

    runs = {"stable-baselines3": lambda: peer.train(UPDATES, BATCH), "sac_hybrid": ours(True, 1)}
    runs |= {"sac_hybrid without LayerNorm": ours(False, 1), "sac_hybrid cta 2": ours(True, 2)}
    rows = []
    for i in range(ROUNDS + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if i:  # the first round warms up
                rows.append((i, name, round(UPDATES / (time.process_time() - start), 2)))
    with open(Path(__file__).with_suffix(".csv"), "w", newline="") as file:
        csv.writer(file).writerows([("round", "script", "updates_per_second"), *rows])
    rates = {name: [row[2] for row in rows if row[1] == name] for name in runs}
    for name, own in rates.items():  # round by round: a machine that slows down for a second slows both
        ratios = np.divide(own, rates["stable-baselines3"])
        low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        print(f"{name:30s} {np.median(own):7.1f} updates/s   {median:.2f}x (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
