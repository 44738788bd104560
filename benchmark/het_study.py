"""Does experience help an agent? Methods, clips, old log-probs and replay on the built-in locks, for equal rollouts.

    python benchmark/het_study.py --tune              # learning rates of each arm, on seeds that are not reported
    python benchmark/het_study.py                     # everything that is not in the CSV yet, then table and picture
    python benchmark/het_study.py --only methods      # one question
    python benchmark/het_study.py --plot              # table and picture from the CSV

Every run is `het_grpo.py` with the flags of its arm and the same --num-rollouts: those that fill the pool count, and an
arm that replays trains for more iterations. Success is that of the frozen policy, greedy, on 504 held-out rooms. The
warm start is a function of the seed and the environment, so it is made once and shared by the arms of a seed.
"""

import argparse
import csv
import json
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
COLUMNS = ["study", "arm", "learning_rate", "seed", "global_step", "seconds", "unguided", "guided"]
COLUMNS += ["off_p99", "all_fail", "rescued"]
SEEDS, TUNING_SEEDS = (1, 2, 3, 4, 5), (101, 102)
RATES = (4e-4, 1e-3, 2e-3)
COMMON = dict(device="cpu", save_every=0, eval_every=40, num_rollouts=10_240)
PLAIN = dict(method="baseline", val_rollout_expmode="woexp")
REPLAY = dict(use_experience_replay=True)
PUBLISHED = REPLAY | dict(replay_old_logp="recorded", replay_loss="shape", retire_solved=True, bucket_weights="normal")
PUBLISHED |= dict(experience_lbound=0, replay_start="success", replay_start_ratio=0.35)
PARTS = dict(env="lock-parts", num_families=16)
STUDIES = {
    "methods": {
        "baseline": PLAIN,
        "HET": dict(method="het"),
        "EC": dict(method="ec"),
        "EI": dict(method="ei"),
    },
    "replay": {
        "baseline + replay": PLAIN | REPLAY,
        "baseline + replay, published": PLAIN | PUBLISHED,
        "baseline + replay, recorded log-probs": PLAIN | REPLAY | dict(replay_old_logp="recorded"),
        "baseline + replay, shape": PLAIN | REPLAY | dict(replay_loss="shape"),
        "baseline + replay, solved tasks retire": PLAIN | REPLAY | dict(retire_solved=True),
        "baseline + replay, argmax": PLAIN | REPLAY | dict(exp_select_mode="argmax"),
        "baseline + replay, random": PLAIN | REPLAY | dict(exp_select_mode="random"),
        "HET + replay": REPLAY,
    },
    "clip": {
        "HET, off clip .28": dict(off_cliprange_high=0.28),
        "HET, off clip 1.0": dict(off_cliprange_high=1.0),
        "HET, behavior": dict(off_old_logp="behavior"),
    },
    "parts": {
        "baseline": PLAIN | PARTS,
        "baseline + replay": PLAIN | REPLAY | PARTS,
        "HET": PARTS,
    },
}
TUNED = [("methods", arm) for arm in STUDIES["methods"]] + [("replay", "baseline + replay")]


def warm_started(real):
    """practise() with a memory on disk."""
    import torch

    def practise(policy, world, dialogue, pad_id, args):
        path = Path(tempfile.gettempdir()) / f"het_warm_{args.env}_{args.num_families}_{args.seed}.pt"
        if not path.exists():
            real(policy, world, dialogue, pad_id, args)
            torch.save(policy.state_dict(), path)
        policy.load_state_dict(torch.load(path, weights_only=True))

    return practise


def run(job):
    """One training run -> rows for the CSV."""
    import torch

    torch.set_num_threads(1)
    import het_grpo

    het_grpo.practise = warm_started(het_grpo.practise)
    het_grpo.plot_curves = het_grpo.save_model = lambda *args: None
    study, arm, rate, seed = job
    with tempfile.TemporaryDirectory() as folder:
        options = COMMON | STUDIES[study][arm] | dict(learning_rate=rate, seed=seed, run_dir=f"{folder}/run")
        sys.stdout = open("/dev/null", "w")
        het_grpo.main(het_grpo.Args(**options))
        rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    done, since = [], []
    for row in rows:
        since.append(row)
        if "eval/success_rate" in row:
            means = []
            for key in ("ratio/off_p99", "groups/all_fail", "groups/rescued"):  # means since the last evaluation
                values = [r[key] for r in since if r.get(key) is not None]
                means.append(round(statistics.mean(values), 5) if values else "")
            scores = [row.get(f"eval/success_{kind}", "") for kind in ("unguided", "guided")]
            done.append([study, arm, rate, seed, row["global_step"], row["time"], *scores, *means])
            since = []
    return done


def read(path):
    """{(study, arm, learning rate, seed): rows}"""
    curves = {}
    if path.exists():
        for row in csv.DictReader(open(path)):
            key = row["study"], row["arm"], float(row["learning_rate"]), int(row["seed"])
            curves.setdefault(key, []).append(row)
    return curves


def numbers(curve, column):
    return [float(row[column]) for row in curve if row[column] != ""]


def best_rates(tuning):
    """The rate with the highest unguided success at the end, mean over the tuning seeds, per arm."""
    found = {}
    for (study, arm, rate, _), curve in tuning.items():
        found.setdefault((study, arm), {}).setdefault(rate, []).append(numbers(curve, "unguided")[-1])
    return {key: max(rates, key=lambda r: statistics.mean(rates[r])) for key, rates in found.items()}


def rate_of(study, arm, rates):
    """Of the arm itself or of the tuned one that it is a variant of."""
    parent = arm.split(",")[0]
    if parent.endswith("+ replay"):
        key = ("replay", "baseline + replay") if parent.startswith("baseline") else ("methods", "HET")
    else:
        key = "methods", parent
    return rates.get(key, rates["methods", "HET"])  # not tuned yet


def table(study, curves):
    """Markdown: arm, rate, unguided and guided success at the end, mean over the run, worst ratio, groups rescued."""
    lines = ["| arm | lr | unguided | by seed | guided | over the run | off p99 | all-fail groups | of them rescued |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for arm in STUDIES[study]:
        rates = sorted({key[2] for key in curves if key[:2] == (study, arm)})
        for rate in rates:
            mine = [curve for key, curve in sorted(curves.items()) if key[:3] == (study, arm, rate)]
            last = [numbers(curve, "unguided")[-1] for curve in mine]
            spread = statistics.stdev(last) if len(last) > 1 else 0.0
            cells = [f"{statistics.mean(last):.2f} ± {spread:.2f}", " ".join(f"{x:.2f}" for x in last)]
            guided = [values[-1] for curve in mine if (values := numbers(curve, "guided"))]
            cells.append(f"{statistics.mean(guided):.2f}" if guided else "–")
            cells.append(f"{statistics.mean(x for curve in mine for x in numbers(curve, 'unguided')[1:]):.2f}")
            p99, failed, rescued = (
                [x for curve in mine for x in numbers(curve, column)] for column in ("off_p99", "all_fail", "rescued")
            )
            cells.append(f"{statistics.mean(p99):.3g}" if p99 else "–")
            cells.append(f"{statistics.mean(failed):.2f}")
            cells.append(f"{sum(rescued) / sum(failed):.2f}" if sum(rescued) else "–")
            lines.append(f"| {arm} | {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(curves, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    studies = [study for study in STUDIES if any(key[0] == study for key in curves)]
    figure = Figure(figsize=(11, 3.2 * len(studies)), layout="tight")
    for i, (study, column) in enumerate([(study, c) for study in studies for c in ("unguided", "guided")], 1):
        axis = figure.add_subplot(len(studies), 2, i)
        compared = [(study, arm) for arm in STUDIES[study]]
        if study in ("replay", "clip"):
            compared.insert(0, ("methods", "baseline" if study == "replay" else "HET"))  # what they vary
        for number, key in enumerate(compared):
            mine = [curve for k, curve in curves.items() if k[:2] == key and numbers(curve, column)]
            if mine:
                x = np.linspace(max(numbers(c, "global_step")[0] for c in mine), COMMON["num_rollouts"], 60)
                y = [np.interp(x, numbers(c, "global_step"), numbers(c, column)) for c in mine]
                axis.plot(x, np.mean(y, 0), color=f"C{number}", label=f"{key[1]} ({len(mine)} seeds)")
        axis.set_title(f"{study}: {column} validation success", fontsize=9)
        axis.set_xlabel("rollouts", fontsize=8)
        axis.set_ylim(-0.02, 1.02)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=6)
    path.parent.mkdir(exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(STUDIES), help="one of the questions")
    parser.add_argument("--arms", nargs="*", help="these arms only")
    parser.add_argument("--seeds", nargs="*", type=int, help="these seeds only")
    parser.add_argument("--rates", nargs="*", type=float, default=RATES, help="learning rates to tune over")
    parser.add_argument("--tune", action="store_true", help="learning rates on the tuning seeds, into het_tuning.csv")
    parser.add_argument("--plot", action="store_true", help="no training")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    tuning_path, study_path = HERE / "het_tuning.csv", HERE / "het_study.csv"
    path = tuning_path if options.tune else study_path
    rates, done = best_rates(read(tuning_path)), read(path)
    jobs = []
    for study in [options.only] if options.only else STUDIES:
        for seed in options.seeds or (TUNING_SEEDS if options.tune else SEEDS):
            for arm in [arm for arm in STUDIES[study] if not options.arms or arm in options.arms]:
                if not options.tune:
                    own = [rate_of(study, arm, rates)]
                else:
                    own = options.rates if (study, arm) in TUNED else []
                jobs += [(study, arm, rate, seed) for rate in own if (study, arm, rate, seed) not in done]
    if not options.plot:
        new = not path.exists() or not path.stat().st_size
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool, open(path, "a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(COLUMNS)
            for i, rows in enumerate(pool.imap_unordered(run, jobs), 1):
                writer.writerows(rows)
                file.flush()
                _, arm, rate, seed, _, seconds, unguided, *_ = rows[-1]
                text = f"[{i}/{len(jobs)}] {arm}, lr {rate}, seed {seed}: {unguided:.3f} in {seconds:.0f} s"
                print(text, flush=True)
    curves = read(path)
    for study in STUDIES:
        if any(key[0] == study for key in curves):
            print(f"\n{study}\n{table(study, curves)}")
    if not options.tune:
        plot(curves, HERE.parent / "docs" / "het_study.png")
