"""Does the learner hold up an arm that needs an action every 100 ms? A simulated arm counts the late ones.

The arm gives an observation at each tick of its clock and needs an action before the next tick. An action is late if it
comes after that tick. An episode has 100 steps, and a reset takes one second. Every arm of the study trains for 300
steps on images of 64 pixels with batches of 64, and is repeated on three seeds.

    python benchmark/sac_arm.py           # about eight minutes; needs two cores with nothing else to do
    python benchmark/sac_arm.py --table   # the table of docs/sac_hybrid.md, from benchmark/sac_arm.csv
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CSV = ROOT / "benchmark" / "sac_arm.csv"
PERIOD = 0.1  # seconds
STEPS = 300
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ARMS = {  # name -> launcher, flags
    "one process, `--utd 1`": ([sys.executable], "--utd 1"),
    "one process, `--utd 4`": ([sys.executable], "--utd 4"),
    "one process, `--utd 0`": ([sys.executable], "--utd 0"),
    "two processes, `--utd 4`": (TORCHRUN, "--utd 4"),
    "two processes, `--utd 0`": (TORCHRUN, "--utd 0"),
}
FLAGS = (
    f"--setup-mode single-arm-learned-gripper --max-steps {STEPS} --training-starts 50 --device cpu"
)
FLAGS += " --batch-size 64 --buffer-size 2000 --no-capture-video --log-interval 300"
FIELDS = ("arm", "seed", "late", "median_ms", "p95_ms", "updates_per_step", "load")


class Arm:
    """sac_hybrid.py makes this environment: --env-id benchmark/sac_arm.py:Arm"""

    def __init__(self, image_keys, action_dim):
        self.rng = np.random.default_rng(0)
        self.delays = []  # seconds from an observation to its action

    def observe(self):
        image = self.rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
        return {"image": image, "pose": np.zeros(7, np.float32)}

    def reset(self):
        time.sleep(1)
        self.num_steps = 0
        self.last_tick = time.monotonic()
        return self.observe(), {}

    def step(self, action):
        self.delays.append(time.monotonic() - self.last_tick)
        time.sleep(max(0, PERIOD - self.delays[-1]))
        self.last_tick = time.monotonic()
        self.num_steps += 1
        return self.observe(), 0.0, False, self.num_steps == 100, {}

    def close(self):
        if "ARM_DELAYS" in os.environ:
            Path(os.environ["ARM_DELAYS"]).write_text(json.dumps(self.delays))


def run(arm, seed):
    launcher, flags = ARMS[arm]
    with tempfile.TemporaryDirectory() as folder:
        delays_path = Path(folder) / "delays.json"
        command = [*launcher, str(ROOT / "sac_hybrid.py"), "--env-id", f"{__file__}:Arm"]
        command += [
            *FLAGS.split(),
            *flags.split(),
            "--seed",
            str(seed),
            "--run-dir",
            f"{folder}/run",
        ]
        env = os.environ | {"ARM_DELAYS": str(delays_path), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        delays = 1000 * np.array(json.loads(delays_path.read_text()))[50:]  # while it learns
        last = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return dict(
        arm=arm,
        seed=seed,
        late=round(float((delays > 1000 * PERIOD).mean()), 4),
        median_ms=round(float(np.median(delays)), 1),
        p95_ms=round(float(np.quantile(delays, 0.95)), 1),
        updates_per_step=round(last["charts/updates"] / (STEPS - 50), 2),
        load=round(os.getloadavg()[0], 1),  # processes that wanted a core in the last minute
    )


def print_table():
    rows = list(csv.DictReader(open(CSV)))
    print("| | late actions | median delay | 95 % of the delays below | updates per step |")
    print("|---|---|---|---|---|")
    for arm in ARMS:
        found = [row for row in rows if row["arm"] == arm]
        if not found:
            continue
        means = {name: np.mean([float(row[name]) for row in found]) for name in FIELDS[2:6]}
        print(
            f"| {arm} | {means['late']:.1%} | {means['median_ms']:.0f} ms | {means['p95_ms']:.0f} ms"
            f" | {means['updates_per_step']:.1f} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true")
    if not parser.parse_args().table:
        with open(CSV, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            for seed in (1, 2, 3):
                for arm in ARMS:
                    writer.writerow(run(arm, seed))
                    file.flush()
    print_table()


if __name__ == "__main__":
    main()
