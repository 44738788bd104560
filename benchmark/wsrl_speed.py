"""Updates per second of wsrl_warmup.py and of stable-baselines3's SAC in the same run, and what prioritized draws cost.

Equal terms: 17 observations, 6 actions, 256x256 networks without LayerNorm, 2 critics, batch 256, one thread, automatic
temperature, every update full: critic, actor, temperature, targets. Sampling the batch counts on both sides. CPU
seconds of the process, alternating, medians: other load must not count.

    pip install stable-baselines3
    python benchmark/wsrl_speed.py            # writes benchmark/wsrl_speed.csv
"""

import argparse
import csv
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from wsrl_warmup import PrioritizedReplayBuffer, UniformReplayBuffer, WarmupAgent, keep_memory, sample_mixed

OBS, ACTIONS, BATCH, UPDATES, ROUNDS = 17, 6, 256, 10, 21


class Blank(gym.Env):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (ACTIONS,), np.float32)

    def reset(self, seed=None, options=None):
        return np.zeros(OBS, np.float32), {}

    def step(self, action):
        return np.zeros(OBS, np.float32), 0.0, False, False, {}


def rows(rng, n):
    columns = {name: rng.normal(size=(n, OBS)) for name in ("obs", "next_obs")}
    columns |= dict(actions=rng.uniform(-1, 1, (n, ACTIONS)), rewards=rng.normal(size=n), masks=np.ones(n))
    return columns | dict(weights=np.ones(n), quality=np.zeros(n), returns=np.zeros(n))


def per_milliseconds(rng):
    """Sample 256 of 10^6 rows and give back their TD errors; median of 200."""
    rb, times = PrioritizedReplayBuffer(1_000_000, 1, 1), []
    rb.size = 1_000_000
    rb.set_priorities(np.arange(rb.size), rng.random(rb.size))
    for _ in range(200):
        start = time.process_time()
        inds, _ = rb.sample(256, 0.4, rng)
        rb.update_priorities(inds, rng.normal(size=256))
        times.append(1000 * (time.process_time() - start))
    return float(np.median(times))


def main():
    try:
        import stable_baselines3
        from stable_baselines3.common.logger import configure
    except ImportError:
        raise SystemExit("benchmark/wsrl_speed.py: needs an optional package: pip install stable-baselines3") from None
    torch.set_num_threads(1)
    keep_memory()  # for both: it is the same process
    rng = np.random.default_rng(0)
    peer = stable_baselines3.SAC("MlpPolicy", Blank(), batch_size=BATCH, buffer_size=10_000, device="cpu", seed=0)
    peer.set_logger(configure(format_strings=[]))
    data = rows(rng, 10_000)
    for i in range(10_000):
        step = [data[name][i][None] for name in ("obs", "next_obs", "actions")]
        peer.replay_buffer.add(*step, np.array([data["rewards"][i]]), np.array([False]), [{}])
    same = dict(hidden_size=256, layer_norm=False, backup_entropy=True)
    plain, ten = WarmupAgent(OBS, ACTIONS, **same), WarmupAgent(OBS, ACTIONS, num_critics=10, **same)
    uniform, prioritized = UniformReplayBuffer(10_000, OBS, ACTIONS), PrioritizedReplayBuffer(10_000, OBS, ACTIONS)
    for rb in (uniform, prioritized):
        rb.insert(data)

    def ours(agent, rb):
        for _ in range(UPDATES):
            batch, is_weights, take_back = sample_mixed((None, rb), (0, BATCH), 0.4, rng, agent)
            stats = agent.weighted_update(
                batch, (is_weights / is_weights.mean(), None) if rb is prioritized else (None,) * 2
            )
            if rb is prioritized:
                take_back(stats["td_errors"].numpy())

    runs = {
        "stable-baselines3": lambda: peer.train(UPDATES, BATCH),
        "wsrl_warmup": lambda: ours(plain, uniform),
        "wsrl_warmup PER": lambda: ours(plain, prioritized),
        "wsrl_warmup ten critics": lambda: ours(ten, uniform),
    }
    found = []
    for i in range(ROUNDS + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if i:  # the first round warms up
                found.append((i, name, round(UPDATES / (time.process_time() - start), 2)))
    per = per_milliseconds(rng)
    found.append((0, "PER sample + update of 256 in 10^6, ms", round(per, 3)))
    with open(Path(__file__).with_suffix(".csv"), "w", newline="") as file:
        csv.writer(file).writerows([("round", "script", "updates_per_second"), *found])
    rates = {name: np.array([row[2] for row in found if row[1] == name]) for name in runs}
    for name, own in rates.items():  # round by round: a machine that slows down for a second slows both
        low, median, high = np.quantile(own / rates["stable-baselines3"], [0.25, 0.5, 0.75])
        print(f"{name:24s} {np.median(own):7.1f} updates/s   {median:.2f}x (quartiles {low:.2f} to {high:.2f})")
    print(f"ten critics cost {np.median(rates['wsrl_warmup'] / rates['wsrl_warmup ten critics']):.2f} times two")
    print(f"PER on 10^6 rows: sample and update of 256 take {per:.2f} ms")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
