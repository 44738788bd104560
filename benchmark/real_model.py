"""A pretrained model on sums that it mostly gets wrong: plain PPO, replay, imitation; whitened or not; and stale.

    python benchmark/real_model.py FOLDER --tune    # five settings an arm on seed 101
    python benchmark/real_model.py FOLDER           # what real_model.csv lacks; SmolLM2-135M-Instruct: 2 CPU hours
    python benchmark/real_model.py --tables         # the tables of the pages, from the CSV

The prompt is "7 + 12 =" without a chat template, the reward 1 if the answer begins with the right number. 900 sums of
1 to 30, of which 90 are held out; equal answers for every arm. Three arms are tuned, by the mean accuracy over the run;
the others have a rate of 5e-5.
"""

import argparse
import csv
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATH = HERE / "real_model.csv"
COLUMNS = [
    "arm",
    "setting",
    "seed",
    "answers",
    "accuracy",
    "sampled",
    "kl_behaviour",
    "cpu_seconds",
]
FLAGS = "--max-prompt-length 32 --max-response-length 4 --batch-size 32 --update-epochs 1 --num-iterations 24"
FLAGS += " --learning-rate 5e-5 --lr-scheduler-type constant --eval-size 90 --eval-every 4 --save-every 1000"
REPLAY = "--use-replay-buffer --replay-sample-size 16"
IMITATION, TUNING_SEED = "rejection sampling", 101
ARMS = {  # name: flags, seeds
    "plain PPO": ("", (1, 2, 3, 4, 5)),
    "replay": (REPLAY, (1, 2, 3, 4, 5)),
    IMITATION: ("", (1, 2, 3, 4, 5)),
    "plain PPO, whitened": ("--norm-adv", (1, 2, 3)),
    "replay, whitened": (f"{REPLAY} --norm-adv", (1, 2, 3)),
    "lag 8, decoupled": ("--rollout-lag 8 --correction decoupled", (1,)),
    "lag 8, dppo": ("--rollout-lag 8 --correction dppo", (1,)),
    "lag 2, decoupled": ("--rollout-lag 2 --correction decoupled", (1,)),
    "lag 2, dppo": ("--rollout-lag 2 --correction dppo", (1,)),
}
RATES = ["--learning-rate 1e-4", "", "--learning-rate 2e-5", "--learning-rate 1e-5"]
GRID = {
    "plain PPO": [*RATES, "--update-epochs 2"],
    "replay": [*RATES, "--replay-sample-size 32"],
    IMITATION: [
        *RATES,
        "--update-epochs 4",
    ],  # supervised steps of 32 an iteration; two where nothing is said
}


def first_number(prompts, responses, answers):
    found = [re.match(r"\s*(\d+)", response) for response in responses]
    return [
        float(bool(match) and match[1] == answer)
        for match, answer in zip(found, answers, strict=True)
    ]


def write_sums(path):
    pairs = [(a, b) for a in range(1, 31) for b in range(1, 31)]
    path.write_text(
        "".join(json.dumps({"prompt": f"{a} + {b} =", "answer": a + b}) + "\n" for a, b in pairs)
    )


def imitate(model, setting, seed, folder):
    """Rejection sampling on the same prompts -> as the lines of ppo_v2.py's metrics.jsonl"""
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    import torch
    import tyro
    from replay_study import rejection_sampling

    import ppo_v2

    torch.set_num_threads(1)
    flags = FLAGS.replace("--update-epochs 1", "--update-epochs 2").split() + setting.split()
    args = tyro.cli(ppo_v2.Args, args=[*flags, *model_flags(model, seed, folder)])
    lm, tokenizer, eos_ids = ppo_v2.load_lm(args)
    train, held_out, _ = ppo_v2.make_task(args, tokenizer)
    policy = ppo_v2.PolicyWithValue(lm, eos_ids, args.temperature)
    stream = random.Random(f"{seed}/0").sample(train, len(train))
    scores = []

    def rollout(pairs):
        uniforms = torch.rand(len(pairs), args.max_response_length)
        rows = ppo_v2.rollout(policy, pairs, tokenizer, first_number, args, uniforms)
        scores.append(rows["scores"].mean().item())
        return rows

    def evaluate():
        return ppo_v2.evaluate(policy, held_out, tokenizer, first_number, args)

    curve = rejection_sampling(args, policy, stream, evaluate, rollout, args.update_epochs, size=32)
    lines = [
        {"global_step": args.batch_size * i, "charts/score": score}
        for i, score in enumerate(scores, 1)
    ]
    lines += [{"global_step": answers, "eval/score": accuracy} for answers, _, accuracy in curve]
    return sorted(lines, key=lambda line: (line["global_step"], len(line), "eval/score" in line))


def model_flags(model, seed, folder):
    flags = [
        "--model-name",
        model,
        "--task",
        f"jsonl:{folder}/sums.jsonl",
        "--seed",
        seed,
        "--device",
        "cpu",
    ]
    return [
        str(word)
        for word in (
            *flags,
            "--reward-fn",
            f"{__file__}:first_number",
            "--run-dir",
            f"{folder}/run",
        )
    ]


def run(model, arm, setting, seed):
    """One run in a process of its own -> rows for the CSV, one per evaluation"""
    with tempfile.TemporaryDirectory() as folder:
        write_sums(Path(folder) / "sums.jsonl")
        command = [
            HERE.parent / "ppo_v2.py",
            *FLAGS.split(),
            *ARMS[arm][0].split(),
            *setting.split(),
        ]
        command += model_flags(model, seed, folder)
        if arm == IMITATION:
            command = [__file__, model, "--imitate", setting, str(seed), folder]
        before = os.times()
        done = subprocess.run(
            [sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True
        )
        after = os.times()
        lines = (
            done.stdout.splitlines() if arm == IMITATION else open(f"{folder}/run/metrics.jsonl")
        )
        rows = [json.loads(line) for line in lines if line.startswith("{")]
    seconds = sum(after[2:4]) - sum(before[2:4])  # of the child: user and system
    found, sampled, drift = [], [], []
    for row in rows:
        sampled += [row["charts/score"]] if "charts/score" in row else []
        drift += [
            row[key]
            for key in ("lag/kl_behaviour", "replay/kl_behaviour")
            if row.get(key) is not None
        ]
        if "eval/score" in row:
            means = [round(statistics.mean(x), 4) if x else "" for x in (sampled, drift)]
            found.append(
                [
                    arm,
                    setting,
                    seed,
                    row["global_step"],
                    round(row["eval/score"], 4),
                    *means,
                    round(seconds),
                ]
            )
            sampled, drift = [], []
    return found


def read():
    """{(arm, setting, seed): rows}"""
    found = {}
    for row in csv.DictReader(open(PATH)) if PATH.exists() else ():
        found.setdefault((row["arm"], row["setting"], int(row["seed"])), []).append(row)
    return found


def over_run(rows):
    return statistics.mean(float(row["accuracy"]) for row in rows[1:])


def best(done, arm):
    """The setting that was best on the tuning seed; the first where nothing was tuned"""
    tuned = {setting: done.get((arm, setting, TUNING_SEED)) for setting in GRID.get(arm, [""])}
    return max(tuned, key=lambda setting: over_run(tuned[setting])) if all(tuned.values()) else ""


def grid_table(done):
    """Mean accuracy over the run on the tuning seed; the last column is what GRID adds at 5e-5"""
    lines = [
        "| seed 101, at a rate of | 1e-4 | 5e-5 | 2e-5 | 1e-5 | more at 5e-5 |",
        "|---" * 6 + "|",
    ]
    for arm, settings in GRID.items():
        runs = {setting: done.get((arm, setting, TUNING_SEED)) for setting in settings}
        cells = [f"{over_run(rows):.3f}" if rows else "" for rows in runs.values()]
        chosen = settings.index(best(done, arm))
        cells[chosen] = f"**{cells[chosen]}**"
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(done, arms, tuned=True):
    """Markdown: greedy accuracy at the start, at the end by seed, over the run; what training samples scored"""
    lines = [
        "| | start | end, by seed | mean | mean over the run | sampled, last sixth | KL(μ, π), median | CPU s |"
    ]
    lines.append("|---" * 8 + "|")
    for arm in arms:
        key = (arm, best(done, arm) if tuned else "")
        runs = [
            rows
            for (*name, seed), rows in sorted(done.items())
            if tuple(name) == key and seed in ARMS[arm][1]
        ]
        if runs:
            ends = [float(rows[-1]["accuracy"]) for rows in runs]
            over = [over_run(rows) for rows in runs]
            sampled = statistics.mean(float(rows[-1]["sampled"]) for rows in runs)
            drift = [
                float(row["kl_behaviour"]) for rows in runs for row in rows if row["kl_behaviour"]
            ]
            seconds = statistics.mean(float(rows[0]["cpu_seconds"]) for rows in runs)
            cells = [
                runs[0][0]["accuracy"][:4],
                " ".join(f"{x:.2f}" for x in ends),
                f"{statistics.mean(ends):.2f}",
            ]
            cells += [f"{statistics.mean(over):.2f}", f"{sampled:.2f}"]
            cells += [f"{statistics.median(drift):.2f}" if drift else "–", f"{seconds:.0f}"]
            lines.append(f"| {arm}{f' `{key[1]}`' if key[1] else ''} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="folder or hub name of a causal LM")
    parser.add_argument(
        "--tune", action="store_true", help="the settings of GRID on the tuning seed"
    )
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help="these only")
    parser.add_argument("--tables", action="store_true", help="no training")
    parser.add_argument("--imitate", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.model or options.tables):
        parser.error("which model?")
    if options.imitate:
        setting, seed, folder = options.imitate
        sys.exit(
            print(*map(json.dumps, imitate(options.model, setting, int(seed), folder)), sep="\n")
        )
    jobs = [(arm, best(read(), arm), seed) for arm in options.arms for seed in ARMS[arm][1]]
    jobs.sort(
        key=lambda job: (list(ARMS).index(job[0]) // 3, job[2])
    )  # a seed of three arms, then the next
    if options.tune:
        jobs = [
            (arm, setting, TUNING_SEED) for arm in options.arms for setting in GRID.get(arm, ())
        ]
    for job in [] if options.tables else jobs:
        if job not in read():
            rows, new = run(options.model, *job), not PATH.exists()
            with open(PATH, "a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS] * new + rows)
            print(*rows[-1], flush=True)
    done, stale = read(), [arm for arm in ARMS if arm.startswith("lag")]
    print(f"\n{table(done, GRID)}\n\n{grid_table(done)}\n\nat 5e-5\n")
    pairs = [arm for arm in ARMS if arm.startswith(("plain PPO", "replay"))]
    print(f"{table(done, pairs, tuned=False)}\n\n{table(done, ['plain PPO', *stale], tuned=False)}")
