"""Where does replay pay? Plain PPO, rejection sampling and PPO with replay, tuned alike, on five tasks.

    python benchmark/replay_study.py --tune     # every setting of GRIDS on the tuning seeds -> replay_tuning.csv
    python benchmark/replay_study.py            # what replay_study.csv lacks, at the best settings, on five seeds
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

SEEDS, TUNING_SEEDS, MORE_SEEDS = (1, 2, 3, 4, 5), (101, 102), (103, 104)
FRESH = {
    "rarer": (6, 7, 8, 9, 10)
}  # where settings of fewer tuning seeds had been looked at on SEEDS
REPEATS = 8  # task long: the sorted digits, this many times over
WRONG = 0.1  # task noisy: share of verdicts that are turned round
TASKS = {  # options, and the accuracy whose cost is reported
    "default": (dict(), 0.9, "3-4 digits: one answer in ten is right at the start"),
    "rare": (dict(min_digits=5, max_digits=6), 0.9, "5-6 digits: one in a hundred"),
    "rarer": (dict(min_digits=7, max_digits=7, answers=12_800), 0.9, "7 digits: one in a thousand"),
    "long": (
        dict(max_response_length=33, sft_steps=600, answers=2_560),
        0.5,
        "3-4 digits, written eight times",
    ),
    "noisy": (dict(), 0.9, "3-4 digits, one verdict in ten is wrong"),
}
REPLAY = dict(use_replay_buffer=True)
GUIDE = REPLAY | dict(
    replay_advantages="all", replay_buffer_size=1000, replay_sample_size=32, priority_alpha=0.6
)
GUIDE |= dict(
    priority_beta=0.4, priority_beta_increment=0.001, priority_age_tau=None, max_replay_reuse=4
)
ARMS = {  # name: options. `sft` and `mean_baseline` are not options of the script but patches below
    "plain PPO": {},
    "rejection sampling": dict(sft=True),
    "replay": REPLAY,
    "replay, guide, uniform": GUIDE | dict(use_priority_sampling=False),
    "replay, guide, PER": GUIDE | dict(use_priority_sampling=True),
    "plain PPO, whitened": dict(norm_adv=True),
    "plain PPO, own critic": dict(separate_critic=True),
    "plain PPO, no critic": dict(mean_baseline=True, vf_coef=0.0),
    "replay, own critic": REPLAY | dict(separate_critic=True),
    "replay, no critic": REPLAY | dict(mean_baseline=True, vf_coef=0.0),
}
ONLY = {arm: ("rare",) for arm in list(ARMS)[3:]}  # arms that answer a question of one task alone
ONLY |= {arm: ("default", "rare") for arm in ARMS if "guide" in arm}
CRITICS = ["plain PPO", *[arm for arm in ARMS if "critic" in arm], "replay"]
CHANGES = [
    {},
    dict(batch_size=64),
    dict(batch_size=256),
    dict(learning_rate=2e-4),
    dict(learning_rate=1e-3),
]
CHANGES += [
    dict(update_epochs=4),
    dict(num_minibatches=2),
    dict(norm_adv=True),
]  # one at a time, from the defaults
GRIDS = {
    "plain PPO": CHANGES + [dict(update_epochs=1)],
    "rejection sampling": [dict(learning_rate=5e-4, steps=n) for n in (2, 4, 8)]
    + [dict(learning_rate=rate, steps=4) for rate in (2e-4, 1e-3)]
    + [
        dict(learning_rate=2e-4, steps=8),
        dict(learning_rate=1e-3, steps=2),
        dict(learning_rate=1e-4, steps=8),
    ]
    + [dict(learning_rate=2e-4, steps=4, batch_size=64)],
    "replay": CHANGES + [dict(replay_sample_size=128)],
}


def rejection_sampling(args, policy, train, evaluate, rollout, steps: int, size=64):
    """The simplest rival: keep what was right, imitate it. `steps` supervised steps of `size` answers an iteration."""
    optimizer = torch.optim.AdamW(
        policy.lm.parameters(), args.learning_rate, eps=1e-5, weight_decay=0.0, fused=True
    )
    kept, curve, seconds = [], [(0, 0.0, evaluate())], 0.0
    names = ("prompt_ids", "prompt_mask", "response_ids", "response_mask")
    for iteration in range(1, args.num_iterations + 1):
        start = time.process_time()
        torch.manual_seed(args.seed * 1_000_003 + iteration)
        rows = rollout(train[(iteration - 1) * args.batch_size : iteration * args.batch_size])
        right = (rows["scores"] > 0).nonzero().flatten().tolist()
        kept += [{name: rows[name][[i]] for name in names} for i in right]
        for _ in range(steps if kept else 0):
            batch = ppo_v2.join([kept[i] for i in torch.randint(len(kept), (size,)).tolist()])
            loss = -ppo_v2.masked_mean(policy(batch)[0], batch["response_mask"])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.step()
        seconds += time.process_time() - start
        if iteration % args.eval_every == 0 or iteration == args.num_iterations:
            curve.append((iteration * args.batch_size, seconds, evaluate()))
    return curve


class RepeatedScramble(random.Random):
    """Scrambles an answer of the task `long` as one: its repeats stay equal to each other."""

    def sample(self, population, k):
        if not isinstance(population, str):
            return super().sample(population, k)
        return super().sample(population[: k // REPEATS], k // REPEATS) * REPEATS


WARM = {}  # (seed, task) -> weights: the warm start is the same for all arms


def prepare(module, task, mean_baseline=False):
    """Let a script remember its warm start, and give it what is no option of it.  -> what undoes this"""
    names = ("warm_start", "make_task", "rollout", "compute_gae", "time", "random")
    before = {name: vars(module)[name] for name in names}
    plain_start, plain_task, plain_rollout = module.warm_start, module.make_task, module.rollout

    def warm_start(lm, pairs, tokenizer, args):
        key = args.seed, task
        if key not in WARM:
            plain_start(lm, pairs, tokenizer, args)
            WARM[key] = {name: x.clone() for name, x in lm.state_dict().items()}
        lm.load_state_dict(WARM[key])

    module.warm_start = warm_start
    if task == "long":
        module.random = types.SimpleNamespace(Random=RepeatedScramble)

        def make_task(args, tokenizer):
            train, held_out, verifier = plain_task(args, tokenizer)
            train, held_out = (
                [(p, answer * REPEATS) for p, answer in pairs] for pairs in (train, held_out)
            )
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
    if mean_baseline:

        def compute_gae(rewards, values, mask, gamma, gae_lambda):
            """No critic: what an answer earns from here on, less the mean over all tokens of the batch."""
            returns = rewards.flip(1).cumsum(1).flip(1) * mask
            return (returns - module.masked_mean(returns, mask)) * mask

        module.compute_gae = compute_gae
    return lambda: vars(module).update(before)


def run(task, arm, setting, seed):
    """One training run -> [(answers, CPU seconds, accuracy), ...]"""
    torch.set_num_threads(1)
    flags = TASKS[task][0] | ARMS[arm] | setting
    answers, sft, steps = (
        flags.pop("answers", 5_120),
        flags.pop("sft", False),
        flags.pop("steps", 0),
    )
    batch_size = flags.get("batch_size", ppo_v2.Args.batch_size)
    flags |= dict(
        num_iterations=answers // batch_size, eval_every=max(1, answers // 20 // batch_size)
    )
    restore = prepare(ppo_v2, task, flags.pop("mean_baseline", False))
    ppo_v2.time = types.SimpleNamespace(
        time=time.process_time
    )  # other load on the machine must not count
    ppo_v2.catch_signals = list  # a signal ends the study, not one run of it
    stdout, sys.stdout = sys.stdout, open("/dev/null", "w")
    try:
        with tempfile.TemporaryDirectory() as folder:
            args = ppo_v2.Args(
                **flags, seed=seed, device="cpu", save_every=10**6, run_dir=f"{folder}/run"
            )
            if sft:
                torch.manual_seed(seed)
                lm, tokenizer, eos_ids = ppo_v2.load_lm(args)
                train, held_out, scorer = ppo_v2.make_task(args, tokenizer)
                ppo_v2.warm_start(lm, train, tokenizer, args)
                policy = ppo_v2.PolicyWithValue(lm, eos_ids, args.temperature)
                stream = random.Random(f"{seed}/0").sample(train, len(train))
                evaluate = functools.partial(
                    ppo_v2.evaluate, policy, held_out, tokenizer, scorer, args
                )

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
            curve.append(
                (
                    row["global_step"],
                    seconds,
                    row["eval/score"],
                    row.get("losses/explained_variance"),
                )
            )
    return curve


# --- tables ---
COLUMNS = ["task", "arm", "setting", "seed", "answers", "seconds", "accuracy", "explained_variance"]


def read(path):
    """{(task, arm, setting, seed): [(answers, seconds, accuracy, explained variance or None), ...]}"""
    curves = {}
    for row in csv.DictReader(open(path)) if path.exists() else ():
        key = row["task"], row["arm"], row["setting"], int(row["seed"])
        point = int(row["answers"]), float(row["seconds"]), float(row["accuracy"])
        explained = row.get("explained_variance")
        curves.setdefault(key, []).append((*point, float(explained) if explained else None))
    return curves


def area(curve):
    """Mean accuracy over the run: higher is sooner."""
    return statistics.mean(point[2] for point in curve[1:])


def ranked_settings(tuning):
    """(task, arm) -> its settings, best first: those of most seeds, by mean accuracy over the run; if level, plainer"""
    found = {}
    for (task, arm, setting, _), curve in tuning.items():
        found.setdefault((task, arm), {}).setdefault(setting, []).append(area(curve))
    order = [json.dumps(setting) for settings in GRIDS.values() for setting in settings]

    def rank(areas, setting):
        return (
            -len(areas[setting]),
            -round(statistics.mean(areas[setting]), 2),
            order.index(setting),
        )

    return {key: sorted(areas, key=functools.partial(rank, areas)) for key, areas in found.items()}


def best_settings(tuning):
    return {key: settings[0] for key, settings in ranked_settings(tuning).items()}


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


def short(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".")


def table(task, curves):
    """One row an arm: end and mean over the run, cost of the task's threshold (median of the seeds), its flags."""
    lines = ["| arm | accuracy at the end by seed | mean over the run | answers | CPU s | got there | tuned flags |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for arm in (arm for arm in ARMS if arm not in CRITICS or arm in GRIDS):
        mine = [curves[key] for key in sorted(curves) if key[:2] == (task, arm)]
        if mine:
            ends = " ".join(short(curve[-1][2]) for curve in mine)
            spent = [[reach(curve, TASKS[task][1], column) for curve in mine] for column in (0, 1)]
            there = f"{sum(value is not None for value in spent[0])} of {len(mine)}"
            cost = f"{median_of(spent[0])} | {median_of(spent[1])} | {there}"
            setting = words(next(key[2] for key in curves if key[:2] == (task, arm)))
            lines.append(
                f"| {arm} | {ends} | {short(statistics.mean(map(area, mine)))} | {cost} | {setting} |"
            )
    return "\n".join(lines)


def critic_table(curves):
    lines = [
        "| arm | end, five seeds | mean over the run | explained variance, second half | CPU s |",
        "|---|---|---|---|---|",
    ]
    for arm in CRITICS:
        mine = [curves[key] for key in sorted(curves) if key[:2] == ("rare", arm)]
        if mine:
            ends = " ".join(short(curve[-1][2]) for curve in mine)
            known = [
                point[3]
                for curve in mine
                for point in curve[len(curve) // 2 :]
                if point[3] is not None
            ]
            explained = "–" if "no critic" in arm else f"{statistics.mean(known):+.2f}"
            cells = [ends, short(statistics.mean(map(area, mine))), explained]
            seconds = statistics.mean(curve[-1][1] for curve in mine)
            lines.append(f"| {arm} | " + " | ".join(cells) + f" | {seconds:.0f} |")
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
                cell = short(statistics.mean(areas)) if areas else ""
                cells.append(f"**{cell}**" if best.get((task, arm)) == setting else cell)
            lines.append(f"| {arm} | {words(setting)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


COLOURS = {"plain PPO": "tab:blue", "rejection sampling": "tab:orange", "replay": "tab:green"}
COLOURS |= {"plain PPO, whitened": "tab:red", "replay, guide, uniform": "tab:purple"}
PANELS = [  # task, column of the x-axis, arms, message
    ("default", 0, list(COLOURS)[:3], "1 in 10 right at the start:\nanything works"),
    ("rare", 0, list(COLOURS)[:3], "1 in 100: imitation and replay\nare sooner"),
    ("rarer", 0, list(COLOURS)[:3], "1 in 1000: plain PPO finds nothing"),
    ("noisy", 0, list(COLOURS)[:3], "1 verdict in 10 is wrong:\nimitation copies luck"),
    ("rare", 1, list(COLOURS)[:3], "1 in 100, by CPU time"),
    ("rare", 0, ["plain PPO", "plain PPO, whitened"], "1 in 100: what whitening costs"),
]


def draw(curves, path):
    """Mean over the seeds and their range, each line named where it ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    for axis, (task, column, arms, message) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        ends = []
        for arm in arms:
            mine = [curves[key] for key in sorted(curves) if key[:2] == (task, arm)]
            if mine:
                x = [
                    statistics.mean(points)
                    for points in zip(*[[p[column] for p in c] for c in mine], strict=True)
                ]
                y = list(zip(*[[p[2] for p in c] for c in mine], strict=True))
                middle = list(map(statistics.mean, y))
                axis.plot(x, middle, color=COLOURS[arm])
                axis.fill_between(
                    x, list(map(min, y)), list(map(max, y)), color=COLOURS[arm], alpha=0.12
                )
                ends.append((middle[-1], x[-1], arm))
        height = 2.0
        for end, x, arm in sorted(ends, reverse=True):  # labels keep a distance from each other
            height = min(end, height - 0.07)
            axis.text(
                x,
                height,
                " " + arm.replace(", ", "\n "),
                color=COLOURS[arm],
                fontsize=8,
                va="center",
            )
        axis.set(title=message, ylim=(0, 1.03), ylabel="accuracy, greedy, held-out")
        axis.set_xlabel("CPU seconds of sampling and updating" if column else "answers generated")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="all settings on the tuning seeds")
    parser.add_argument(
        "--more", action="store_true", help="7 digits: more tuning seeds for the best settings"
    )
    parser.add_argument("--tables", action="store_true", help="no training")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    options = parser.parse_args()
    tuning_path, study_path = HERE / "replay_tuning.csv", HERE / "replay_study.csv"
    path = tuning_path if options.tune else study_path
    best, ranked, done = (
        best_settings(read(tuning_path)),
        ranked_settings(read(tuning_path)),
        read(path),
    )
    jobs = []
    if (
        options.more
    ):  # where success is a matter of luck, two seeds mislead: the three best settings get more
        path, done = tuning_path, read(tuning_path)
        arms = [arm for arm in options.arms if ("rarer", arm) in ranked]
        jobs = [
            ("rarer", arm, setting, seed)
            for seed in MORE_SEEDS
            for arm in arms
            for setting in ranked["rarer", arm][:3]
        ]
    for task in options.tasks if not options.more else ():
        seeds = TUNING_SEEDS if options.tune else FRESH.get(task, SEEDS)
        for seed in seeds:
            for arm in options.arms:
                if task in ONLY.get(arm, TASKS):
                    kin = (
                        arm.split(",")[0] if arm in CRITICS else arm
                    )  # a critic changes, the rest stays
                    tuned = best.get((task, kin), "{}")  # others: the defaults
                    settings = (
                        list(map(json.dumps, GRIDS.get(arm, []))) if options.tune else [tuned]
                    )
                    if (
                        options.tune and task == "long"
                    ):  # dear: the three best settings of the default task
                        settings = ranked["default", arm][:3] if settings else []
                    jobs += [(task, arm, setting, seed) for setting in settings]
    jobs = [] if options.tables else [job for job in jobs if job not in done]
    for i, (task, arm, setting, seed) in enumerate(jobs, 1):
        curve = run(task, arm, json.loads(setting), seed)
        new = not path.exists()
        with open(path, "a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([COLUMNS] if new else [])
            rows = [
                [point[0], *(round(x, 4) if x is not None else "" for x in point[1:])]
                for point in curve
            ]
            writer.writerows([[task, arm, setting, seed, *row] for row in rows])
        done = f"{task}, {arm}, {setting}, seed {seed}: {curve[-1][2]:.3f}, {curve[-1][1]:.0f} s"
        print(f"[{i}/{len(jobs)}] {done}", flush=True)
    curves, tuning = read(study_path), read(tuning_path)
    print(f"\nmean accuracy over the run, tuning seeds\n\n{grid_table(tuning)}")
    for task, (_, threshold, title) in TASKS.items():
        print(f"\n{task}: {title}; answers and CPU seconds to {threshold}\n\n{table(task, curves)}")
    print(f"\n{critic_table(curves)}")
    if curves:
        draw(curves, HERE.parent / "docs" / "replay_study.png")


if __name__ == "__main__":
    main()
