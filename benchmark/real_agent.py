"""A pretrained model as an agent: het_grpo.py on a text game of two turns, with and without experience, and its rivals.

    python benchmark/real_agent.py FOLDER       # what real_agent.csv lacks; SmolLM2-135M-Instruct: an hour of CPU time
    python benchmark/real_agent.py --tables     # the tables of docs/het_grpo.md, from the CSV

Equal rollouts and one learning rate for every arm; no arm was tuned. There are two parts:
  given   doors.py, without a chat template: six doors, two keys each. The pool has a past game of every door. HET
          and sft play half of their training games with it, sd asks it about failures, the baseline sees it in
          validation only.
  own     house.py, with a chat template. No pool is given. After a first round of 24 games and after every iteration
          notes are added: the built-in summarizer tells where a success found the item, or the policy itself is
          asked what it has learned (house.py:reflect). The baseline has no notes.
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

import doors
import house
import torch

HERE = Path(__file__).resolve().parent
PATH = HERE / "real_agent.csv"
COLUMNS = [
    "arm",
    "learning_rate",
    "seed",
    "rollouts",
    "unguided",
    "guided",
    "sampled",
    "cpu_seconds",
    "notes",
    "right_notes",
]
FLAGS = "--num-train-tasks 120 --updated-freq 0 --max-turns 2 --max-turn-tokens 1 --temperature 0.7 --num-tasks 4"
FLAGS += " --group-size 6 --update-epochs 1 --eval-size 48 --eval-every 3 --save-every 1000 --num-iterations 6"
FLAGS += " --init-exp-before-training 0"
DOORS = f"--env {HERE}/doors.py:Doors"
ARMS = {
    "baseline": "--method baseline --val-rollout-expmode mixed",
    "HET": "--method het",
    "sft": "--method sft",
    "sd": None,  # measured with distill.py; not run here
}
HOUSE = f"--env {HERE}/house.py:House --chat-template --max-turns 2 --max-turn-tokens 12 --temperature 0.5"
HOUSE += " --num-tasks 4 --group-size 4 --num-train-tasks 24 --num-iterations 6 --eval-every 6 --save-every 1000"
HOUSE += " --update-epochs 1"
NOTES = "--method het --eval-size 48 --init-exp-before-training 6 --updated-freq 1"
OWN = {
    "no notes": "--method baseline --eval-size 24",
    "notes of the built-in summarizer": NOTES,
    "notes of the policy": f"{NOTES} --summarizer {HERE}/house.py:reflect",
}
RATE, SEEDS = "3e-5", (1, 2, 3)


def run(model, arm, seed):
    """One run of het_grpo.py -> rows for the CSV, one per evaluation"""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{HOUSE} {OWN[arm]}" if arm in OWN else f"{FLAGS} {DOORS} {ARMS[arm]}"
        command = [
            sys.executable,
            HERE.parent / "het_grpo.py",
            *flags.split(),
            "--model-name",
            model,
        ]
        if arm in ARMS:
            lines = [json.dumps(dict(topic=x, text=doors.played(x))) + "\n" for x in doors.PAIRS]
            (Path(folder) / "pool.jsonl").write_text("".join(lines))
            command += ["--experience-pool", f"{folder}/pool.jsonl"]
            command += ["--experience-template", "{}\n\n"]
        command += ["--learning-rate", RATE, "--seed", seed]
        command += ["--device", "cpu", "--run-dir", f"{folder}/run"]
        before = os.times()
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
        checkpoint = torch.load(f"{folder}/run/checkpoint.pt", weights_only=True)
        notes = checkpoint["state"]["pool"]["records"]
    seconds = sum(after[2:4]) - sum(before[2:4])  # of the child: user and system
    found, sampled = [], []
    for row in rows:
        sampled += [row["success/unguided"]] if "success/unguided" in row else []
        if "eval/success_unguided" in row:
            names = ("eval/success_unguided", "eval/success_guided")
            scores = [round(row[name], 4) if name in row else "" for name in names]
            scores.append(round(statistics.mean(sampled), 4) if sampled else "")
            found.append([arm, RATE, seed, row["global_step"], *scores, round(seconds), "", ""])
            sampled = []
    if arm in OWN:
        found[-1][-2:] = len(notes), sum(house.is_right(note) for note in notes)
    return found


def read():
    """{(arm, seed): rows}"""
    found = {}
    for row in csv.DictReader(open(PATH)) if PATH.exists() else ():
        found.setdefault((row["arm"], int(row["seed"])), []).append(row)
    return found


def table(done, arms):
    """Markdown: greedy success on held-out tasks at the start and at the end, without and with advice"""
    kinds = " | ".join(
        f"{kind} advice: start | end, by seed | mean" for kind in ("without", "with")
    )
    own = arms is OWN
    names = ["rollouts", "cpu_seconds", *(["notes", "right_notes"] if own else [])]
    titles = "rollouts | CPU s" + (" | notes | right ones" if own else "")
    lines = [f"| | {kinds} | {titles} |", "|---" * (7 + len(names)) + "|"]
    for arm in arms:
        runs = [rows for (name, _), rows in sorted(done.items()) if name == arm]
        cells = []
        for kind in ("unguided", "guided") if runs else ():
            starts = sorted({f"{float(rows[0][kind]):.2f}" for rows in runs if rows[0][kind]})
            ends = [float(rows[-1][kind]) for rows in runs if rows[-1][kind]]
            cells += [" ".join(starts) or "–", " ".join(f"{x:.2f}" for x in ends) or "–"]
            cells += [f"**{statistics.mean(ends):.2f}**" if ends else "–"]
        for name in names if runs else ():
            cells.append(f"{statistics.mean(float(rows[-1][name]) for rows in runs):.0f}")
        lines += [f"| {arm} | " + " | ".join(cells) + " |"] if runs else []
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="folder or hub name of a causal LM")
    parser.add_argument("--tables", action="store_true", help="no training")
    options = parser.parse_args()
    if not (options.model or options.tables):
        parser.error("which model?")
    for job in (
        []
        if options.tables
        else [(arm, seed) for seed in SEEDS for arm in ARMS | OWN if (ARMS | OWN)[arm]]
    ):  # a seed of all, then the next
        if job not in read():
            rows, new = run(options.model, *job), not PATH.exists()
            with open(PATH, "a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS] * new + rows)
            print(*rows[-1], flush=True)
    for arms in (ARMS, OWN):
        print(f"\n{table(read(), arms)}")
