"""Does experience help an agent more than imitating its own successes? Equal rollouts, equal start.

    python benchmark/het_study.py             # what is not in the CSV yet, then the picture
    python benchmark/het_study.py --tune --settings "2e-3 x 1" "1e-3 x 2"    # on seeds that are not reported
    python benchmark/het_study.py --tune --games lucky worn --arms baseline HET sft    # successes that mislead
    python benchmark/het_study.py --games lake noisier    # other games, on seeds of their own
    python benchmark/het_study.py --table     # the tables of docs/het_grpo.md, from the CSVs

Every run is `het_grpo.py` with the flags of its arm and about 10,240 rollouts: those that fill the pool count, and an
arm that replays trains for more iterations. Success is that of the frozen policy, greedy, in held-out rooms. CPU time
is that of the process without warm start and evaluation. The warm start is a function of the seed and the game, so it
is made once and shared by the arms of a seed.
"""

import argparse
import csv
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import distill

import het_grpo as het

STUDY, TUNING = HERE / "het_study.csv", HERE / "het_tuning.csv"
SEEDS, TUNING_SEEDS = (31, 32, 33, 34, 35), (101, 102)
COLUMNS = ["game", "arm", "learning_rate", "epochs", "seed", "global_step", "cpu_seconds"]
COLUMNS += ["unguided", "guided", "unseen", "off_p99"]
ROLLOUTS, FILL, EVAL_SIZE, EVALUATIONS = 10_240, 768, 480, 3
GAMES = {  # the pool grows with every iteration
    "lock": dict(updated_freq=1),
    "lake": dict(updated_freq=1, env=f"{HERE}/lake.py:Lake", max_turns=10),
    "lucky": dict(updated_freq=1, env=f"{HERE}/locks.py:Lucky"),
    "lucky long": dict(updated_freq=1, env=f"{HERE}/locks.py:Lucky"),  # twice the rollouts
    "luckier": dict(updated_freq=1, env=f"{HERE}/locks.py:Luckier"),
    "told": dict(updated_freq=1, env=f"{HERE}/locks.py:Told"),
    "worn": dict(updated_freq=1, env=f"{HERE}/locks.py:Worn", max_turns=5),
    "noisy": dict(updated_freq=1, env=f"{HERE}/locks.py:Noisy"),
    "noisier": dict(updated_freq=1, env=f"{HERE}/locks.py:Noisier"),
}
REPORTED = {"lock": "twelve locks, seven turns", "lucky": "locks that luck opens, too"}
REPORTED |= {"lucky long": "locks that luck opens, too: twice the rollouts"}
REPORTED |= {
    "lake": "twelve frozen lakes, ten turns",
    "noisier": "locks whose judge is wrong in one verdict of five",
}
NAMES = (
    "4e-3 x 1",
    "2e-3 x 1",
    "1e-3 x 1",
    "5e-4 x 1",
    "2e-3 x 2",
    "1e-3 x 2",
)  # learning rate x epochs
SETTINGS = {name: (float(name[:4]), int(name[-1])) for name in NAMES}
CHOSEN = {
    "HET": (1e-3, 2),
    "HET + replay": (1e-3, 2),
    "sft": (1e-3, 1),
}  # on the tuning seeds; others 2e-3 x 1
REPLAY = dict(use_experience_replay=True)
ARMS = {
    "baseline": dict(method="baseline"),
    "baseline + replay": dict(method="baseline") | REPLAY,
    "HET": dict(method="het"),
    "HET + replay": REPLAY,
    "sft": dict(method="sft"),
    "sd": dict(method="baseline", val_rollout_expmode="mixed"),  # distill.py
    "sft, newest": dict(method="sft", exp_select_mode="random"),
    "recorded log-probs": dict(method="baseline", replay_old_logp="recorded") | REPLAY,
    "retirement": dict(method="baseline", retire_solved=True) | REPLAY,
    "sft, no advice": dict(method="sft", train_rollout_expmode="woexp"),
    "sft, no advice, newest": dict(
        method="sft", train_rollout_expmode="woexp", exp_select_mode="random"
    ),
    "sft, two shortest": dict(method="sft"),
    "sd, coefficient 0.3": dict(method="baseline", val_rollout_expmode="mixed"),
}
RIVALS = [
    ("lock", arm) for arm in ("sft", "sft, two shortest", "sd", "sd, coefficient 0.3")
]  # a grid of their own
SEARCHED = ["lucky long", "luckier", "told", "worn", "noisy", "noisier"]
PUBLISHED = ["recorded log-probs", "retirement"]
MAIN = {game: list(ARMS)[:6] for game in GAMES} | {"lake": ["baseline", "HET", "sft"]}
MAIN |= dict.fromkeys(("lucky", "lucky long"), ["baseline", "baseline + replay", "sft, no advice"])
MAIN["lucky long"] = [*MAIN["lucky"], "sft, no advice, newest"]
MAIN["noisier"] = ["baseline", "baseline + replay", "sft", "sft, newest"]
FRESH = dict.fromkeys(("lucky", "noisier"), (41, 42, 43, 44, 45)) | {
    "lucky long": (46, 47, 48, 49, 50)
}


def seeds_of(game):
    return FRESH.get(game, SEEDS)


def chosen(game, arm):
    """Learning rate and epochs; on the lake and where verdicts mislead the same are best for all."""
    return CHOSEN.get(arm, (2e-3, 1)) if game == "lock" else (1e-3, 2)


def options_of(game, arm):
    """The flags of an arm; as many iterations as the rollouts allow."""
    options = GAMES[game] | ARMS[arm]
    per_iteration = (
        60 if "use_experience_replay" in options else 64
    )  # 4 of 8 tasks get one replayed member
    filled = FILL if options.get("method") != "baseline" else 0
    rollouts = 2 * ROLLOUTS if game == "lucky long" else ROLLOUTS
    return options | dict(num_iterations=(rollouts - filled) // per_iteration)


class Told:
    """Advice that is right, about rules that nobody has seen."""

    def __init__(self, env, tasks):
        self.advice = {}
        for task in tasks:
            question, info = env.reset(task)
            self.advice[question] = f"{info['topic']} : " + " ".join(info["solution"])

    def retrieve(self, question):
        return self.advice[question]


def validate_with_unseen(validate):
    """validate(), and whether the policy still follows advice: eval/success_unseen."""

    def wrapped(player, held_out):
        metrics, played = validate(player, held_out)
        env = player.envs[0]
        if "solution" in env.reset(het.PRACTICE)[1]:
            tasks = range(2 * het.PRACTICE, 2 * het.PRACTICE + math.ceil(len(held_out) / 2))
            other = het.replace(player, pool=Told(env, tasks))
            planned = [het.Trajectory(task, i, guided=True) for i, task in enumerate(tasks)]
            unseen = other.play(planned)
            metrics["eval/success_unseen"] = statistics.mean(t.success for t in unseen)
        return metrics, played

    return wrapped


def run(job):
    """One training run -> rows for the CSV."""
    game, arm, (rate, epochs), seed = job
    clock = dict(excluded=0.0, seen=[])

    def untimed(function):
        def wrapped(*args, **kwargs):
            clock["seen"].append(time.process_time() - clock["excluded"])
            start = time.process_time()
            result = function(*args, **kwargs)
            clock["excluded"] += time.process_time() - start
            return result

        return wrapped

    def practice(player):
        policy, args = player.policy, player.args
        names = "seed env max_turns".split()
        key = hashlib.sha1(
            json.dumps([str(getattr(args, name)) for name in names]).encode()
        ).hexdigest()[:12]
        path = Path(tempfile.gettempdir()) / f"het_warm_{key}.pt"
        if not path.exists():
            real(player)
            torch.save(policy.state_dict(), path)
        policy.load_state_dict(torch.load(path, weights_only=True))

    real, het.practice = het.practice, untimed(practice)
    het.validate, het.Run.finish = untimed(validate_with_unseen(het.validate)), lambda *args: None
    if arm.startswith("sd"):
        distill.install(het, coefficient=0.3 if "0.3" in arm else 1.0)
    if arm == "sft, two shortest":
        het.MAX_TRAJECTORIES_PER_TASK = 2
    with tempfile.TemporaryDirectory() as folder:
        options = options_of(game, arm) | dict(learning_rate=rate, update_epochs=epochs, seed=seed)
        options |= dict(
            device="cpu",
            save_every=10_000,
            eval_every=math.ceil(options["num_iterations"] / EVALUATIONS),
        )
        options |= dict(eval_size=EVAL_SIZE, run_dir=f"{folder}/run")
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        het.main(het.Args(**options))
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl", encoding="utf-8")]
    done, worst, times = [], 0.0, iter(clock["seen"][1:])
    for row in rows:
        worst = max(worst, row.get("ratio/off_p99") or 0.0)
        if "eval/success_rate" in row:
            scores = [
                row.get(f"eval/success_{kind}", "") for kind in ("unguided", "guided", "unseen")
            ]
            scores = [round(x, 4) if x != "" else x for x in scores]
            seconds = next(times) - clock["seen"][0]
            what = [game, arm, rate, epochs, seed, row["global_step"], round(seconds, 1)]
            done.append([*what, *scores, round(worst, 3)])
    return done


def read(path):
    """{(game, arm, (learning rate, epochs), seed): rows}"""
    curves = {}
    if path.exists():
        for row in csv.DictReader(open(path)):
            setting = float(row["learning_rate"]), int(row["epochs"])
            key = row["game"], row["arm"], setting, int(row["seed"])
            curves.setdefault(key, []).append(row)
    return curves


def numbers(curves, column):
    """Values at the end of each run that has them."""
    return [float(curve[-1][column]) for curve in curves if curve[-1][column] != ""]


def table(game, curves, arms=ARMS):
    """Markdown: what the frozen policy does at the end, mean and by seed; cost."""
    lines = [
        "| arm | lr x epochs | seeds | unguided success | by seed | guided | unseen, told | rollouts | CPU s |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    curves = {
        key: curve
        for key, curve in sorted(curves.items())
        if key[0] == game and key[3] in seeds_of(game)
    }
    for arm in arms:
        for setting in sorted({key[2] for key in curves if key[1] == arm}):
            mine = [curve for key, curve in curves.items() if key[1:3] == (arm, setting)]
            cells = [f"{arm} | {setting[0]:g} x {setting[1]} | {len(mine)}"]
            cells.append(f"**{statistics.mean(numbers(mine, 'unguided')):.2f}**")
            cells.append(" ".join(f"{x:.2f}" for x in numbers(mine, "unguided")))
            for column in ("guided", "unseen"):
                found = numbers(mine, column)
                cells.append(f"{statistics.mean(found):.2f}" if found else "–")
            cells += [
                f"{statistics.mean(numbers(mine, c)):,.0f}" for c in ("global_step", "cpu_seconds")
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ends(curves, game, arm, setting):
    """Unguided success at the end of each tuning run, or a dash."""
    mine = [curve for key, curve in sorted(curves.items()) if key[:3] == (game, arm, setting)]
    return " ".join(f"{x:.2f}" for x in numbers(mine, "unguided")) or "–"


def grid(game, curves):
    """Markdown: unguided success on the tuning seeds, a row per arm, a column per setting that somebody tried."""
    mine = {key for key in curves if key[0] == game and (game, key[1]) not in RIVALS}
    tried = [setting for setting in SETTINGS.values() if setting in {key[2] for key in mine}]
    lines = [f"| {game} | " + " | ".join(f"{rate:g} x {epochs}" for rate, epochs in tried) + " |"]
    lines.append("|---|" + "---|" * len(tried))
    for arm in (arm for arm in ARMS if arm in {key[1] for key in mine}):
        lines.append(
            "| "
            + " | ".join([arm, *(ends(curves, game, arm, setting) for setting in tried)])
            + " |"
        )
    return "\n".join(lines)


def search(curves):
    """Markdown: games that ought to need more than imitation, on the tuning seeds, every arm at its best setting."""
    lines = ["| arm | " + " | ".join(SEARCHED) + " |", "|---|" + "---|" * len(SEARCHED)]

    def mean(cell):
        return -1.0 if cell == "–" else statistics.mean(map(float, cell.split()))

    for arm in (arm for arm in ARMS if any(key[0] in SEARCHED and key[1] == arm for key in curves)):
        cells = [
            max((ends(curves, game, arm, x) for x in SETTINGS.values()), key=mean)
            for game in SEARCHED
        ]
        lines.append("| " + " | ".join([arm, *cells]) + " |")
    return "\n".join(lines)


def early(curves, bar=0.9):
    """Markdown: how soon the rivals are there, on the tuning seeds of the lock; the first evaluation at the bar."""
    lines = ["| arm | lr x epochs | unguided success | guided | rollouts to .9 | CPU s to .9 |"]
    lines.append("|---|---|---|---|---|---|")
    for game, arm in RIVALS:
        for setting in sorted({key[2] for key in curves if key[:2] == (game, arm)}, reverse=True):
            mine = [
                curve for key, curve in sorted(curves.items()) if key[:3] == (game, arm, setting)
            ]
            cells = [arm, f"{setting[0]:g} x {setting[1]}"]
            cells += [
                " ".join(f"{x:.2f}" for x in numbers(mine, column))
                for column in ("unguided", "guided")
            ]
            there = [
                next((row for row in curve if float(row["unguided"]) >= bar), None)
                for curve in mine
            ]
            for column in ("global_step", "cpu_seconds"):
                cells.append(
                    " ".join(f"{float(row[column]):,.0f}" if row else "–" for row in there)
                )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(curves, path):
    """Success without advice against episodes: median thick, every seed thin, names at the ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained", facecolor="white")
    axis = figure.subplots()
    shown = {
        "sft": ("imitation", "tab:orange", 0.07),
        "HET": ("HET", "tab:green", 0.0),
        "baseline": ("GRPO", "tab:blue", 0.0),
    }
    for arm, (name, color, shift) in shown.items():
        setting = chosen("lock", arm)
        seeds = [x for key, x in sorted(curves.items()) if key[:3] == ("lock", arm, setting)]
        steps = [int(row["global_step"]) for row in seeds[0]]
        heights = [[float(row["unguided"]) for row in curve] for curve in seeds]
        for values in heights:
            axis.plot(steps, values, color=color, linewidth=0.9, alpha=0.4)
        medians = [statistics.median(values) for values in zip(*heights, strict=True)]
        axis.plot(steps, medians, ".-", color=color, linewidth=3.5, markersize=11)
        place = (steps[-1] + 250, medians[-1] + shift)
        axis.annotate(name, place, color=color, va="center", fontsize=15, fontweight="bold")
    axis.set_title(
        "HET opens locks that GRPO leaves shut;\nimitation is the fastest", fontsize=16, loc="left"
    )
    axis.set_xlabel("episodes played (thick: median of 5 seeds, thin: each seed)", fontsize=12)
    axis.set_ylabel("success without advice", fontsize=13)
    axis.set_xlim(0, 13_200)
    axis.set_ylim(0, 1.12)
    axis.set_xticks([0, 2500, 5000, 7500, 10_000], ["0", "2,500", "5,000", "7,500", "10,000"])
    axis.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axis.tick_params(labelsize=12)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="the tuning seeds, into het_tuning.csv")
    parser.add_argument(
        "--table", action="store_true", help="no training: the tables of the page, and the picture"
    )
    parser.add_argument("--games", nargs="*", default=["lock"], choices=GAMES)
    parser.add_argument(
        "--arms", nargs="*", choices=ARMS, help="other than those that are reported"
    )
    parser.add_argument("--seeds", nargs="*", type=int)
    parser.add_argument(
        "--settings", nargs="*", choices=SETTINGS, help="other than the chosen one of an arm"
    )
    parser.add_argument(
        "--evaluations", type=int, default=EVALUATIONS, help="of a run, beside that of its start"
    )
    options = parser.parse_args()
    EVALUATIONS = options.evaluations
    path = TUNING if options.tune else STUDY
    done, jobs = read(path), []
    for game in options.games:
        for seed in options.seeds or (TUNING_SEEDS if options.tune else seeds_of(game)):
            for arm in options.arms or MAIN[game]:
                mine = [SETTINGS[name] for name in options.settings or ()] or [chosen(game, arm)]
                jobs += [
                    (game, arm, setting, seed)
                    for setting in mine
                    if (game, arm, setting, seed) not in done
                ]
    transformers.LlamaForCausalLM  # imported now, or every process below would do it again  # noqa: B018
    for job in [] if options.table else jobs:
        workers = multiprocessing.get_context("fork").Pool(
            1
        )  # a process of its own: its CPU seconds
        rows = workers.apply(run, (job,))
        workers.close()
        workers.join()
        new = not path.exists()
        with open(path, "a", newline="") as file:
            csv.writer(file).writerows([COLUMNS] * new + rows)
        print(rows[-1], flush=True)
    for game, title in REPORTED.items():
        if any(key[0] == game for key in read(STUDY)):
            print(
                f"\n{title}\n\n{table(game, read(STUDY), [arm for arm in ARMS if arm not in PUBLISHED])}"
            )
    print(
        f"\nreplay as published\n\n{table('lock', read(STUDY), ['baseline + replay', *PUBLISHED])}"
    )
    print(f"\n{early(read(TUNING))}\n\n{search(read(TUNING))}")
    for game in ("lock", "lucky", "lake"):
        print(f"\n{grid(game, read(TUNING))}")
    if read(STUDY) and not options.tune:
        plot(read(STUDY), HERE.parent / "docs" / "het_study.png")
