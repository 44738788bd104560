"""What the two commands of the README do, with nothing else set, on five seeds each. Seconds are CPU time.

python benchmark/ppo_default.py             # two minutes; writes what ppo_default.csv lacks and prints the table
python benchmark/ppo_default.py --tables    # the table from the CSV; no training
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATH = HERE / "ppo_default.csv"
COLUMNS = ["command", "seed", "start", "end", "responses_to_0.9", "seconds_to_0.9", "seconds"]
COMMANDS = ("ppo.py", "ppo_v2.py --use-replay-buffer")
SEEDS = (311, 312, 313, 314, 315)
# The script as it is typed, with a clock that other programs on this machine do not move.
WITH_CPU_CLOCK = """
import runpy, sys, time
time.time = time.process_time
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(command, seed):
    """-> a row of the CSV"""
    with tempfile.TemporaryDirectory() as folder:
        typed = f"{HERE.parent}/{command} --seed {seed} --eval-every 1 --run-dir {folder}/run"
        before = os.times()
        subprocess.run(
            [sys.executable, "-c", WITH_CPU_CLOCK, *typed.split()],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=HERE.parent,
        )
        after = os.times()
        metrics = Path(folder) / "run" / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    seconds = 0.0
    for row in rows:  # of training: without evaluation
        seconds += row.get("time/rollout", 0) + row.get("time/update", 0)
        if row["eval/score"] >= 0.9:
            break
    whole = after.children_user + after.children_system
    whole -= before.children_user + before.children_system
    ends = [round(rows[0]["eval/score"], 4), round(rows[-1]["eval/score"], 4)]
    return [command, seed, *ends, row["global_step"], round(seconds, 2), round(whole, 1)]


def read():
    if not PATH.exists():
        return []
    return list(csv.DictReader(open(PATH, encoding="utf-8")))


def table():
    heads = "command | accuracy at the start | at the end, by seed | mean | responses to 0.9"
    lines = [f"| {heads} | CPU s of training to 0.9 | CPU s in total |", "|---" * 7 + "|"]
    for command in COMMANDS:
        mine = [row for row in read() if row["command"] == command]
        numbers = {name: [float(row[name]) for row in mine] for name in COLUMNS[2:]}
        if not mine:
            continue
        cells = [
            f"`python {command}`",
            f"{min(numbers['start']):.2f}–{max(numbers['start']):.2f}",
            " ".join(f"{end:.3f}" for end in numbers["end"]),
            f"{statistics.mean(numbers['end']):.3f}",
            f"{statistics.median(numbers['responses_to_0.9']):.0f}",
            f"{statistics.median(numbers['seconds_to_0.9']):.1f}",
            f"{statistics.median(numbers['seconds']):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="no training")
    options = parser.parse_args()
    done = [(row["command"], int(row["seed"])) for row in read()]
    jobs = [(command, seed) for seed in SEEDS for command in COMMANDS]
    for job in [] if options.tables else jobs:
        if job not in done:
            row = run(*job)
            is_new = not PATH.exists()
            with open(PATH, "a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS] * is_new + [row])
            print(*row, flush=True)
    print(table())
