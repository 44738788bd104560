"""The README's first table: `python ppo.py --seed S` for five seeds, nothing else set. Seconds are CPU time.

    python benchmark/ppo_default.py             # about five minutes; writes ppo_default.csv and prints the table
    python benchmark/ppo_default.py --table     # the table from the CSV
"""

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PATH = HERE / "ppo_default.csv"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="no training")
    rows, spent = [], 0.0
    for seed in () if parser.parse_args().table else range(1, 6):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, HERE.parent / "ppo.py", "--seed", str(seed), "--run-dir", f"{folder}/run"]
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
            start = json.loads(open(f"{folder}/run/metrics.jsonl").readline())["eval/score"]
            summary = json.loads(Path(folder, "run", "summary.json").read_text())
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds, spent = usage.ru_utime + usage.ru_stime - spent, usage.ru_utime + usage.ru_stime
        rows.append([seed, start, summary["eval/score"], round(seconds, 1), summary["global_step"]])
    if rows:
        with open(PATH, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["seed", "start_score", "eval_score", "seconds", "responses"])
            writer.writerows(rows)
    for row in csv.DictReader(open(PATH)):
        start, end, seconds = (float(row[name]) for name in ("start_score", "eval_score", "seconds"))
        print(f"| {row['seed']} | {start:.3f} | {end:.3f} | {seconds:.0f} s |")
