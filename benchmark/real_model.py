"""A pretrained model: ppo_v2.py on sums that it mostly gets wrong, with and without replay, whitened or not, and stale.

    python benchmark/real_model.py FOLDER       # what real_model.csv lacks; SmolLM2-135M-Instruct: 70 CPU minutes
    python benchmark/real_model.py --tables     # the tables of the pages, from the CSV

The prompt is "7 + 12 =" without a chat template, the reward 1 if the answer begins with the right number. 900 sums of
1 to 30, of which 90 are held out; equal answers for every arm. The learning rate is that of one trial with plain PPO on
seed 101; no arm was tuned.
"""

import argparse
import csv
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATH = HERE / "real_model.csv"
COLUMNS = ["arm", "seed", "answers", "accuracy", "sampled", "kl_behaviour", "cpu_seconds"]
FLAGS = "--max-prompt-length 32 --max-response-length 4 --batch-size 32 --update-epochs 1 --num-iterations 24"
FLAGS += " --learning-rate 5e-5 --lr-scheduler-type constant --eval-size 90 --eval-every 4 --save-every 1000"
REPLAY = "--use-replay-buffer --replay-sample-size 16"
ARMS = {  # name: flags, seeds
    "plain PPO": ("", (1, 2, 3)),
    "replay": (REPLAY, (1, 2, 3)),
    "plain PPO, whitened": ("--norm-adv", (1, 2, 3)),
    "lag 8, decoupled": ("--rollout-lag 8 --correction decoupled", (1,)),
    "lag 8, dppo": ("--rollout-lag 8 --correction dppo", (1,)),
    "lag 2, decoupled": ("--rollout-lag 2 --correction decoupled", (1,)),
    "lag 2, dppo": ("--rollout-lag 2 --correction dppo", (1,)),
    "replay, whitened": (f"{REPLAY} --norm-adv", (1, 2, 3)),
}


def first_number(prompts, responses, answers):
    found = [re.match(r"\s*(\d+)", response) for response in responses]
    return [float(bool(match) and match[1] == answer) for match, answer in zip(found, answers, strict=True)]


def write_sums(path):
    pairs = [(a, b) for a in range(1, 31) for b in range(1, 31)]
    path.write_text("".join(json.dumps({"prompt": f"{a} + {b} =", "answer": a + b}) + "\n" for a, b in pairs))


def run(model, arm, seed):
    """One run of ppo_v2.py -> rows for the CSV, one per evaluation"""
    with tempfile.TemporaryDirectory() as folder:
        write_sums(Path(folder) / "sums.jsonl")
        command = [sys.executable, HERE.parent / "ppo_v2.py", *FLAGS.split(), *ARMS[arm][0].split()]
        command += ["--model-name", model, "--task", f"jsonl:{folder}/sums.jsonl", "--seed", seed]
        command += ["--reward-fn", f"{__file__}:first_number", "--device", "cpu", "--run-dir", f"{folder}/run"]
        before = os.times()
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    seconds = sum(after[2:4]) - sum(before[2:4])  # of the child: user and system
    found, sampled, drift = [], [], []
    for row in rows:
        sampled += [row["charts/score"]] if "charts/score" in row else []
        drift += [row[key] for key in ("lag/kl_behaviour", "replay/kl_behaviour") if row.get(key) is not None]
        if "eval/score" in row:
            means = [round(statistics.mean(x), 4) if x else "" for x in (sampled, drift)]
            found.append([arm, seed, row["global_step"], round(row["eval/score"], 4), *means, round(seconds)])
            sampled, drift = [], []
    return found


def read():
    """{(arm, seed): rows}"""
    found = {}
    for row in csv.DictReader(open(PATH)) if PATH.exists() else ():
        found.setdefault((row["arm"], int(row["seed"])), []).append(row)
    return found


def table(done, arms):
    """Markdown: greedy accuracy at the start, at the end by seed, over the run; what training samples scored"""
    lines = ["| | start | end, by seed | mean | mean over the run | sampled, last sixth | KL(mu, pi) | CPU s |"]
    lines.append("|---" * 8 + "|")
    for arm in arms:
        runs = [rows for (name, _), rows in sorted(done.items()) if name == arm]
        if runs:
            ends = [float(rows[-1]["accuracy"]) for rows in runs]
            over = [statistics.mean(float(row["accuracy"]) for row in rows[1:]) for rows in runs]
            sampled = statistics.mean(float(rows[-1]["sampled"]) for rows in runs)
            drift = [float(row["kl_behaviour"]) for rows in runs for row in rows if row["kl_behaviour"]]
            seconds = statistics.mean(float(rows[0]["cpu_seconds"]) for rows in runs)
            cells = [runs[0][0]["accuracy"][:4], " ".join(f"{x:.2f}" for x in ends), f"{statistics.mean(ends):.2f}"]
            cells += [f"{statistics.mean(over):.2f}", f"{sampled:.2f}"]
            cells += [f"{statistics.mean(drift):.3f}" if drift else "–", f"{seconds:.0f}"]
            lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or hub name of a causal LM")
    parser.add_argument("--tables", action="store_true", help="no training")
    options = parser.parse_args()
    if not (options.model or options.tables):
        parser.error("which model?")
    jobs = [(arm, seed) for arm, (_, seeds) in ARMS.items() for seed in seeds]
    jobs.sort(key=lambda job: (list(ARMS).index(job[0]) // 3, job[1]))  # a seed of three arms, then the next
    for job in [] if options.tables else jobs:
        if job not in read():
            rows, new = run(options.model, *job), not PATH.exists()
            with open(PATH, "a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS] * new + rows)
            print(*rows[-1], flush=True)
    stale = [arm for arm in ARMS if arm.startswith("lag")]
    print(f"\n{table(read(), [arm for arm in ARMS if arm not in stale])}\n\n{table(read(), ['plain PPO', *stale])}")
