"""Where does replay help? Plain PPO, rejection sampling and PPO with replay, tuned alike, on five tasks.

    python benchmark/replay_study.py --tune     # the settings of GRIDS, tuning seeds -> replay_tuning.csv
    python benchmark/replay_study.py --more     # the three best settings of an arm on two more tuning seeds
    python benchmark/replay_study.py            # the best settings on five other seeds -> replay_study.csv
    python benchmark/replay_study.py --tables   # tables and picture from the CSVs; no training

Both files are resumable: a run that they hold is not repeated. Every run is `ppo_v2.py` with the flags that
the tables print, or `rejection_sampling` below on the same model, prompts and sampler. Accuracy is greedy, on
held-out prompts, by the true verifier. Seconds are CPU time of sampling and updating, without warm start and
evaluation.
"""

import argparse
import copy
import csv
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
sys.path[:0] = [str(HERE.parent), str(HERE)]
from panels import METHOD, PLAIN, RIVAL, SIZE, WIDTH, name_lines, show_lines

import ppo_v2

TUNING_PATH = HERE / "replay_tuning.csv"
STUDY_PATH = HERE / "replay_study.csv"
SEEDS = (301, 302, 303, 304, 305)
MORE_SEEDS = (*SEEDS, 306, 307, 308, 309, 310)  # lambda on the task rare
TUNING_SEEDS = (101, 102)
FINALIST_SEEDS = (
    103,
    104,
)  # where success is rare, two seeds mislead: the three best settings get more
REPEATS = 8  # task long: the sorted digits are written so many times
WRONG = 0.1  # task noisy: share of verdicts that are inverted
TASKS = {  # options, the accuracy whose cost is reported, title
    "default": (dict(), 0.9, "3-4 digits: one response in ten is right at the start"),
    "rare": (dict(min_digits=5, max_digits=6), 0.9, "5-6 digits: one in a hundred"),
    "rarer": (
        dict(min_digits=7, max_digits=7, responses=12_800),
        0.9,
        "7 digits: one in a thousand",
    ),
    "long": (
        dict(max_response_length=33, sft_steps=600, responses=2_560),
        0.5,
        "3-4 digits, written eight times",
    ),
    "noisy": (dict(), 0.9, "3-4 digits, one verdict in ten is wrong"),
}
REPLAY = dict(use_replay_buffer=True)
GUIDE = dict(  # the values of the design document
    use_replay_buffer=True,
    replay_advantages="all",
    replay_buffer_size=1000,
    replay_sample_size=32,
    priority_alpha=0.6,
    priority_beta=0.4,
    priority_beta_increment=0.001,
    priority_age_tau=None,
    max_replay_reuse=4,
)
ARMS = {  # name: options. sft, own_critic and mean_baseline are patches below, not options of the script
    "plain PPO": {},
    "rejection sampling": dict(sft=True),
    "replay": REPLAY,
    "plain PPO, defaults": {},
    "plain PPO, lambda .95": dict(gae_lambda=0.95),
    "plain PPO, whitened": dict(norm_adv=True),
    "replay, guide, uniform": GUIDE | dict(use_priority_sampling=False),
    "replay, guide, PER": GUIDE | dict(use_priority_sampling=True),
    "plain PPO, own critic": dict(own_critic=True),
    "plain PPO, batch mean": dict(mean_baseline=True, vf_coef=0.0),
    "replay, own critic": REPLAY | dict(own_critic=True),
    "replay, batch mean": REPLAY | dict(mean_baseline=True, vf_coef=0.0),
    "replay, no baseline": REPLAY | dict(vf_coef=0.0),
}
TUNED = ("plain PPO", "rejection sampling", "replay")
TUNED_TASKS = ("rare", "rarer")  # the others take the settings of the first
LAMBDAS = ("plain PPO, defaults", "plain PPO, lambda .95")
CRITICS = [arm for arm in ARMS if "critic" in arm or "mean" in arm or "baseline" in arm]
ONLY = {arm: ("rare",) for arm in ARMS if arm not in TUNED}  # the tasks of the other arms
ONLY |= {"plain PPO, lambda .95": ("rare", "long")}
ONLY |= {"plain PPO, defaults": ("default", "rare", "long", "noisy")}
ONLY |= {arm: ("default", "rare") for arm in ARMS if "guide" in arm}

CHANGES = [  # one at a time, from the defaults
    {},
    dict(batch_size=64),
    dict(batch_size=256),
    dict(learning_rate=2e-4),
    dict(learning_rate=1e-3),
    dict(update_epochs=4),
    dict(num_minibatches=2),
    dict(gae_lambda=0.95),
    dict(norm_adv=True),
]
IMITATION = [
    dict(learning_rate=5e-4, steps=2),
    dict(learning_rate=5e-4, steps=4),
    dict(learning_rate=5e-4, steps=8),
    dict(learning_rate=2e-4, steps=4),
    dict(learning_rate=2e-4, steps=8),
    dict(learning_rate=1e-4, steps=8),
    dict(learning_rate=1e-3, steps=2),
    dict(learning_rate=2e-4, steps=4, batch_size=64),
    dict(learning_rate=2e-4, steps=8, batch_size=64),
    dict(learning_rate=1e-4, steps=8, batch_size=64),
]
GRIDS = {  # ten settings for each arm, on 5-6 digits
    "plain PPO": CHANGES + [dict(vf_coef=0.0)],
    "rejection sampling": IMITATION,
    "replay": CHANGES + [dict(replay_sample_size=128)],
}
RARER_GRIDS = {  # three settings for each arm, on 7 digits, where a run takes three times as long
    "plain PPO": [{}, dict(gae_lambda=0.95), dict(vf_coef=0.0)],
    "rejection sampling": [
        dict(learning_rate=2e-4, steps=4),
        dict(learning_rate=2e-4, steps=4, batch_size=64),
        dict(learning_rate=1e-4, steps=8, batch_size=64),
    ],
    "replay": [{}, dict(num_minibatches=2), dict(replay_sample_size=128)],
}


def rejection_sampling(args, policy, prompt_order, evaluate, rollout, steps: int, size=64):
    """The simplest rival: keep the right responses and imitate them, in `steps` supervised steps an iteration."""
    optimizer = torch.optim.AdamW(
        policy.lm.parameters(), args.learning_rate, eps=1e-5, weight_decay=0.0, fused=True
    )
    kept = []
    curve = [(0, 0.0, evaluate())]
    seconds = 0.0
    names = ("prompt_ids", "prompt_mask", "response_ids", "response_mask")
    for iteration in range(1, args.num_iterations + 1):
        start = time.process_time()
        torch.manual_seed(args.seed * 1_000_003 + iteration)
        last = iteration * args.batch_size
        rows = rollout(prompt_order[last - args.batch_size : last])
        right = (rows["scores"] > 0).nonzero().flatten().tolist()
        kept += [{name: rows[name][[i]] for name in names} for i in right]
        for _ in range(steps if kept else 0):
            batch = ppo_v2.join([kept[i] for i in torch.randint(len(kept), (size,)).tolist()])
            logprobs, _, _ = ppo_v2.logprobs_and_values(policy, batch)
            loss = -ppo_v2.masked_mean(logprobs, batch["response_mask"])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.lm.parameters(), args.max_grad_norm)
            optimizer.step()
        seconds += time.process_time() - start
        if iteration % args.eval_every == 0 or iteration == args.num_iterations:
            curve.append((last, seconds, evaluate()))
    return curve


# --- what is not an option of the scripts ---
class RepeatedScramble(random.Random):
    """Scrambles the answer of the task `long` once: its repeats stay equal to each other."""

    def sample(self, population, k):
        if not isinstance(population, str):
            return super().sample(population, k)
        return super().sample(population[: k // REPEATS], k // REPEATS) * REPEATS


class TwoCaches:
    """The caches of policy and critic, behind the one method that `generate` calls."""

    def __init__(self, policy, critic):
        self.policy = policy
        self.critic = critic

    def reorder_cache(self, indices):
        self.policy.reorder_cache(indices)
        self.critic.reorder_cache(indices)


def policy_with_critic(PolicyWithValue):
    """A subclass whose values come from a second language model."""

    class PolicyWithCritic(PolicyWithValue):
        def __init__(self, lm, eos_ids, temperature):
            super().__init__(lm, eos_ids, temperature)
            self.critic = PolicyWithValue(copy.deepcopy(lm), eos_ids, temperature)
            CRITIC_TRUNKS.append(self.critic.lm)

        def forward(self, ids, mask, num_last, cache=None, use_cache=False):
            caches = cache or TwoCaches(None, None)
            logits, _, policy_cache = super().forward(ids, mask, num_last, caches.policy, use_cache)
            _, values, critic_cache = self.critic(ids, mask, num_last, caches.critic, use_cache)
            return logits, values, TwoCaches(policy_cache, critic_cache)

    return PolicyWithCritic


WARM = {}  # (seed, task) -> weights: the warm start is the same for all arms
CRITIC_TRUNKS = []  # a critic of its own begins from the warm start, too
PATCHED = """warm_start make_task rollout compute_gae time random PolicyWithValue Signals save_model
    save_checkpoint""".split()


def prepare(module, task, mean_baseline=False, own_critic=False):
    """Let a script remember its warm start, and give it what is no option of it.  -> what undoes this"""
    before = {name: vars(module)[name] for name in PATCHED if name in vars(module)}
    finish = module.Run.finish
    module.Run.finish = lambda self, *panels: None  # no picture, no files: they cost time
    module.time = types.SimpleNamespace(time=time.process_time)  # other load must not count
    if module is ppo_v2:  # ppo.py has none of these
        module.save_model = module.save_checkpoint = lambda *args, **options: None
        # a signal ends the study, not one run of it
        module.Signals = lambda: types.SimpleNamespace(received=False, release=lambda: None)

    def warm_start(lm, pairs, tokenizer, args):
        key = args.seed, task
        if key not in WARM:
            before["warm_start"](lm, pairs, tokenizer, args)
            WARM[key] = {name: x.clone() for name, x in lm.state_dict().items()}
        for trunk in [lm, *CRITIC_TRUNKS]:
            trunk.load_state_dict(WARM[key])
        CRITIC_TRUNKS.clear()

    module.warm_start = warm_start
    if own_critic:
        module.PolicyWithValue = policy_with_critic(module.PolicyWithValue)
    if task == "long":
        module.random = types.SimpleNamespace(Random=RepeatedScramble)

        def make_task(args):
            train_pairs, eval_pairs, scorer = before["make_task"](args)
            train_pairs = [(prompt, answer * REPEATS) for prompt, answer in train_pairs]
            eval_pairs = [(prompt, answer * REPEATS) for prompt, answer in eval_pairs]
            return train_pairs, eval_pairs, scorer

        module.make_task = make_task
    if task == "noisy":

        def rollout(policy, pairs, tokenizer, scorer, args, uniforms=None):
            rows = before["rollout"](policy, pairs, tokenizer, scorer, args, uniforms)
            if uniforms is not None:  # training; evaluation asks the true verifier
                wrong = torch.rand(len(pairs)) < WRONG
                rows["scores"] = torch.where(wrong, 1 - rows["scores"], rows["scores"])
            return rows

        module.rollout = rollout
    if mean_baseline:

        def compute_gae(rewards, values, mask, gamma, gae_lambda):
            """What a response earns from here on, minus the mean over all tokens of the batch."""
            returns = rewards.flip(1).cumsum(1).flip(1) * mask
            return (returns - module.masked_mean(returns, mask)) * mask

        module.compute_gae = compute_gae

    def restore():
        vars(module).update(before)
        module.Run.finish = finish

    return restore


class Silent:
    """No output while a run trains."""

    def __enter__(self):
        self.stdout = sys.stdout
        sys.stdout = tempfile.TemporaryFile("w", encoding="utf-8")

    def __exit__(self, *error):
        sys.stdout = self.stdout


def read_metrics(folder):
    text = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def imitate(args, steps):
    """Rejection sampling on the model, the prompts and the sampler of ppo_v2.py."""
    torch.manual_seed(args.seed)
    train_pairs, eval_pairs, scorer = ppo_v2.make_task(args)
    lm, tokenizer, eos_ids = ppo_v2.load_lm(args)
    policy = ppo_v2.PolicyWithValue(lm, eos_ids, args.temperature)
    ppo_v2.warm_start(lm, train_pairs, tokenizer, args)
    num_prompts = args.num_iterations * args.batch_size
    prompt_order = ppo_v2.shuffled_passes(train_pairs, num_prompts, args.seed)

    def evaluate():
        metrics, _ = ppo_v2.evaluate(policy, eval_pairs, tokenizer, scorer, args)
        return metrics["eval/score"]

    def rollout(pairs):
        uniforms = torch.rand(len(pairs), args.max_response_length)
        return ppo_v2.rollout(policy, pairs, tokenizer, scorer, args, uniforms)

    return rejection_sampling(args, policy, prompt_order, evaluate, rollout, steps)


def run(task, arm, setting, seed):
    """One training run -> [(responses, CPU seconds, accuracy, explained variance or None), ...]"""
    torch.set_num_threads(1)
    flags = TASKS[task][0] | ARMS[arm] | setting
    responses = flags.pop("responses", 5_120)
    sft = flags.pop("sft", False)
    steps = flags.pop("steps", 0)
    batch_size = flags.get("batch_size", ppo_v2.Args.batch_size)
    flags["num_iterations"] = responses // batch_size
    flags["eval_every"] = max(1, responses // 20 // batch_size)
    mean_baseline = flags.pop("mean_baseline", False)
    own_critic = flags.pop("own_critic", False)
    restore = prepare(ppo_v2, task, mean_baseline, own_critic)
    try:
        with Silent(), tempfile.TemporaryDirectory() as folder:
            args = ppo_v2.Args(**flags, seed=seed, device="cpu", run_dir=f"{folder}/run")
            if sft:
                return [(*point, None) for point in imitate(args, steps)]
            ppo_v2.main(args)
            rows = read_metrics(f"{folder}/run")
    finally:
        restore()
    curve = []
    seconds = 0.0
    for row in rows:
        seconds += row.get("time/rollout", 0) + row.get("time/update", 0)
        if "eval/score" in row:
            explained = row.get("losses/explained_variance")
            curve.append((row["global_step"], seconds, row["eval/score"], explained))
    return curve


# --- the CSVs ---
COLUMNS = "task arm setting seed responses seconds accuracy explained_variance".split()


def read(path):
    """{(task, arm, setting, seed): [(responses, seconds, accuracy, explained variance or None), ...]}"""
    curves = {}
    if not path.exists():
        return curves
    for row in csv.DictReader(open(path, encoding="utf-8")):
        key = row["task"], row["arm"], row["setting"], int(row["seed"])
        explained = float(row["explained_variance"]) if row["explained_variance"] else None
        point = int(row["responses"]), float(row["seconds"]), float(row["accuracy"]), explained
        curves.setdefault(key, []).append(point)
    return curves


def append(path, rows, columns):
    """Add rows to a CSV; a new one gets its header."""
    is_new = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([columns] if is_new else [])
        writer.writerows(rows)


def rounded(value):
    return "" if value is None else round(value, 4)


# --- what is run ---
def area(curve):
    """Mean accuracy over the run: the higher, the faster."""
    return statistics.mean(point[2] for point in curve[1:])


def grid(task, arm):
    grids = dict(rare=GRIDS, rarer=RARER_GRIDS)[task]
    return [json.dumps(setting) for setting in grids.get(arm, [])]


def areas_of(tuning, task, arm) -> dict:
    """{setting: mean accuracy over the run, of each tuning seed}"""
    found = {}
    for setting in grid(task, arm):
        areas = [area(curve) for key, curve in tuning.items() if key[:3] == (task, arm, setting)]
        if areas:
            found[setting] = areas
    return found


def ranked_settings(tuning, task, arm):
    """Settings, best first: those with most seeds, by their mean; of equals, the earlier one of the grid."""
    areas = areas_of(tuning, task, arm)

    def rank(setting):
        return -len(areas[setting]), -round(statistics.mean(areas[setting]), 2)

    return sorted(areas, key=rank)


def best_setting(tuning, task, arm) -> str:
    """Of a tuned arm. Tasks without a grid take the setting of 5-6 digits. Arms about the critic take
    the setting of replay, all others the defaults."""
    task = "rarer" if task == "rarer" else "rare"
    if arm in CRITICS and "replay" in arm:
        arm = "replay"
    settings = ranked_settings(tuning, task, arm)
    if arm in TUNED and not settings:
        sys.exit(f"{task}, {arm}: run --tune first")
    return settings[0] if settings else "{}"


def tuning_jobs(tuning, tasks, arms):
    jobs = []
    for task in [task for task in tasks if task in TUNED_TASKS]:
        for seed in TUNING_SEEDS:
            for arm in [arm for arm in arms if arm in TUNED]:
                jobs += [(task, arm, setting, seed) for setting in grid(task, arm)]
    return jobs


def finalist_jobs(tuning, tasks, arms):
    jobs = []
    for task in [task for task in tasks if task in TUNED_TASKS]:
        for arm in [arm for arm in arms if arm in TUNED]:
            for setting in ranked_settings(tuning, task, arm)[:3]:
                jobs += [(task, arm, setting, seed) for seed in FINALIST_SEEDS]
    return jobs


def study_jobs(tuning, tasks, arms):
    jobs = []
    for task in tasks:
        for seed in MORE_SEEDS:
            for arm in arms:
                has_seed = seed in SEEDS or (arm in LAMBDAS and task == "rare")
                if has_seed and task in ONLY.get(arm, TASKS):
                    jobs.append((task, arm, best_setting(tuning, task, arm), seed))
    return jobs


# --- tables ---
def curves_of(curves, task, arm, seeds=SEEDS):
    keys = [key for key in sorted(curves) if key[:2] == (task, arm) and key[3] in seeds]
    return [curves[key] for key in keys]


def reach(curve, threshold, column=0):
    """Responses (0) or CPU seconds (1) until an accuracy, or None."""
    return next((point[column] for point in curve if point[2] >= threshold), None)


def words(setting: str) -> str:
    """A setting as the flags that a reader types."""
    flags = []
    for name, value in json.loads(setting).items():
        option = "--" + name.replace("_", "-")
        flags.append(option if value is True else f"{option} {value}")
    return "`" + " ".join(flags) + "`" if flags else "defaults"


def median_of(values):
    """The median; a run that never gets there counts as the longest."""
    values = sorted(float("inf") if value is None else value for value in values)
    middle = values[len(values) // 2]
    return "–" if middle == float("inf") else f"{middle:.0f}"


def short(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".")


def ends_of(curves):
    return " ".join(short(curve[-1][2]) for curve in curves)


def table(task, curves, arms, seeds=SEEDS):
    """One row an arm: end and mean over the run, cost of the task's threshold (median of the seeds), its flags."""
    lines = [
        "| arm | accuracy at the end, by seed | mean | mean over the run | responses | CPU s | reached | flags |",
        "|---" * 8 + "|",
    ]
    threshold = TASKS[task][1]
    for arm in arms:
        mine = curves_of(curves, task, arm, seeds)
        if not mine:
            continue
        responses = [reach(curve, threshold, 0) for curve in mine]
        seconds = [reach(curve, threshold, 1) for curve in mine]
        num_reached = len([value for value in responses if value is not None])
        cells = [
            arm,
            ends_of(mine),
            short(statistics.mean(curve[-1][2] for curve in mine)),
            short(statistics.mean(area(curve) for curve in mine)),
            median_of(responses),
            median_of(seconds),
            f"{num_reached} of {len(mine)}",
            words(next(key[2] for key in curves if key[:2] == (task, arm))),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def critic_table(curves):
    lines = [
        "| arm | flags | accuracy at the end, by seed | mean | mean over the run "
        "| explained variance, second half | CPU s |",
        "|---" * 7 + "|",
    ]
    # the tuned plain PPO has --vf-coef 0: no baseline
    arms = ["plain PPO, defaults", "plain PPO", *[arm for arm in CRITICS if "plain" in arm]]
    arms += ["replay", *[arm for arm in CRITICS if "replay" in arm]]
    for arm in arms:
        mine = curves_of(curves, "rare", arm)
        if not mine:
            continue
        halves = [point for curve in mine for point in curve[len(curve) // 2 :]]
        known = [point[3] for point in halves if point[3] is not None]
        setting = next(key[2] for key in curves if key[:2] == ("rare", arm))
        has_critic = "vf_coef" not in ARMS[arm] | json.loads(setting)
        cells = [
            arm,
            words(setting),
            ends_of(mine),
            short(statistics.mean(curve[-1][2] for curve in mine)),
            short(statistics.mean(area(curve) for curve in mine)),
            f"{statistics.mean(known):+.2f}" if has_critic else "–",
            f"{statistics.mean(curve[-1][1] for curve in mine):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def grid_table(tuning):
    """Mean accuracy over the run of every setting that was tried, mean of the tuning seeds."""
    lines = ["| arm | setting | " + " | ".join(TUNED_TASKS) + " |", "|---" * 4 + "|"]
    for arm in GRIDS:
        for setting in grid("rare", arm):
            cells = []
            for task in TUNED_TASKS:
                areas = areas_of(tuning, task, arm)
                cell = ""
                if setting in areas:
                    cell = short(statistics.mean(areas[setting]))
                    cell += "†" * (len(areas[setting]) > len(TUNING_SEEDS))  # four seeds
                is_best = areas and ranked_settings(tuning, task, arm)[0] == setting
                cells.append(f"**{cell}**" if is_best else cell)
            lines.append(f"| {arm} | {words(setting)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- picture ---
COLORS = {"plain PPO": PLAIN, "rejection sampling": RIVAL, "replay": METHOD}
PANELS = [  # task, message
    ("default", "1 response in 10 is right: nothing to gain"),
    ("rare", "1 in 100: both outperform plain PPO"),
    ("rarer", "1 in 1000: plain PPO learns nothing"),
    ("noisy", "1 verdict in 10 is wrong: do not imitate"),
]


def draw(curves, path):
    """The median of the seeds, with every seed as a thin line. Each line has its name where it ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 7), layout="constrained")
    for axis, (task, message) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        lines = {}
        for arm in TUNED:
            seeds = [
                [(point[0], point[2]) for point in curve] for curve in curves_of(curves, task, arm)
            ]
            if seeds:
                lines["imitation" if arm == "rejection sampling" else arm] = (COLORS[arm], seeds)
        ends = show_lines(axis, lines)
        axis.set_title(message, fontsize=14, loc="left")
        axis.set(ylim=(-0.02, 1.03))
        axis.set_ylabel("accuracy on held-out prompts", fontsize=12)
        axis.set_xlabel("responses", fontsize=12)
        name_lines(axis, ends)
    figure.supxlabel("thick: median · thin: each seed", fontsize=12)
    figure.savefig(path, **SIZE)


def show(title, table):
    if len(table.splitlines()) > 2:  # not without a row
        print(f"\n{title}\n\n{table}")


def print_tables():
    curves = read(STUDY_PATH)
    tuning = read(TUNING_PATH)
    for task, (_, threshold, title) in TASKS.items():
        if task == "long":  # below
            continue
        arms = [arm for arm in ARMS if arm not in CRITICS and "lambda" not in arm]
        title = f"{task}: {title}; responses and CPU seconds to {threshold}"
        show(title, table(task, curves, arms))
    for task in ("rare", "long"):
        show(f"lambda, {task}", table(task, curves, LAMBDAS, MORE_SEEDS))
    show("the critic, rare", critic_table(curves))
    show("mean accuracy over the run, tuning seeds", grid_table(tuning))
    if curves:
        draw(curves, HERE.parent / "docs" / "replay_study.png")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="all settings on the tuning seeds")
    parser.add_argument("--more", action="store_true", help="the best settings on more of them")
    parser.add_argument("--tables", action="store_true", help="no training")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    options = parser.parse_args()
    if options.tables:
        print_tables()
        return
    make_jobs = tuning_jobs if options.tune else study_jobs
    make_jobs = finalist_jobs if options.more else make_jobs
    path = TUNING_PATH if options.tune or options.more else STUDY_PATH
    jobs = make_jobs(read(TUNING_PATH), options.tasks, options.arms)
    jobs = [job for job in jobs if job not in read(path)]
    for i, (task, arm, setting, seed) in enumerate(jobs, 1):
        curve = run(task, arm, json.loads(setting), seed)
        rows = []
        for responses, seconds, accuracy, explained in curve:
            numbers = [rounded(seconds), rounded(accuracy), rounded(explained)]
            rows.append([task, arm, setting, seed, responses, *numbers])
        append(path, rows, COLUMNS)
        result = f"{curve[-1][2]:.3f}, {curve[-1][1]:.0f} s"
        print(f"[{i}/{len(jobs)}] {task}, {arm}, {setting}, seed {seed}: {result}", flush=True)
    print_tables()


if __name__ == "__main__":
    main()
