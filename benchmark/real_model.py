"""A pretrained model on sums that it mostly gets wrong: plain PPO, replay, imitation; whitened or not; and stale.

    python benchmark/real_model.py FOLDER --tune    # five settings per arm on seed 101, lambda .95
    python benchmark/real_model.py FOLDER           # what real_model.csv lacks; SmolLM2-135M-Instruct: 3 CPU hours
    python benchmark/real_model.py FOLDER --arms "plain PPO" --gae-lambda 1    # these runs only
    python benchmark/real_model.py --tables         # the tables of the pages, from the CSV

The prompt is "7 + 12 =" without a chat template. The reward is 1 if the response begins with the right number. There
are 900 sums of 1 to 30, of which 90 are held out, and every arm generates 768 responses. Four arms are tuned, by the
mean accuracy over the run, at lambda .95. The others have a learning rate of 5e-5.
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
COLUMNS = [
    "arm",
    "setting",
    "gae_lambda",
    "seed",
    "responses",
    "accuracy",
    "sampled",
    "kl_behaviour",
    "cpu_seconds",
]
FLAGS = "--max-prompt-length 32 --max-response-length 4 --batch-size 32 --update-epochs 1 --num-iterations 24"
FLAGS += " --learning-rate 5e-5 --lr-scheduler-type constant --eval-size 90 --eval-every 4 --save-every 1000"
REPLAY = "--use-replay-buffer --replay-sample-size 16"
IMITATION = "rejection sampling"
LORA = "plain PPO, LoRA"  # needs peft
TUNING_SEED = 101
LAMBDAS = {"plain PPO": ("1", "0.95")}  # the other arms: 0.95
ARMS = {  # name: flags, seeds
    "plain PPO": ("", (1, 2, 3, 4, 5)),
    "replay": (REPLAY, (1, 2, 3, 4, 5)),
    IMITATION: ("", (1, 2, 3, 4, 5)),
    LORA: ("--lora-rank 16", (1, 2, 3, 4, 5)),
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
    LORA: [
        "--learning-rate 1.6e-3",
        "--learning-rate 8e-4",
        "--learning-rate 4e-4",
        "--learning-rate 2e-4",
        "--learning-rate 1e-4",
    ],
}


def first_number(prompts, responses, answers):
    found = [re.match(r"\s*(\d+)", response) for response in responses]
    return [
        float(bool(match) and match[1] == answer)
        for match, answer in zip(found, answers, strict=True)
    ]


def write_sums(path):
    pairs = [(a, b) for a in range(1, 31) for b in range(1, 31)]
    lines = [json.dumps({"prompt": f"{a} + {b} =", "answer": a + b}) + "\n" for a, b in pairs]
    path.write_text("".join(lines), encoding="utf-8")


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
    train, held_out, _ = ppo_v2.make_task(args)
    lm, tokenizer, eos_ids = ppo_v2.load_lm(args)
    policy = ppo_v2.PolicyWithValue(lm, eos_ids, args.temperature)
    stream = ppo_v2.shuffled_passes(train, args.num_iterations * args.batch_size, seed)
    scores = []

    def rollout(pairs):
        uniforms = torch.rand(len(pairs), args.max_response_length)
        rows = ppo_v2.rollout(policy, pairs, tokenizer, first_number, args, uniforms)
        scores.append(rows["scores"].mean().item())
        return rows

    def evaluate():
        metrics, _ = ppo_v2.evaluate(policy, held_out, tokenizer, first_number, args)
        return metrics["eval/score"]

    curve = rejection_sampling(args, policy, stream, evaluate, rollout, args.update_epochs, size=32)
    lines = [
        {"global_step": args.batch_size * i, "charts/score": score}
        for i, score in enumerate(scores, 1)
    ]
    for responses, _, accuracy in curve:
        lines.append({"global_step": responses, "eval/score": accuracy})
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


def run(model, arm, setting, gae_lambda, seed):
    """One run in a process of its own -> rows for the CSV, one per evaluation"""
    with tempfile.TemporaryDirectory() as folder:
        write_sums(Path(folder) / "sums.jsonl")
        command = [
            HERE.parent / "ppo_v2.py",
            *FLAGS.split(),
            *ARMS[arm][0].split(),
            *setting.split(),
            "--gae-lambda",
            gae_lambda,
        ]
        command += model_flags(model, seed, folder)
        if arm == IMITATION:
            command = [__file__, model, "--imitate", setting, str(seed), folder]
        before = os.times()
        done = subprocess.run(
            [sys.executable, *command], check=True, stdout=subprocess.PIPE, encoding="utf-8"
        )
        after = os.times()
        lines = done.stdout.splitlines()
        if arm != IMITATION:
            metrics = Path(folder) / "run" / "metrics.jsonl"
            lines = metrics.read_text(encoding="utf-8").splitlines()
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
                    gae_lambda,
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
    """{(arm, setting, gae_lambda, seed): rows}"""
    found = {}
    if not PATH.exists():
        return found
    for row in csv.DictReader(open(PATH, encoding="utf-8")):
        key = row["arm"], row["setting"], row["gae_lambda"], int(row["seed"])
        found.setdefault(key, []).append(row)
    return found


def over_run(rows):
    return statistics.mean(float(row["accuracy"]) for row in rows[1:])


def best(done, arm):
    """The setting that was best on the tuning seed; the first where nothing was tuned"""
    tuned = {}
    for setting in GRID.get(arm, [""]):
        tuned[setting] = done.get((arm, setting, "0.95", TUNING_SEED))
    return max(tuned, key=lambda setting: over_run(tuned[setting])) if all(tuned.values()) else ""


def grid_table(done):
    """Mean accuracy over the run on the tuning seed; the last column is what GRID adds at 5e-5"""
    lines = [
        "| seed 101, at a rate of | 1e-4 | 5e-5 | 2e-5 | 1e-5 | more at 5e-5 |",
        "|---" * 6 + "|",
    ]
    for arm, settings in GRID.items():
        if arm == LORA:  # other rates
            continue
        runs = {setting: done.get((arm, setting, "0.95", TUNING_SEED)) for setting in settings}
        cells = [f"{over_run(rows):.3f}" if rows else "" for rows in runs.values()]
        chosen = settings.index(best(done, arm))
        cells[chosen] = f"**{cells[chosen]}**"
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    rates = {setting: done.get((LORA, setting, "0.95", TUNING_SEED)) for setting in GRID[LORA]}
    means = [f"`{flags}` {over_run(rows):.3f}" for flags, rows in rates.items() if rows]
    return "\n".join(lines) + f"\n\n{LORA}: {', '.join(means) or 'not measured'}"


def table(done, arms, tuned=True):
    """Markdown: greedy accuracy at the start, at the end by seed, over the run; what training samples scored"""
    lines = [
        "| | start | end, by seed | mean | mean over the run | sampled, last sixth | KL(μ, π), median | CPU s |"
    ]
    lines.append("|---" * 8 + "|")
    pairs = [(arm, gae_lambda) for arm in arms for gae_lambda in LAMBDAS.get(arm, ("0.95",))]
    for arm, gae_lambda in pairs:
        key = (arm, best(done, arm) if tuned else "", gae_lambda)
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
            flags = key[1] if arm == IMITATION else f"{key[1]} --gae-lambda {gae_lambda}".strip()
            lines.append(f"| {arm}{f' `{flags}`' if flags else ''} | " + " | ".join(cells) + " |")
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
    parser.add_argument("--gae-lambda", choices=["1", "0.95"], help="runs with this lambda only")
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
    jobs = []
    for arm in options.arms:
        for gae_lambda in LAMBDAS.get(arm, ("0.95",)):
            jobs += [(arm, best(read(), arm), gae_lambda, seed) for seed in ARMS[arm][1]]
    if options.tune:
        jobs = []
        for arm in options.arms:
            jobs += [(arm, setting, "0.95", TUNING_SEED) for setting in GRID.get(arm, ())]
    if options.gae_lambda:
        jobs = [job for job in jobs if job[2] == options.gae_lambda]
    for job in [] if options.tables else jobs:
        if job not in read():
            rows = run(options.model, *job)
            is_new = not PATH.exists()
            with open(PATH, "a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS] * is_new + rows)
            print(*rows[-1], flush=True)
    done, stale = read(), [arm for arm in ARMS if arm.startswith("lag")]
    print(f"\n{table(done, GRID)}\n\n{grid_table(done)}\n\nat 5e-5\n")
    pairs = [arm for arm in ARMS if arm.startswith(("plain PPO", "replay"))]
    print(f"{table(done, pairs, tuned=False)}\n\n{table(done, ['plain PPO', *stale], tuned=False)}")
