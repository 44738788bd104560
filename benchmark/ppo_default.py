"""What the two commands of the README do, nothing else set, on five seeds each. Seconds are CPU time.

python benchmark/ppo_default.py             # about four minutes; writes ppo_default.csv and prints the table
python benchmark/ppo_default.py --table     # the table from the CSV
"""

import argparse
import csv
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PATH = HERE / "ppo_default.csv"
COLUMNS = ["command", "seed", "start", "end", "answers_to_0.9", "seconds_to_0.9", "seconds"]
COMMANDS = ("ppo.py", "ppo.py, second pass", "ppo_v2.py --use-replay-buffer")
SEEDS = (11, 12, 13, 14, 15)
CPU_CLOCK = "import runpy, sys, time; time.time = time.process_time; sys.argv = sys.argv[1:]\n"  # other load is no cost
AS_TYPED = "runpy.run_path(sys.argv[0], run_name='__main__')"
SECOND_PASS = """
import ppo
sample = ppo.rollout

def rollout(policy, pairs, *rest):  # log-probs and values not by the sampler, but by the training pass
    rows = sample(policy, pairs, *rest)
    if rest[3:]:  # training; evaluation draws no uniforms
        rows["logprobs"], _, rows["values"] = ppo.score_rows(policy, rows, len(pairs))
    return rows

ppo.rollout = rollout
ppo.main(ppo.tyro.cli(ppo.Args, args=sys.argv[1:]))
"""


def run(command, seed):
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        typed, _, second = command.partition(", ")
        flags = f"{HERE.parent / typed} --seed {seed} --eval-every 1 --run-dir {folder}/run".split()
        code = CPU_CLOCK + (SECOND_PASS if second else AS_TYPED)
        subprocess.run(
            [sys.executable, "-c", code, *flags],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=HERE.parent,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    seconds = 0.0
    for row in rows:  # of training: without evaluation
        seconds += row.get("time/rollout", 0) + row.get("time/update", 0)
        if row["eval/score"] >= 0.9:
            break
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    ends = [round(row["eval/score"], 4) for row in (rows[0], rows[-1])]
    return [command, seed, *ends, row["global_step"], round(seconds, 2), round(whole, 1)]


def table():
    rows = list(csv.DictReader(open(PATH)))
    lines = ["| command | start | end, seeds 11–15 | mean | answers to .9 | CPU s of training to .9 | CPU s in all |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for command in COMMANDS:
        mine = [row for row in rows if row["command"] == command]
        start, end, answers, sooner, whole = (
            [float(row[name]) for row in mine] for name in (*COLUMNS[2:4], *COLUMNS[4:])
        )
        ends = " ".join(f"{x:.3f}".replace("0.", ".") for x in end)
        middle = [
            f"{statistics.median(x):.{n}f}" for x, n in ((answers, 0), (sooner, 1), (whole, 0))
        ]
        first = f"{min(start):.2f}–{max(start):.2f}"
        typed, _, variant = command.partition(", ")
        cells = [
            f"`python {typed}`" + f", {variant}" * bool(variant),
            first,
            ends,
            f"{statistics.mean(end):.3f}",
            *middle,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="no training")
    if not parser.parse_args().table:
        rows = [run(command, seed) for seed in SEEDS for command in COMMANDS]
        with open(PATH, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    print(table())
