"""FetchPickAndPlace-v4 with sac_hybrid.py: scripted demos in the manual's format, then training on the state.

    pip install gymnasium-robotics 'mujoco<3.12'
    python benchmark/sac_fetch.py                                   # state, writes benchmark/sac_fetch_state.csv
    python benchmark/sac_fetch.py --env-id FetchPickAndPlace-v4     # as it is, writes benchmark/sac_fetch_plain.csv
Whatever follows is handed to sac_hybrid.py.
"""

import csv
import json
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import gymnasium_robotics
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sac_hybrid import Args, Robot, main, write_demos

gym.register_envs(gymnasium_robotics)
DEMOS = 50
FETCH = "FetchPickAndPlace-v4"


class ScaledFetch:
    """FetchPickAndPlace-v4 as HIL-SERL would set it up: reward 1 and the end on success, numbers of a size near 1.

    The plain one (--env-id FetchPickAndPlace-v4: reward -1 until success, metres) runs, too; it learned nothing in 5000
    steps (benchmark/sac_fetch_plain.csv).
    """

    def __init__(self, image_keys, action_dim):
        self.env = gym.make(FETCH)
        self.action_space = self.env.action_space

    def observe(self, raw):
        state, goal = raw["observation"], raw["desired_goal"]
        hand, block, middle = state[:3], state[3:6], [1.34, 0.75, 0.47]
        places = np.concatenate(
            [hand - middle, block - middle, goal - middle, block - hand, goal - block]
        )
        rest = np.concatenate(
            [20 * state[9:11], state[11:14], 10 * state[14:25]]
        )  # fingers, rotation, speeds
        return {"state": np.clip(np.concatenate([10 * places, rest]), -5, 5).astype(np.float32)}

    def reset(self, seed=None):
        raw, info = self.env.reset(seed=seed)
        return self.observe(raw), info

    def step(self, action):
        raw, _, _, truncated, info = self.env.step(action)
        success = bool(info["is_success"])
        return self.observe(raw), float(success), success, truncated and not success, info


def expert(env) -> np.ndarray:
    """Over the block, down, close, to the goal."""
    raw = env.unwrapped._get_obs()
    state, goal = raw["observation"], raw["desired_goal"]
    hand, block, width = state[:3], state[3:6], state[9:11].sum()
    offset, grip = block - hand, 1.0
    if np.abs(offset[:2]).max() > 0.01 and np.linalg.norm(offset) > 0.02:
        target = block + [0, 0, 0.06]
    elif np.linalg.norm(offset) > 0.012:
        target = block
    elif width > 0.0505:
        target, grip = block, -1.0
    else:
        target, grip = hand + (goal - block), -1.0
    return np.append(np.clip((target - hand) * 12, -1, 1), grip).astype(np.float32)


def make_demos(args: Args, path: Path):
    robot = Robot(args)
    env = getattr(robot.env, "env", robot.env)
    episodes = []
    for number in range(DEMOS):
        episodes.append(robot.play(lambda obs: expert(env), 50_000 + number))
    write_demos(path, np.concatenate(episodes))
    num_successes = sum(records["success_rate"][-1] for records in episodes)
    print(f"scripted expert: {num_successes:.0f} of {DEMOS} episodes succeed", flush=True)


if __name__ == "__main__":
    own = f"{Path(__file__)}:ScaledFetch"
    defaults = dict(
        env_id=own, max_steps=10_000, batch_size=128, training_starts=200, random_steps=0
    )
    defaults |= dict(bc_weight=0.5, gamma=0.97, lr=1e-3, tau=0.01, init_alpha=1e-3)
    args = tyro.cli(
        Args,
        default=Args(**defaults | dict(eval_every=1_000, eval_episodes=20, report_episodes=50)),
    )
    with tempfile.TemporaryDirectory() as folder:
        demos = Path(folder) / "demos.pkl"
        make_demos(args, demos)
        args.demo_paths = [str(demos)]
        args.run_dir = args.run_dir or f"{folder}/run"
        start = time.time()
        metrics = main(args)
        seconds = time.time() - start
        lines = (Path(args.run_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "eval/success_rate" in row]
    rows = [(row["global_step"], row["time"], row["eval/success_rate"]) for row in rows]
    rows.append((args.max_steps, round(seconds, 1), metrics["report/success_rate"]))
    name = f"sac_fetch_{'plain' if args.env_id == FETCH else 'state'}.csv"
    with open(Path(__file__).with_name(name), "w", newline="") as file:
        csv.writer(file).writerows([("global_step", "seconds", "success_rate"), *rows])
    print(
        f"{name}: {metrics['report/success_rate']:.2f} on {args.report_episodes} episodes after {seconds:.0f} s"
    )
