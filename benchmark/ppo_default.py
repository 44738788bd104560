"""The README's first table: `python ppo.py --seed S` for five seeds, nothing else set. Seconds are CPU time.

    python benchmark/ppo_default.py     # about five minutes; writes ppo_default.csv and prints the table
"""

import csv
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

if __name__ == "__main__":
    rows, spent = [], 0.0
    for seed in range(1, 6):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, HERE.parent / "ppo.py", "--seed", str(seed), "--run-dir", f"{folder}/run"]
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
            start = json.loads(open(f"{folder}/run/metrics.jsonl").readline())["eval/score"]
            summary = json.loads(Path(folder, "run", "summary.json").read_text())
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds, spent = usage.ru_utime + usage.ru_stime - spent, usage.ru_utime + usage.ru_stime
        rows.append([seed, start, summary["eval/score"], round(seconds, 1), summary["global_step"]])
        print(f"| {seed} | {start:.3f} | {summary['eval/score']:.3f} | {seconds:.0f} s |", flush=True)
    with open(HERE / "ppo_default.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["seed", "start_score", "eval_score", "seconds", "responses"])
        writer.writerows(rows)
