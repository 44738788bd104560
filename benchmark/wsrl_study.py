"""What do online steps add to the best of data and clone? Every arm on the same data, frozen policies.

    python benchmark/wsrl_study.py                      # what is not in the CSV yet, then tables and picture
    python benchmark/wsrl_study.py --task "one demo" --arms design bc --seeds 1 2
    python benchmark/wsrl_study.py --table              # tables and picture from the CSV, no training
    python benchmark/wsrl_study.py --switch             # why a clone falls when it goes online: wsrl_switch.csv

Rows of wsrl_study.csv are evaluations: the mean action on 10 fixed episodes, `env_steps` after the warm-up
(0: the offline policy). The tasks are ones that cloning does not solve. All arms have the same networks, rates,
batches, two critics, one update per environment step: what differs is the data they keep, and how they start.
"""

import argparse
import contextlib
import csv
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
PATH = HERE / "wsrl_study.csv"
COLUMNS = ["task", "arm", "seed", "env_steps", "return", "data_return", "kept_bytes", "cpu_seconds"]
SEEDS = (1, 2, 3, 4, 5)  # settings were chosen on 101 and 102
COMMON = dict(env_id="Pendulum-v1", device="cpu", offline_steps=1_500, online_steps=2_000, eval_every=250)
EXPERT = -130.0  # the swing-up script has -110 on these episodes; two evaluations in a row must reach this
TASKS = {
    "no demos": dict(sources=("suboptimal", "random")),  # 20 episodes of each
    "one demo": dict(sources=("demos",), data_size=200),  # one episode, nothing else
}
SAME = dict(num_critics=2, utd_ratio=1)  # the papers: ten critics, 4 and 20 updates a step
PLAIN = dict(use_prioritized_replay=False, weighted_loss="none", retention_ratio=1.0, initial_offline_ratio=0.5)
ARMS = {
    "scratch": dict(preset="scratch", offline_steps=0),
    "rlpd": dict(preset="rlpd", offline_steps=0) | SAME,
    "wsrl": dict(preset="wsrl", warmup_rollout_steps=500) | SAME,  # the paper's 5000 are longer than these runs
    "bc then SAC": dict(preset="bc"),
    "bc then SAC, clone kept": dict(preset="bc", online_bc_weight=1.0, offline_decay_rate=0.998),
    "SAC then SAC": PLAIN,  # the design without any of its four parts
    "design": {},
    "design - PER": dict(use_prioritized_replay=False),
    "design - weights": dict(weighted_loss="none"),
    "design - retention": dict(retention_ratio=1.0),
    "design - decay": dict(initial_offline_ratio=0.5),
}
ONLY_THERE = {arm: "no demos" for arm in ARMS if arm.startswith("design -")} | {
    "scratch": "no demos"
}  # it reads no data
SWITCH = HERE / "wsrl_switch.csv"
SWITCH_COLUMNS = ["arm", "seed", "env_steps", "return", "critic_return"]
SWITCH_ARMS = {"bc then SAC": {}, "bc then SAC, clone kept": dict(online_bc_weight=1.0)}


def switch(arm, seed):
    """MountainCarContinuous from all three sources: the clone's return, and that of the critic's best of 41 actions."""
    import numpy as np
    import torch

    import wsrl_warmup

    grid, judge = torch.linspace(-1, 1, 41)[:, None], wsrl_warmup.evaluate_policy

    def evaluate(agent, env, episodes):
        @torch.no_grad()
        def best(obs):
            features = agent.critic.encoder(torch.from_numpy(obs)[None]).expand(len(grid), -1)
            return grid[agent.critic.qf(features, grid).mean(0).argmax()].numpy()

        if agent.updates < 1_500:  # the warm-up is not the question
            return {"eval/episodic_return": 0.0}
        plays = [wsrl_warmup.play(env, 10_000 + i, best)[0] for i in range(episodes)]
        critic_return = float(np.mean([sum(row[2] for row in rows) for rows in plays]))
        return judge(agent, env, episodes) | {"eval/critic_return": critic_return}

    options = dict(
        env_id="MountainCarContinuous-v0", preset="bc", device="cpu", sources=("demos", "suboptimal", "random")
    )
    options |= dict(offline_steps=1_500, online_steps=300, eval_every=100, seed=seed) | SWITCH_ARMS[arm]
    data = HERE.parent / "runs" / "wsrl_data" / "switch" / str(seed)
    wsrl_warmup.evaluate_policy = evaluate
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            wsrl_warmup.main(wsrl_warmup.Args(**options, run_dir=f"{folder}/run", data_dir=str(data)))
            rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    finally:
        wsrl_warmup.evaluate_policy = judge
    rows = [row for row in rows if "eval/critic_return" in row]
    scores = [[round(row[f"eval/{name}"], 1) for name in ("episodic_return", "critic_return")] for row in rows]
    return [[arm, seed, row["charts/env_steps"], *own] for row, own in zip(rows, scores, strict=True)]


def switch_table():
    """Markdown: mean over the seeds at 0, 100, 200, 300 online steps"""
    rows = list(csv.DictReader(open(SWITCH))) if SWITCH.exists() else []
    lines = [
        "| MountainCarContinuous-v0 | at the switch | after 100 steps | after 200 | after 300 | seeds |",
        "|---" * 6 + "|",
    ]
    for arm in SWITCH_ARMS:
        for name, label in (("return", "policy"), ("critic_return", "the critic's best action")):
            mine = [row for row in rows if row["arm"] == arm]
            means = (
                [statistics.mean(float(r[name]) for r in mine if r["env_steps"] == str(t)) for t in (0, 100, 200, 300)]
                if mine
                else []
            )
            cells = " | ".join(f"{x:.1f}" for x in means).replace("-", "−")
            if mine:
                lines.append(f"| {arm}: {label} | {cells} | {len({row['seed'] for row in mine})} |")
    return "\n".join(lines)


def append(path, columns, rows):
    new = not path.exists()
    with open(path, "a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows] if new else rows)


def run(task, arm, seed):
    """One training run -> rows for the CSV."""
    import wsrl_warmup

    data = HERE.parent / "runs" / "wsrl_data" / task.replace(" ", "_") / str(seed)
    start = time.process_time()  # CPU seconds of this process: other load on the machine must not count
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        options = COMMON | TASKS[task] | ARMS[arm] | dict(seed=seed, run_dir=f"{folder}/run", data_dir=str(data))
        wsrl_warmup.main(wsrl_warmup.Args(**options))
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    returns = [
        float(line.split("return ")[1].split(",")[0]) for line in out.getvalue().splitlines() if "successes" in line
    ]
    seconds, best = round(time.process_time() - start, 1), max(returns, default=float("nan"))
    rows = [row for row in rows if "eval/episodic_return" in row]
    if rows[-1]["charts/env_steps"] < options["online_steps"]:
        sys.exit("the run was stopped")  # it is not a result
    first = max(i for i, row in enumerate(rows) if row["charts/env_steps"] == 0)  # the policy that goes online
    found = []
    for row in rows[first:]:
        kept = row.get("buffer/offline_bytes", 0)
        point = (row["charts/env_steps"], round(row["eval/episodic_return"], 1))
        found.append([task, arm, seed, *point, best, kept, seconds])
    return found


def read(path=PATH):
    """{(task, arm, seed): {env_steps: return}}, and what the data have, the same way"""
    curves, data = {}, {}
    for row in csv.DictReader(open(path)) if path.exists() else ():
        for task in TASKS if row["arm"] == "scratch" else [row["task"]]:  # it reads no data: one run for both
            key = task, row["arm"], int(row["seed"])
            curves.setdefault(key, {})[int(row["env_steps"])] = float(row["return"])
            data[key] = float(row["data_return"])
    return curves, data


def reach(curve):
    """Environment steps until the frozen policy has the expert's level, and has it at the next evaluation, too."""
    steps = sorted(curve)
    good = [curve[step] >= EXPERT for step in steps]
    return next((steps[i] for i in range(len(steps) - 1) if good[i] and good[i + 1]), float("inf"))


def table(task, curves, data):
    """Markdown: return at 0, 500, 2000 steps, mean (worst seed); most lost below the start; steps to the expert"""
    head = "arm | return at 0 | at 500 | at 2000 steps | most lost below the start | steps to the expert's level"
    lines = [f"| {head} |", "|---" * 6 + "|"]
    for arm in ARMS:
        mine = [curve for key, curve in curves.items() if key[:2] == (task, arm)]
        if mine:
            points = [[curve[step] for curve in mine] for step in (0, 500, 2000)]
            cells = [f"{statistics.mean(values):.0f} ({min(values):.0f})" for values in points]
            lost = statistics.mean(max(0, curve[0] - min(curve.values())) for curve in mine)
            reached = sorted(map(reach, mine))
            median, done = reached[len(reached) // 2], sum(x < float("inf") for x in reached)
            steps = f"{median:.0f}" if median < float("inf") else "> 2000"
            cells += [f"{lost:.0f}", f"{steps}, {done} of {len(mine)} seeds"]
            lines.append(f"| {arm} | {' | '.join(cells)} |".replace("| -", "| −").replace("(-", "(−"))
    return "\n".join(lines)


def plot(curves, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.4), layout="constrained")
    axes = figure.subplots(1, 3)
    shown = [arm for arm in ARMS if not arm.startswith("design -")]
    for axis, task in zip(axes, TASKS, strict=False):
        for i, arm in enumerate(shown):
            mine = [curve for key, curve in curves.items() if key[:2] == (task, arm)]
            if len(mine) > 2:
                means = [statistics.mean(curve[step] for curve in mine) for step in sorted(mine[0])]
                label = arm if len(mine) == len(SEEDS) else f"{arm} (seeds: {len(mine)})"
                width = 2.8 if arm == "design" else 1.3
                axis.plot(sorted(mine[0]), means, ".-", color=f"C{i}", label=label, linewidth=width)
        axis.axhline(EXPERT, color="gray", linewidth=0.8, linestyle="--")
        axis.text(0, EXPERT + 3, "expert's level", fontsize=7, color="gray", va="bottom")
        axis.set_yscale("symlog", linthresh=100)
        axis.set_ylim(-1700, -100)
        axis.set_yticks(ticks := [-1500, -1000, -500, -300, -200, -150, -120], [str(tick) for tick in ticks])
        axis.set(title=f"Pendulum-v1, {task}", xlabel="online environment steps after the warm-up")
        axis.set_ylabel("return of the frozen policy, mean of the seeds")
        axis.legend(fontsize=7)
    rows = list(csv.DictReader(open(SWITCH))) if SWITCH.exists() else []
    for arm, color in zip(SWITCH_ARMS, ("C3", "C4"), strict=True):
        for name, style, what in (("return", ".-", "policy"), ("critic_return", ".:", "critic's best action")):
            points = {
                t: [float(r[name]) for r in rows if r["arm"] == arm and r["env_steps"] == str(t)]
                for t in (0, 100, 200, 300)
            }
            means = [statistics.mean(values or [0]) for values in points.values()]
            axes[2].plot(list(points), means, style, color=color, label=f"{arm}: {what}")
    axes[2].set(
        title="MountainCarContinuous-v0, a clone goes online", xlabel="online environment steps after the warm-up"
    )
    axes[2].set_ylabel("return, mean of the seeds")
    axes[2].legend(fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.title.set_size(11)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), help="one of the tasks")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), help="these arms only")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=PATH, help="another CSV, as for tuning seeds")
    parser.add_argument("--table", "--plot", action="store_true", help="no training")
    parser.add_argument("--switch", action="store_true", help="the other question, see above")
    options = parser.parse_args()
    have = {(row["arm"], int(row["seed"])) for row in csv.DictReader(open(SWITCH))} if SWITCH.exists() else set()
    for seed in options.seeds if options.switch else ():
        for arm in [arm for arm in SWITCH_ARMS if (arm, seed) not in have]:
            append(SWITCH, SWITCH_COLUMNS, switch(arm, seed))
    print(switch_table())
    done, _ = read(options.out)
    jobs = [(t, a, s) for s in options.seeds for t in TASKS for a in options.arms if options.task in (None, t)]
    jobs = [job for job in jobs if job not in done and ONLY_THERE.get(job[1], job[0]) == job[0]]
    for job in [] if options.table or options.switch else jobs:
        rows = run(*job)
        append(options.out, COLUMNS, rows)
        print(f"{job}: {[round(row[4]) for row in rows]}, {rows[-1][-1]} CPU seconds", flush=True)
    curves, data = read(options.out)
    for task in TASKS:
        print(f"\nPendulum-v1, {task}\n{table(task, curves, data)}")
    if curves and options.out == PATH:
        plot(curves, HERE.parent / "docs" / "wsrl_study.png")
