"""wsrl_warmup.py - SAC warmed up on offline data, fine-tuned online: the paper's WSRL and a weighted design beside it.

WSRL (arXiv:2412.07762): pre-train offline, act with the frozen policy for a while, then learn online without the data.
The design this script started from also calls itself WSRL-style and does something else: weighted losses, prioritized
replay, part of the data kept, an offline share that decays. --preset takes either, RLPD (arXiv:2302.02948) or
SAC from scratch; an option that is given wins over the preset. The SAC core is word for word that of sac_hybrid.py.
    offline: sample sources -> weighted SAC, CQL or Cal-QL   |   keep the best rows   |   online: act, mix, update

Simplified on purpose: one environment, vector observations. Under torchrun every process plays the same environment
with the same random numbers and computes its share of each batch.
Shapes: N rows, D observation dims, A action dims, E critics, M actions of the CQL term (K uniform, 2 K of the policy).

    python wsrl_warmup.py                                           # three data sources, warm-up, fine-tuning: minutes
    python wsrl_warmup.py --preset wsrl --env-id Pendulum-v1
    python wsrl_warmup.py --make-data --env-id Pendulum-v1          # write data/Pendulum-v1/demos.npz and two more
    python wsrl_warmup.py --offline-data demos=a.npz:2.0 --offline-data demos=b.pkl --offline-data other=c.npz
    python wsrl_warmup.py --stage offline --checkpoint-path warm.pth --filtered-data-path kept.npz
    python wsrl_warmup.py --stage online --checkpoint-path warm.pth --filtered-data-path kept.npz
    torchrun --nproc-per-node 2 wsrl_warmup.py --preset rlpd
"""

import atexit
import contextlib
import ctypes
import io
import json
import math
import os
import pickle
import pickletools
import signal
import sys
import tempfile
import threading
import time
import zipfile
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

PRESETS = {  # what an option left at None becomes first
    # differs from the design document: it keeps the best 20 % and drops the conservative term when it goes online.
    # Both can cost it the warm policy (README): a few of the best rows need not cover the states, and an objective
    # that changes moves every Q value. Its values: --retention-ratio 0.2 --online-cql-alpha 0, and best by "TD error,
    # reward and the like", "high quality": any --retention-by is a reading of that, none a departure from it
    "design": dict(
        warmup_rollout_steps=0, learning_starts=0, retention_ratio=0.5, num_critics=2,
        initial_offline_ratio=1.0, offline_decay_rate=0.999, min_offline_ratio=0.5, num_sampled_critics=2,
        utd_ratio=1, use_prioritized_replay=True, weighted_loss="both",
    ),
    "wsrl": dict(
        offline_objective="calql", warmup_rollout_steps=5_000, learning_starts=0, retention_ratio=0.0, num_critics=10,
        initial_offline_ratio=0.0, offline_decay_rate=1.0, min_offline_ratio=0.0, num_sampled_critics=2,
        utd_ratio=4, use_prioritized_replay=False, weighted_loss="none", online_cql_alpha=0.0,
    ),
    "rlpd": dict(
        offline_objective="sac", offline_steps=0, warmup_rollout_steps=0, retention_ratio=1.0, num_critics=10,
        initial_offline_ratio=0.5, offline_decay_rate=1.0, min_offline_ratio=0.5, num_sampled_critics=2,
        utd_ratio=20, use_prioritized_replay=False, weighted_loss="none", online_cql_alpha=0.0,
    ),
    "scratch": dict(
        offline_objective="sac", offline_steps=0, warmup_rollout_steps=0, retention_ratio=0.0, num_critics=2,
        initial_offline_ratio=0.0, offline_decay_rate=1.0, min_offline_ratio=0.0, num_sampled_critics=2,
        utd_ratio=1, use_prioritized_replay=False, weighted_loss="none", online_cql_alpha=0.0,
    ),
}  # fmt: skip
SMALL = dict(offline_steps=5_000, online_steps=5_000, learning_starts=500, hidden_size=64, batch_size=128, lr=1e-3)
SMALL |= dict(tau=0.01, buffer_size=50_000, eval_every=500, data_steps=10_000)
TASKS = {  # then: what a small task needs
    # a sparse reward: Cal-QL's bound by the return is there at once, while plain SAC's policy came and went
    "MountainCarContinuous-v0": SMALL | dict(reward_scale=0.1, offline_objective="calql"),
    # with 128 rows the mean action came to fail where the sampled ones did not, on three tuning seeds of five
    "Pendulum-v1": SMALL | dict(reward_scale=0.1, batch_size=256),
    "Reacher-v5": SMALL,
    "InvertedDoublePendulum-v5": SMALL | dict(reward_scale=0.1),
}
DEFAULTS = dict(  # and then
    offline_steps=50_000, online_steps=100_000, learning_starts=5_000, hidden_size=256, batch_size=256, lr=3e-4,
    tau=0.005, buffer_size=1_000_000, eval_every=5_000, data_steps=50_000, reward_scale=1.0, offline_objective="sac",
)  # fmt: skip
PAPERS = {  # what a run is compared with when it lists its departures; the critics have LayerNorm in both
    "wsrl": PRESETS["wsrl"] | dict(hidden_size=256, batch_size=256, gamma=0.99, tau=0.005, lr=3e-4, layer_norm=True),
    "rlpd": PRESETS["rlpd"] | dict(hidden_size=256, batch_size=256, gamma=0.99, tau=0.005, lr=3e-4, layer_norm=True),
}
DESIGN = dict(  # the document's own values, for the preset of that name; for retention_by it has none, see above
    offline_steps=50_000, initial_offline_ratio=1.0, offline_decay_rate=0.999, min_offline_ratio=0.5, demo_weight=2.0,
    success_weight_bonus=1.5, retention_ratio=0.2, use_prioritized_replay=True, priority_alpha=0.6, priority_beta=0.4,
    online_cql_alpha=0.0,
)  # fmt: skip
SOURCE_WEIGHTS = {"suboptimal": 1.0, "random": 0.5}  # demos: --demo-weight; any other name: 1


# --- args ---
@dataclass
class Args:
    # experiment
    exp_name: str = Path(__file__).stem
    """first part of the run folder's name"""
    seed: int = 1
    """decides initial weights, data, sampling and shuffling; evaluation does not depend on it"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes cuda, then mps, then cpu"""
    num_threads: int = 1
    """torch CPU threads; tiny models are fastest with 1 (0: torch decides)"""
    run_dir: str | None = None
    """folder of this run (None: runs/{exp_name}__{seed}__{time})"""
    save_dir: str | None = None
    """folder of checkpoint_{step}.pth and final_model.pth (None: checkpoints/ in the run folder)"""
    resume: str | None = None
    """auto: go on from the newest checkpoint of run_dir, or of exp_name and seed; PATH: that one (None: start fresh)"""
    save_every: int = 10_000
    """steps between checkpoints (iterations in the language-model scripts); 0: only at the end"""
    preset: Literal["design", "wsrl", "rlpd", "scratch"] = "design"
    """fills the options left out: the weighted design, the WSRL paper, RLPD, or SAC without any offline data"""
    stage: Literal["both", "offline", "online"] = "both"
    """offline: end after the warm-up, with checkpoint_path and filtered_data_path written; online: go on from those"""
    checkpoint_path: str | None = None
    """what a warm-up leaves for --stage online (None: not written)"""
    filtered_data_path: Annotated[str | None, tyro.conf.arg(aliases=("--demo-path",))] = None
    """.npz of the offline rows that the warm-up retained, for --stage online (None: not written)"""

    # task
    env_id: str = "MountainCarContinuous-v0"
    """Gymnasium id (package:Id imports the package), flat observations, bounded actions; small tasks: those in TASKS"""
    offline_data: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(aliases=("--offline-data-path",))
    ] = ()
    """[name=]path[:weight], repeatable, .npz, demo .pkl or minari:ID; a name may repeat (none: made, see data_dir)"""
    make_data: bool = False
    """only write the three sources of env_id to data_dir, then end"""
    data_dir: str | None = None
    """folder of the sources made here; files in it are used (None: data/ in the run folder; make_data: data/env_id)"""
    data_size: int = 4_000
    """transitions of each source made here, rounded up to whole episodes"""
    data_steps: int | None = None
    """environment steps of the SAC run that makes demos where no script can (None: 10000 small tasks, else 50000)"""
    demo_weight: float = 2.0
    """weight of the source named demos (suboptimal: 1, random: 0.5, other names: 1)"""
    success_weight_bonus: float = 1.5
    """factor on the weight of rows of successful episodes"""
    reward_scale: float | None = None
    """factor on rewards in the learner only; goes with init_alpha and cql_alpha (None: 0.1 or 1, by env_id)"""

    # model
    hidden_size: int | None = None
    """width of actor and critics (None: 64 small tasks, else 256)"""
    layer_norm: bool = True
    """LayerNorm in actor and critics"""
    dropout: float = 0.0
    """share of hidden units of the actor dropped in its update, against overfitting; 0: off"""

    # rollout
    offline_steps: Annotated[int | None, tyro.conf.arg(aliases=("--warmup-steps",))] = None
    """offline updates; the paper's warm-up is warmup_rollout_steps (None: 0 rlpd, scratch; 5000 small tasks; 50000)"""
    online_steps: int | None = None
    """environment steps after the offline updates (None: warmup_rollout_steps plus 5000 small tasks, else 100000)"""
    warmup_rollout_steps: int | None = None
    """online steps at the start in which the warm policy acts, sampled, and nothing is updated (None: preset)"""
    learning_starts: int | None = None
    """online steps at the start with uniformly random actions and no update (None: 0, 500 or 5000)"""

    # optimization
    batch_size: int | None = None
    """rows of an update (None: 128 small tasks but Pendulum, else 256)"""
    lr: float | None = None
    """Adam, for actor, critics and temperature (None: 1e-3 small tasks, else 3e-4)"""
    obs_noise: float = 0.0
    """offline augmentation: noise on observations, in their standard deviations; 0: off"""
    early_stop_patience: int = 0
    """offline: end after this many checks on held-out episodes without a better one, restore the best; 0: off"""
    early_stop_every: int = 500
    """offline updates between such checks"""
    holdout_ratio: float = 0.1
    """share of the episodes held out for them"""
    max_skipped_steps: int = 10
    """end the run after this many optimizer steps in a row with a non-finite gradient"""

    # SAC
    gamma: float = 0.99
    """discount per step"""
    tau: float | None = None
    """share of the new weights in the target critics per update (None: 0.01 small tasks, else 0.005)"""
    utd_ratio: int | None = None
    """updates per online step, on fresh batches; the last of them also updates actor and temperature (None: preset)"""
    num_critics: int | None = None
    """ensemble size (None: preset)"""
    num_sampled_critics: int | None = None
    """critics drawn for the minimum in the target (None: preset)"""
    init_alpha: float = 0.1
    """temperature at the start"""
    target_entropy: float | None = None
    """the temperature steers towards it (None: minus half the action dims)"""
    backup_entropy: bool = False
    """entropy bonus in the critic's target"""
    offline_objective: Literal["sac", "cql", "calql"] | None = None
    """cql, calql: add cql_alpha times the conservative term to the offline critic loss (None: preset or env_id)"""
    cql_alpha: float = 1.0
    """weight of that term; 0 is sac"""
    online_cql_alpha: float | None = None
    """the same after the warm-up, on the offline rows of a batch (None: design: cql_alpha, others: 0)"""
    cql_num_actions: int = 4
    """K: actions from each of uniform, policy at s, policy at s' """

    # replay
    buffer_size: int | None = None
    """transitions in the online buffer (None: 50000 small tasks, else 1000000)"""
    initial_offline_ratio: float | None = None
    """offline share of a batch when going online (None: preset)"""
    offline_decay_rate: float | None = None
    """factor on that share per environment step since (None: preset)"""
    min_offline_ratio: float | None = None
    """floor of that share (None: preset)"""
    retention_ratio: float | None = None
    """share of the offline rows kept when going online; the rest is released (None: preset)"""
    retention_by: Literal["td_error", "reward", "quality"] = "td_error"
    """what is kept: rows with the largest TD error, with the largest reward, or of the best episodes"""
    weighted_loss: Literal["none", "critic", "both"] | None = None
    """which losses the source, quality and success weights enter (None: preset)"""
    source_weight_in: Literal["loss", "sampling"] = "loss"
    """where those weights act: on the loss of a row, or on the chance to draw it"""
    use_prioritized_replay: bool | None = None
    """draw rows by their TD error (None: preset)"""
    priority_alpha: float = 0.6
    """0: uniform, 1: in proportion to the priority"""
    priority_beta: float = 0.4
    """how much of the sampling bias the weights undo, 0 to 1"""

    # logging
    eval_every: int | None = None
    """steps, offline or online, between frozen-policy evaluations (0: ends of the stages; None: 500 or 5000)"""
    eval_episodes: int = 10
    """episodes of such an evaluation, the same ones each time"""
    log_interval: int = 100
    """steps, offline or online, between lines of metrics.jsonl"""
    track: bool = False
    """also log to wandb (WANDB_MODE=offline works without an account)"""
    wandb_project_name: str = "stale-experience"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb team (None: your default one)"""

    def __post_init__(self):
        default_length = self.online_steps is None
        for name, value in (DEFAULTS | TASKS.get(self.env_id, {}) | PRESETS[self.preset]).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.online_cql_alpha is None:  # nothing changes at the transition
            self.online_cql_alpha = self.cql_alpha if self.offline_objective != "sac" else 0.0
        if default_length:
            self.online_steps += self.warmup_rollout_steps  # else the paper's 5000 would leave nothing to learn in
        positive = "online_steps hidden_size batch_size lr utd_ratio num_critics num_sampled_critics init_alpha"
        positive += " buffer_size data_size data_steps demo_weight success_weight_bonus reward_scale max_skipped_steps"
        positive += " early_stop_every cql_num_actions eval_episodes log_interval"
        not_negative = "seed num_threads save_every offline_steps warmup_rollout_steps learning_starts obs_noise"
        not_negative += " early_stop_patience cql_alpha online_cql_alpha eval_every"
        for name in positive.split():
            check(0 < getattr(self, name) < math.inf, self, name, "a positive number")
        for name in not_negative.split():
            check(0 <= getattr(self, name) < math.inf, self, name, "0 or a positive number")
        shares = "gamma tau initial_offline_ratio offline_decay_rate min_offline_ratio retention_ratio priority_alpha"
        for name in (shares + " priority_beta").split():
            check(0 <= getattr(self, name) <= 1, self, name, "between 0 and 1")
        check(self.seed < 2**32, self, "seed", "less than 2**32")
        for name in ("dropout", "holdout_ratio"):
            check(0 <= getattr(self, name) < 1, self, name, "0 or more and less than 1")
        check(self.target_entropy is None or math.isfinite(self.target_entropy), self, "target_entropy", "a number")
        critics = f"at most --num-critics {self.num_critics}"
        check(self.num_sampled_critics <= self.num_critics, self, "num_sampled_critics", critics)
        floor = f"above 0 with --min-offline-ratio {self.min_offline_ratio}: there would be nothing to draw"
        check(self.retention_ratio > 0 or self.min_offline_ratio == 0, self, "retention_ratio", floor)
        floor = f"at most --initial-offline-ratio {self.initial_offline_ratio}"
        check(self.min_offline_ratio <= self.initial_offline_ratio, self, "min_offline_ratio", floor)
        unused = self.stage == "online" or not (self.offline_steps or self.retention_ratio)
        check(not (unused and self.offline_data), self, "offline_data", "left out: no part of this run reads it")
        if self.stage != "both":
            check(self.checkpoint_path is not None, self, "checkpoint_path", f"a file with --stage {self.stage}")
            kept = f"a file with --stage {self.stage} and --retention-ratio {self.retention_ratio}"
            check(self.filtered_data_path or not self.retention_ratio, self, "filtered_data_path", kept)
            check(self.offline_steps > 0, self, "stage", f"both: --preset {self.preset} has no warm-up")


def fail(message: str, code: int = 2) -> NoReturn:
    """How every bad input ends: one line, no traceback."""
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    raise SystemExit(code)


def check(condition: bool, args, name: str, allowed: str):
    if not condition:
        fail(f"--{name.replace('_', '-')} {getattr(args, name)} is not allowed: it must be {allowed}")


def parse_args(args_class):
    """Command line -> Args, with tyro's error box folded into one line."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(args_class, description=__doc__)
    except SystemExit:
        lines = [line.strip("│╭╮╰╯─ ") for line in box.getvalue().splitlines()]
        lines = [line for line in lines if line.strip("-")]  # on a poor terminal the box is drawn in ASCII
        if len(lines) > 1:
            end = next(i for i, line in enumerate(lines) if "helptext" in line)
            fail(" ".join(lines[1:end]) + " (--help lists what is allowed)")
        print(box.getvalue(), end="", file=sys.stderr)
        raise


def departures(args: Args, source: dict | None = None) -> list[str]:
    """Where a run is not its paper, or another source: option, value, the value there."""
    word, source = ("there", source) if source else ("paper", PAPERS["rlpd" if args.preset == "rlpd" else "wsrl"])
    differs = [(name, getattr(args, name), value) for name, value in source.items() if getattr(args, name) != value]
    return [f"{name} {value} ({word} {theirs})" for name, value, theirs in differs]


# --- task ---
class ControlEnv:
    """A Gymnasium environment as the loop sees it: flat float32 observations, actions in [-1,1]."""

    def __init__(self, env_id: str):
        try:
            self.env = gym.make(env_id, disable_env_checker=True)
        except (gym.error.Error, ImportError) as error:  # gymnasium reports a missing mujoco as its own error
            fail(f"--env-id {env_id} cannot be made: {str(error).splitlines()[0]}")
        space = self.env.action_space
        flat = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
        if not flat or not np.isfinite([space.low, space.high]).all():
            fail(f"--env-id {env_id} has actions {space}: a flat Box with finite bounds is needed")
        if not isinstance(self.env.observation_space, gym.spaces.Box) or len(self.env.observation_space.shape) != 1:
            self.env = gym.wrappers.FlattenObservation(self.env)
        self.env_id, self.low, self.high = env_id, space.low, space.high
        self.center, self.scale = (self.high + self.low) / 2, (self.high - self.low) / 2
        self.obs_dim, self.action_dim = self.env.observation_space.shape[0], space.shape[0]

    def reset(self, seed: int):
        return self.env.reset(seed=seed)[0].astype(np.float32)

    def step(self, action):
        """-> next_obs, reward, terminated, truncated, success"""
        executed = np.clip(self.center + self.scale * action, self.low, self.high).astype(np.float32)
        obs, reward, terminated, truncated, info = self.env.step(executed)
        if not math.isfinite(reward):
            fail(f"--env-id {self.env_id} gave the reward {reward}", code=1)
        success = bool(info.get("is_success", info.get("success", terminated and reward > 0)))
        return obs.astype(np.float32), float(reward), bool(terminated), bool(truncated), success

    def play(self, seed: int, act):
        """One episode of act(obs) -> action: what a data file holds, as lists"""
        obs, done, rows = self.reset(seed), False, {name: [] for name in DATA_COLUMNS}
        while not done:
            action = act(obs)
            next_obs, reward, terminated, truncated, _ = self.step(action)
            values = (obs, self.center + self.scale * action, reward, next_obs, terminated, truncated)
            for name, value in zip(DATA_COLUMNS, values, strict=True):
                rows[name].append(value)
            obs, done = next_obs, terminated or truncated
        return rows


def pump_up(obs):
    """MountainCarContinuous: push the way it rolls. (A)"""
    return np.array([1.0 if obs[1] >= 0 else -1.0], np.float32)


def swing_up(obs):
    """Pendulum: bring the energy to that of standing upright, then balance. (A)"""
    cos, sin, speed = obs
    angle, energy = math.atan2(sin, cos), speed**2 / 2 + 15 * (cos - 1)  # 0: upright, at rest
    torque = -10 * angle - 2.5 * speed if cos > 0.9 else -energy * speed
    return np.array([np.clip(torque / 2, -1, 1)], np.float32)


def make_sources(args: Args, env: ControlEnv, folder: Path) -> list[str]:
    """demos, suboptimal and random .npz; a file that is there is kept, so a killed run continues with the same data."""
    script = {"MountainCarContinuous-v0": pump_up, "Pendulum-v1": swing_up}.get(args.env_id)
    experts = {"demos": script, "suboptimal": script, "random": None}
    complete = all((folder / f"{name}.npz").exists() for name in experts)
    if not complete:
        check_folder("data-dir", folder)
    if script is None and not complete:
        print(f"no script for {args.env_id}: {args.data_steps} steps of SAC make the demos", flush=True)
        half = max(1, args.data_steps // 2)
        with tempfile.TemporaryDirectory() as run, contextlib.redirect_stdout(io.StringIO()):
            same = dict(env_id=args.env_id, device=args.device, num_threads=args.num_threads, seed=args.seed)
            length = dict(online_steps=2 * half, save_every=half, eval_every=0)
            main(Args(preset="scratch", run_dir=run, **same, **length), alone=True)
            if not (Path(run) / "checkpoints" / "final_model.pth").exists():
                fail("stopped while the demos were made", code=130)
            for name, step in (("demos", 2 * half), ("suboptimal", half)):
                agent = WarmupAgent(env.obs_dim, env.action_dim, hidden_size=args.hidden_size)
                agent.load(Path(run) / "checkpoints" / f"checkpoint_{step}.pth")
                experts[name] = agent.policy.act
    for number, (name, expert) in enumerate(experts.items()):
        path = folder / f"{name}.npz"
        if path.exists():
            continue
        rng = np.random.default_rng([args.seed, 1, number])

        def act(obs, expert=expert, noise={"demos": 0.1, "suboptimal": 0.5, "random": 0.0}[name], rng=rng):  # noqa: B006
            if expert is None or (noise == 0.5 and rng.random() < 0.5):  # half of a suboptimal episode is random
                return rng.uniform(-1, 1, env.action_dim).astype(np.float32)
            return (expert(obs) + noise * rng.normal(size=env.action_dim)).clip(-1, 1).astype(np.float32)

        rows = {column: [] for column in DATA_COLUMNS}
        while len(rows["rewards"]) < args.data_size:
            for column, values in env.play(int(rng.integers(2**31)), act).items():
                rows[column] += values
        write_npz(path, {column: np.array(values) for column, values in rows.items()})
    return [f"{name}={folder / name}.npz" for name in experts]


def write_npz(path: Path, columns: dict):
    """Whole or not at all, as checkpoints."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(file, **columns)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        fail(f"cannot write {path}: {error.strerror}", code=1)


class DemoDtype:
    """Stands for numpy.dtype while a demo file is read: plain numbers only, nothing is handed to numpy's C code."""

    def __init__(self, name, *_):
        self.dtype = {code: np.dtype(code) for code in ("b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")}.get(name)
        if self.dtype is None:
            raise pickle.UnpicklingError(f"it holds numpy data of type {name!r}, and plain numbers are expected")

    def __setstate__(self, state):
        if not (isinstance(state, tuple) and len(state) >= 5 and state[1] in ("<", ">", "|") and not any(state[2:5])):
            raise pickle.UnpicklingError("it holds a numpy data type that is not plain numbers")
        self.dtype = self.dtype.newbyteorder(state[1])


class DemoArray:
    """Stands for numpy.ndarray while a demo file is read."""

    def __init__(self, *_):
        self.array = None

    def __setstate__(self, state):
        _, shape, dtype, fortran, raw = state
        self.array = decode_array(raw, dtype, shape, "F" if fortran else "C").array


def decode_array(raw, dtype, shape, order="C") -> DemoArray:
    if not isinstance(dtype, DemoDtype) or not isinstance(raw, bytes | bytearray):
        raise pickle.UnpicklingError("it holds a numpy array that is not plain numbers")
    result = DemoArray()
    result.array = np.frombuffer(bytes(raw), dtype.dtype).reshape(shape, order=order)  # ValueError if sizes disagree
    return result


def decode_scalar(dtype, raw):
    return decode_array(raw, dtype, ()).array[()]


def decode_latin1(text, encoding):
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it decodes bytes with {encoding!r}")
    return text.encode("latin1")


class DemoUnpickler(pickle.Unpickler):
    """Numbers, texts, plain containers and numpy arrays of numbers. Whatever else a file names is refused unseen."""

    ALLOWED = {("numpy", "dtype"): DemoDtype, ("numpy", "ndarray"): DemoArray, ("_codecs", "encode"): decode_latin1}
    for core in ("numpy.core", "numpy._core"):
        ALLOWED[core + ".multiarray", "_reconstruct"] = DemoArray
        ALLOWED[core + ".multiarray", "scalar"] = decode_scalar
        ALLOWED[core + ".numeric", "_frombuffer"] = decode_array

    def find_class(self, module, name):
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and demos hold numbers, texts and arrays only")
        return self.ALLOWED[module, name]


def load_pickle(path: str):
    """A demo file is a stranger's program for the unpickler: read it with a small vocabulary, end in one line."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        fail(f"demo file {path} cannot be read: {error.strerror}")
    try:
        for opcode, arg, _ in pickletools.genops(data):  # also finds what is cut off, before anything is built
            if "PUT" in opcode.name and arg is not None and arg > len(data):
                raise pickle.UnpicklingError("its memo is larger than the file")  # would fill the memory
        return DemoUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises almost any type
        fail(f"demo file {path} is refused: {(str(error) or repr(error)).splitlines()[0]}")


DATA_COLUMNS = ("obs", "actions", "rewards", "next_obs", "terminations", "truncations")
OTHER_NAMES = {  # what other files call them: sac_hybrid.py's demos, D4RL
    "observations": "obs", "observations/state": "obs", "next_observations": "next_obs", "terminals": "terminations",
    "next_observations/state": "next_obs", "timeouts": "truncations", "state": "obs",
}  # fmt: skip


def is_npz(path: str) -> bool:
    """By its first bytes, too: --filtered-data-path kept.pkl is an .npz all the same."""
    return path.endswith(".npz") or zipfile.is_zipfile(path)


def read_source(path: str, env: ControlEnv) -> dict[str, np.ndarray]:
    """DATA_COLUMNS of an .npz, a demo .pkl or minari:ID, checked; actions in the environment's units."""
    if path.startswith("minari:"):
        try:
            import minari
        except ImportError:
            fail(f"--offline-data {path} needs an optional package: pip install 'minari[hdf5]'")
        try:
            episodes = list(minari.load_dataset(path[7:]).iterate_episodes())
        except Exception as error:  # unknown id, not downloaded, no HDF5 reader
            fail(f"--offline-data {path} cannot be read: {(str(error) or repr(error)).splitlines()[0]}")
        raw = {name: np.concatenate([getattr(e, name) for e in episodes]) for name in DATA_COLUMNS if "obs" not in name}
        raw["obs"] = np.concatenate([e.observations[:-1] for e in episodes])
        raw["next_obs"] = np.concatenate([e.observations[1:] for e in episodes])
    elif is_npz(path):
        try:
            with np.load(path, allow_pickle=False) as file:
                raw = {name: file[name] for name in file.files}
        except Exception as error:  # missing, cut off, or holding objects
            fail(f"data file {path} is refused: {(str(error) or repr(error)).splitlines()[0]}")
    else:
        transitions = load_pickle(path)
        if not isinstance(transitions, list) or not all(isinstance(row, dict) for row in transitions):
            fail(f"data file {path}: a list of transitions, each a dict, is expected")
        raw = {}
        for name in transitions[0] if transitions else ():
            values = [row.get(name) for row in transitions]
            values = [value.get("state") if isinstance(value, dict) else value for value in values]
            values = [value.array if isinstance(value, DemoArray) else value for value in values]
            with contextlib.suppress(ValueError, TypeError):  # ragged or missing: reported below, if it is needed
                raw[name] = np.array(values, np.float32)
    raw = {OTHER_NAMES.get(name, name): column for name, column in raw.items()}
    if "masks" not in raw and "dones" in raw:  # sac_hybrid.py's: optional
        raw["masks"] = 1 - np.asarray(raw["dones"])
    if "masks" in raw and "terminations" not in raw:  # mask 0 is the end of the value
        raw["terminations"] = np.asarray(raw["masks"]) == 0
    if "dones" in raw and "truncations" not in raw:
        raw["truncations"] = (np.asarray(raw["dones"]) != 0) & ~(np.asarray(raw.get("terminations", False)) != 0)
    columns, size = {}, max((len(np.atleast_1d(raw[name])) for name in DATA_COLUMNS if name in raw), default=0)
    shapes = dict(zip(DATA_COLUMNS, ((env.obs_dim,), (env.action_dim,), (), (env.obs_dim,), (), ()), strict=True))
    for name, shape in shapes.items():
        if name not in raw:
            fail(f"data file {path} lacks {name!r}, or its rows differ in shape; it has {[str(key) for key in raw]}")
        columns[name] = column = np.asarray(raw[name])
        if column.shape != (size, *shape) or column.dtype.kind not in "biuf":
            kind = f"{column.dtype} of shape {column.shape}"
            fail(f"data file {path}: {name} is {kind}, expected numbers of shape {(size, *shape)} for {env.env_id}")
        columns[name] = column = column.astype(np.float32)
        if not np.isfinite(column).all():
            row = int(np.argwhere(~np.isfinite(column))[0][0])
            fail(f"data file {path}: {name} of row {row} is not finite")
    if not size:
        fail(f"data file {path} is empty: transitions are expected")
    return columns


def episode_slices(columns: dict) -> list[slice]:
    """Episodes end where the environment ended them, and where a row does not continue the one before it."""
    ends = (columns["terminations"] + columns["truncations"]) > 0
    ends[:-1] |= (columns["next_obs"][:-1] != columns["obs"][1:]).any(1)
    ends[-1] = True
    stops = np.flatnonzero(ends) + 1
    return [slice(int(a), int(b)) for a, b in zip([0, *stops[:-1]], stops, strict=True)]


def compute_data_quality(trajectory: dict, return_range=(0.0, 1.0), max_length: int = 1) -> float:
    """Mean of three parts, each in [0,1]: success, return within its range, and how it ended against the clock.

    The last: a success is better the sooner (0.5 to 1), a failure is better the later (0 to 0.5), a time limit is 0.5.
    """
    low, high = return_range
    part = (sum(trajectory["rewards"]) - low) / (high - low) if high > low else 0.5
    late = min(1.0, len(trajectory["rewards"]) / max_length)
    success, failed = trajectory["success"], trajectory["terminated"] and not trajectory["success"]
    clock = 1 - late / 2 if success else late / 2 if failed else 0.5
    return float((float(success) + np.clip(part, 0, 1) + clock) / 3)


def data_weight(source_weight: float, quality: float, success: bool, success_weight_bonus: float) -> float:
    """source * quality * bonus; an average quality of 0.5 is neutral"""
    return source_weight * (0.5 + quality) * (success_weight_bonus if success else 1.0)


def load_offline_data(args: Args, env: ControlEnv, specs) -> tuple[dict[str, np.ndarray], list[str]]:
    """All sources as rows of a buffer (actions in [-1,1], rewards scaled, weights), plus a line about each."""
    sources, trajectories = {}, []
    for spec in specs:
        name, equals, path = spec.partition("=")  # at the first one: a path may hold more of them
        if not equals or "/" in name:  # no name, but a path, perhaps of a folder such as lr=0.1
            name, path = "demos", spec
        name = name or "demos"
        head, _, tail = path.rpartition(":")
        weight = {"demos": args.demo_weight, **SOURCE_WEIGHTS}.get(name, 1.0)
        with contextlib.suppress(ValueError):
            path, weight = (head, float(tail)) if head and math.isfinite(float(tail)) else (path, weight)
        if not weight > 0:
            fail(f"--offline-data {spec} is not allowed: the weight must be a positive number")
        if not path:
            fail(f"--offline-data {spec} is not allowed: it must be [name=]path[:weight]")
        sources.setdefault(name, []).append((read_source(path, env), weight))
    for name, files in sources.items():
        for columns, weight in files:
            for rows in episode_slices(columns):
                episode = {key: column[rows] for key, column in columns.items()}
                terminated, rewards = bool(episode["terminations"][-1]), episode["rewards"]
                # no file says what success is: an episode that ended by itself on its largest, positive reward
                success = terminated and rewards[-1] > 0 and rewards[-1] == rewards.max()
                trajectories.append(episode | dict(name=name, weight=weight, terminated=terminated, success=success))
    totals = [float(t["rewards"].sum()) for t in trajectories]
    bounds, longest = (min(totals), max(totals)), max(len(t["rewards"]) for t in trajectories)
    parts = []
    for number, t in enumerate(trajectories):
        size = len(t["rewards"])
        t["quality"] = compute_data_quality(t, bounds, longest)
        weight = data_weight(t["weight"], t["quality"], t["success"], args.success_weight_bonus)
        rewards = t["rewards"] * np.float32(args.reward_scale)
        parts.append(dict(
            obs=t["obs"], actions=((t["actions"] - env.center) / env.scale).clip(-1, 1).astype(np.float32),
            rewards=rewards, next_obs=t["next_obs"], masks=1 - t["terminations"], weights=np.full(size, weight),
            quality=np.full(size, t["quality"]), returns=return_to_go(rewards, args.gamma),
            episode=np.full(size, number),
        ))  # fmt: skip
    columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    lines = []
    for name in sources:
        mine = [t for t in trajectories if t["name"] == name]
        means = [np.mean([f(t) for t in mine]) for f in (lambda t: t["rewards"].sum(), lambda t: t["quality"])]
        size = f"{len(mine)} episodes, {sum(len(t['rewards']) for t in mine)} rows, weight {mine[0]['weight']:g}"
        wins = sum(bool(t["success"]) for t in mine)
        lines.append(f"{name}: {size}, return {means[0]:.1f}, quality {means[1]:.2f}, successes {wins}")
    return columns, lines


# --- networks ---
def mlp(in_dim: int, hidden_size: int, out_dim: int, layer_norm: bool) -> nn.Sequential:
    layers = []
    for width in (in_dim, hidden_size):
        norm = [nn.LayerNorm(hidden_size)] if layer_norm else []
        layers += [nn.Linear(width, hidden_size), *norm, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(hidden_size, out_dim))


class Actor(nn.Module):
    """Tanh-normal policy.  (N,F) -> mean (N,C), std (N,C), both before the tanh"""

    def __init__(self, feature_dim: int, action_dim: int, hidden_size: int, layer_norm: bool):
        super().__init__()
        self.net = mlp(feature_dim, hidden_size, 2 * action_dim, layer_norm)

    def forward(self, features):
        mean, log_std = self.net(features).chunk(2, -1)
        return mean, log_std.clamp(math.log(1e-5), math.log(5)).exp()


class Temperature(nn.Module):
    """alpha = softplus(raw), so that it stays positive"""

    def __init__(self, init_alpha: float):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(math.log(math.expm1(init_alpha))))

    def forward(self):
        return F.softplus(self.raw)


class QEnsemble(nn.Module):
    """E critics in batched matrix products.  (N,F), (N,C) -> (E,N)"""

    def __init__(self, num_critics: int, feature_dim: int, action_dim: int, hidden_size: int, layer_norm: bool):
        super().__init__()
        widths = [feature_dim + action_dim, hidden_size, hidden_size, 1]
        self.num_critics, self.layer_norm = num_critics, layer_norm
        self.weights, self.biases, self.scales, self.shifts = (nn.ParameterList() for _ in range(4))
        for i, (fan_in, fan_out) in enumerate(zip(widths, widths[1:], strict=False)):
            bound = fan_in**-0.5  # as in nn.Linear
            self.weights.append(nn.Parameter(torch.empty(num_critics, fan_in, fan_out).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(num_critics, 1, fan_out).uniform_(-bound, bound)))
            if layer_norm and i < 2:
                self.scales.append(nn.Parameter(torch.ones(num_critics, 1, fan_out)))
                self.shifts.append(nn.Parameter(torch.zeros(num_critics, 1, fan_out)))

    def forward(self, features, actions):
        x = torch.cat([features, actions], -1).expand(self.num_critics, -1, -1)  # (E,N,F+C)
        for i in range(2):
            x = torch.baddbmm(self.biases[i], x, self.weights[i])
            if self.layer_norm:
                x = F.layer_norm(x, x.shape[-1:]) * self.scales[i] + self.shifts[i]
            x = x.relu_()
        # a product with one column is slow as a matrix product
        return (x * self.weights[2].mT).sum(-1) + self.biases[2].squeeze(-1)


class Dropout(nn.Module):
    """nn.Dropout with a generator of its own, so that a resumed run continues the same masks"""

    rank, world_size = 0, 1  # under torchrun: the mask of the whole batch is drawn, see WarmupAgent.share

    def __init__(self, rate: float, rng: torch.Generator):
        super().__init__()
        self.rate, self.rng = rate, rng

    def forward(self, x):
        if not self.training:
            return x
        whole = torch.rand(len(x) * self.world_size, *x.shape[1:], generator=self.rng)
        kept = (whole[self.rank :: self.world_size] >= self.rate).to(x)
        return x * kept / (1 - self.rate)


class VectorPolicy(nn.Module):
    """Actor and the statistics that observations are normalised by."""

    def __init__(self, actor: Actor, obs_dim: int):
        super().__init__()
        self.actor = actor
        self.register_buffer("obs_mean", torch.zeros(obs_dim))
        self.register_buffer("obs_std", torch.ones(obs_dim))

    def normalise(self, obs):
        return (obs - self.obs_mean) / self.obs_std

    @torch.no_grad()
    def act(self, obs: np.ndarray, rng: torch.Generator | None = None) -> np.ndarray:
        """A sample (the mean without rng).  (D,) -> (A,) in [-1,1]"""
        mean, std = self.actor(self.normalise(torch.from_numpy(obs).to(self.obs_mean.device).unsqueeze(0)))
        if rng is not None:
            mean = mean + std * torch.randn(mean.shape, generator=rng).to(mean.device)
        return mean.tanh()[0].cpu().numpy()


# --- buffer ---
class UniformReplayBuffer:
    """Rows in preallocated float32 columns; the oldest is overwritten. A row's weight is for the losses."""

    def __init__(self, capacity: int, obs_dim: int, action_dim: int):
        widths = dict(obs=(obs_dim,), actions=(action_dim,), rewards=(), next_obs=(obs_dim,), masks=(), weights=())
        widths |= dict(quality=(), returns=())  # of an online row: 0.5 and -inf, it is not known
        self.columns = {name: np.zeros((capacity, *shape), np.float32) for name, shape in widths.items()}
        self.capacity, self.size, self.at = capacity, 0, 0

    def __len__(self):
        return self.size

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def insert(self, rows: dict):
        """Columns of any length up to the capacity"""
        inds = (self.at + np.arange(len(rows["rewards"]))) % self.capacity
        for name, column in self.columns.items():
            column[inds] = rows[name]
        self.at = (self.at + len(inds)) % self.capacity
        self.size = min(self.capacity, self.size + len(inds))
        return inds

    def sample(self, batch_size: int, beta: float, rng: np.random.Generator):
        """-> row numbers, importance weights before they are divided by their maximum"""
        return rng.integers(0, self.size, batch_size), np.ones(batch_size)

    def update_priorities(self, inds, td_errors):
        pass

    def select_top_k(self, priorities: np.ndarray, k: int):
        """A buffer of just the k rows with the highest priorities; earlier rows win ties."""
        best = np.sort(np.argsort(-priorities, kind="stable")[:k])
        kept = self.like(k)
        kept.insert({name: column[best] for name, column in self.columns.items()})
        return kept, best

    def like(self, capacity: int):
        return type(self)(capacity, self.columns["obs"].shape[1], self.columns["actions"].shape[1])

    def state_dict(self) -> dict:
        filled = {name: torch.from_numpy(column[: self.size]) for name, column in self.columns.items()}
        return dict(columns=filled, size=self.size, at=self.at, capacity=self.capacity)

    def load_state_dict(self, state: dict):
        self.size, self.at = state["size"], state["at"]
        for name, column in self.columns.items():
            column[: self.size] = state["columns"][name].numpy()


class PrioritizedReplayBuffer(UniformReplayBuffer):
    """Proportional prioritized replay (arXiv:1511.05952). priorities holds (|td|+1e-6)^alpha, raised once when set:
    p^alpha and a cumsum over 10^6 rows at each draw would cost more than a gradient step.

    Up to TREE_FROM rows a draw searches a cached cumsum, beyond that a sum tree: node i has the children 2i, 2i+1.
    """

    TREE_FROM = 50_000

    def __init__(self, capacity: int, obs_dim: int, action_dim: int, alpha: float = 0.6, by_weight: bool = False):
        super().__init__(capacity, obs_dim, action_dim)
        self.alpha, self.by_weight, self.max_priority = alpha, by_weight, 1.0
        self.leaves = 1 << (capacity - 1).bit_length() if capacity > self.TREE_FROM else 0
        self.tree = np.zeros(2 * self.leaves)  # float64: float32 sums of 10^6 numbers miss rows
        self.priorities = self.tree[self.leaves : self.leaves + capacity] if self.leaves else np.zeros(capacity)
        self.cumsum = None

    def like(self, capacity: int):
        dims = (self.columns[name].shape[1] for name in ("obs", "actions"))
        return PrioritizedReplayBuffer(capacity, *dims, self.alpha, self.by_weight)

    def set_priorities(self, inds, priorities):
        self.priorities[inds] = priorities
        self.cumsum = None
        if self.leaves:
            nodes = (np.atleast_1d(inds) + self.leaves) >> 1
            while nodes[0]:  # all reach the root at once
                self.tree[nodes] = self.tree[2 * nodes] + self.tree[2 * nodes + 1]
                nodes = nodes >> 1

    def insert(self, rows: dict):
        inds = super().insert(rows)  # not seen yet: at least as urgent as any
        self.set_priorities(inds, self.max_priority * (rows["weights"] if self.by_weight else 1.0))
        return inds

    def find(self, points: np.ndarray) -> np.ndarray:
        """Rows whose share of [0, total) the points fall into; rounding must not lead beyond the last row."""
        if not self.leaves:
            return np.minimum(np.searchsorted(self.cumsum, points, side="right"), self.size - 1)
        nodes = np.ones(len(points), np.int64)
        for _ in range(self.leaves.bit_length() - 1):
            left = self.tree[2 * nodes]
            right = points >= left
            points = points - left * right
            nodes = 2 * nodes + right
        return np.minimum(nodes - self.leaves, self.size - 1)

    def sample(self, batch_size: int, beta: float, rng: np.random.Generator):
        # differs from the design: alpha is not an argument here, it is in what is stored
        if not self.leaves and self.cumsum is None:
            self.cumsum = self.priorities[: self.size].cumsum()
        total = self.tree[1] if self.leaves else self.cumsum[-1]
        inds = self.find(rng.random(batch_size) * total)
        # a source weight in the sampling is meant to bias, so only the priority's share is undone
        own = self.priorities[inds] / (self.columns["weights"][inds] if self.by_weight else 1.0)
        return inds, importance_weights(own / total, self.size, beta)

    def update_priorities(self, inds, td_errors):
        priorities = (np.abs(td_errors).astype(np.float64) + 1e-6) ** self.alpha
        self.max_priority = max(self.max_priority, float(priorities.max()))
        self.set_priorities(inds, priorities * (self.columns["weights"][inds] if self.by_weight else 1.0))

    def select_top_k(self, priorities: np.ndarray, k: int):
        kept, best = super().select_top_k(priorities, k)
        kept.set_priorities(np.arange(k), self.priorities[best])
        kept.max_priority = self.max_priority
        return kept, best

    def state_dict(self) -> dict:
        priorities = torch.from_numpy(self.priorities[: self.size])
        return super().state_dict() | dict(priorities=priorities, max_priority=self.max_priority)

    def load_state_dict(self, state: dict):
        super().load_state_dict(state)
        if self.size:
            self.set_priorities(np.arange(self.size), state["priorities"].numpy())
        self.max_priority = state["max_priority"]


def check_rows(args: Args, env: ControlEnv):
    """Columns are filled lazily: without this a run would be killed hours later."""
    row = 4 * (2 * env.obs_dim + env.action_dim + 5) + 16  # float32 columns, and a priority in its tree
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    check(args.buffer_size * row <= 0.9 * memory, args, "buffer_size", f"at most {int(0.9 * memory / row)}, for memory")


def make_buffer(args: Args, env: ControlEnv, capacity: int) -> UniformReplayBuffer:
    sampling = args.source_weight_in == "sampling"
    if not (args.use_prioritized_replay or sampling):
        return UniformReplayBuffer(capacity, env.obs_dim, env.action_dim)
    alpha = args.priority_alpha if args.use_prioritized_replay else 0.0
    return PrioritizedReplayBuffer(capacity, env.obs_dim, env.action_dim, alpha, by_weight=sampling)


def compute_priorities(buffer: UniformReplayBuffer, by: str, agent) -> np.ndarray:
    """What filter_offline_data ranks rows by.  -> (N,)"""
    if by != "td_error":
        return {"reward": buffer.columns["rewards"], "quality": buffer.columns["quality"]}[by][: buffer.size]
    errors = []
    for inds in np.array_split(np.arange(buffer.size), math.ceil(buffer.size / 4096)):
        q_values, target = agent.judge(gather([(buffer, inds)], agent))
        errors.append((q_values - target).mean(0).abs().cpu().numpy())
    return np.concatenate(errors)


def filter_offline_data(buffer: UniformReplayBuffer, retention_ratio: float = 0.2, by: str = "quality", agent=None):
    """The best rows in arrays of their own: the others are released with the old buffer. At least one is kept."""
    if retention_ratio == 1:
        return buffer
    top_k = max(1, int(len(buffer) * retention_ratio))
    return buffer.select_top_k(compute_priorities(buffer, by, agent), top_k)[0]


def save_filtered_data(args: Args, env: ControlEnv, buffer: UniformReplayBuffer):
    """Retained rows as a data file, in the environment's units, and beside them the buffer's own numbers, exact."""
    rows = {name: column[: buffer.size] for name, column in buffer.columns.items()}
    columns = dict(obs=rows["obs"], next_obs=rows["next_obs"], actions=env.center + env.scale * rows["actions"])
    columns |= dict(rewards=rows["rewards"] / args.reward_scale, terminations=rows["masks"] == 0)
    columns |= dict(truncations=np.zeros(buffer.size, bool))  # not kept: an episode ends where rows do not continue
    columns |= {f"buffer_{name}": rows[name] for name in rows if "obs" not in name}
    if isinstance(buffer, PrioritizedReplayBuffer):
        columns |= dict(priorities=buffer.priorities[: buffer.size], max_priority=buffer.max_priority)
    write_npz(Path(args.filtered_data_path), columns)


def load_filtered_data(args: Args, env: ControlEnv) -> UniformReplayBuffer:
    """What save_filtered_data wrote, or any data file: then all of it, as the source `demos`."""
    path = args.filtered_data_path
    rows = read_source(path, env)
    with np.load(path) if is_npz(path) else contextlib.nullcontext({}) as file:
        extra = {name: file[name] for name in file}
    buffer = make_buffer(args, env, len(rows["rewards"]))
    if "buffer_rewards" not in extra:
        buffer.insert(load_offline_data(args, env, [f"demos={path}"])[0])
        return buffer
    rows |= {name[7:]: column for name, column in extra.items() if name.startswith("buffer_")}
    buffer.insert(rows)
    if isinstance(buffer, PrioritizedReplayBuffer) and "priorities" in extra:
        buffer.set_priorities(np.arange(len(buffer)), extra["priorities"])
        buffer.max_priority = float(extra["max_priority"])
    return buffer


def split_rows(batch_size: int, ratio: float, num_offline: int, num_online: int) -> tuple[int, int]:
    """Rows from (offline, online). What the online buffer lacks comes from offline; an empty buffer gives nothing."""
    if not num_offline or not num_online:
        return (batch_size, 0) if num_offline else (0, batch_size if num_online else 0)
    online = min(batch_size - int(batch_size * ratio), num_online)
    return batch_size - online, online


def gather(parts, agent, order=None) -> dict[str, torch.Tensor]:
    """Rows of one or more buffers as one batch, observations normalised."""
    batch = {}
    for name in parts[0][0].columns:
        arrays = [buffer.columns[name][inds] for buffer, inds in parts]
        array = arrays[0] if order is None else np.concatenate(arrays)[order]
        batch[name] = torch.from_numpy(array).to(agent.device)
    for name in ("obs", "next_obs"):
        batch[name] = agent.policy.normalise(batch[name])
    return batch


def sample_mixed(buffers, split, beta: float, rng: np.random.Generator, agent):
    """Rows of the buffers, shuffled. -> batch, importance weights (N,), and a function that takes back TD errors"""
    draws = [(rb, *rb.sample(n, beta, rng)) for rb, n in zip(buffers, split, strict=True) if n]
    order = rng.permutation(sum(split)) if len(draws) > 1 else None  # one buffer: nothing to mix, no draw
    batch = gather([(rb, inds) for rb, inds, _ in draws], agent, order)
    is_weights = draws[0][2] if order is None else np.concatenate([own for *_, own in draws])[order]
    is_weights = torch.from_numpy(is_weights / is_weights.max()).float()  # one maximum for the rows of both

    def take_back(td_errors: np.ndarray):
        if order is not None:
            td_errors = td_errors[np.argsort(order)]
        at = 0
        for rb, inds, _ in draws:
            rb.update_priorities(inds, td_errors[at : at + len(inds)])
            at += len(inds)

    return batch, is_weights.to(agent.device), take_back


# --- math ---
def tanh_normal(mean, std, noise):
    """Action tanh(u), u = mean + std * noise, and its log density (SAC, arXiv:1812.05905, eq. 26).  -> (N,C), (N,)"""
    u = mean + std * noise
    logprobs = -0.5 * noise**2 - std.log() - 0.5 * math.log(2 * math.pi)
    logprobs = logprobs - 2 * (math.log(2) - u - F.softplus(-2 * u))  # log(1 - tanh(u)^2), finite for every u
    return u.tanh(), logprobs.sum(-1)


def td_target(rewards, masks, next_q_values, gamma, entropy_bonus=0.0):
    """y = r + gamma * mask * (min_e Q(s',a') + entropy_bonus).  (N,), (N,), (E,N) -> (N,)"""
    assert rewards.shape == masks.shape == next_q_values.shape[1:]  # broadcasting hides bugs
    return rewards + gamma * masks * (next_q_values.min(0).values + entropy_bonus)


def polyak(target, source, tau: float):
    """target += tau * (source - target), in place"""
    target.lerp_(source, tau)


def flatten(module: nn.Module) -> torch.Tensor:
    """One vector of which all parameters become views: Adam and Polyak are then one operation, not one per layer."""
    flat, at = nn.utils.parameters_to_vector(module.parameters()).detach().clone(), 0
    for param in module.parameters():
        param.data = flat[at : at + param.numel()].view_as(param)
        at += param.numel()
    return flat


def apply_gradients(loss, *trained) -> bool:
    """One step for each (module, optimizer of its flat vector); none, and False, if a gradient is not finite."""
    params = [list(module.parameters()) for module, _ in trained]
    # autograd.grad, not backward: nothing else collects a gradient, such as the critic in the actor's loss
    grads = iter(torch.autograd.grad(loss, sum(params, []), materialize_grads=True))
    flat = [torch.cat([next(grads).reshape(-1) for _ in own]) for own in params]
    if not math.isfinite(sum(grad.dot(grad) for grad in flat)):
        return False
    for (_, optimizer), grad in zip(trained, flat, strict=True):
        optimizer.param_groups[0]["params"][0].grad = grad
        optimizer.step()
    return True


def offline_ratio_at(step: int, initial: float, decay: float, floor: float) -> float:
    """Offline share of a batch, `step` environment steps after going online"""
    return max(floor, initial * decay**step)


def beta_at(progress: float, beta: float = 0.4) -> float:
    """Exponent of the importance weights: from beta to 1 over the run"""
    return beta + (1 - beta) * min(1.0, progress)


def importance_weights(probabilities, size: int, beta: float):
    """(N P(i))^-beta, not yet divided by the maximum (arXiv:1511.05952, section 3.4)"""
    return (size * probabilities) ** -beta


def batch_weights(*factors):
    """Product over the batch mean: the mean weight is 1, so the learning rate keeps its meaning.  (N,) ... -> (N,)"""
    product = math.prod(factors)
    return product / product.mean()


def weighted_mean(values, weights=None):
    """mean(w * x), weights that average 1 on the last axis; None is the plain mean.  (..., N), (N,) -> ()"""
    return values.mean() if weights is None else (values * weights).mean()


def return_to_go(rewards, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma G_t+1 within one episode. A time limit cuts the sum off.  (T,) -> (T,)"""
    returns, total = np.zeros(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        returns[t] = total = float(rewards[t]) + gamma * total
    return returns


def uniform_log_density(low, high) -> float:
    """Of actions drawn between the environment's own bounds"""
    return -float(np.log(np.asarray(high, np.float64) - low).sum())


def calibrate(q_values, returns, num_uniform: int):
    """Cal-QL (arXiv:2303.05479): the policy's actions are not pushed below the data's return.  (E,N,M), (N,)"""
    uniform, policy = q_values[..., :num_uniform], q_values[..., num_uniform:]
    return torch.cat([uniform, torch.maximum(policy, returns[:, None])], -1)


def conservative_gap(q_values, log_densities, data_q_values):
    """CQL (arXiv:2006.04779): log sum_m exp(Q(s,a_m) - log mu(a_m)) - Q(s,a).  (E,N,M), (N,M), (E,N) -> (E,N)"""
    assert q_values.shape[1:] == log_densities.shape and q_values.shape[:2] == data_q_values.shape
    return torch.logsumexp(q_values - log_densities, -1) - data_q_values


class WarmupAgent:
    """Networks, targets, optimizers and the update rule."""

    NETWORKS = ("policy", "qf", "qf_target", "temperature")
    rank, world_size = 0, 1  # under torchrun each process gets the rows rank, rank + world_size, ... of a batch

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        device="cpu",
        *,
        hidden_size: int = 256,
        layer_norm: bool = True,
        dropout: float = 0.0,
        num_critics: int = 2,
        num_sampled_critics: int = 2,
        lr: float = 3e-4,
        gamma: float = 0.99,
        tau: float = 0.005,
        init_alpha: float = 0.1,
        target_entropy: float | None = None,
        backup_entropy: bool = False,
        cql_num_actions: int = 4,
        action_low=None,
        action_high=None,
        seed: int = 1,
    ):
        self.network_config = dict(obs_dim=obs_dim, action_dim=action_dim, hidden_size=hidden_size)
        self.network_config |= dict(layer_norm=layer_norm, dropout=dropout, num_critics=num_critics)
        self.device, self.lr, self.gamma, self.tau = torch.device(device), lr, gamma, tau
        self.num_sampled_critics, self.backup_entropy = num_sampled_critics, backup_entropy
        self.init_alpha, self.cql_num_actions = init_alpha, cql_num_actions
        self.action_low = -np.ones(action_dim) if action_low is None else action_low
        self.action_high = np.ones(action_dim) if action_high is None else action_high
        self.target_entropy = -0.5 * action_dim if target_entropy is None else target_entropy
        self.dropout_rng = torch.Generator().manual_seed(seed + 2)
        with torch.random.fork_rng(devices=[]):  # initial weights leave the global generator alone
            torch.manual_seed(seed)
            self.build(**self.network_config)
        self.noise_rng = torch.Generator().manual_seed(seed)
        self.updates = self.skipped_steps = self.skipped_in_a_row = 0

    def build(self, obs_dim, action_dim, hidden_size, layer_norm, dropout, num_critics):
        head = (hidden_size, layer_norm)
        self.policy = VectorPolicy(Actor(obs_dim, action_dim, *head), obs_dim).to(self.device)
        if dropout:
            layers = [[x, Dropout(dropout, self.dropout_rng)] if isinstance(x, nn.ReLU) else [x]
                      for x in self.policy.actor.net]  # fmt: skip
            self.policy.actor.net = nn.Sequential(*sum(layers, []))
        self.policy.eval()
        self.qf = QEnsemble(num_critics, obs_dim, action_dim, *head).to(self.device)
        self.qf_target = QEnsemble(num_critics, obs_dim, action_dim, *head).to(self.device).requires_grad_(False)
        self.qf_target.load_state_dict(self.qf.state_dict())
        self.temperature = Temperature(self.init_alpha).to(self.device)
        adam = dict(lr=self.lr, fused=True)
        self.flat_critic, self.flat_target = flatten(self.qf), flatten(self.qf_target)
        self.critic_optimizer = torch.optim.Adam([self.flat_critic], **adam)
        self.actor_optimizer = torch.optim.Adam([flatten(self.policy.actor)], **adam)
        self.alpha_optimizer = torch.optim.Adam([flatten(self.temperature)], **adam)

    def share(self, draw, size, *dims):
        """This process's rows of random numbers for the whole batch, so that all processes draw the same."""
        whole = draw(size * self.world_size, *dims, generator=self.noise_rng)
        return whole[self.rank :: self.world_size].to(self.device)

    def noise(self, like):
        return self.share(torch.randn, *like.shape)

    def bellman(self, batch):
        """-> q_values (E,N), target (N,)"""
        with torch.no_grad():
            mean, std = self.policy.actor(batch["next_obs"])
            next_actions, next_logprobs = tanh_normal(mean, std, self.noise(mean))
            next_q_values = self.qf_target(batch["next_obs"], next_actions)  # (E,N)
            if self.num_sampled_critics < len(next_q_values):  # a random subset, as in REDQ (arXiv:2101.05982)
                chosen = torch.randperm(len(next_q_values), generator=self.noise_rng)[: self.num_sampled_critics]
                next_q_values = next_q_values[chosen.to(self.device)]
            bonus = -self.temperature() * next_logprobs if self.backup_entropy else 0.0
            target = td_target(batch["rewards"], batch["masks"], next_q_values, self.gamma, bonus)
        return self.qf(batch["obs"], batch["actions"]), target

    def cql_loss(self, batch, q_values, calibrated: bool):
        """Mean conservative gap, 0 for online rows. Densities are those of actions in the environment's units."""
        size, k = len(batch["actions"]), self.cql_num_actions
        unit = float(np.log((self.action_high - self.action_low) / 2).sum())
        with torch.no_grad():
            uniform = self.share(torch.rand, size, k, batch["actions"].shape[1]) * 2 - 1
            actions = [uniform]
            logs = [torch.full((size, k), uniform_log_density(self.action_low, self.action_high), device=self.device)]
            for obs in (batch["obs"], batch["next_obs"]):  # both judged at s
                mean, std = (x[:, None].expand(-1, k, -1) for x in self.policy.actor(obs))
                sampled, logprobs = tanh_normal(mean, std, self.noise(mean))
                actions.append(sampled)
                logs.append(logprobs - unit)
        actions, logs = torch.cat(actions, 1), torch.cat(logs, 1)  # (N,M,A), (N,M)
        obs = batch["obs"][:, None].expand(-1, 3 * k, -1)
        all_q = self.qf(obs.flatten(0, 1), actions.flatten(0, 1)).unflatten(1, (size, 3 * k))  # (E,N,M)
        if calibrated:
            all_q = calibrate(all_q, batch["returns"], k)
        # The term holds back what no row has tried. An online row has been tried, and without a return to calibrate
        # it the term would push down just what the policy does now.
        known = batch["returns"] > -math.inf
        return (conservative_gap(all_q, logs, q_values) * known).mean()

    def actor_losses(self, batch, weights=None):
        """-> actor loss, temperature loss, entropy"""
        mean, std = self.policy.actor(batch["obs"])
        actions, logprobs = tanh_normal(mean, std, self.noise(mean))
        q_values = self.qf(batch["obs"], actions).mean(0)  # differs from SAC: mean, not minimum, as RLPD does
        alpha = self.temperature()
        actor_loss = weighted_mean(alpha.detach() * logprobs - q_values, weights)
        alpha_loss = alpha * (-logprobs.detach().mean() - self.target_entropy)  # more entropy than wanted: cool down
        return actor_loss, alpha_loss, -logprobs.detach().mean()

    def weighted_update(
        self, batch: dict, weights=(None, None), full: bool = True, cql_alpha: float = 0.0, calibrated: bool = False
    ) -> dict[str, torch.Tensor]:
        """One update; weights of the critic's and of the actor's rows; `full` includes actor and temperature.

        A non-finite gradient is counted and goes nowhere. -> stats, among them td_errors (N,) for the priorities
        """
        q_values, target = self.bellman(batch)
        td_errors = q_values - target
        critic_loss = weighted_mean(td_errors.square(), weights[0])
        stats = {"critic_loss": critic_loss.detach(), "q_values": q_values.detach().mean()}
        stats["td_errors"] = td_errors.detach().mean(0)
        loss = critic_loss
        if cql_alpha:
            gap = self.cql_loss(batch, q_values, calibrated)
            loss, stats["cql_loss"] = loss + cql_alpha * gap, gap.detach()
        applied = apply_gradients(loss, (self.qf, self.critic_optimizer))
        if full and applied:
            self.policy.train()
            actor_loss, alpha_loss, entropy = self.actor_losses(batch, weights[1])
            self.policy.eval()
            trained = (self.policy.actor, self.actor_optimizer), (self.temperature, self.alpha_optimizer)
            applied = apply_gradients(actor_loss + alpha_loss, *trained)
            stats |= {"actor_loss": actor_loss.detach(), "alpha_loss": alpha_loss.detach(), "entropy": entropy}
            stats["alpha"] = self.temperature().detach()
        if applied:
            polyak(self.flat_target, self.flat_critic, self.tau)
        return self.count(applied, stats)

    @torch.no_grad()
    def judge(self, batch):
        """bellman() outside training: draws from a generator of its own"""
        training, self.noise_rng = self.noise_rng, torch.Generator().manual_seed(0)
        ranks, self.rank, self.world_size = (self.rank, self.world_size), 0, 1  # these rows are not shared out
        q_values, target = self.bellman(batch)
        self.noise_rng, (self.rank, self.world_size) = training, ranks
        return q_values, target

    def distribute(self, rank: int, world_size: int):
        """From now on every gradient is the mean over the processes: that of the whole batch, as in one process."""
        for module in (self, *(x for x in self.policy.modules() if isinstance(x, Dropout))):
            module.rank, module.world_size = rank, world_size

        def average(grad):
            grad = grad.contiguous()
            dist.all_reduce(grad)
            return grad / world_size

        for module in (self.qf, self.policy.actor, self.temperature):
            for param in module.parameters():
                param.register_hook(average)

    def heldout_error(self, batch) -> float:
        """TD error over the variance of its target. Not the bare error: that is least while all values are still 0."""
        q_values, target = self.judge(batch)
        return float((q_values - target).square().mean() / target.var().clamp(min=1e-8))

    def count(self, applied: bool, stats: dict) -> dict:
        self.updates += 1
        self.skipped_steps += not applied
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        return stats if applied else {}

    def networks(self) -> dict[str, torch.Tensor]:
        """A copy of every weight: policy, critics, slow copies, temperature."""
        modules = nn.ModuleDict({name: getattr(self, name) for name in self.NETWORKS})
        return {key: weight.detach().cpu().clone() for key, weight in modules.state_dict().items()}

    def load_networks(self, weights: dict[str, torch.Tensor]):
        nn.ModuleDict({name: getattr(self, name) for name in self.NETWORKS}).load_state_dict(weights)

    def state_dict(self) -> dict:
        optimizers = [x.state_dict() for x in (self.critic_optimizer, self.actor_optimizer, self.alpha_optimizer)]
        counters = [self.updates, self.skipped_steps, self.skipped_in_a_row]
        rngs = dict(noise_rng=self.noise_rng.get_state(), dropout_rng=self.dropout_rng.get_state())
        state = dict(network_config=self.network_config, networks=self.networks(), optimizers=optimizers)
        return state | dict(counters=counters, **rngs)

    def load(self, checkpoint):
        """A path, or what torch.load made of it. Widths come from the file."""
        if isinstance(checkpoint, str | Path):
            checkpoint = load_checkpoint(Path(checkpoint))
        state = checkpoint.get("agent", checkpoint)
        config = state["network_config"]
        for name in ("obs_dim", "action_dim"):
            if config[name] != self.network_config[name]:
                raise ValueError(f"the checkpoint has {name} {config[name]}, this agent {self.network_config[name]}")
        if config != self.network_config:
            self.network_config = config
            self.build(**config)
        self.load_networks(state["networks"])
        optimizers = (self.critic_optimizer, self.actor_optimizer, self.alpha_optimizer)
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
            optimizer.param_groups[0]["lr"] = self.lr  # --stage online may choose another
        self.updates, self.skipped_steps, self.skipped_in_a_row = state["counters"]
        self.noise_rng.set_state(state["noise_rng"])
        self.dropout_rng.set_state(state["dropout_rng"])


# --- rollout ---
class Collector:
    """One environment, its own random numbers, and what it takes to continue an episode."""

    def __init__(self, env: ControlEnv, policy: VectorPolicy, seed: int):
        self.env, self.policy, self.seed = env, policy, seed
        self.act_rng = torch.Generator().manual_seed(seed * 1000)
        self.random_rng = np.random.default_rng([seed, 3])
        self.episode, self.actions, self.obs, self.total = 0, [], None, 0.0

    def reset(self):
        seed = np.random.SeedSequence([self.seed, 4, self.episode]).generate_state(1)[0]
        self.obs, self.total = self.env.reset(int(seed)), 0.0

    def step(self, random: bool) -> tuple[dict, tuple | None]:
        """One transition, by the policy's sample or at random. -> row, (return, length, success) at an episode's end"""
        if self.obs is None:
            self.reset()
        action = self.policy.act(self.obs, self.act_rng) if not random else None
        if random:
            action = self.random_rng.uniform(-1, 1, self.env.action_dim).astype(np.float32)
        self.actions.append(action)
        obs = self.obs
        self.obs, reward, terminated, truncated, success = self.env.step(action)
        self.total += reward
        # a time limit bootstraps from its next_obs, only a termination ends the value
        row = dict(obs=obs, actions=action, rewards=reward, next_obs=self.obs, masks=1.0 - terminated)
        episode = None
        if terminated or truncated:
            episode = (self.total, len(self.actions), success)
            self.obs, self.episode, self.actions = None, self.episode + 1, []
        return row, episode

    def state_dict(self) -> dict:
        rngs = dict(act_rng=self.act_rng.get_state(), random_rng=self.random_rng.bit_generator.state)
        return dict(episode=self.episode, actions=torch.from_numpy(np.array(self.actions, np.float32)), **rngs)

    def load_state_dict(self, state: dict):
        self.act_rng.set_state(state["act_rng"])
        self.random_rng.bit_generator.state = state["random_rng"]
        self.episode, self.actions = state["episode"], list(state["actions"].numpy())
        if self.actions:  # the same seed and the same actions lead to the same place
            self.reset()
            for action in self.actions:
                self.obs, reward, *_ = self.env.step(action)
                self.total += reward


# --- evaluate ---
def evaluate_frozen(policy: VectorPolicy, env: ControlEnv, first_seed: int, num_episodes: int) -> dict[str, float]:
    """The mean action, the same episodes for every run."""
    successes, returns, lengths = [], [], []
    for episode in range(num_episodes):
        obs, done, success = env.reset(first_seed + episode), False, False
        returns.append(0.0)
        lengths.append(0)
        while not done:
            obs, reward, terminated, truncated, success = env.step(policy.act(obs))
            returns[-1] += reward
            lengths[-1] += 1
            done = terminated or truncated
        successes.append(success)
    means = [float(np.mean(values)) for values in (successes, returns, lengths)]
    return dict(zip(("eval/success_rate", "eval/episodic_return", "eval/episodic_length"), means, strict=True))


# --- run folder ---
class Writer:
    """metrics.jsonl, wandb, the progress line. Opens at the first log: a run that fails its checks leaves nothing."""

    def __init__(self, args, run_dir: Path, total: int, enabled: bool = True):
        self.args, self.run_dir, self.enabled = args, run_dir, enabled
        self.opened, self.wandb = False, None
        self.started = time.time()
        self.bar = tqdm(total=total, disable=not (enabled and sys.stderr.isatty()), dynamic_ncols=True)
        self.total, self.every = total, max(1, total // 15)

    def write(self, name: str, text: str, mode: Literal["w", "a"] = "w"):
        """A file of the run folder. A full disk or a folder that cannot be made ends the run with one line."""
        if not self.enabled:
            return
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            with open(self.run_dir / name, mode) as file:
                file.write(text)
        except OSError as error:
            fail(f"cannot write {self.run_dir / name}: {error.strerror}", code=1)

    def log(self, metrics: dict[str, float], global_step: int):
        if not self.enabled:
            return
        if not self.opened:
            self.write("args.json", json.dumps(asdict(self.args), indent=2) + "\n")
            if self.args.track:
                import wandb

                whose = dict(project=self.args.wandb_project_name, entity=self.args.wandb_entity)
                self.wandb = wandb.init(**whose, name=self.run_dir.name, config=asdict(self.args), dir=self.run_dir)
            self.opened = True
        row = {"global_step": global_step, "time": round(time.time() - self.started, 3)}
        row |= {key: value if math.isfinite(value) else None for key, value in metrics.items()}  # JSON knows no NaN
        self.write("metrics.jsonl", json.dumps(row) + "\n", "a")
        if self.wandb:
            self.wandb.log(metrics, step=global_step)

    def status(self, line: str, done: int):
        """The numbers a person watches: behind the bar on a terminal, else a plain line now and then."""
        self.bar.set_postfix_str(line, refresh=False)
        self.bar.update(done - self.bar.n)
        if self.enabled and self.bar.disable and (done % self.every == 0 or done == self.total):
            print(f"[{done}/{self.total}] {line}", flush=True)

    def close(self, summary: dict, curves: list[str]):
        self.bar.close()
        if not self.enabled:
            return
        self.write("summary.json", json.dumps(summary, indent=2) + "\n")
        plot_curves(self.run_dir, curves)
        if self.wandb:
            self.wandb.finish()


def plot_curves(run_dir: Path, keys: list[str]):
    """curves.png: one panel per key of metrics.jsonl, against global_step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(12, 2.8 * math.ceil(len(keys) / 3)), layout="tight")
    for i, key in enumerate(keys, 1):
        axis = figure.add_subplot(math.ceil(len(keys) / 3), 3, i)
        points = [(row["global_step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o" if len(points) < 12 else None)
        axis.set_title(key, fontsize=10)
        axis.grid(alpha=0.3)
    FigureCanvasAgg(figure).print_png(run_dir / "curves.png")


def pick_device(name: str) -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind in available if available[kind])
    if not available[name]:
        fail(f"--device {name} is not available here; allowed: auto, {', '.join(k for k in available if available[k])}")
    return torch.device(name)


def save_checkpoint(path: Path, state: dict):
    """Whole or not at all: temporary file, fsync, rename. A kill at any moment leaves the previous checkpoint good."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # the rename itself must survive a power cut, too
        os.close(folder)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        temporary.unlink(missing_ok=True)
        fail(f"cannot write checkpoint {path}: {str(error).splitlines()[0]}; what was saved before is intact", code=1)


def load_checkpoint(path: Path) -> dict:
    """Tensors and plain values only: a checkpoint from somebody else cannot run code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        fail(f"checkpoint {path} does not exist")
    except Exception as error:  # truncated zip, foreign pickle, wrong magic: many types, one meaning
        fail(f"checkpoint {path} is damaged or not one of ours: {(str(error) or repr(error)).splitlines()[0]}")


class StopSignal:
    """SIGINT or SIGTERM: finish what is under way, save, end. The second one ends at once."""

    def __init__(self):
        self.received = None
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(self, number, frame):
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        print(f"{signal.Signals(number).name}: finishing this step, then saving; again: end now", file=sys.stderr)

    def restore(self):
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def init_distributed(device: torch.device) -> tuple[int, int, torch.device]:
    """Rank, number of ranks and this rank's device; (0, 1, device) without torchrun."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    atexit.register(dist.destroy_process_group)
    if dist.get_rank() > 0:
        sys.stdout = open(os.devnull, "w")  # one voice is enough
    return dist.get_rank(), dist.get_world_size(), device


def sum_over_ranks(stats: dict, world_size: int, device) -> dict:
    if world_size == 1:
        return stats
    values = torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in stats.values()])
    dist.all_reduce(values)
    return dict(zip(stats, values, strict=True))


def keep_memory():
    """glibc gives blocks over 128 kB back to the kernel at once and asks again: half the time of a small conv net."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**28)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def newest_checkpoint(args: Args) -> Path | None:
    """What --resume means: a file, or for auto the highest step of this run or of the last of this name and seed."""
    if args.resume != "auto" and not (args.resume and Path(args.resume).is_dir()):
        return Path(args.resume) if args.resume else None
    runs = sorted(Path("runs").glob(f"{args.exp_name}__{args.seed}__*"), key=lambda path: path.stat().st_mtime)
    folders = [run / "checkpoints" for run in reversed(runs)]  # the newest may have been killed before it saved
    if args.resume != "auto":
        folders = [Path(args.resume), Path(args.resume) / "checkpoints"]
    elif args.save_dir or args.run_dir:
        folders = [Path(args.save_dir or Path(args.run_dir) / "checkpoints")]
    for folder in folders:
        found = [path for path in folder.glob("checkpoint_*.pth") if path.stem[11:].isdigit()]
        if found:
            return max(found, key=lambda path: int(path.stem[11:]))
    if args.resume != "auto":
        fail(f"--resume {args.resume}: there is no checkpoint in this folder")
    print(f"nothing to resume in {', '.join(map(str, folders)) or 'runs/'}: starting fresh", flush=True)
    return None


def check_folder(option: str, folder: Path):
    """A folder that cannot be made is found now, not when the first checkpoint is due."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        fail(f"--{option} {folder} is not allowed: {there} is not a folder that can be written to")


def check_same_run(args: Args, saved: dict, path: Path):
    """A resumed run may be longer or log more often; whatever else differs would make it another run.

    What is spread over the length of a run (priority_beta's way to 1) is then spread over the new length.
    """
    free = "run_dir save_dir resume max_steps save_every save_buffers device num_threads log_interval track".split()
    free += ["online_steps", "wandb_project_name", "wandb_entity", "exp_name", "report_episodes", "test", "create_data"]
    for name, value in asdict(args).items():
        if name not in saved:
            fail(f"--resume {path} is not a checkpoint of this script: it has no {name}")
        if name not in free and saved[name] != value:
            option = f"--{name.replace('_', '-')} {value}"
            fail(f"{option} is not allowed: it must be {saved[name]} as in the checkpoint {path}")


def cut_back(path: Path, global_step: int):
    """Drop the rows of metrics.jsonl that the resumed run will write again, and a half-written last one."""
    if path.exists():
        rows = [line for line in path.read_text().splitlines() if line.endswith("}")]
        rows = [line for line in rows if json.loads(line)["global_step"] <= global_step]
        path.with_suffix(".tmp").write_text("".join(row + "\n" for row in rows))
        os.replace(path.with_suffix(".tmp"), path)  # killed here, too, nothing is lost


def drop_later(folder: Path, step: int):
    """Delete what was saved after the resumed step: auto would take that branch, which is given up, for the newest.

    Lowest first, buffers last: killed on the way, the newest of it is still whole, with its metrics, or none is left.
    """
    for kind in ("checkpoint", "buffers"):
        steps = {path: path.stem[len(kind) + 1 :] for path in folder.glob(f"{kind}_*.pth")}
        later = {path: int(number) for path, number in steps.items() if number.isdigit() and int(number) > step}
        for path in sorted(later, key=later.get):
            path.unlink()
            print(f"dropped {path}, saved after step {step}", flush=True)


# --- main ---
def main(args: Args, alone: bool = False) -> dict[str, float]:
    """`alone`: not with the other processes of torchrun, as the run that makes demos"""
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    keep_memory()
    device = pick_device(args.device)
    rank, world_size, device = (0, 1, device) if alone else init_distributed(device)
    shared = f"a multiple of the {world_size} processes"
    check(args.batch_size % world_size == 0, args, "batch_size", shared)
    env = ControlEnv(args.env_id)
    check_rows(args, env)
    if args.make_data:
        folder = Path(args.data_dir or f"data/{args.env_id}")
        for line in load_offline_data(args, env, make_sources(args, env, folder))[1]:
            print(f"{folder}: {line}")
        return {}
    started = [int(time.time())]
    if world_size > 1:
        dist.broadcast_object_list(started)
    checkpoint_path = newest_checkpoint(args)
    saved = load_checkpoint(checkpoint_path) if checkpoint_path else None
    if saved is not None and not (isinstance(saved, dict) and "run_dir" in saved):
        fail(f"--resume {checkpoint_path} holds a policy, not a run: a checkpoint_*.pth is needed")
    run_dir = args.run_dir or (saved["run_dir"] if saved else None)
    run_dir = Path(run_dir or f"runs/{args.exp_name}__{args.seed}__{started[0]}")
    save_dir = Path(args.save_dir or run_dir / "checkpoints")
    goes_on = args.resume and (saved is None or checkpoint_path.resolve().parent == save_dir.resolve())
    if rank == 0 and not goes_on and (run_dir / "metrics.jsonl").exists():
        fail(f"--run-dir {run_dir} holds a run already: choose another folder")
    for name, folder in (("run-dir", run_dir), ("save-dir", save_dir)):
        check_folder(name, folder)
    for name in ("checkpoint_path", "filtered_data_path") if args.stage != "online" else ():
        if getattr(args, name) is not None:
            check(not Path(getattr(args, name)).is_dir(), args, name, "a file, not a folder")
            check_folder(name.replace("_", "-"), Path(getattr(args, name)).parent)
    if saved:
        check_same_run(args, saved["args"], checkpoint_path)
    elif args.resume and rank == 0:
        cut_back(run_dir / "metrics.jsonl", -1)  # killed before its first checkpoint
    handed_over = load_checkpoint(Path(args.checkpoint_path)) if args.stage == "online" and not saved else None
    fixed = ("env_id", "offline_steps", "reward_scale", "gamma", "hidden_size", "num_critics", "layer_norm", "dropout")
    if handed_over is not None:
        theirs = handed_over.get("args", {}) if isinstance(handed_over, dict) else {}
        if "offline_steps" not in theirs or handed_over.get("step") != theirs["offline_steps"]:
            fail(f"--checkpoint-path {args.checkpoint_path} is not what --stage offline leaves there")
        for name in fixed:
            same = f"{theirs[name]} as in {args.checkpoint_path}"
            check(getattr(args, name) == theirs[name], args, name, same)
    options = "hidden_size layer_norm dropout num_critics num_sampled_critics lr gamma tau init_alpha target_entropy"
    options = {name: getattr(args, name) for name in (options + " backup_entropy cql_num_actions seed").split()}
    bounds = dict(action_low=env.low, action_high=env.high)
    agent = WarmupAgent(env.obs_dim, env.action_dim, device, **options, **bounds)
    collector = Collector(ControlEnv(args.env_id), agent.policy, args.seed)
    online_rb = make_buffer(args, env, args.buffer_size)
    sample_rng = np.random.default_rng([args.seed, 5])  # one per purpose: more draws of one leave the other alone
    augment_rng = torch.Generator().manual_seed(args.seed + 1)
    last_step = args.offline_steps + (args.online_steps if args.stage != "offline" else 0)
    # of the early stop: held-out rows, best error, checks since, best weights
    heldout, best_error, stale_checks, best = None, math.inf, 0, None
    step, original_bytes = 0, 0
    episodes = deque(maxlen=20)  # (return, length, success) of the last training episodes
    sums, counts = {}, {}  # metric -> sum and number since the last log line; tensors: nothing waits for the device

    uses_data = args.offline_steps > 0 or args.retention_ratio > 0
    offline_rb = None
    if saved or handed_over:
        state = saved or handed_over
        agent.load(state)
        sample_rng.bit_generator.state, step = state["sample_rng"], state["step"]
        augment_rng.set_state(state["augment_rng"])
        collector.load_state_dict(state["collector"])
        best_error, stale_checks, best, heldout = state["early_stop"]
        episodes.extend(state["episodes"])
        sums, counts, original_bytes = state["sums"], state["counts"], state["original_bytes"]
        online_rb.load_state_dict(state["online_rb"])
        if handed_over and args.retention_ratio:  # the rows come from the file; what is not in it from the checkpoint
            offline_rb = load_filtered_data(args, env)
        elif state["offline_rb"]:
            offline_rb = make_buffer(args, env, state["offline_rb"]["capacity"])
            offline_rb.load_state_dict(state["offline_rb"])
        if saved and rank == 0:
            if checkpoint_path.parent.resolve() == save_dir.resolve():
                drop_later(save_dir, step)
            cut_back(run_dir / "metrics.jsonl", step)
            print(f"resumed {checkpoint_path}: step {step}, {agent.updates} updates", flush=True)
    elif uses_data:
        if rank > 0:
            dist.barrier()  # the first process makes the files, the others find them
        specs = args.offline_data or make_sources(args, env, Path(args.data_dir or run_dir / "data"))
        if rank == 0 and world_size > 1:
            dist.barrier()
        columns, lines = load_offline_data(args, env, specs)
        print("\n".join(lines), flush=True)
        number, held = columns.pop("episode"), np.zeros(len(columns["rewards"]), bool)
        if args.early_stop_patience and args.offline_steps:
            chosen = np.random.default_rng([args.seed, 6]).permutation(number[-1] + 1)
            held = np.isin(number, chosen[: max(1, int(len(chosen) * args.holdout_ratio))])
            if held.all():
                fail(f"--holdout-ratio {args.holdout_ratio} is not allowed: it leaves none of {len(chosen)} episodes")
            heldout = {name: torch.from_numpy(np.asarray(column[held], np.float32)) for name, column in columns.items()}
        if args.source_weight_in == "sampling":
            columns["weights"] = columns["weights"] / columns["weights"].mean()
        offline_rb = make_buffer(args, env, int((~held).sum()))
        offline_rb.insert({name: column[~held] for name, column in columns.items()})
        original_bytes = offline_rb.nbytes
        mean, std = columns["obs"].mean(0), columns["obs"].std(0)
        agent.policy.obs_mean.copy_(torch.from_numpy(mean))
        agent.policy.obs_std.copy_(torch.from_numpy(np.where(std < 1e-6, 1.0, std)))
        del columns
    else:  # no statistics before the first step: the bounds of the space, where it has some
        space = env.env.observation_space
        finite = np.isfinite(space.low) & np.isfinite(space.high) & (space.high - space.low < 1e6)
        low, high = np.where(finite, space.low, -1.0), np.where(finite, space.high, 1.0)
        agent.policy.obs_mean.copy_(torch.from_numpy((high + low) / 2))
        agent.policy.obs_std.copy_(torch.from_numpy((high - low) / 2))

    resolved = PRESETS["wsrl"].keys() | TASKS["Pendulum-v1"].keys()
    table = "  ".join(f"{name} {getattr(args, name)}" for name in sorted(resolved))
    print(f"preset {args.preset}: {table}")
    paper = "RLPD (2302.02948)" if args.preset == "rlpd" else "WSRL (2412.07762)"
    print(f"departures from the paper, {paper}: {'; '.join(departures(args)) or 'none'}", flush=True)
    if args.preset == "design":  # why: see PRESETS
        print(f"departures from the design document: {'; '.join(departures(args, DESIGN)) or 'none'}", flush=True)

    def go_online():
        """Keep what is worth keeping; the arrays of the rest are released."""
        if offline_rb is None or not args.retention_ratio:
            return None
        return filter_offline_data(offline_rb, args.retention_ratio, args.retention_by, agent)

    def save(path: Path, offline_rows: bool = True):
        if rank > 0:
            return
        state = dict(agent=agent.state_dict(), collector=collector.state_dict(), online_rb=online_rb.state_dict())
        state |= dict(offline_rb=offline_rb.state_dict() if offline_rows and offline_rb is not None else None)
        state |= dict(sample_rng=sample_rng.bit_generator.state, augment_rng=augment_rng.get_state(), step=step)
        state |= dict(early_stop=[best_error, stale_checks, best, heldout], episodes=list(episodes), sums=sums)
        state |= dict(counts=counts, original_bytes=original_bytes, args=asdict(args), run_dir=str(run_dir))
        save_checkpoint(path, state)

    if world_size > 1:
        agent.distribute(rank, world_size)
    writer = Writer(args, run_dir, total=last_step, enabled=rank == 0)
    metrics, scores = {}, {}
    if step == 0:
        if args.offline_steps == 0:
            offline_rb = go_online()
        scores = evaluate_frozen(agent.policy, env, 10_000, args.eval_episodes)
        writer.log(scores | {"charts/env_steps": 0}, 0)
    start_time, start_step, start_updates = time.time(), step, agent.updates
    rollout_time = update_time = all_updates_time = 0.0  # the first two: seconds since the last log line
    stop_signal = StopSignal()
    while step < last_step:
        step += 1
        env_steps = max(0, step - args.offline_steps)

        # 1 collect
        rollout_start = time.time()
        num_updates, ratio = 1, 1.0
        if env_steps:
            row, episode = collector.step(random=env_steps <= args.learning_starts)
            row["rewards"] *= args.reward_scale
            row |= dict(weights=1.0, quality=0.5, returns=-math.inf)
            online_rb.insert({name: np.asarray(value)[None] for name, value in row.items()})
            if episode:
                episodes.append(episode)
            idle = max(args.warmup_rollout_steps, args.learning_starts)
            num_updates = args.utd_ratio if env_steps > idle else 0
            schedule = (args.initial_offline_ratio, args.offline_decay_rate, args.min_offline_ratio)
            ratio = offline_ratio_at(env_steps, *schedule)

        # 2 update
        update_start = time.time()
        rollout_time += update_start - rollout_start
        for i in range(num_updates):
            beta = beta_at(step / (args.offline_steps + args.online_steps), args.priority_beta)
            num_offline = len(offline_rb) if offline_rb is not None and ratio else 0
            split = split_rows(args.batch_size, ratio, num_offline, len(online_rb))
            batch, is_weights, take_back = sample_mixed((offline_rb, online_rb), split, beta, sample_rng, agent)
            if args.obs_noise and not env_steps:
                for name in ("obs", "next_obs"):
                    noise = torch.randn(batch[name].shape, generator=augment_rng).to(device)
                    batch[name] = batch[name] + args.obs_noise * noise
            critic_factors = [is_weights] if args.use_prioritized_replay else []
            actor_factors = []  # not the importance weights: the actor fits no target
            if args.source_weight_in == "loss" and split[0]:
                critic_factors += [batch["weights"]] if args.weighted_loss != "none" else []
                actor_factors += [batch["weights"]] if args.weighted_loss == "both" else []
            weights = [batch_weights(*factors) if factors else None for factors in (critic_factors, actor_factors)]
            rows = {name: column[rank::world_size] for name, column in batch.items()}
            weights = [own if own is None else own[rank::world_size] for own in weights]
            cql_alpha = args.online_cql_alpha if env_steps else args.cql_alpha
            conservative = dict(cql_alpha=cql_alpha * (args.offline_objective != "sac"))
            conservative["calibrated"] = args.offline_objective == "calql"
            stats = agent.weighted_update(rows, weights, full=i == num_updates - 1, **conservative)
            td_errors = stats.pop("td_errors", None)
            if world_size > 1 and stats:
                summed = sum_over_ranks(stats, world_size, device)
                stats = {name: value / world_size for name, value in summed.items()}
            if td_errors is not None and args.use_prioritized_replay:
                if world_size > 1:
                    parts = [torch.empty_like(td_errors) for _ in range(world_size)]
                    dist.all_gather(parts, td_errors)
                    td_errors = torch.stack(parts, 1).flatten()  # back in the order of the batch
                take_back(td_errors.cpu().numpy())
            stats["offline_frac"] = split[0] / args.batch_size
            for name, value in stats.items():
                sums[name], counts[name] = sums.get(name, 0) + value, counts.get(name, 0) + 1
            if agent.skipped_in_a_row >= args.max_skipped_steps:
                fail(f"{agent.skipped_in_a_row} gradients in a row were not finite (step {step})", code=1)
        update_time += time.time() - update_start

        # 3 go online
        if heldout and not env_steps and (step % args.early_stop_every == 0):
            batch = {name: column.to(device) for name, column in heldout.items()}
            batch |= {name: agent.policy.normalise(batch[name]) for name in ("obs", "next_obs")}
            error = agent.heldout_error(batch)
            sums["heldout_error"], counts["heldout_error"] = error, 1
            if error < best_error:
                best_error, stale_checks, best = error, 0, agent.networks()
            else:
                stale_checks += 1
            if stale_checks >= args.early_stop_patience:
                print(f"early stop after {step} offline updates: held-out error {error:.3f}, best {best_error:.3f}")
                step = args.offline_steps
        if step == args.offline_steps:
            if best is not None:
                agent.load_networks(best)
                best = heldout = None
            take_back = None  # it holds the old buffer
            offline_rb = go_online()

        # 4 log
        if step % args.log_interval == 0 or step == last_step:
            all_updates_time += update_time
            metrics = {f"losses/{name}": float(sums[name]) / counts[name] for name in sums if name != "offline_frac"}
            if "offline_frac" in sums:
                metrics["buffer/offline_frac"] = sums["offline_frac"] / counts["offline_frac"]
            sums, counts = {}, {}
            metrics |= {
                "losses/skipped_steps": agent.skipped_steps,
                "buffer/online_size": len(online_rb),
                "buffer/offline_size": len(offline_rb) if offline_rb is not None else 0,
                "buffer/offline_bytes": offline_rb.nbytes if offline_rb is not None else 0,
                "charts/env_steps": env_steps,
                "charts/episodes": collector.episode,
                "charts/updates": agent.updates,
                "charts/SPS": (step - start_step) / (time.time() - start_time),
                "charts/UPS": (agent.updates - start_updates) / max(1e-9, all_updates_time),
                "time/rollout": rollout_time,
                "time/update": update_time,
            }
            rollout_time = update_time = 0.0
            if episodes:
                names = ("charts/episodic_return", "charts/episodic_length", "charts/success_rate")
                metrics |= dict(zip(names, [float(x) for x in np.mean(episodes, 0)], strict=True))
            writer.log(metrics, step)

        # 5 evaluate
        if step in (args.offline_steps, last_step) or (args.eval_every and step % args.eval_every == 0):
            scores = evaluate_frozen(agent.policy, env, 10_000, args.eval_episodes)
            writer.log(scores | {"charts/env_steps": env_steps}, step)
        stage = f"online {env_steps}" if env_steps else "offline"
        found = f" return {scores['eval/episodic_return']:.1f}" if scores else ""  # none yet after a resume
        writer.status(stage + found, done=step)

        # 6 save; what is handed over comes first: after the checkpoint of the last step nothing would write it again
        if step == args.offline_steps and args.stage != "online":
            if args.filtered_data_path and offline_rb is not None and rank == 0:
                save_filtered_data(args, env, offline_rb)
            if args.checkpoint_path:
                save(Path(args.checkpoint_path), offline_rows=not args.filtered_data_path)
        stopping = sum_over_ranks({"stop": stop_signal.received is not None}, world_size, device)["stop"] > 0
        if (args.save_every and step % args.save_every == 0) or step == last_step or stopping:
            save(save_dir / f"checkpoint_{step}.pth")
            numbered = [path for path in save_dir.glob("checkpoint_*.pth") if path.stem[11:].isdigit()]
            for path in sorted(numbered, key=lambda path: int(path.stem[11:]))[:-2] if rank == 0 else ():
                path.unlink()
        if stopping:
            break
    stop_signal.restore()

    seconds = round(time.time() - start_time, 1)
    if step < last_step:
        writer.bar.close()
        where = f"--run-dir {run_dir}" + (f" --save-dir {save_dir}" if args.save_dir else "")
        print(f"saved {save_dir / f'checkpoint_{step}.pth'}; --resume auto {where} continues it")
        return metrics
    metrics |= scores or evaluate_frozen(agent.policy, env, 10_000, args.eval_episodes)  # resumed at its end: none yet
    if rank == 0:
        save_checkpoint(save_dir / "final_model.pth", dict(agent=agent.state_dict(), args=asdict(args)))
    kept = offline_rb.nbytes if offline_rb is not None else 0
    summary = {"global_step": step, "updates": agent.updates, "seconds": seconds, "departures": departures(args)}
    summary |= {"offline_bytes": original_bytes, "retained_bytes": kept}
    curves = ["eval/episodic_return", "eval/success_rate", "charts/episodic_return"]
    curves += ["losses/q_values", "losses/critic_loss", "losses/alpha"]
    writer.close(summary | metrics, curves)
    env.env.close()
    collector.env.env.close()
    work = f"{step - start_step} steps, {agent.updates - start_updates} updates in {seconds} s"
    print(f"{work}; offline data held: {original_bytes / 1e6:.2f} MB, then {kept / 1e6:.2f} MB")
    rate = f"success {metrics['eval/success_rate']:.2f}"
    print(f"eval/episodic_return {metrics['eval/episodic_return']:.1f}, {rate}: {save_dir}/final_model.pth")
    return metrics


if __name__ == "__main__":
    main(parse_args(Args))
