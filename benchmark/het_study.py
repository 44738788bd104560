"""Does experience help an agent? Methods, clips, old log-probs and replay on the built-in locks, for equal rollouts.

    python benchmark/het_study.py --tune              # learning rates of each arm, on seeds that are not reported
    python benchmark/het_study.py                     # everything that is not in the CSV yet, then table and picture
    python benchmark/het_study.py --only methods      # one question
    python benchmark/het_study.py --plot              # table and picture from the CSV

Every run is `het_grpo.py` with the flags of its arm. Rollouts that fill the pool before training count: an arm without
a pool trains that many iterations longer. Success is that of the frozen policy, greedy, on 504 held-out rooms.
"""

import argparse
import csv
import json
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
COLUMNS = ["study", "arm", "learning_rate", "seed", "global_step", "seconds", "unguided", "guided"]
COLUMNS += ["off_p99", "all_fail", "rescued"]
SEEDS, TUNING_SEEDS = (1, 2, 3, 4, 5), (101, 102)
RATES = (4e-4, 1e-3, 2e-3)
COMMON = dict(device="cpu", save_every=0, eval_every=50)
PLAIN = dict(method="baseline", val_rollout_expmode="woexp")
REPLAY = dict(use_experience_replay=True)
RESCUE = REPLAY | dict(experience_lbound=-1, bucket_weights="uniform")
STUDIES = {
    "methods": {
        "baseline": PLAIN,
        "EC": dict(method="ec"),
        "EI": dict(method="ei"),
        "EI, negatives masked": dict(method="ei", off_policy_neg="mask"),
        "HET": dict(method="het"),
        "HET, negatives masked": dict(method="het", off_policy_neg="mask"),
    },
    "clip": {
        "HET, off clip .28": dict(off_cliprange_high=0.28),
        "HET, off clip .6": dict(off_cliprange_high=0.6),
        "HET, off clip 1.0": dict(off_cliprange_high=1.0),
        "HET, behavior": dict(off_old_logp="behavior"),
        "HET, shape": dict(off_policy_loss="shape"),
        "HET, tis": dict(off_policy_loss="tis"),
    },
    "replay": {
        "baseline + replay, clip": PLAIN | REPLAY | dict(replay_loss="clip"),
        "baseline + replay, shape": PLAIN | REPLAY,
        "baseline + replay, argmax": PLAIN | REPLAY | dict(exp_select_mode="argmax"),
        "baseline + replay, random": PLAIN | REPLAY | dict(exp_select_mode="random"),
        "baseline + replay, 0/n eligible, uniform": PLAIN | RESCUE,
        "baseline + replay, 0/n eligible, clip": PLAIN | RESCUE | dict(replay_loss="clip"),
        "HET + replay, shape": REPLAY,
        "HET + replay, 0/n eligible, uniform": RESCUE,
    },
    "parts": {
        "baseline": PLAIN | dict(env="lock-parts", num_families=16),
        "HET": dict(env="lock-parts", num_families=16),
        "HET + replay": REPLAY | dict(env="lock-parts", num_families=16),
    },
}


def options_of(study, arm):
    """Flags of an arm, with the iterations that spend the rollouts of the others on its own training."""
    import het_grpo

    flags = COMMON | STUDIES[study][arm]
    default = het_grpo.Args()
    extra = default.init_exp_tasks // default.num_tasks if flags.get("method") == "baseline" else 0
    return flags | dict(num_iterations=default.num_iterations + extra)


def run(job):
    """One training run -> rows for the CSV."""
    import torch

    torch.set_num_threads(1)
    import het_grpo

    study, arm, rate, seed = job
    with tempfile.TemporaryDirectory() as folder:
        options = options_of(study, arm) | dict(learning_rate=rate, seed=seed, run_dir=f"{folder}/run")
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


def table(study, curves):
    """Markdown: arm, rate, unguided and guided success at the end, mean over the run, worst ratio, groups rescued."""
    lines = ["| arm | lr | unguided | by seed | guided | over the run | off p99 | all-fail groups | rescued |"]
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
            for column in ("off_p99", "all_fail", "rescued"):
                values = [x for curve in mine for x in numbers(curve, column)]
                cells.append(f"{statistics.mean(values):.3g}" if values else "–")
            lines.append(f"| {arm} | {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(curves, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(study, column) for study in STUDIES for column in ("unguided", "guided")]
    figure = Figure(figsize=(11, 3.2 * len(STUDIES)), layout="tight")
    for i, (study, column) in enumerate(panels, 1):
        axis = figure.add_subplot(len(STUDIES), 2, i)
        for arm in STUDIES[study]:
            mine = [curve for key, curve in curves.items() if key[:2] == (study, arm) and numbers(curve, column)]
            if mine:
                x = [statistics.mean(v) for v in zip(*[numbers(c, "global_step") for c in mine], strict=True)]
                y = [statistics.mean(v) for v in zip(*[numbers(c, column) for c in mine], strict=True)]
                axis.plot(x, y, label=arm)
        axis.set_title(f"{study}: {column} validation success", fontsize=9)
        axis.set_ylim(-0.02, 1.02)
        axis.grid(alpha=0.3)
        if column == "unguided":
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
                like = (
                    "baseline" if arm.startswith("baseline") else "HET"
                )  # an arm that was not tuned takes its parent's
                known = rates.get((study, arm), rates.get(("methods", like), 1e-3))
                own = options.rates if options.tune else [known]
                jobs += [(study, arm, rate, seed) for rate in own if (study, arm, rate, seed) not in done]
    if not options.plot:
        new = not path.exists()
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
