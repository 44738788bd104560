"""How long until it works? wsrl_warmup.py against the SAC of stable-baselines3 and of SBX, each at its best.

    pip install -e .[peers,mujoco]         # optional extras; --tables does without them
    python benchmark/control.py --tune     # only the grid, on a seed of its own -> control_tuning.csv
    python benchmark/control.py            # that, then what control.csv lacks: the best settings, five seeds
    python benchmark/control.py --why      # scratch with what SB3 does otherwise, one thing at a time
    python benchmark/control.py --tables   # tables and picture from the CSVs; no training

The mean action is judged on the same 10 episodes for all, every 250 environment steps. A run ends when it has the
higher level of its task at two evaluations in a row. Seconds are CPU time on one thread of acting and updating, an
offline warm-up included; without imports, evaluation and what is compiled once. SBX (JAX) has a process of its own.
rlpd and design are given offline data, the others are not: that is what they are for, and no equal comparison.
"""

import argparse
import contextlib
import csv
import functools
import io
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

STUDY, TUNING, SEEDS, TUNING_SEED = (
    HERE / "control.csv",
    HERE / "control_tuning.csv",
    (1, 2, 3, 4, 5),
    101,
)
COLUMNS = [
    "task",
    "arm",
    "setting",
    "seed",
    "env_steps",
    "cpu_seconds",
    "return",
    "compile_seconds",
]
LEVELS = {
    "Pendulum-v1": (-200, -150),
    "Reacher-v5": (-8, -7),
}  # the scripts have -110, -5.5; no action -1200, -11
BUDGET = 5_000
EVERY, EPISODES, OFFLINE_STEPS = 250, 10, 1_500
NO_DATA = {"SB3": "–", "SBX": "–", "scratch": "–"}
ARMS = {  # offline data of each, those of wsrl_study.py
    "Pendulum-v1": NO_DATA
    | {
        "rlpd": "8000 rows",
        "design": "8000 rows",
        "rlpd, one demo": "200 rows",
        "design, one demo": "200 rows",
    },
    "Reacher-v5": NO_DATA | {"rlpd": "8000 rows", "design": "8000 rows"},
}
# the trials: what differs from rate 0.001, one update a step, batches of 256, two layers of 64, and the random steps
# of the library or preset (100 or 200; design: none). rlpd has two critics and one update, as in wsrl_study.py: the
# preset's ten and 20 cost many times as much
GRID = [
    {},
    dict(rate=3e-4),
    dict(rate=3e-3),
    dict(updates=2),
    dict(updates=4),
    dict(batch=128),
    dict(starts=500),  # random steps; design, which has none: updates of the warm-up
    dict(width=256),
]
TRIALS = [json.dumps(each) for each in GRID]
LIKE_SB3 = {  # --why: what the library does otherwise
    "scratch": {},
    "no LayerNorm": dict(layer_norm=False),
    "reward not scaled": dict(reward_scale=1.0),  # on Reacher-v5 it never is
    "temperature from 1": dict(init_alpha=1.0),
    "target rate 0.005": dict(tau=0.005),
}
LIKE_SB3["all four"] = {name: value for each in LIKE_SB3.values() for name, value in each.items()}
WORDS = dict(rate="rate", updates="updates a step", batch="batch", starts="starts", width="width")


# --- runs ---
def judge(env_id, act):
    """Mean return of `act`, (N,D) -> (N,A), on the fixed episodes, side by side; none ends before its time limit."""
    import gymnasium as gym
    import numpy as np

    envs = [gym.make(env_id) for _ in range(EPISODES)]
    obs, total, over = [env.reset(seed=10_000 + i)[0] for i, env in enumerate(envs)], 0.0, False
    while not over:
        steps = [env.step(action) for env, action in zip(envs, act(np.float32(obs)), strict=True)]
        obs, over = [step[0] for step in steps], steps[0][3]
        total += sum(step[1] for step in steps)
    return float(total) / EPISODES


class Clock:
    """CPU seconds between evaluations; the curve so far; says when the race is over."""

    def __init__(self, task):
        self.task, self.curve, self.seconds, self.since = task, [], 0.0, time.process_time()

    def evaluate(self, env_steps, act):
        """-> whether the higher level was there at two evaluations in a row"""
        self.seconds += time.process_time() - self.since
        self.curve = [
            point for point in self.curve if point[0] < env_steps
        ]  # the warm-up ends at step 0, too
        self.curve.append((env_steps, self.seconds, judge(self.task, act)))
        self.since = time.process_time()
        return steps_to(self.curve, LEVELS[self.task][1]) is not None


class Finished(Exception):
    pass


class NoSignals:
    """A signal ends the study, not a run."""

    received = False

    def release(self):
        pass


def run_ours(
    arm, task, seed, steps, rate=1e-3, updates=1, batch=256, starts=None, width=64, **more
):
    import wsrl_study

    import wsrl_warmup

    preset, _, data = arm.partition(", ")
    data = data or {"Pendulum-v1": "no demos", "Reacher-v5": "Reacher"}[task]
    options = dict(preset=preset, num_critics=2, utd_ratio=updates, batch_size=batch)
    options |= dict(hidden_size=width, online_steps=steps, eval_every=10**6)
    options["warmup_steps"] = (starts or OFFLINE_STEPS) if preset == "design" else 0
    if starts and preset != "design":
        options["warmup_rollout_steps"] = starts
    clock = Clock(task)
    explore = wsrl_warmup.explore

    steps_done = [0]

    def judge_now(agent, env_steps):
        env = wsrl_warmup.make_gym_env(task)
        scale, center = env.action_scale, env.action_center
        if clock.evaluate(env_steps, lambda obs: center + scale * agent.act(obs)):
            raise Finished

    def evaluate(agent, env, episodes):  # at the start, where the warm-up ends, and at the end
        if agent.updates == 0:  # until here it read data and made networks
            clock.since = time.process_time()
        judge_now(agent, steps_done[0])
        return {"eval/episodic_return": clock.curve[-1][2]}

    def explore_and_judge(agent, obs, env_steps, rng):
        """The libraries are judged in the middle of an episode, too."""
        steps_done[0] = env_steps
        if env_steps > 1 and (env_steps - 1) % EVERY == 0:
            judge_now(agent, env_steps - 1)
        return explore(agent, obs, env_steps, rng)

    changes = dict(evaluate_policy=evaluate, explore=explore_and_judge, Signals=NoSignals)
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(tempfile.TemporaryDirectory())
        for name, new in changes.items():
            stack.enter_context(mock.patch.object(wsrl_warmup, name, new))
        args = wsrl_study.make_args(data, options | more, seed, rate, f"{target}/run")
        with contextlib.suppress(Finished):
            wsrl_warmup.main(args)
    return clock.curve, 0.0


def run_peer(library, task, seed, steps, rate=1e-3, updates=1, batch=256, starts=100, width=64):
    import gymnasium as gym
    from stable_baselines3.common.callbacks import BaseCallback

    if library == "SB3":
        from stable_baselines3 import SAC
    else:
        from sbx import SAC
    options = dict(
        learning_rate=rate, gradient_steps=updates, batch_size=batch, learning_starts=starts
    )
    options |= dict(
        policy_kwargs=dict(net_arch=[width, width]), buffer_size=50_000, seed=seed, device="cpu"
    )
    env = gym.make(task)
    model = SAC("MlpPolicy", env, **options)
    clock, train, compiled = Clock(task), model.train, []

    def act(obs):
        return model.predict(obs, deterministic=True)[0]

    def first(*args, **kwargs):  # SBX compiles here, SB3 does nothing of the kind
        start = time.process_time()
        train(*args, **kwargs)
        compiled.append(time.process_time() - start)
        clock.since, model.train = clock.since + compiled[0], train

    class Judge(BaseCallback):
        def _on_training_start(self):
            model.predict(env.observation_space.sample())  # what acting compiles
            clock.seconds, clock.since = 0.0, time.process_time()
            clock.evaluate(0, act)

        def _on_step(self):
            return self.num_timesteps % EVERY > 0 or not clock.evaluate(self.num_timesteps, act)

    model.train = first
    model.learn(steps, callback=Judge())
    return clock.curve, compiled[0]


def run(task, arm, setting, seed, steps=None):
    """-> [(environment steps, CPU seconds, return), ...], CPU seconds of compiling"""
    import torch

    torch.set_num_threads(1)
    go = functools.partial(run_peer if arm in ("SB3", "SBX") else run_ours, arm)
    with contextlib.redirect_stdout(io.StringIO()):
        return go(task=task, seed=seed, steps=steps or BUDGET, **json.loads(setting))


def record(path, pool, *job):
    curve, compiled = pool.submit(run, *job).result() if job[1] == "SBX" else run(*job)
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS] if new else [])
        rows = [[x, round(y, 2), round(z, 2), round(compiled, 2)] for x, y, z in curve]
        writer.writerows([*job, *row] for row in rows)
    print(
        *job,
        *(f"{level}: {steps_to(curve, level)}" for level in LEVELS[job[0]]),
        rows[-1],
        flush=True,
    )


# --- tables ---
def read(path):
    curves = {}
    for row in csv.DictReader(open(path)) if path.exists() else ():
        key = row["task"], row["arm"], row["setting"], int(row["seed"])
        curves[key] = (
            curves.get(key, []) if int(row["env_steps"]) else []
        )  # one that was run again counts once
        curves[key].append((int(row["env_steps"]), float(row["cpu_seconds"]), float(row["return"])))
    return curves


def steps_to(curve, level, column=0):
    """Environment steps (column 1: CPU seconds) until the level is there, and at the next evaluation, too."""
    pairs = zip(curve, curve[1:], strict=False)
    return next((a[column] for a, b in pairs if min(a[2], b[2]) >= level), None)


def middle(curves, level, column):
    """Median over the seeds; a run that never gets there counts as the longest."""
    values = [steps_to(curve, level, column) for curve in curves]
    return statistics.median([float("inf") if value is None else value for value in values])


def best(tuning, task, arm, column):
    """The setting with the fewest steps (0) or seconds (1) to the higher level; if level, the other decides."""
    scores = {}
    for setting in TRIALS:
        curve = tuning.get((task, arm, setting, TUNING_SEED))
        if curve:
            found = [steps_to(curve, LEVELS[task][1], c) for c in (column, 1 - column)]
            mean = statistics.mean(point[2] for point in curve)
            scores[setting] = (1, -mean) if found[0] is None else (0, *found)
    return min(scores, key=scores.get) if len(scores) == len(TRIALS) else None


def finished(curves, tuning):
    """Tasks of which nothing is missing"""
    jobs = {
        t: [(t, arm, best(tuning, t, arm, c), s) for arm in ARMS[t] for c in (0, 1) for s in SEEDS]
        for t in LEVELS
    }
    return [task for task, own in jobs.items() if all(job in curves for job in own)]


def words(arm, setting):
    options = json.loads(setting)
    names = WORDS | (dict(starts="warm-up") if "design" in arm else {})
    return ", ".join(f"{names[name]} {value:g}" for name, value in options.items()) or "centre"


def cells(curves, tuning, task, arm, column):
    """Median costs of both levels, on how many seeds the higher was reached, the setting"""
    setting = best(tuning, task, arm, column)
    mine = [curve for key, curve in curves.items() if key[:3] == (task, arm, setting)]
    costs = [middle(mine, level, column) for level in LEVELS[task]]
    costs = ["–" if cost == float("inf") else f"{cost:.{column}f}" for cost in costs]
    done = sum(steps_to(curve, LEVELS[task][1]) is not None for curve in mine)
    return [*costs, f"{done} of {len(mine)}", words(arm, setting)]


def table(task, curves, tuning):
    low, high = LEVELS[task]
    head = f"{task} | offline data | steps to {low} | to {high} | got there | at the setting"
    head += f" | CPU s to {low} | to {high} | got there | at the setting"
    lines = [f"| {head} |".replace("to -", "to −"), "|---" * 10 + "|"]
    for arm, data in ARMS[task].items():
        row = [data, *cells(curves, tuning, task, arm, 0), *cells(curves, tuning, task, arm, 1)]
        lines.append(f"| {arm} | {' | '.join(row)} |")
    return "\n".join(lines)


def grid_table(task, tuning):
    """Every trial: steps and CPU seconds to the higher level on the tuning seed; best of each in bold"""
    lines = [f"| setting | {' | '.join(ARMS[task])} |", "|---" * (1 + len(ARMS[task])) + "|"]
    for setting in TRIALS:
        row = []
        for arm in ARMS[task]:
            curve = tuning[task, arm, setting, TUNING_SEED]
            texts = [steps_to(curve, LEVELS[task][1], column) for column in (0, 1)]
            texts = [
                f"{x:.0f}{unit}" if x is not None else "–"
                for x, unit in zip(texts, ("", " s"), strict=True)
            ]
            chosen = [best(tuning, task, arm, column) == setting for column in (0, 1)]
            texts = [
                f"**{text}**" if bold else text for text, bold in zip(texts, chosen, strict=True)
            ]
            row.append(", ".join(texts))
        name = words("SB3", setting) + "; design: updates of the warm-up" * ("starts" in setting)
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def why_jobs(task, tuning):
    """{change: job without its seed}, from the setting that needed the fewest steps"""
    changes = {
        name: more
        for name, more in LIKE_SB3.items()
        if task == "Pendulum-v1" or name != "reward not scaled"
    }
    base = json.loads(best(tuning, task, "scratch", 0) or "{}")
    return {name: (task, "scratch", json.dumps(base | more)) for name, more in changes.items()}


def why_table(curves, tuning):
    """Steps to both levels, on how many seeds the higher was reached"""
    heads = [
        f"{task}: steps to {low} | to {high} | got there" for task, (low, high) in LEVELS.items()
    ]
    lines = [f"| scratch | {' | '.join(heads)} |".replace("to -", "to −"), "|---" * 7 + "|"]
    jobs = {task: why_jobs(task, tuning) for task in LEVELS}
    for name in LIKE_SB3:
        row = []
        for task, levels in LEVELS.items():
            mine = [curve for key, curve in curves.items() if key[:3] == jobs[task].get(name)]
            steps = [middle(mine, level, 0) for level in levels] if mine else []
            row += ["–" if x == float("inf") else f"{x:.0f}" for x in steps] or ["", ""]
            row.append(
                f"{sum(steps_to(c, levels[1]) is not None for c in mine)} of {len(mine)}"
                if mine
                else ""
            )
        lines.append(f"| {name.replace('scratch', 'as it is')} | {' | '.join(row)} |")
    return "\n".join(lines)


COLOURS = ("tab:red", "tab:orange", "tab:gray", "tab:purple", "tab:blue", "tab:pink", "tab:cyan")
TITLES = {
    ("Pendulum-v1", 0): "Pendulum-v1: data save nearly every step",
    ("Pendulum-v1", 1): "Pendulum-v1: SBX, compiled, needs half of SB3's CPU time",
    ("Reacher-v5", 0): "Reacher-v5: without data it takes thousands",
    ("Reacher-v5", 1): "Reacher-v5: data save CPU time, too",
}


def draw(tasks, curves, tuning, path):
    """A dot a seed, hollow at the end of its run where it never got there; the median beside the bar that marks it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 0.4 + 3.1 * len(tasks)), layout="constrained")
    panels = [(task, column) for task in tasks for column in (0, 1)]
    for i, (task, column) in enumerate(panels, 1):
        axis = figure.add_subplot(len(tasks), 2, i)
        arms = list(reversed(ARMS[task]))
        for y, (arm, colour) in enumerate(zip(arms, reversed(COLOURS[: len(arms)]), strict=True)):
            setting, level = best(tuning, task, arm, column), LEVELS[task][1]
            mine = [curve for key, curve in curves.items() if key[:3] == (task, arm, setting)]
            for curve in mine:
                x = steps_to(curve, level, column)
                face = "none" if x is None else colour
                axis.plot(
                    curve[-1][column] if x is None else x,
                    y,
                    "o",
                    color=colour,
                    markerfacecolor=face,
                    alpha=0.6,
                )
            if (x := middle(mine, level, column)) < float("inf"):
                axis.plot(x, y, "|", color=colour, markersize=22, markeredgewidth=2.5)
                axis.annotate(
                    f"{x:.{column}f}", (x, y + 0.27), ha="center", fontsize=9, color=colour
                )
        names = [arm if arm in NO_DATA or "," in arm else f"{arm} + data" for arm in arms]
        axis.set_yticks(range(len(arms)), names)
        unit = "CPU seconds" if column else "environment steps"
        axis.set(title=TITLES.get((task, column), task), ylim=(-0.5, len(arms) - 0.3))
        axis.set_xlabel(f"{unit} to a return of {level} (number: median)".replace("-", "−"))
        axis.set_xlim(left=min(0, axis.get_xlim()[0]))
        axis.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="only the grid")
    parser.add_argument(
        "--why", action="store_true", help="scratch, with one thing after the other as SB3 has it"
    )
    parser.add_argument("--tables", action="store_true", help="no training")
    parser.add_argument("--tasks", nargs="*", default=list(LEVELS), choices=list(LEVELS))
    options = parser.parse_args()
    grid = [
        (task, arm, g, TUNING_SEED) for task in options.tasks for g in TRIALS for arm in ARMS[task]
    ]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for path in [] if options.tables else [TUNING] if options.tune else [TUNING, STUDY]:
            tuning, done = read(TUNING), read(path)
            jobs = grid
            if path == STUDY and options.why:
                own = [job for task in options.tasks for job in why_jobs(task, tuning).values()]
                jobs = [(*job, seed) for seed in SEEDS for job in own]
            elif path == STUDY:
                pairs = [
                    (task, seed, arm)
                    for task in options.tasks
                    for seed in SEEDS
                    for arm in ARMS[task]
                ]
                chosen = {
                    pair: [best(tuning, pair[0], pair[2], column) for column in (0, 1)]
                    for pair in pairs
                }
                jobs = [
                    (task, arm, s, seed)
                    for (task, seed, arm), both in chosen.items()
                    for s in dict.fromkeys(both)
                ]
            jobs = [job for job in jobs if job not in done]
            for arm in {
                job[1]: None for job in jobs if job[1] != "SBX"
            }:  # what a library does once is nobody's cost
                run("Pendulum-v1", arm, "{}", 0, steps=500)
            for job in jobs:
                record(path, pool, *job)
    curves, tuning = read(STUDY), read(TUNING)
    for task in (tasks := finished(curves, tuning)):
        print(
            f"\n{table(task, curves, tuning)}\n\ntrials, seed {TUNING_SEED}\n\n{grid_table(task, tuning)}"
        )
    if tasks:
        print(f"\nwhat SB3 does otherwise\n\n{why_table(curves, tuning)}")
        draw(tasks, curves, tuning, HERE.parent / "docs" / "control.png")


if __name__ == "__main__":
    main()
