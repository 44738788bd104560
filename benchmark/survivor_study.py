"""Where does hybrid experience training pay? Vaults with random rewards, and notes that mislead.

    python benchmark/survivor_study.py --tune             # every arm, every setting, seeds 121 to 123
    python benchmark/survivor_study.py                    # the best setting of each arm, seeds 141 to 145
    python benchmark/survivor_study.py --notes fair       # the same with notes that do not mislead
    python benchmark/survivor_study.py --tables           # the tables, from the CSV files
    python benchmark/survivor_study.py --arms HET --settings std    # a setting that was not chosen

Every run is het_grpo.py with 24,576 episodes; notes come from a file and the pool does not grow. Every
arm has four settings: an entropy bonus of 0 or .03, times advantages divided by the group's deviation
or not. Imitation has no deviation: it has one epoch or two instead. A setting is chosen by the mean of
success with and without advice on the tuning seeds. What is in the CSV already is not run again.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import survivor

STUDY = HERE / "survivor_study.csv"
TUNING = HERE / "survivor_tuning.csv"
TUNING_SEEDS = (121, 122, 123)
SEEDS = (141, 142, 143, 144, 145)
COLUMNS = ["notes", "arm", "setting", "seed", "episodes", "unguided", "guided"]
EPISODES = 24_576
ARMS = {
    "GRPO": "--method baseline --val-rollout-expmode mixed",
    "GRPO + replay": "--method baseline --val-rollout-expmode mixed --use-experience-replay",
    "EC": "--method ec",
    "EI": "--method ei",
    "HET": "--method het",
    "imitation": "--method sft",
    "imitation for 15 iterations, then GRPO": (
        "--method baseline --val-rollout-expmode mixed --imitate-iterations 15"
    ),
}
SETTINGS = {
    "std": "",
    "std, entropy .03": "--ent-coef 0.03",
    "mean": "--no-adv-std",
    "mean, entropy .03": "--no-adv-std --ent-coef 0.03",
}
IMITATION_SETTINGS = {
    "2 epochs": "",
    "2 epochs, entropy .03": "--ent-coef 0.03",
    "1 epoch": "--update-epochs 1",
    "1 epoch, entropy .03": "--update-epochs 1 --ent-coef 0.03",
}
NOTES = {"misleading": True, "fair": False}  # of winners, or of players drawn at random


def run(notes: str, arm: str, setting: str, seed: int) -> list:
    """One run of het_grpo.py -> a row for the CSV"""
    per_iteration = 60 if "replay" in ARMS[arm] else 64  # 4 of 8 groups have a replayed member
    num_iterations = EPISODES // per_iteration
    with tempfile.TemporaryDirectory() as folder:
        pool = Path(folder) / "notes.jsonl"
        pool.write_text(survivor.notes(of_winners=NOTES[notes]), encoding="utf-8")
        command = [sys.executable, HERE.parent / "het_grpo.py", *ARMS[arm].split()]
        command += settings_of(arm)[setting].split()
        command += f"--max-turns 3 --success-reward 0.5 --updated-freq 0 --seed {seed}".split()
        command += f"--init-exp-before-training 0 --num-iterations {num_iterations}".split()
        command += f"--eval-every {num_iterations} --save-every {num_iterations}".split()
        command += ["--env", f"{HERE}/survivor.py:Vault", "--experience-pool", pool]
        command += ["--device", "cpu", "--run-dir", f"{folder}/run"]
        words = [str(word) for word in command]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        last = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))
    scores = [round(last[f"eval/success_{kind}"], 4) for kind in ("unguided", "guided")]
    return [notes, arm, setting, seed, last["global_step"], *scores]


def read(path: Path) -> dict:
    """{(notes, arm, setting, seed): row}"""
    found = {}
    if path.exists():
        with open(path, encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found[row["notes"], row["arm"], row["setting"], int(row["seed"])] = row
    return found


def scores(found: dict, notes: str, arm: str, setting: str) -> list[tuple[float, float]]:
    """(without advice, with advice) of each seed"""
    rows = [row for key, row in sorted(found.items()) if key[:3] == (notes, arm, setting)]
    return [(float(row["unguided"]), float(row["guided"])) for row in rows]


def mean_of_both(pairs: list[tuple[float, float]]) -> float:
    return statistics.mean(sum(pair) / 2 for pair in pairs)


def settings_of(arm: str) -> dict[str, str]:
    return IMITATION_SETTINGS if arm == "imitation" else SETTINGS


def best_setting(arm: str) -> str | None:
    """The best on the tuning seeds; None while a run is missing."""
    found = read(TUNING)
    means = {}
    for setting in settings_of(arm):
        pairs = scores(found, "misleading", arm, setting)
        if len(pairs) < len(TUNING_SEEDS):
            return None
        means[setting] = mean_of_both(pairs)
    return max(means, key=means.get)


def table(found: dict, notes: str) -> str:
    """Markdown: a row for each arm and setting that was run"""
    lines = [f"| vault, {notes} notes | setting | seeds | without advice | with advice | mean |"]
    lines.append("|---|---|---|---|---|---|")
    for arm in ARMS:
        for setting in settings_of(arm):
            pairs = scores(found, notes, arm, setting)
            if pairs:
                columns = list(zip(*pairs, strict=True))
                cells = [arm, setting, str(len(pairs))]
                cells += [" ".join(f"{x:.2f}" for x in column) for column in columns]
                cells.append(f"**{mean_of_both(pairs):.2f}**")
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="tuning seeds, all settings")
    parser.add_argument("--tables", action="store_true", help="no training")
    parser.add_argument("--notes", choices=NOTES, default="misleading")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--settings",
        nargs="*",
        choices=SETTINGS | IMITATION_SETTINGS,
        help="default: the best of an arm",
    )
    parser.add_argument("--seeds", nargs="*", type=int)
    options = parser.parse_args()
    path = TUNING if options.tune else STUDY
    for seed in options.seeds or (TUNING_SEEDS if options.tune else SEEDS):
        for arm in options.arms:
            chosen = settings_of(arm) if options.tune else [best_setting(arm)]
            settings = options.settings or chosen
            for setting in settings:
                job = (options.notes, arm, setting, seed)
                if options.tables or setting is None or job in read(path):
                    continue
                row = run(*job)
                is_new = not path.exists()
                with open(path, "a", newline="", encoding="utf-8") as file:
                    csv.writer(file, lineterminator="\n").writerows([COLUMNS] * is_new + [row])
                print(*row, flush=True)
    for path in (STUDY, TUNING):
        for notes in NOTES:
            found = read(path)
            if any(key[0] == notes for key in found):
                print(f"\n{table(found, notes)}")
