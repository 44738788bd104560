"""How long until it works? Our scripts and rejection sampling against TRL's GRPOTrainer at its best.

    pip install trl==1.16.0                # an optional extra; --tables does without it
    python benchmark/race.py --tune        # only TRL's settings, one coordinate at a time -> race_tuning.csv
    python benchmark/race.py               # that, then what race.csv lacks: all arms at their best, five seeds
    python benchmark/race.py --tables      # tables and picture from the CSVs; no training

All arms have the same tiny model, warm start, prompts and held-out evaluation. Our arms and rejection sampling have the
settings that replay_study.py found. Seconds are CPU time of sampling and updating on one thread, without warm start and
evaluation.
"""

import argparse
import contextlib
import functools
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import torch
from panels import METHOD, RIVAL, SECOND_RIVAL, SIZE, VARIANT, WIDTH, name_lines, show_lines
from replay_study import (
    TASKS,
    TUNING_SEEDS,
    append,
    area,
    best_setting,
    prepare,
    reach,
    read_metrics,
    rejection_sampling,
    short,
)
from replay_study import read as read_curves

import ppo
import ppo_v2

STUDY, TUNING, SEEDS = HERE / "race.csv", HERE / "race_tuning.csv", (301, 302, 303, 304, 305)
COLUMNS = [
    "task",
    "arm",
    "setting",
    "seed",
    "responses",
    "seconds",
    "accuracy",
    "explained_variance",
]
BUDGET = {
    "default": (5_120, 128),
    "rare": (7_680, 256),
}  # responses of a run, responses between evaluations
TRL = "TRL, GRPO"
ARMS = {  # name here: name in replay_study.py, whose tuned setting it has
    "ppo.py": "plain PPO",
    "ppo_v2.py, replay": "replay",
    "rejection sampling": "rejection sampling",
    TRL: None,
}
CENTRE = dict(
    learning_rate=5e-4, batch_size=128, num_generations=8, scale_rewards="none", num_iterations=2
)
CENTRE |= dict(
    loss_type="dapo",
    lr_scheduler_type="linear",
    steps_per_generation=1,
    adam_epsilon=1e-8,
    beta=0.0,
)
SEARCH = [  # from the centre, in this order; the best so far is kept
    ("learning_rate", (2e-4, 1e-3, 2e-3)),
    ("scale_rewards", ("group", "batch")),
    ("num_generations", (2, 4, 16)),
    ("batch_size", (64, 256)),
    ("num_iterations", (1, 4)),
    ("loss_type", ("grpo", "dr_grpo", "cispo")),  # bnpo is dapo where there is one device
    ("steps_per_generation", (2,)),
    ("lr_scheduler_type", ("constant",)),
    ("adam_epsilon", (1e-5,)),
    ("beta", (0.01,)),
    ("learning_rate", (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)),
]


def settings_of_ours():
    """(task, arm) -> the best of replay_tuning.csv, as text"""
    tuning = read_curves(HERE / "replay_tuning.csv")
    best = {}
    for task in BUDGET:
        for arm, name in ARMS.items():
            if name:
                best[task, arm] = best_setting(tuning, task, name)
    return best


# --- runs ---
def start(task, seed, **options):
    """Model, warm start, prompts and evaluation, as our scripts have them  -> args, policy, stream, scorer, ..."""
    args = ppo.Args(**TASKS[task][0], **options, seed=seed, device="cpu")
    torch.manual_seed(seed)
    train, held_out, scorer = ppo.make_task(args)
    lm, tokenizer, eos_ids = ppo.load_lm(args)
    policy = ppo.PolicyWithValue(lm, eos_ids, args.temperature)
    ppo.warm_start(lm, train, tokenizer, args)
    stream = ppo.shuffled_passes(train, len(train), seed)

    def evaluate():
        metrics, _ = ppo.evaluate(policy, held_out, tokenizer, scorer, args)
        return metrics["eval/score"]

    return args, policy, stream, tokenizer, scorer, evaluate


def run_script(module, task, seed, responses, every, batch_size=128, **options):
    """`ppo.py` or `ppo_v2.py` as they are -> [(responses, CPU seconds, accuracy), ...]"""
    options |= dict(
        batch_size=batch_size,
        num_iterations=responses // batch_size,
        eval_every=max(1, every // batch_size),
    )
    options |= TASKS[task][0] | dict(seed=seed, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        module.main(module.Args(**options, run_dir=f"{folder}/run"))
        rows = read_metrics(f"{folder}/run")
    curve, seconds = [], 0.0
    for row in rows:
        seconds += row.get("time/rollout", 0) + row.get("time/update", 0)
        if "eval/score" in row:
            curve.append((row["global_step"], seconds, row["eval/score"]))
    return curve


def run_rejection_sampling(task, seed, responses, every, steps, batch_size=128, **options):
    loop = dict(num_iterations=responses // batch_size, eval_every=max(1, every // batch_size))
    args, policy, stream, tokenizer, scorer, evaluate = start(
        task, seed, batch_size=batch_size, **loop, **options
    )

    def rollout(pairs):
        return ppo.rollout(
            policy, pairs, tokenizer, scorer, args, torch.rand(len(pairs), args.max_response_length)
        )

    return rejection_sampling(args, policy, stream, evaluate, rollout, steps)


def run_trl(
    task,
    seed,
    responses,
    every,
    batch_size,
    steps_per_generation,
    num_iterations,
    loss_type,
    **options,
):
    """GRPOTrainer on the same model and prompts, each of which it asks `num_generations` times."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args, policy, stream, tokenizer, scorer, evaluate = start(task, seed)
    tokenizer.padding_side = "left"
    data = Dataset.from_list(
        [dict(prompt=prompt, answer=answer) for prompt, answer in stream[:responses]]
    )
    steps = steps_per_generation * num_iterations  # optimizer steps of one batch of responses
    curve, spent = [], [0.0, 0.0]  # CPU seconds so far, clock at the start of a step

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *rest, **kwargs):
            curve.append((0, 0.0, evaluate()))

        def on_step_begin(self, *rest, **kwargs):
            spent[1] = time.process_time()

        def on_step_end(self, config, state, *rest, **kwargs):
            spent[0] += time.process_time() - spent[1]
            done = state.global_step * batch_size // steps
            if state.global_step % steps == 0 and done % every == 0:
                policy.eval()
                curve.append((done, spent[0], evaluate()))
                policy.train()

    def reward(prompts, completions, completion_ids, answer, **_):
        ended = [
            tokenizer.eos_token_id in ids for ids in completion_ids
        ]  # as ours: cut off is wrong
        right = scorer(prompts, completions, answer)
        return [float(x and y) for x, y in zip(right, ended, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        policy.lm.save_pretrained(folder)
        policy.lm.config._name_or_path = folder  # with a beta its reference is read from there
        config = GRPOConfig(
            **options,
            output_dir=folder,
            seed=seed,
            per_device_train_batch_size=batch_size // steps_per_generation,
            steps_per_generation=steps_per_generation,
            num_iterations=num_iterations,
            max_steps=responses // batch_size * steps,
            max_completion_length=args.max_response_length,
            loss_type=loss_type,
            epsilon_high=5.0 if loss_type == "cispo" else None,  # what its documentation recommends
            shuffle_dataset=False,  # the stream is shuffled, and the same as ours
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        GRPOTrainer(
            policy.lm,
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        ).train()
    return curve


def run(task, arm, setting, seed, responses=None, every=None):
    torch.set_num_threads(1)
    budget = responses or BUDGET[task][0], every or BUDGET[task][1]
    runs = {
        "ppo.py": functools.partial(run_script, ppo),
        "rejection sampling": run_rejection_sampling,
        TRL: run_trl,
    }
    runs["ppo_v2.py, replay"] = functools.partial(run_script, ppo_v2, use_replay_buffer=True)
    options = (CENTRE if arm == TRL else {}) | json.loads(setting)
    undo = [prepare(module, task) for module in (ppo, ppo_v2)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return runs[arm](task=task, seed=seed, responses=budget[0], every=budget[1], **options)
    finally:
        for restore in undo:
            restore()


def record(path, task, arm, setting, seed, **options):
    curve = run(task, arm, setting, seed, **options)
    rows = [[task, arm, setting, seed, x, round(y, 4), round(z, 4), ""] for x, y, z in curve]
    append(path, rows, COLUMNS)
    print(
        f"{task}, {arm}, {setting}, seed {seed}: {area(curve):.3f}, {curve[-1][2]:.3f}, {curve[-1][1]:.1f} s",
        flush=True,
    )


def search(task, tuning, measure=None):
    """Coordinate search -> settings in the order of trial with their scores, the best of them. `measure` runs one."""
    tried = {}

    def score(setting):
        text, areas = json.dumps({k: v for k, v in setting.items() if v != CENTRE[k]}), []
        for seed in TUNING_SEEDS if text not in tried else ():
            key = task, TRL, text, seed
            if key not in tuning and measure:
                measure(*key)
            areas += [area(tuning[key])] if key in tuning else []
            if areas and areas[0] < max(tried.values(), default=0) / 2:
                break  # hopeless: one seed is enough
        if areas:
            tried[text] = round(statistics.mean(areas), 2)
        return tried.get(text, -1.0)

    best = CENTRE
    for name, values in SEARCH:
        best = max(
            [best, *(best | {name: value} for value in values)], key=score
        )  # of equals, what it was
    return tried, json.dumps({k: v for k, v in best.items() if v != CENTRE[k]})


# --- tables ---
def read(path):
    return {key: [point[:3] for point in curve] for key, curve in read_curves(path).items()}


def of(curves, task, arm):
    return [curves[key] for key in sorted(curves) if key[:2] == (task, arm)]


def middle(curves, threshold, column):
    """Median over the seeds; a run that never gets there counts as the longest."""
    values = [reach(curve, threshold, column) for curve in curves]
    return statistics.median([float("inf") if value is None else value for value in values])


def table(task, curves):
    head = f"{task} | accuracy at the end, by seed | responses to .5 | to .9 | CPU s to .5 | to .9 | reached .9"
    lines = [f"| {head} | TRL's cost of .5: responses, CPU s | of .9 |", "|---" * 9 + "|"]
    theirs = of(curves, task, TRL)
    ends = [statistics.median(curve[-1][column] for curve in theirs) for column in (0, 1)]
    for arm in ARMS:
        if mine := of(curves, task, arm):
            costs = [
                [middle(mine, threshold, column) for threshold in (0.5, 0.9)] for column in (0, 1)
            ]
            cells = [" ".join(short(curve[-1][2]) for curve in mine)]
            cells += ["–" if x == float("inf") else f"{x:.0f}" for x in costs[0]]
            cells += ["–" if x == float("inf") else f"{x:.1f}" for x in costs[1]]
            cells.append(f"{sum(reach(curve, 0.9) is not None for curve in mine)} of {len(mine)}")
            for i, threshold in enumerate((0.5, 0.9)):
                pairs = [
                    (middle(theirs, threshold, column), costs[column][i], ends[column])
                    for column in (0, 1)
                ]
                cells.append(", ".join(ratio(*pair) for pair in pairs))
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio(theirs, mine, end):
    """How many times as much TRL needs; at least so many times if it was not there at its end."""
    if mine == float("inf"):
        return "–"
    return f"> {end / mine:.1f}x" if theirs == float("inf") else f"{theirs / mine:.1f}x"


def grid_table(tuning):
    """Every setting of TRL that was tried, as changes from the centre: mean accuracy over the run, tuning seeds"""
    lines = ["| setting | " + " | ".join(BUDGET) + " |", "|---" * (1 + len(BUDGET)) + "|"]
    found = {task: search(task, tuning) for task in BUDGET}
    for text in dict.fromkeys(text for tried, _ in found.values() for text in tried):
        cells = [short(tried[text]) if text in tried else "" for tried, _ in found.values()]
        cells = [
            f"**{x}**" if text == best else x
            for x, (_, best) in zip(cells, found.values(), strict=True)
        ]
        words = ", ".join(f"{name} {value}" for name, value in json.loads(text).items())
        lines.append(f"| {f'`{words}`' if words else 'centre'} | {' | '.join(cells)} |")
    return "\n".join(lines)


COLORS = dict(zip(ARMS, (METHOD, VARIANT, SECOND_RIVAL, RIVAL), strict=True))
TITLES = {"default": "1 in 10 right at the start", "rare": "1 in 100 right at the start"}


def draw(curves, path):
    """The median of the seeds, with every seed as a thin line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 7), layout="constrained")
    panels = [(task, column) for column in (0, 1) for task in BUDGET]
    for axis, (task, column) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        lines = {}
        for arm, color in COLORS.items():
            seeds = [[(point[column], point[2]) for point in c] for c in of(curves, task, arm)]
            if seeds:
                lines[arm] = (color, seeds)
        ends = show_lines(axis, lines)
        axis.set_title(TITLES[task], fontsize=14, loc="left")
        axis.set(ylim=(-0.02, 1.03))
        axis.set_ylabel("accuracy on held-out prompts", fontsize=12)
        axis.set_xlabel(
            "CPU seconds of sampling and updating" if column else "responses", fontsize=12
        )
        name_lines(axis, ends)
    figure.supxlabel("thick: median · thin: each seed", fontsize=12)
    figure.savefig(path, **SIZE)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="TRL on the tuning seeds")
    parser.add_argument("--tables", action="store_true", help="no training")
    parser.add_argument("--tasks", nargs="*", default=list(BUDGET), choices=list(BUDGET))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    options = parser.parse_args()
    tuning, done, best = read(TUNING), read(STUDY), settings_of_ours()

    def measure(*job):
        record(TUNING, *job, responses=5_120, every=256)  # as ours were tuned
        tuning.update(read(TUNING))

    for task in options.tasks if not options.tables else ():
        best[task, TRL] = search(task, tuning, measure)[1]
        print(f"{task}, {TRL}: {best[task, TRL]}", flush=True)
    jobs = [
        (task, arm, best.get((task, arm)), seed)
        for task in options.tasks
        for seed in SEEDS
        for arm in options.arms
    ]
    jobs = [] if options.tables or options.tune else [job for job in jobs if job not in done]
    for arm in (
        options.arms if jobs else ()
    ):  # what a library does once in a process is nobody's cost
        run("default", arm, best.get(("default", arm), "{}"), 0, responses=512)
    for job in jobs:
        record(STUDY, *job)
    curves, tuning = read(STUDY), read(TUNING)
    for task in [task for task in BUDGET if of(curves, task, TRL)]:
        print(f"\n{task}: {TASKS[task][2]}\n\n{table(task, curves)}")
    print(f"\nmean accuracy over the run, tuning seeds\n\n{grid_table(tuning)}")
    if curves:
        draw(curves, HERE.parent / "docs" / "race.png")


if __name__ == "__main__":
    main()
