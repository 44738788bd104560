"""What do online steps add to the best of data and clone? Every arm on the same data, frozen policies.

    python benchmark/wsrl_study.py                      # what is not in the CSVs yet, then tables and picture
    python benchmark/wsrl_study.py --task "one demo" --arms design "bc then SAC" --seeds 1 2
    python benchmark/wsrl_study.py --table              # tables and picture from the CSVs, no training
    python benchmark/wsrl_study.py --tune               # the rates of GRID on seed 101: wsrl_tuning.csv
    python benchmark/wsrl_study.py --switch             # why a clone falls when it goes online: wsrl_switch.csv

Rows of wsrl_study.csv are evaluations: the mean action on 10 fixed episodes, `env_steps` after the warm-up
(0: the offline policy). All arms of a task have the same networks, batches, two critics, one update per environment
step; without demos each has the rate that was best for it in wsrl_tuning.csv, which also holds runs at other rates.
Reacher needs: pip install -e .[mujoco]
"""

import argparse
import contextlib
import csv
import io
import json
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
PATH, TUNING, SWITCH = (HERE / f"wsrl_{name}.csv" for name in ("study", "tuning", "switch"))
COLUMNS = "task arm seed env_steps return data_return cpu_seconds lr".split()
SEEDS, TUNING_SEEDS, GRID = (1, 2, 3, 4, 5), (101,), (3e-4, 1e-3, 3e-3)
COMMON = dict(warmup_steps=1_500, online_steps=2_000, eval_every=200, device="cpu")
COMMON |= dict(capture_video=False, save_every=10**6)
ENV_IDS = {"no demos": "Pendulum-v1", "one demo": "Pendulum-v1", "Reacher": "Reacher-v5"}
# Reacher: rewards are small as they are; all other options are those of the built-in task
TASKS = {"no demos": {}, "one demo": {}, "Reacher": dict(reward_scale=1.0)}
# two evaluations in a row must reach this; the scripts have -110 on these episodes and -5.8
EXPERT = {"no demos": -130.0, "one demo": -130.0, "Reacher": -7.0}
SAME = dict(num_critics=2, utd_ratio=1)  # the papers: ten critics, 4 and 20 updates per step
PLAIN = dict(
    use_prioritized_replay=False,
    weighted_loss="none",
    retention_ratio=1.0,
    initial_offline_ratio=0.5,
)
ARMS = {
    "scratch": dict(preset="scratch", warmup_steps=0),
    "rlpd": dict(preset="rlpd", warmup_steps=0) | SAME,
    # the paper's 5000 frozen steps are longer than these runs
    "wsrl": dict(preset="wsrl", warmup_rollout_steps=500) | SAME,
    "bc then SAC": dict(preset="bc"),
    "SAC then SAC": PLAIN,  # the design without any of its four parts
    "design": {},
}
PARTS = {  # of the design, each taken away
    "design - PER": dict(use_prioritized_replay=False),
    "design - weights": dict(weighted_loss="none"),
    "design - retention": dict(retention_ratio=1.0),
    "design - decay": dict(initial_offline_ratio=0.5),
    "design - all four": PLAIN,  # SAC then SAC at the design's rate
}
SWITCH_COLUMNS = ["arm", "seed", "env_steps", "return", "critic_return"]
BC_WEIGHT = 5.0  # the first value that was tried, on seed 101
SWITCH_ARMS = {"bc then SAC": {}, "bc then SAC, clone kept": dict(bc_weight=BC_WEIGHT)}


def reach(obs):
    """Reacher: pull the fingertip to the target along both joints (the Jacobian's transpose), and brake."""
    import numpy as np

    cos1, cos2, sin1, sin2, _, _, *speed, x, y = obs  # x, y: from target to fingertip
    cos, sin = cos1 * cos2 - sin1 * sin2, sin1 * cos2 + cos1 * sin2
    torque = [
        -0.1 * (sin1 * x - cos1 * y) - 0.11 * (sin * x - cos * y),
        -0.11 * (sin * x - cos * y),
    ]
    return np.clip(-20 * np.array(torque) - 0.05 * np.array(speed), -1, 1)


def make_data(task, seed):
    """Data files of a task, the same for all arms.  -> options that name them"""
    import wsrl_warmup

    if task == "no demos":
        return {}  # the built-in task makes them itself
    folder = HERE.parent / "runs" / "wsrl_data" / task.replace(" ", "_") / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    env = wsrl_warmup.make_gym_env(ENV_IDS[task])
    expert, sources, num_rows = reach, ("suboptimal", "random"), 4_000
    if task == "one demo":
        expert, sources, num_rows = wsrl_warmup.swing_up, ("demos",), 200
    options = {}
    for source in sources:
        path = folder / f"{source}.pkl"
        if not path.exists():
            transitions = wsrl_warmup.make_source(env, expert, source, seed, num_rows)
            path.write_bytes(pickle.dumps(transitions))
        option = "offline_data_path" if source == "demos" else f"{source}_data_path"
        options[option] = [str(path)]
    return options


def make_args(task, arm_options, seed, lr, run_dir):
    """The options of a run, as the command line would complete them"""
    import wsrl_warmup

    preset = arm_options.get("preset", "design")
    options = wsrl_warmup.default_options(preset=preset) | COMMON | TASKS[task]
    options |= dict(env_id=ENV_IDS[task], seed=seed, lr=lr, run_dir=run_dir) | arm_options
    if options["warmup_steps"] or options["retention_ratio"]:
        options |= make_data(task, seed)
    return wsrl_warmup.Args(**options)


def run(task, arm, seed, lr):
    """One training run -> rows for the CSV."""
    import wsrl_warmup

    start = time.process_time()  # other load on the machine must not count
    with tempfile.TemporaryDirectory() as target, contextlib.redirect_stdout(io.StringIO()) as out:
        args = make_args(task, (ARMS | PARTS)[arm], seed, lr, f"{target}/run")
        wsrl_warmup.main(args)
        rows = [json.loads(line) for line in open(f"{target}/run/metrics.jsonl", encoding="utf-8")]
    lines = [line for line in out.getvalue().splitlines() if "mean return" in line]
    best = max((float(line.split("return ")[1]) for line in lines), default=float("nan"))
    seconds = round(time.process_time() - start, 1)
    rows = [row for row in rows if "eval/episodic_return" in row]
    if rows[-1]["charts/env_steps"] < 2_000:
        sys.exit("the run was stopped")  # it is not a result
    first = max(i for i, row in enumerate(rows) if row["charts/env_steps"] == 0)
    found = []
    for row in rows[first:]:  # from the policy that goes online
        point = (row["charts/env_steps"], round(row["eval/episodic_return"], 2))
        found.append([task, arm, seed, *point, best, seconds, lr])
    return found


def read(path=PATH):
    """{(task, arm, seed, rate): {env_steps: return}}"""
    curves = {}
    for row in csv.DictReader(open(path)) if path.exists() else ():
        both = ["no demos", "one demo"]  # it reads no data: one run for both
        for task in both if row["arm"] == "scratch" and row["task"] in both else [row["task"]]:
            key = task, row["arm"], int(row["seed"]), float(row["lr"])
            curves.setdefault(key, {})[int(row["env_steps"])] = float(row["return"])
    return curves


def append(path, columns, rows):
    new = not path.exists()
    with open(path, "a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows] if new else rows)


def tuned(task, arm):
    """Mean return over all evaluations of the tuning seeds, by rate; all of them or none"""
    runs = read(TUNING)
    found = {lr: [runs.get((task, arm, seed, lr)) for seed in TUNING_SEEDS] for lr in GRID}
    if not all(all(curves) for curves in found.values()):
        return {}
    return {
        lr: statistics.mean(x for curve in curves for x in curve.values())
        for lr, curves in found.items()
    }


def rate(task, arm):
    """The best of the grid; a part is taken from the design as it was tuned. Where nothing was tuned: 1e-3."""
    scores = tuned(task, "design" if arm in PARTS else arm)
    return max(scores, key=scores.get) if scores else 1e-3


def of(task, arm):
    """Curves of the reported seeds at the arm's rate"""
    own = rate(task, arm)
    return [curve for key, curve in read().items() if key[:2] == (task, arm) and key[3] == own]


def steps_to(curve, level):
    """Environment steps until the frozen policy has the expert's level, and has it at the next evaluation, too."""
    steps = sorted(curve)
    good = [curve[step] >= level for step in steps]
    return next((steps[i] for i in range(len(steps) - 1) if good[i] and good[i + 1]), float("inf"))


def table(task, arms=ARMS):
    """Markdown: return at 0, 400, 2000 steps, over all from 400 on: mean (worst seed); loss; steps to the expert"""
    head = "arm | rate | return at 0 | at 400 | at 2000 steps | 400 to 2000 | most lost below the start"
    lines = [f"| {head} | steps to the expert's level |", "|---" * 8 + "|"]
    for arm in arms:
        if mine := of(task, arm):
            points = [[curve[step] for curve in mine] for step in (0, 400, 2000)]
            points.append(
                [statistics.mean(x for step, x in curve.items() if step >= 400) for curve in mine]
            )
            digits = 1 if task == "Reacher" else 0
            cells = [
                f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f})"
                for values in points
            ]
            lost = statistics.mean(max(0, curve[0] - min(curve.values())) for curve in mine)
            reached = sorted(steps_to(curve, EXPERT[task]) for curve in mine)
            median, done = reached[len(reached) // 2], sum(x < float("inf") for x in reached)
            steps = f"{median:.0f}" if median < float("inf") else "> 2000"
            cells += [f"{lost:.{digits}f}", f"{steps}, {done} of {len(mine)} seeds"]
            row = f"| {arm} | {rate(task, arm):g} | {' | '.join(cells)} |"
            lines.append(row.replace("| -", "| −").replace("(-", "(−"))
    return "\n".join(lines)


def tuning_table(task):
    """Markdown: what the tuning seed gave at each rate"""
    lines = [
        "| arm, at the rate | " + " | ".join(f"{lr:g}" for lr in GRID) + " |",
        "|---" * (1 + len(GRID)) + "|",
    ]
    for arm in ARMS:
        scores, best, digits = tuned(task, arm), rate(task, arm), 1 if task == "Reacher" else 0
        if not scores:
            continue
        cells = [
            f"**{x:.{digits}f}**" if lr == best else f"{x:.{digits}f}" for lr, x in scores.items()
        ]
        lines.append(f"| {arm} | {' | '.join(cells)} |".replace("-", "−"))
    return "\n".join(lines)


def push_along(obs):
    """MountainCarContinuous-v0: push in the direction of motion."""
    import numpy as np

    return np.where(obs[1:] >= 0, 1.0, -1.0)


def switch(arm, seed):
    """MountainCarContinuous from all three sources: the clone's return, and that of the critic's best of 41 actions."""
    import numpy as np
    import torch

    import wsrl_warmup

    grid = torch.linspace(-1, 1, 41)[:, None]
    env = wsrl_warmup.make_gym_env("MountainCarContinuous-v0")

    def judge(agent):
        @torch.no_grad()
        def best(obs):
            features = agent.normalizer(torch.from_numpy(obs)[None]).expand(len(grid), -1)
            return grid[agent.critic(features, grid).mean(0).argmax()].numpy()

        returns = []
        for act in (agent.act, best):
            plays = [wsrl_warmup.play_episode(env, act, 10_000 + i)[0] for i in range(10)]
            sums = [sum(transition["rewards"] for transition in play) for play in plays]
            returns.append(round(float(np.mean(sums)), 1))
        return returns

    options = wsrl_warmup.default_options(preset="bc") | COMMON | dict(batch_size=128, seed=seed)
    options |= dict(env_id="MountainCarContinuous-v0", eval_every=10**6, eval_episodes=1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for source in wsrl_warmup.SOURCES:
            transitions = wsrl_warmup.make_source(env, push_along, source, seed)
            Path(folder, f"{source}.pkl").write_bytes(pickle.dumps(transitions))
        paths = [f"{source}_data_path" for source in ("offline", "suboptimal", "random")]
        data = {
            path: [f"{folder}/{source}.pkl"]
            for path, source in zip(paths, wsrl_warmup.SOURCES, strict=True)
        }
        warm = f"{folder}/warm.pth"
        stage_one = dict(checkpoint_path=warm, run_dir=f"{folder}/0")
        wsrl_warmup.main(wsrl_warmup.Args(**options | data | stage_one))
        found = [[arm, seed, 0, *judge(wsrl_warmup.WarmupAgent.load(warm))]]
        # an evaluation waits for the end of an episode, so each point is the end of a run
        for steps in (100, 200, 300):
            stage_two = dict(checkpoint_path=warm, demo_path=f"{folder}/filtered_demos.pkl")
            stage_two |= dict(learner=True, online_steps=steps, run_dir=f"{folder}/{steps}")
            wsrl_warmup.main(wsrl_warmup.Args(**options | stage_two | SWITCH_ARMS[arm]))
            agent = wsrl_warmup.WarmupAgent.load(f"{folder}/{steps}/final_model.pth")
            found.append([arm, seed, steps, *judge(agent)])
    return found


def switch_means(arm, name):
    """At 0, 100, 200, 300 online steps, over the seeds; and how many these are"""
    mine = [row for row in csv.DictReader(open(SWITCH)) if row["arm"] == arm]
    points = [
        [float(row[name]) for row in mine if row["env_steps"] == str(t)] for t in (0, 100, 200, 300)
    ]
    return [statistics.mean(values) for values in points], len(points[0])


def switch_table():
    head = "| MountainCarContinuous-v0 | at the switch | after 100 steps | after 200 | after 300 | seeds |"
    lines = [head, "|---" * 6 + "|"]
    for arm in SWITCH_ARMS:
        for name, label in (("return", "policy"), ("critic_return", "the critic's best action")):
            means, seeds = switch_means(arm, name)
            cells = " | ".join(f"{x:.1f}" for x in means).replace("-", "−")
            lines.append(f"| {arm}: {label} | {cells} | {seeds} |")
    return "\n".join(lines)


def is_complete(task, arms):
    """All seeds of two arms or more have been run, and of no arm only some of them."""
    counts = [len(of(task, arm)) for arm in arms]
    return sum(count > 0 for count in counts) > 1 and set(counts) <= {0, len(SEEDS)}


COLORS = {  # one role, one color: the method, its simple rival, plain training, the papers
    "SAC then SAC": "#008a5e",
    "bc then SAC": "#e07b00",
    "scratch": "#2468b2",
    "wsrl": "#b8433a",
    "rlpd": "#8a8f98",
}


def plot(path):
    """A panel per task: the median over the seeds as a thick line, each seed as a thin one"""
    from matplotlib.figure import Figure

    tasks = [task for task in TASKS if is_complete(task, ARMS)]
    if not tasks:
        return
    figure = Figure(figsize=(6.5 * len(tasks), 4.2), layout="constrained", facecolor="white")
    for axis, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for arm, color in COLORS.items():
            mine = of(task, arm)
            for curve in mine:
                axis.plot(list(curve), list(curve.values()), color=color, alpha=0.25, linewidth=0.8)
            if mine:
                medians = [statistics.median(curve[step] for curve in mine) for step in mine[0]]
                axis.plot(list(mine[0]), medians, color=color, linewidth=2.5, label=arm)
        level = dict(color="black", linewidth=0.8, linestyle="--", label="near the expert")
        axis.axhline(EXPERT[task], **level)
        bottom, top = {"Reacher": (-30, -4)}.get(task, (-1600, 0))
        axis.set(title=ENV_IDS[task], ylim=(bottom, top), ylabel="return of the frozen policy")
        axis.set_xlabel("environment steps after the warm-up")
        axis.legend(fontsize=9, loc="lower right")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=list(TASKS), help="one of the tasks")
    parser.add_argument("--arms", nargs="*", default=list(ARMS | PARTS), help="these arms only")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--tune", action="store_true", help="the grid, on the tuning seeds")
    parser.add_argument("--switch", action="store_true", help="the other question, see above")
    parser.add_argument("--table", action="store_true", help="no training")
    options = parser.parse_args()
    pairs = [(task, arm) for task in TASKS for arm in options.arms if options.task in (None, task)]
    # with one demo scratch is the same run, nothing was tuned, and no part was taken away
    pairs = [(t, a) for t, a in pairs if t != "one demo" or a not in PARTS]
    pairs = [(t, a) for t, a in pairs if (t, a) != ("one demo", "scratch")]
    if options.table:
        jobs, path = [], PATH
    elif options.switch:
        have = (
            {(row["arm"], int(row["seed"])) for row in csv.DictReader(open(SWITCH))}
            if SWITCH.exists()
            else set()
        )
        for arm, seed in [(a, s) for s in options.seeds for a in SWITCH_ARMS if (a, s) not in have]:
            append(SWITCH, SWITCH_COLUMNS, switch(arm, seed))
        jobs, path = [], PATH
    elif options.tune:
        pairs = [(task, arm) for task, arm in pairs if task != "one demo" and arm not in PARTS]
        jobs, path = (
            [(*pair, seed, lr) for seed in TUNING_SEEDS for pair in pairs for lr in GRID],
            TUNING,
        )
    else:
        jobs, path = [(*pair, seed, rate(*pair)) for seed in options.seeds for pair in pairs], PATH
    done = read(path)
    for job in [job for job in jobs if job not in done]:
        rows = run(*job)
        append(path, COLUMNS, rows)
        print(
            f"{job}: {[round(row[4], 1) for row in rows]}, {rows[-1][-2]} CPU seconds", flush=True
        )
    for task in TASKS:
        if is_complete(task, ARMS):
            print(f"\n{task}\n{table(task)}")
    for task in ("no demos", "Reacher"):
        if is_complete(task, PARTS):
            print(f"\nParts of the design, {task}\n{table(task, PARTS)}")
        if any(tuned(task, arm) for arm in ARMS):
            print(f"\nTuning, {task}\n{tuning_table(task)}")
    if SWITCH.exists():
        print(f"\n{switch_table()}")
    plot(HERE.parent / "docs" / "wsrl_study.png")
