"""Where does replay pay? Plain PPO, rejection sampling and PPO with replay, tuned alike, on five tasks.

    python benchmark/replay_study.py --tune     # every setting of GRIDS on the tuning seeds -> replay_tuning.csv
    python benchmark/replay_study.py            # what replay_study.csv lacks, at the best settings, on seeds 1 to 5
    python benchmark/replay_study.py --tables   # tables and picture from the CSVs; no training

Every run is `ppo_v2.py` with the flags that the tables print, or `rejection_sampling` below on the same model, prompts
and sampler. Accuracy is greedy, on held-out prompts, by the true verifier; seconds are CPU time of sampling and
updating, without warm start and evaluation.
"""

import argparse
import csv
import functools
import json
import random
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import ppo_v2

SEEDS, TUNING_SEEDS = (1, 2, 3, 4, 5), (101, 102)
REPEATS = 8  # task long: the sorted digits, this many times over
WRONG = 0.1  # task noisy: share of verdicts that are turned round
TASKS = {  # options, and the accuracy whose cost is reported
    "default": (dict(), 0.9, "3-4 digits: one answer in ten is right at the start"),
    "rare": (dict(min_digits=5, max_digits=6), 0.9, "5-6 digits: one in a hundred"),
    "rarer": (dict(min_digits=7, max_digits=7, answers=12_800), 0.9, "7 digits: one in a thousand"),
    "long": (dict(max_response_length=33, sft_steps=600), 0.5, "3-4 digits, written eight times"),
    "noisy": (dict(), 0.9, "3-4 digits, one verdict in ten is wrong"),
}
REPLAY = dict(use_replay_buffer=True)
GUIDE = REPLAY | dict(replay_advantages="all", min_replay_size=100, replay_sample_size=32, priority_alpha=0.6)
GUIDE |= dict(priority_beta=0.4, priority_beta_increment=0.001, priority_age_tau=None, max_replay_reuse=4)
ARMS = {  # name: options; "sft" means rejection sampling
    "plain PPO": {},
    "rejection sampling": dict(sft=True),
    "replay": REPLAY,
    "replay, guide, uniform": GUIDE | dict(use_priority_sampling=False),
    "replay, guide, PER": GUIDE,
    "plain PPO, whitened": dict(norm_adv=True),
}
ONLY = {"replay, guide, uniform": ("default", "rare"), "replay, guide, PER": ("default", "rare")}
ONLY |= {"plain PPO, whitened": ("default", "rare")}  # arms that answer a question of these tasks alone
CHANGES = [{}, dict(batch_size=64), dict(batch_size=256), dict(learning_rate=2e-4), dict(learning_rate=1e-3)]
CHANGES += [dict(update_epochs=4)]  # one at a time, from the defaults
GRIDS = {
    "plain PPO": CHANGES + [dict(norm_adv=True)],
    "rejection sampling": [dict(learning_rate=5e-4, steps=n) for n in (2, 4, 8)]
    + [dict(learning_rate=rate, steps=4) for rate in (2e-4, 1e-3)]
    + [dict(learning_rate=2e-4, steps=8), dict(learning_rate=1e-3, steps=2)],
    "replay": CHANGES + [dict(replay_sample_size=128)],
}


def grid(task, arm):
    """Seven settings an arm; on `long`, whose runs take minutes, the learning rate alone."""
    settings = GRIDS.get(arm, [])
    return [s for s in settings if s.keys() <= {"learning_rate", "steps"} and s.get("steps", 4) == 4 or task != "long"]


def rejection_sampling(args, policy, train, evaluate, rollout, steps: int):
    """The simplest rival: keep what was right, imitate it. `steps` supervised steps of 64 answers an iteration."""
    optimizer = torch.optim.AdamW(policy.lm.parameters(), args.learning_rate, eps=1e-5, weight_decay=0.0, fused=True)
    kept, curve, seconds = [], [(0, 0.0, evaluate())], 0.0
    names = ("prompt_ids", "prompt_mask", "response_ids", "response_mask")
    for iteration in range(1, args.num_iterations + 1):
        start = time.process_time()
        torch.manual_seed(args.seed * 1_000_003 + iteration)
        rows = rollout(train[(iteration - 1) * args.batch_size : iteration * args.batch_size])
        right = (rows["scores"] > 0).nonzero().flatten().tolist()
        kept += [{name: rows[name][[i]] for name in names} for i in right]
        for _ in range(steps if kept else 0):
            batch = ppo_v2.join([kept[i] for i in torch.randint(len(kept), (64,)).tolist()])
            loss = -ppo_v2.masked_mean(policy(batch)[0], batch["response_mask"])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.step()
        seconds += time.process_time() - start
        if iteration % args.eval_every == 0 or iteration == args.num_iterations:
            curve.append((iteration * args.batch_size, seconds, evaluate()))
    return curve


WARM = {}  # (seed, task) -> weights: the warm start is the same for all arms


def prepare(module, task):
    """Let a script remember its warm start, and give it the tasks that are not options of it."""
    plain_start, plain_task, plain_rollout = module.warm_start, module.make_task, module.rollout

    def warm_start(lm, pairs, tokenizer, args):
        key = args.seed, task
        if key not in WARM:
            plain_start(lm, pairs, tokenizer, args)
            WARM[key] = {name: x.clone() for name, x in lm.state_dict().items()}
        lm.load_state_dict(WARM[key])

    module.warm_start = warm_start
    if task == "long":
        plain_scramble = module.scramble
        module.scramble = lambda answer, rng: plain_scramble(answer[: len(answer) // REPEATS], rng) * REPEATS

        def make_task(args, tokenizer):
            train, held_out, verifier = plain_task(args, tokenizer)
            train, held_out = ([(p, answer * REPEATS) for p, answer in pairs] for pairs in (train, held_out))
            return train, held_out, verifier

        module.make_task = make_task
    if task == "noisy":

        def rollout(policy, pairs, tokenizer, scorer, args, uniforms=None):
            rows = plain_rollout(policy, pairs, tokenizer, scorer, args, uniforms)
            if uniforms is not None:  # training; evaluation asks the true verifier
                wrong = torch.rand(len(pairs)) < WRONG
                rows["scores"] = torch.where(wrong, 1 - rows["scores"], rows["scores"])
            return rows

        module.rollout = rollout
    return lambda: vars(module).update(
        warm_start=plain_start, make_task=plain_task, rollout=plain_rollout,
        scramble=plain_scramble if task == "long" else module.scramble,
    )  # fmt: skip


def run(task, arm, setting, seed):
    """One training run -> [(answers, CPU seconds, accuracy), ...]"""
    torch.set_num_threads(1)
    flags = TASKS[task][0] | ARMS[arm] | setting
    answers, sft, steps = flags.pop("answers", 5_120), flags.pop("sft", False), flags.pop("steps", 0)
    batch_size = flags.get("batch_size", ppo_v2.Args.batch_size)
    flags |= dict(num_iterations=answers // batch_size, eval_every=max(1, answers // 20 // batch_size))
    restore = prepare(ppo_v2, task)
    ppo_v2.time = types.SimpleNamespace(time=time.process_time)  # other load on the machine must not count
    stdout, sys.stdout = sys.stdout, open("/dev/null", "w")
    try:
        with tempfile.TemporaryDirectory() as folder:
            args = ppo_v2.Args(**flags, seed=seed, device="cpu", save_every=10**6, run_dir=f"{folder}/run")
            if sft:
                torch.manual_seed(seed)
                lm, tokenizer, eos_ids = ppo_v2.load_lm(args)
                train, held_out, scorer = ppo_v2.make_task(args, tokenizer)
                ppo_v2.warm_start(lm, train, tokenizer, args)
                policy = ppo_v2.PolicyWithValue(lm, eos_ids, args.temperature)
                stream = random.Random(f"{seed}/0").sample(train, len(train))
                evaluate = functools.partial(ppo_v2.evaluate, policy, held_out, tokenizer, scorer, args)

                def rollout(pairs):
                    uniforms = torch.rand(len(pairs), args.max_response_length)
                    return ppo_v2.rollout(policy, pairs, tokenizer, scorer, args, uniforms)

                return rejection_sampling(args, policy, stream, evaluate, rollout, steps)
            ppo_v2.main(args)
            rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    finally:
        sys.stdout = stdout
        restore()
    curve, seconds = [], 0.0
    for row in rows:
        seconds += row.get("time/rollout", 0) + row.get("time/update", 0)
        if "eval/score" in row:
            curve.append((row["global_step"], seconds, row["eval/score"]))
    return curve


# --- tables ---
COLUMNS = ["task", "arm", "setting", "seed", "answers", "seconds", "accuracy"]


def read(path):
    """{(task, arm, setting, seed): [(answers, seconds, accuracy), ...]}"""
    curves = {}
    for row in csv.DictReader(open(path)) if path.exists() else ():
        key = row["task"], row["arm"], row["setting"], int(row["seed"])
        curves.setdefault(key, []).append((int(row["answers"]), float(row["seconds"]), float(row["accuracy"])))
    return curves


def area(curve):
    """Mean accuracy over the run: higher is sooner."""
    return statistics.mean(accuracy for _, _, accuracy in curve[1:])


def best_settings(tuning):
    """(task, arm) -> the setting with the highest mean accuracy over the run, over the tuning seeds"""
    found = {}
    for (task, arm, setting, _), curve in tuning.items():
        found.setdefault((task, arm), {}).setdefault(setting, []).append(area(curve))
    return {key: max(areas, key=lambda s: statistics.mean(areas[s])) for key, areas in found.items()}


def reach(curve, threshold, column=0):
    return next((point[column] for point in curve if point[2] >= threshold), None)


def words(setting: str) -> str:
    """A setting as the flags that a reader types."""
    flags = [f"--{k.replace('_', '-')} {v}" if v is not True else f"--{k.replace('_', '-')}"
             for k, v in json.loads(setting).items()]  # fmt: skip
    return "`" + " ".join(flags) + "`" if flags else "defaults"


def median_of(values):
    """Middle of five where a run that never gets there counts as the longest."""
    values = sorted(v if v is not None else float("inf") for v in values)
    middle = values[len(values) // 2]
    return "–" if middle == float("inf") else f"{middle:.0f}"


def table(task, curves, settings):
    lines = ["| arm | accuracy at the end, by seed | mean over the run | answers | CPU s | of 5 | setting |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for arm in ARMS:
        mine = [curves[key] for key in sorted(curves) if key[:2] == (task, arm)]
        if not mine:
            continue
        ends = " ".join(f"{curve[-1][2]:.2f}".removeprefix("0") for curve in mine)
        threshold = TASKS[task][1]
        spent = [[reach(curve, threshold, column) for curve in mine] for column in (0, 1)]
        there = sum(value is not None for value in spent[0])
        cost = f"{median_of(spent[0])} | {median_of(spent[1])} | {there}"
        setting = words(next(key[2] for key in curves if key[:2] == (task, arm)))
        lines.append(f"| {arm} | {ends} | {statistics.mean(map(area, mine)):.2f} | {cost} | {setting} |")
    return "\n".join(lines)


def grid_table(tuning):
    """Mean accuracy over the run of every setting that was tried, mean of the tuning seeds."""
    lines = ["| arm | setting | " + " | ".join(TASKS) + " |", "|---|---|" + "---|" * len(TASKS)]
    best = best_settings(tuning)
    for arm, settings in GRIDS.items():
        for setting in map(json.dumps, settings):
            cells = []
            for task in TASKS:
                areas = [area(tuning[key]) for key in tuning if key[:3] == (task, arm, setting)]
                cell = f"{statistics.mean(areas):.2f}".removeprefix("0") if areas else ""
                cells.append(f"**{cell}**" if best.get((task, arm)) == setting else cell)
            lines.append(f"| {arm} | {words(setting)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="all settings on the tuning seeds")
    parser.add_argument("--tables", action="store_true", help="no training")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    options = parser.parse_args()
    tuning_path, study_path = HERE / "replay_tuning.csv", HERE / "replay_study.csv"
    path = tuning_path if options.tune else study_path
    best, done = best_settings(read(tuning_path)), read(path)
    jobs = []
    for task in options.tasks:
        for seed in TUNING_SEEDS if options.tune else SEEDS:
            for arm in options.arms:
                if task in ONLY.get(arm, TASKS):
                    tuned = best.get((task, arm), "{}")  # the others at the defaults
                    settings = map(json.dumps, grid(task, arm)) if options.tune else [tuned]
                    jobs += [(task, arm, setting, seed) for setting in settings]
    jobs = [] if options.tables else [job for job in jobs if job not in done]
    for i, (task, arm, setting, seed) in enumerate(jobs, 1):
        curve = run(task, arm, json.loads(setting), seed)
        new = not path.exists()
        with open(path, "a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([COLUMNS] if new else [])
            rows = [(answers, round(seconds, 2), round(accuracy, 4)) for answers, seconds, accuracy in curve]
            writer.writerows([[task, arm, setting, seed, *row] for row in rows])
        print(f"[{i}/{len(jobs)}] {task}, {arm}, {setting}, seed {seed}: {curve[-1][2]:.3f}, {curve[-1][1]:.0f} s", flush=True)
    curves, tuning = read(study_path), read(tuning_path)
    print(f"\nmean accuracy over the run, tuning seeds\n\n{grid_table(tuning)}")
    for task, (_, threshold, title) in TASKS.items():
        print(f"\n{task}: {title}; answers and CPU seconds to {threshold}\n\n{table(task, curves, best)}")


if __name__ == "__main__":
    main()
