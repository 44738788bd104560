# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "tyro==1.0.16",
#     "tqdm==4.70.1", "matplotlib==3.11.2", "wandb==0.31.0"]
# ///
"""wsrl_warmup.py - SAC warmed up on offline data, fine-tuned online.

WSRL (arXiv:2412.07762): pre-train offline, act with the frozen policy for a while, then learn
online without the data. The design this script started from does something else: weighted losses,
prioritized replay, the best data kept, an offline share that decays. --preset takes either, RLPD
(arXiv:2302.02948), cloning or SAC from scratch.
    offline: sources -> weighted SAC, CQL, Cal-QL or BC | keep the best | online: act, mix, update
Adds to the SAC core, which is word for word that of sac_hybrid.py (markers in the code):
    warm-up: weights       - of source, quality, success and importance, in both losses
    warm-up: conservative  - CQL (arXiv:2006.04779), Cal-QL (arXiv:2303.05479)
    warm-up: cloning       - regression on the data's actions, and what is kept of it online
    warm-up: replay        - prioritized (arXiv:1511.05952), retention, decaying offline share
Simplified on purpose: one process, one environment, vector observations.
Shapes: N rows, D observation dims, A action dims, E critics, M actions of the CQL term.

    python wsrl_warmup.py                     # Pendulum from poor data, no demos: a minute on a CPU
    python wsrl_warmup.py --preset bc         # the same from a clone
    python wsrl_warmup.py --offline-data demos=a.npz:2.0 --offline-data demos=b.pkl
    python wsrl_warmup.py --stage offline --checkpoint-path warm.pth --filtered-data-path kept.pth
    python wsrl_warmup.py --checkpoint-path warm.pth --filtered-data-path kept.pth  # goes on
"""

import copy
import io
import json
import math
import os
import pickle
import pickletools
import re
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from tyro.conf import UseAppendAction, arg

# What a preset makes of an option that is left out. The design's document keeps the best 20 % of
# the data, which can cost the warm policy: here it is half.
OPTIONS = """offline_objective offline_steps warmup_rollout_steps learning_starts retention_ratio
    initial_offline_ratio offline_decay_rate min_offline_ratio num_critics utd_ratio
    use_prioritized_replay weighted_loss""".split()
PRESETS = {
    "design": ("sac", 1_500, 0, 0, 0.5, 1.0, 0.999, 0.5, 2, 1, True, "both"),
    "wsrl": ("calql", 1_500, 5_000, 0, 0.0, 0.0, 1.0, 0.0, 10, 4, False, "none"),
    "rlpd": ("sac", 0, 0, 200, 1.0, 0.5, 1.0, 0.5, 10, 20, False, "none"),
    "scratch": ("sac", 0, 0, 200, 0.0, 0.0, 1.0, 0.0, 2, 1, False, "none"),
    # cloning, then half of each batch from the data: the baseline to beat (arXiv:2603.27400)
    "bc": ("bc", 1_500, 0, 0, 1.0, 0.5, 1.0, 0.5, 2, 1, False, "none"),
}
WATCHED = """losses/critic_loss losses/actor_loss losses/alpha_loss losses/alpha
    buffer/offline_frac eval/episodic_return""".split()


# --- args ---
SOURCES = ("demos", "suboptimal", "random")
Steps = Annotated[int | None, arg(aliases=["--warmup-steps"])]  # the design document's name
Files = Annotated[UseAppendAction[tuple[str, ...]], arg(aliases=["--offline-data-path"])]


@dataclass
class Args:
    # run
    seed: int = 1  # decides initial weights, data, sampling and shuffling; not the evaluation
    device: str = "auto"  # cpu, cuda, mps, ... (auto: cpu for built-in tasks, else an accelerator)
    num_threads: int = 1  # of torch on a CPU; tiny models are fastest with 1
    run_dir: str | None = None  # a new folder (None: runs/{script}__{seed}__{time})
    exp_name: str | None = None  # in the place of {script} there
    resume: bool = False  # go on with run_dir, or start it if there is nothing yet
    save_every: int = 10_000  # steps, off- or online, between checkpoints; the last is saved anyway
    eval_every: int = 250  # steps between evaluations of the policy (0: at the switch and the end)
    eval_episodes: int = 10  # of each, the same ones each time
    log_interval: int = 100  # steps between lines of metrics.jsonl
    track: bool = False  # also log to wandb (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "stale-experience"  # where the runs of wandb are gathered
    preset: Literal["design", "wsrl", "rlpd", "scratch", "bc"] = "design"  # fills what is left out
    stage: Literal["offline", "online", "both"] | None = None  # None: online after checkpoint_path
    learner: bool = False  # the design document's way to say --stage online
    checkpoint_path: str | None = None  # the warm-up's result; goes on from it if it is there
    filtered_data_path: Annotated[str | None, arg(aliases=["--demo-path"])] = None  # rows it kept
    # task
    env_id: str = "Pendulum-v1"  # Gymnasium id; observations are flattened, actions a bounded Box
    offline_data: Files = ()  # [name=]path[:weight] of .npz, .pkl or minari:ID (none: see sources)
    sources: tuple[Literal[SOURCES], ...] = SOURCES[1:]  # made here if there is no offline_data
    make_data: bool = False  # only write the three sources to data_dir, then end
    data_dir: str | None = None  # keeps the sources made here; existing ones are used
    data_size: int = 4_000  # transitions of each source made here, rounded up to whole episodes
    demo_weight: float = 2.0  # of the source named demos (suboptimal 1, random 0.5, others 1)
    success_weight_bonus: float = 1.5  # factor on the weight of rows of successful episodes
    reward_scale: float = 0.1  # in the learner only; goes with init_alpha and cql_alpha
    # model
    hidden_size: int = 64  # width of actor and critics; 256 for a robot
    layer_norm: bool = True  # LayerNorm in actor and critics
    dropout: float = 0.0  # share of hidden units of the actor dropped in its update
    # rollout
    offline_steps: Steps = None  # updates before the first env step (preset; a robot: 50000)
    warmup_rollout_steps: int | None = None  # by the frozen policy, the paper's warm-up (preset)
    online_steps: int = 2_000  # environment steps after those
    learning_starts: int | None = None  # of them at random, without an update (preset)
    # optimization
    batch_size: int = 256  # rows of an update
    lr: float = 1e-3  # Adam, for actor, critics and temperature
    obs_noise: float = 0.0  # offline augmentation, in standard deviations of the observations
    early_stop_patience: int = 0  # checks without a better held-out error, 20 in a warm-up (0: off)
    # SAC
    gamma: float = 0.99  # discount per step
    tau: float = 0.01  # share of the new weights in the targets
    utd_ratio: int | None = None  # updates per online step; the last includes the actor (preset)
    num_critics: int | None = None  # ensemble size (preset)
    num_sampled_critics: int = 2  # critics drawn for the minimum in the target
    init_alpha: float = 0.1  # temperature at the start
    backup_entropy: bool = False  # entropy bonus in the critic's target
    offline_objective: Literal["sac", "cql", "calql", "bc"] | None = None  # of the warm-up (preset)
    cql_alpha: float = 1.0  # weight of the conservative term; 0 is sac
    online_cql_alpha: float = 0.0  # the same online, on offline rows
    online_bc_weight: float = 0.0  # of cloning offline rows online, in units of |Q|; fades
    # replay
    buffer_size: int = 50_000  # transitions in the online buffer
    initial_offline_ratio: float | None = None  # offline share of a batch at the switch (preset)
    offline_decay_rate: float | None = None  # on it and on cloning, per online step (preset)
    min_offline_ratio: float | None = None  # its floor (preset)
    retention_ratio: float | None = None  # share of the offline rows kept online (preset)
    retention_by: Literal["td_error", "reward", "quality"] = "td_error"  # which rows are kept
    weighted_loss: Literal["none", "critic", "both"] | None = None  # where row weights enter
    use_prioritized_replay: bool | None = None  # draw rows by their TD error (preset)
    priority_alpha: float = 0.6  # 0: uniform, 1: in proportion to the priority
    priority_beta: float = 0.4  # how much of the sampling bias the weights undo, rising to 1

    def __post_init__(self):  # tyro shows a ValueError from here in its error box
        if self.exp_name and not self.run_dir:
            self.run_dir = f"runs/{self.exp_name}__{self.seed}__{int(time.time())}"
        new = not (self.resume and self.run_dir and Path(self.run_dir, "latest.pth").exists())
        paths = (self.checkpoint_path, self.filtered_data_path)
        warm, kept = (Path(path or "").is_file() for path in paths)
        if self.learner or (self.stage is None and warm and new):
            self.stage = "online"
        self.stage = self.stage or "both"
        for name, value in zip(OPTIONS, PRESETS[self.preset], strict=True):
            if getattr(self, name) is None:
                setattr(self, name, value)
        positive = """hidden_size batch_size lr utd_ratio num_critics num_sampled_critics
            init_alpha buffer_size reward_scale data_size log_interval save_every eval_episodes"""
        shares = """gamma tau dropout initial_offline_ratio min_offline_ratio offline_decay_rate
            retention_ratio priority_alpha priority_beta"""
        for name, value in vars(self).items():
            least = 1e-9 if name in positive.split() else 0
            most = 1 if name in shares.split() else sys.maxsize
            if type(value) in (int, float) and not least <= value <= most:
                raise ValueError(f"--{name} {value} is not allowed: from {least} to {most}")
        online, floor = self.stage == "online", self.min_offline_ratio
        reads = not online and (self.offline_steps or self.retention_ratio)
        ready = dict(offline=self.checkpoint_path, online=warm or not new, both=True)[self.stage]
        for wrong, message in (
            (floor > self.initial_offline_ratio, "--min-offline-ratio is above the initial one"),
            (floor and not self.retention_ratio, "--min-offline-ratio, but nothing is retained"),
            (self.offline_data and not reads, "--offline-data would not be read"),
            (not ready, f"--stage {self.stage} needs the --checkpoint-path of a warm-up"),
            (new and not online and (warm or kept), "nothing is overwritten: the warm-up is there"),
            (self.resume and not self.run_dir, "--resume needs --run-dir"),
        ):
            if wrong:
                raise ValueError(message)


WSRLConfig = Args  # the design document's name


# --- task ---
COLUMNS = ("obs", "actions", "rewards", "next_obs", "terminations", "truncations")


def make_env(env_id: str):
    """Flat float32 observations, actions in [-1,1]; scale and center lead back to its own."""
    env = gym.wrappers.FlattenObservation(gym.make(env_id))
    env = gym.wrappers.DtypeObservation(env, np.float32)
    low, high = env.action_space.low, env.action_space.high
    env = gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))
    env.scale, env.center = (high - low) / 2, (high + low) / 2
    return env


def play(env, seed: int, act):
    """One episode of act(obs) -> action: rows in the order of COLUMNS, and whether it succeeded"""
    (obs, _), done, rows = env.reset(seed=seed), False, []
    while not done:
        action = act(obs)
        next_obs, reward, terminated, truncated, info = env.step(action)
        rows.append((obs, action, reward, next_obs, terminated, truncated))
        obs, done = next_obs, terminated or truncated
    return rows, info.get("is_success", info.get("success", terminated and reward > 0))


def swing_up(obs):
    """Pendulum: bring the energy to that of standing upright, then balance."""
    cos, sin, speed = obs
    angle, energy = math.atan2(sin, cos), speed**2 / 2 + 15 * (cos - 1)  # 0: upright, at rest
    torque = -10 * angle - 2.5 * speed if cos > 0.9 else -energy * speed
    return np.array([np.clip(torque / 2, -1, 1)])


def make_source(env, expert, name: str, size: int, rng) -> dict[str, np.ndarray]:
    """Whole episodes: demos are a little noisy, half of the suboptimal actions are random."""
    noise, chance = dict(demos=(0.1, 0.0), suboptimal=(0.5, 0.5), random=(0.0, 1.0))[name]
    rows = []

    def act(obs):
        action = rng.uniform(-1, 1, len(env.scale))
        if rng.random() >= chance:
            action = expert(obs) + noise * rng.normal(size=len(env.scale))
        return action.clip(-1, 1).astype(np.float32)

    while len(rows) < size:
        rows += play(env, int(rng.integers(2**31)), act)[0]
    columns = dict(zip(COLUMNS, map(np.array, zip(*rows, strict=True)), strict=True))
    return columns | dict(actions=env.center + env.scale * columns["actions"])


def make_sources(args: Args, names, folder: Path) -> list[str]:
    """An .npz of each name, by a script or a SAC run of its own; what is there is kept."""
    scripts = {"MountainCarContinuous-v0": lambda obs: np.where(obs[1:] >= 0, 1.0, -1.0)}
    script = (scripts | {"Pendulum-v1": swing_up}).get(args.env_id)
    experts = dict(demos=script, suboptimal=script, random=None)
    missing = [name for name in names if not (folder / f"{name}.npz").exists()]
    if script is None and {*missing} - {"random"}:
        print(f"no script for {args.env_id}: {args.online_steps} steps of SAC instead")
        with tempfile.TemporaryDirectory() as run:
            own = dict.fromkeys([*OPTIONS, "checkpoint_path", "filtered_data_path", "stage"])
            own |= dict(preset="scratch", make_data=False, eval_every=0, run_dir=run, resume=True)
            for name, part in (("suboptimal", 0.5), ("demos", 1.0)):
                main(replace(args, **own, online_steps=int(part * args.online_steps)))
                experts[name] = WarmupAgent.load(f"{run}/final_model.pth").act
    folder.mkdir(parents=True, exist_ok=True)
    for name in missing:
        rng = np.random.default_rng([args.seed, 1, [*experts].index(name)])
        columns = make_source(make_env(args.env_id), experts[name], name, args.data_size, rng)
        np.savez(folder / f"{name}.npz", **columns)
    return [f"{name}={folder / name}.npz" for name in names]


class DemoUnpickler(pickle.Unpickler):
    """A demo file is a stranger's program: arrays of numbers and plain containers, no more."""

    ALLOWED = """numpy.ndarray numpy.dtype numpy._core.multiarray._reconstruct _codecs.encode
        numpy._core.multiarray.scalar numpy._core.numeric._frombuffer""".split()
    TYPES = {code: np.dtype(code) for code in "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split()}

    def find_class(self, module, name):
        module = module.replace("numpy.core", "numpy._core")  # as older files call it
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        if name == "dtype":  # numpy's own constants: no file can give them false flags
            return lambda code, *_: self.TYPES[code]
        return super().find_class(module, name)


def load_pickle(data: bytes) -> dict[str, list]:
    """Columns of a list of transitions; a nested one is named like observations/image."""
    columns, size = {}, 0
    for opcode, argument, _ in pickletools.genops(data):  # nothing is built yet
        if argument == ">" or ("PUT" in opcode.name and (argument or 0) > len(data)):
            raise ValueError("it is big-endian, or its memo is larger than the file")
    for row in DemoUnpickler(io.BytesIO(data)).load():
        for name, value in row.items():
            for key, item in value.items() if isinstance(value, dict) else [("", value)]:
                columns.setdefault(f"{name}/{key}".rstrip("/"), []).append(item)
                size += getattr(item, "nbytes", 0)
    if size > 2**26 + 20 * len(data):  # one array, named a million times
        raise ValueError(f"its {len(data)} bytes would become {size}")
    return columns


def check_column(columns: dict, name: str, shape: tuple = (), dtype=np.float32) -> np.ndarray:
    """A stranger's column: arrays or numbers, finite in float32, masks in [0,1].  (N,*shape)"""
    column, rule = columns[name], "safe" if dtype == np.uint8 else "same_kind"
    checked = np.zeros((len(columns["rewards"]), *shape), dtype)
    if not len(column) == len(checked) > 0:
        raise ValueError(f"there are {len(column)} {name} to {len(checked)} rewards")
    for row, value in enumerate(column):  # a list is not an array, however small
        numbers = isinstance(value, np.ndarray | np.generic | int | float)
        kind = np.asarray(value).dtype if numbers else type(value).__name__
        if not numbers or np.shape(value) != shape or not np.can_cast(kind, dtype, rule):
            found, wanted = f"{kind} {getattr(value, 'shape', '')}", f"{np.dtype(dtype)} {shape}"
            raise ValueError(f"{name} of row {row} is {found}, expected is {wanted}")
        checked[row] = value
        if not np.isfinite(checked[row]).all() or (name == "masks" and not 0 <= value <= 1):
            raise ValueError(f"{name} of row {row} is not finite in float32, or no mask")
    return checked


def load_columns(path: str) -> dict:
    """Of a .pkl or .npz: name -> list or array, not checked yet."""
    try:
        if path.endswith(".npz"):
            return dict(np.load(path, allow_pickle=False))
        return load_pickle(Path(path).read_bytes())
    except Exception as error:  # a damaged file raises almost any type
        sys.exit(f"data file {path} holds no transitions: {type(error).__name__}: {error}")


def read_source(path: str, obs_dim: int, action_dim: int) -> dict[str, np.ndarray]:
    """COLUMNS of an .npz, a demo .pkl or minari:ID, checked; actions and rewards as in the file."""
    if path.startswith("minari:"):
        import minari

        episodes = [vars(each) for each in minari.load_dataset(path[7:]).iterate_episodes()]
        for each in episodes:
            each["obs"], each["next_obs"] = each["observations"][:-1], each["observations"][1:]
        raw = {name: np.concatenate([each[name] for each in episodes]) for name in COLUMNS}
    else:
        raw = load_columns(path)
    try:
        if "dones" in raw:  # sac_hybrid.py's: a mask of 0 ends the value, too
            for name in [*raw]:
                raw[name.removesuffix("/state").replace("observations", "obs")] = raw[name]
            dones = check_column(raw, "dones") != 0
            masks = check_column(dict(masks=1 - dones) | raw, "masks")
            raw |= dict(terminations=1 - masks, truncations=dones * (masks > 0))
        shapes = dict(obs=(obs_dim,), next_obs=(obs_dim,), actions=(action_dim,))
        return {name: check_column(raw, name, shapes.get(name, ())) for name in COLUMNS}
    except (KeyError, ValueError) as error:
        missing = "a column is missing: " if isinstance(error, KeyError) else ""
        sys.exit(f"data file {path}: {missing}{error}")


def episode_slices(columns: dict) -> list[slice]:
    """Episodes end where they were ended, and where a row does not continue the one before it."""
    ends = (columns["terminations"] + columns["truncations"]) > 0
    ends[:-1] |= (columns["next_obs"][:-1] != columns["obs"][1:]).any(1)
    ends[-1] = True
    stops = np.flatnonzero(ends) + 1
    return [slice(int(a), int(b)) for a, b in zip([0, *stops[:-1]], stops, strict=True)]


def succeeded(trajectory: dict) -> bool:
    """No file says what success is: it ended by itself on its largest, positive reward."""
    rewards = trajectory["rewards"]
    return bool(trajectory["terminations"][-1] and rewards[-1] == max(rewards) > 0)


def compute_data_quality(trajectory: dict, return_range=(0.0, 1.0), max_length: int = 1) -> float:
    """Mean of success, return within its range, and the clock, each in [0,1]."""
    (low, high), rewards, success = return_range, trajectory["rewards"], succeeded(trajectory)
    part = np.clip((sum(rewards) - low) / (high - low), 0, 1) if high > low else 0.5
    failed = trajectory["terminations"][-1] and not success
    late = min(1.0, len(rewards) / max_length)
    # a success is better the sooner (0.5 to 1), a failure the later (0 to 0.5), else 0.5
    clock = 1 - late / 2 if success else late / 2 if failed else 0.5
    return float((success + part + clock) / 3)


def row_dtype(env) -> np.dtype:
    """Of a replay buffer: actions in [-1,1], rewards scaled, what is known of a row's episode"""
    obs, action = env.observation_space.shape, env.action_space.shape
    scalars = ["rewards", "masks", "weights", "quality", "returns"]
    arrays = [("obs", "f4", obs), ("next_obs", "f4", obs), ("actions", "f4", action)]
    return np.dtype(arrays + [(name, "f4") for name in scalars])


def load_offline_data(args: Args, specs, env):
    """All sources as rows of a buffer, each row's number of its episode, mean return by source"""
    dtype, episodes, parts, returns = row_dtype(env), [], [], {}
    for spec in specs:  # [name=]path[:weight]
        name, path, weight = re.fullmatch(r"(?:([^=/]*)=)?(.+?)(?::([0-9.]+))?", spec).groups()
        name = name or "demos"
        weight = float(weight or dict(demos=args.demo_weight, random=0.5).get(name, 1.0))
        columns = read_source(path, dtype["obs"].shape[0], len(env.scale))
        for rows in episode_slices(columns):
            episodes.append((weight, {key: columns[key][rows] for key in COLUMNS}))
            returns.setdefault(name, []).append(float(columns["rewards"][rows].sum()))
    totals = [total for own in returns.values() for total in own]
    bounds, longest = (min(totals), max(totals)), max(len(t["rewards"]) for _, t in episodes)
    for weight, t in episodes:
        rows, quality = np.zeros(len(t["rewards"]), dtype), compute_data_quality(t, bounds, longest)
        rows["obs"], rows["next_obs"] = t["obs"], t["next_obs"]
        rows["masks"] = 1 - t["terminations"]
        rows["actions"] = ((t["actions"] - env.center) / env.scale).clip(-1, 1)
        rows["rewards"] = t["rewards"] * args.reward_scale
        rows["returns"], rows["quality"] = return_to_go(rows["rewards"], args.gamma), quality
        # warm-up: weights; an average quality of 0.5 is neutral
        bonus = args.success_weight_bonus if succeeded(t) else 1
        rows["weights"] = weight * (0.5 + quality) * bonus
        parts.append(rows)
    for name, own in returns.items():
        returns[name] = float(np.mean(own))
        print(f"{name}: {len(own)} episodes, return {returns[name]:.1f}", flush=True)
    number = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return np.concatenate(parts), number, returns


# --- networks ---
def mlp(in_dim: int, out_dim: int, hidden_size: int, layer_norm: bool, dropout: float = 0.0):
    layers = []
    for width in (in_dim, hidden_size):
        norm = [nn.LayerNorm(hidden_size)] if layer_norm else []
        drop = [nn.Dropout(dropout)] if dropout else []
        layers += [nn.Linear(width, hidden_size), *norm, nn.ReLU(inplace=True), *drop]
    return nn.Sequential(*layers, nn.Linear(hidden_size, out_dim))


class QEnsemble(nn.Module):
    """E critics in batched matrix products.  (N,F), (N,C) -> (E,N)"""

    def __init__(self, num_critics: int, in_dim: int, hidden_size: int, layer_norm: bool):
        super().__init__()
        critics = [mlp(in_dim, 1, hidden_size, layer_norm) for _ in range(num_critics)]
        same = zip(*(critic.parameters() for critic in critics), strict=True)
        stacked = [torch.stack(parameters).detach() for parameters in same]  # (E,out,in) or (E,out)
        stacked = [x.mT.contiguous() if x.ndim == 3 else x.unsqueeze(1) for x in stacked]
        self.stacked, self.layer_norm = nn.ParameterList(stacked), layer_norm

    def forward(self, features, actions):
        *hidden, last_weight, last_bias = self.stacked  # (E,in,out), (E,1,out)
        x = torch.cat([features, actions], -1).expand(len(last_bias), -1, -1)  # (E,N,F+C)
        hidden = iter(hidden)
        for weight, bias in zip(hidden, hidden, strict=True):
            x = torch.baddbmm(bias, x, weight)
            if self.layer_norm:
                scale, shift = next(hidden), next(hidden)
                x = F.layer_norm(x, x.shape[-1:]) * scale + shift
            x = x.relu_()
        # one column is slow as a matrix product
        return (x * last_weight.mT).sum(-1) + last_bias.squeeze(-1)


class Normalizer(nn.Module):
    """The encoder of vectors: by offline statistics.  (N,D) -> (N,D)"""

    def __init__(self, mean, std):
        super().__init__()
        self.dim = len(mean)
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.as_tensor(std, dtype=torch.float32))

    def forward(self, obs):
        return (obs - self.mean) / self.std


# --- buffer ---
class PrioritizedReplayBuffer:  # warm-up: replay
    """Rows in a ring; drawn by priorities (|td|+1e-6)^alpha, raised once when set; 0: uniformly."""

    def __init__(self, capacity: int, dtype: np.dtype, alpha: float = 0.6, rows=()):
        self.rows, self.priorities = np.zeros(capacity, dtype), np.zeros(capacity)  # float64
        self.alpha, self.size, self.at, self.max_priority = alpha, 0, 0, 1.0
        if len(rows):
            self.insert(rows)

    def __len__(self):
        return self.size

    def insert(self, rows):
        inds = (self.at + np.arange(len(rows))) % len(self.rows)
        self.rows[inds], self.priorities[inds] = rows, self.max_priority  # new: as urgent as any
        self.at = (self.at + len(rows)) % len(self.rows)
        self.size = min(len(self.rows), self.size + len(rows))

    def sample(self, batch_size: int, beta: float, rng: np.random.Generator):
        """-> row numbers, importance weights before they are divided by their maximum"""
        if not self.alpha:
            return rng.integers(len(self), size=batch_size), np.ones(batch_size)
        cumsum = self.priorities[: len(self)].cumsum()  # 4 ms at 10^6 rows: no tree is needed
        inds = cumsum.searchsorted(rng.random(batch_size) * cumsum[-1], side="right")
        inds = inds.clip(max=len(self) - 1)  # rounding must not lead beyond the last row
        probabilities = self.priorities[inds] / cumsum[-1]
        return inds, (len(self) * probabilities) ** -beta  # arXiv:1511.05952, section 3.4

    def update_priorities(self, inds, td_errors):
        self.priorities[inds] = (np.abs(td_errors).astype(np.float64) + 1e-6) ** self.alpha
        self.max_priority = max(self.max_priority, float(self.priorities[inds].max()))

    def select_top_k(self, priorities, k: int):
        """A buffer of just the k rows with the highest priorities; earlier rows win ties."""
        best = np.sort(np.argsort(-priorities, kind="stable")[:k])
        kept = PrioritizedReplayBuffer(k, self.rows.dtype, self.alpha, self.rows[best])
        kept.priorities[:], kept.max_priority = self.priorities[best], self.max_priority
        return kept

    def state_dict(self) -> dict:
        rows = torch.tensor(self.rows[: self.size].view(np.uint8))  # copies
        priorities = torch.tensor(self.priorities[: self.size])
        return dict(rows=rows, priorities=priorities, at=self.at, max_priority=self.max_priority)

    def load_state_dict(self, state: dict):
        rows = state["rows"].numpy().view(self.rows.dtype)
        self.__init__(max(len(rows), len(self.rows)), rows.dtype, self.alpha, rows)
        self.priorities[: self.size] = state["priorities"].numpy()
        self.at, self.max_priority = state["at"], state["max_priority"]


def compute_priorities(buffer: PrioritizedReplayBuffer, by: str, agent=None):
    """What filter_offline_data ranks rows by.  -> (N,)"""
    if by != "td_error":
        return buffer.rows[{"reward": "rewards", "quality": "quality"}[by]][: len(buffer)]
    pieces = np.array_split(buffer.rows[: len(buffer)], math.ceil(len(buffer) / 4096))
    errors = [agent.errors(tensors(rows, agent.device))[0] for rows in pieces]  # (E,N) each
    return torch.cat(errors, 1).mean(0).abs().cpu().numpy()


def filter_offline_data(buffer, retention_ratio: float = 0.2, by: str = "quality", agent=None):
    """The best rows, in arrays of their own: the rest is released with the old ones."""
    if retention_ratio == 1 or not len(buffer):
        return buffer
    top_k = max(math.ceil(retention_ratio), int(len(buffer) * retention_ratio))  # 1, unless 0
    return buffer.select_top_k(compute_priorities(buffer, by, agent), top_k)


def split_rows(batch_size: int, ratio: float, num_offline: int, num_online: int) -> tuple[int, int]:
    """Rows from (offline, online). What is lacking online comes from offline."""
    if not num_offline or not num_online:
        return (batch_size, 0) if num_offline else (0, batch_size if num_online else 0)
    online = min(batch_size - int(batch_size * ratio), num_online)
    return batch_size - online, online


def tensors(rows: np.ndarray, device) -> dict[str, torch.Tensor]:
    names = rows.dtype.names
    return {k: torch.from_numpy(np.ascontiguousarray(rows[k])).to(device) for k in names}


def sample_mixed(args, buffers, split, beta: float, rng, device):
    """Rows of both, shuffled, with weights.  -> batch; buffer, row numbers, places of each part"""
    draws = [(rb, *rb.sample(n, beta, rng)) for rb, n in zip(buffers, split, strict=True) if n]
    order = rng.permutation(sum(split))
    batch = tensors(np.concatenate([rb.rows[inds] for rb, inds, _ in draws])[order], device)
    is_weights = np.concatenate([own for *_, own in draws])[order]
    is_weights = torch.from_numpy(is_weights / is_weights.max()).float().to(device)  # one maximum
    # warm-up: weights; the actor fits no target, so importance is not for it
    own, none = batch["weights"], torch.ones_like(batch["weights"])
    batch["weights"] = batch_weights(is_weights, none if args.weighted_loss == "none" else own)
    batch["actor_weights"] = batch_weights(own if args.weighted_loss == "both" else none)
    places = np.split(np.argsort(order), [len(draws[0][1])])
    return batch, [(rb, inds, place) for (rb, inds, _), place in zip(draws, places, strict=False)]


# --- math ---
def tanh_normal(mean, std, noise):
    """tanh(mean + std * noise), its log density: eq. 26 of arXiv:1812.05905.  -> (N,C), (N,)"""
    u = mean + std * noise
    logprobs = -0.5 * noise**2 - std.log() - 0.5 * math.log(2 * math.pi)
    logprobs = logprobs - 2 * (math.log(2) - u - F.softplus(-2 * u))  # finite for every u
    return u.tanh(), logprobs.sum(-1)


def td_target(rewards, masks, next_q_values, gamma, entropy_bonus=0.0):
    """y = r + gamma * mask * (min_e Q(s',a') + entropy_bonus).  (N,), (N,), (E,N) -> (N,)"""
    assert rewards.shape == masks.shape == next_q_values.shape[1:]  # broadcasting hides bugs
    return rewards + gamma * masks * (next_q_values.min(0).values + entropy_bonus)


def flatten(parameters: list) -> torch.Tensor:
    """One vector that the parameters are views of from now on, so that Adam is one operation."""
    vector = nn.utils.parameters_to_vector(parameters).detach()  # a copy
    nn.utils.vector_to_parameters(vector, parameters)
    return vector


def apply_gradients(loss, *groups) -> bool:
    """One step of each (parameters, optimizer); of none, and False, if a gradient is not finite."""
    # autograd.grad, not backward: the actor's loss leaves no gradient in the critic
    inputs = [param for params, _ in groups for param in params]
    grads = torch.autograd.grad(loss, inputs, materialize_grads=True)
    vector = torch.cat([grad.reshape(-1) for grad in grads])
    finite, at = math.isfinite(vector.dot(vector)), 0
    for params, optimizer in groups if finite else ():
        (flat,) = optimizer.param_groups[0]["params"]
        flat.grad, at = vector[at : at + len(flat)], at + len(flat)
        optimizer.step()
    return finite


class SAC(nn.Module):
    """Soft actor-critic (arXiv:1812.05905) on an encoder's features, the same in both scripts.
    A subclass adds heads, `more_critic_losses` and `more_actor_losses`; rows come with weights."""

    def __init__(self, encoder, action_dim: int, target_entropy: float, device, args, **heads):
        super().__init__()
        net, dropout = (args.hidden_size, args.layer_norm), getattr(args, "dropout", 0.0)
        qf = QEnsemble(args.num_critics, encoder.dim + action_dim, *net)
        self.actor = mlp(encoder.dim, 2 * action_dim, *net, dropout)
        self.critic = nn.ModuleDict(dict(encoder=encoder, qf=qf) | heads)
        self.critic_target = copy.deepcopy(self.critic).requires_grad_(False)
        self.raw_alpha = nn.Parameter(torch.tensor(math.log(math.expm1(args.init_alpha))))
        self.args, self.target_entropy, self.device = args, target_entropy, torch.device(device)
        self.updates = self.skipped_steps = self.skipped_in_a_row = 0
        self.to(device).eval()
        groups = [*self.critic.parameters()], [*self.actor.parameters(), self.raw_alpha]
        vectors = [flatten(params) for params in groups]
        self.flat_critic, self.flat_target = vectors[0], flatten([*self.critic_target.parameters()])
        self.optimizers = [torch.optim.Adam([vector], args.lr, fused=True) for vector in vectors]
        self.critic_group, self.actor_group = zip(groups, self.optimizers, strict=True)

    def alpha(self):
        return F.softplus(self.raw_alpha)  # stays positive

    def noise(self, like):
        return torch.randn(like.shape).to(self.device)  # the same numbers on every device

    def policy(self, features):
        """-> mean (N,C), std (N,C), both before the tanh"""
        mean, log_std = self.actor(features).chunk(2, -1)
        return mean, log_std.clamp(math.log(1e-5), math.log(5)).exp()

    def bellman(self, batch):
        """-> features (N,F), next ones by fast and slow encoder, q_values (E,N), target (N,)"""
        features = self.critic.encoder(batch["obs"])
        with torch.no_grad():
            following = self.critic.encoder(batch["next_obs"])
            slow = self.critic_target.encoder(batch["next_obs"])
            mean, std = self.policy(following)
            next_actions, next_logprobs = tanh_normal(mean, std, self.noise(mean))
            next_q = self.critic_target.qf(slow, next_actions)  # (E,N)
            if self.args.num_sampled_critics < self.args.num_critics:  # REDQ (arXiv:2101.05982)
                chosen = torch.randperm(self.args.num_critics)[: self.args.num_sampled_critics]
                next_q = next_q[chosen.to(mean.device)]
            bonus = -self.alpha() * next_logprobs if self.args.backup_entropy else 0.0
            target = td_target(batch["rewards"], batch["masks"], next_q, self.args.gamma, bonus)
        return features, following, slow, self.critic.qf(features, batch["actions"]), target

    def actor_losses(self, batch, features):
        mean, std = self.policy(features)
        actions, logprobs = tanh_normal(mean, std, self.noise(mean))
        # differs from SAC: the mean of the critics, not their minimum, as RLPD and HIL-SERL do
        objective = self.alpha().detach() * logprobs - self.critic.qf(features, actions).mean(0)
        excess = -logprobs.detach().mean() - self.target_entropy  # more than wanted: cool down
        loss = (batch["actor_weights"] * objective).mean()
        losses = dict(actor_loss=loss, alpha_loss=self.alpha() * excess)
        return losses | self.more_actor_losses(batch, mean)

    def update(self, batch: dict, full: bool = True) -> dict[str, torch.Tensor]:
        """One update; `full` includes actor and temperature. A non-finite gradient goes nowhere."""
        # no generator has a history; torch.manual_seed takes longer: it seeds every device
        torch.default_generator.manual_seed(self.args.seed * 1_000_003 + self.updates)
        features, *following, q_values, target = self.bellman(batch)
        td_errors = q_values - target  # (E,N)
        losses = dict(critic_loss=(batch["weights"] * td_errors.square()).mean())
        losses |= self.more_critic_losses(batch, features, *following, q_values)
        applied = apply_gradients(sum(losses.values()), self.critic_group)
        if full and applied:
            actor_losses = self.actor_losses(batch, features.detach())
            applied = apply_gradients(sum(actor_losses.values()), self.actor_group)
            losses |= actor_losses | dict(alpha=self.alpha())
        if applied:
            self.flat_target.lerp_(self.flat_critic, self.args.tau)  # Polyak averaging
        losses |= dict(q_values=q_values.mean(), td_errors=td_errors.mean(0))
        return self.count(applied, losses)

    def count(self, applied: bool, stats: dict) -> dict:
        self.updates, self.skipped_steps = self.updates + 1, self.skipped_steps + (not applied)
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        if self.skipped_in_a_row == 10:
            sys.exit("10 gradients in a row were not finite: nothing is learned")
        return {name: value.detach() for name, value in stats.items()} if applied else {}

    def get_extra_state(self):  # state_dict() is then all of the agent
        counters = (self.updates, self.skipped_steps, self.skipped_in_a_row)
        return dict(counters=counters, optimizers=[each.state_dict() for each in self.optimizers])

    def set_extra_state(self, state):
        self.updates, self.skipped_steps, self.skipped_in_a_row = state["counters"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(saved))  # it would keep those very tensors
            optimizer.param_groups[0]["lr"] = self.args.lr  # the rate is not that of the file


def offline_ratio_at(step: int, initial: float, decay: float, floor: float) -> float:
    """Offline share of a batch, `step` environment steps after going online"""
    return max(floor, initial * decay**step)


def priority_beta_schedule(t: float, beta: float = 0.4) -> float:
    """Exponent of the importance weights: from beta to 1 over the run, t from 0 to 1"""
    return beta + (1 - beta) * min(1.0, t)


def batch_weights(*factors):
    """Product over the batch mean: the mean weight is 1, the learning rate keeps its meaning."""
    product = math.prod(factors)
    return product / product.mean()


def statistics(space, obs):
    """Mean and spread of the data's observations, or of the space's bounds.  -> (D,), (D,)"""
    low, high = np.float64(space.low), np.float64(space.high)
    bounded = high - low < 1e6
    half = np.where(bounded, high - low, 2.0) / 2
    if not len(obs):
        return np.where(bounded, low + half, 0.0), half
    # one demo may never leave the top of the swing: a spread of nearly 0 would blow up all else
    std = np.maximum(obs.std(0), 0.3 * half * bounded)
    return obs.mean(0), np.where(std < 1e-6, 1.0, std)


def return_to_go(rewards, gamma: float) -> list[float]:
    """G_t = r_t + gamma G_t+1 within one episode. A time limit cuts the sum off.  (T,) -> (T,)"""
    backwards = accumulate(map(float, reversed(rewards)), lambda total, r: r + gamma * total)
    return [*backwards][::-1]


def calibrate(q_values, returns, num_uniform: int):
    """Cal-QL: the policy's actions are not pushed below the data's return.  (E,N,M), (N,)"""
    uniform, policy = q_values[..., :num_uniform], q_values[..., num_uniform:]
    return torch.cat([uniform, torch.maximum(policy, returns[:, None])], -1)


def conservative_gap(q_values, log_densities, data_q_values):
    """log sum_m exp(Q(s,a_m) - log mu(a_m)) - Q(s,a).  (E,N,M), (N,M), (E,N) -> (E,N)"""
    assert q_values.shape[1:] == log_densities.shape and q_values.shape[:2] == data_q_values.shape
    return torch.logsumexp(q_values - log_densities, -1) - data_q_values


class WarmupAgent(SAC):
    """SAC on vectors, with a conservative term or cloning; `enter` says which counts when."""

    K = 4  # actions of the conservative term from each of: uniform, policy at s, policy at s'

    def __init__(self, args, action_scale, mean, std, device="cpu"):
        """Half range of the environment's actions (A,); mean and std of its observations (D,)"""
        torch.manual_seed(args.seed)
        self.action_scale, dim = np.asarray(action_scale), len(action_scale)
        super().__init__(Normalizer(mean, std), dim, -0.5 * dim, device, args)
        self.enter(0)

    def enter(self, env_steps: int):
        """The objective, this many environment steps after the warm-up."""
        args, online = self.args, env_steps > 0
        self.cloning = args.offline_objective == "bc" and not online
        self.bc_weight = online * args.online_bc_weight * args.offline_decay_rate**env_steps
        conservative = args.offline_objective in ("cql", "calql")
        self.cql_alpha = conservative * (args.online_cql_alpha if online else args.cql_alpha)

    def more_critic_losses(self, batch, features, next_features, slow, q_values):
        self.q_size = q_values.detach().abs().mean()  # the unit of what is cloned online
        if not self.cql_alpha:
            return {}
        # warm-up: conservative; densities are those of actions in the environment's units
        size, k, scale = len(features), self.K, self.action_scale
        with torch.no_grad():
            actions = [torch.rand(size, k, len(scale)).to(self.device) * 2 - 1]
            logs = [torch.full((size, k), -float(np.log(2 * scale).sum())).to(self.device)]
            for at in (features, next_features):  # both judged at s
                mean, std = (x[:, None].expand(-1, k, -1) for x in self.policy(at))
                sampled, logprobs = tanh_normal(mean, std, self.noise(mean))
                actions.append(sampled)
                logs.append(logprobs - float(np.log(scale).sum()))
        actions, logs = torch.cat(actions, 1), torch.cat(logs, 1)  # (N,M,A), (N,M)
        repeated = features[:, None].expand(-1, 3 * k, -1).flatten(0, 1)
        all_q = self.critic.qf(repeated, actions.flatten(0, 1)).unflatten(1, (size, -1))  # (E,N,M)
        if self.args.offline_objective == "calql":
            all_q = calibrate(all_q, batch["returns"], k)
        offline = batch["returns"] > -math.inf  # an online row has been tried
        gap = (conservative_gap(all_q, logs, q_values) * offline).mean()
        return {"cql_loss": self.cql_alpha * gap}

    def actor_losses(self, batch, features):
        self.actor.train()  # dropout, where there is some, is for this alone
        if self.cloning:  # warm-up: cloning
            error = (self.policy(features)[0].tanh() - batch["actions"]).square().sum(-1)
            losses = {"actor_loss": (batch["actor_weights"] * error).mean()}
        else:
            losses = super().actor_losses(batch, features)
        self.actor.eval()
        return losses

    def more_actor_losses(self, batch, mean):
        if not self.bc_weight:
            return {}
        # warm-up: cloning; on offline rows, in units of |Q| as in TD3+BC (arXiv:2106.06860)
        error = (mean.tanh() - batch["actions"]).square().sum(-1) * (batch["returns"] > -math.inf)
        return {"bc_loss": self.bc_weight * self.q_size * error.mean()}

    @torch.no_grad()
    def errors(self, batch):
        """TD errors (E,N) and targets (N,) outside training"""
        torch.manual_seed(0)  # each update seeds anew
        *_, q_values, target = self.bellman(batch)
        return q_values - target, target

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise=0.0) -> np.ndarray:
        """At `noise` standard deviations from the mean.  (D,) -> (A,) in [-1,1]"""
        features = self.critic.encoder(torch.from_numpy(obs)[None].to(self.device))
        mean, std = (x[0].cpu().numpy() for x in self.policy(features))
        return np.tanh(mean + std * noise)

    def checkpoint(self) -> dict:
        spaces = dict(action_scale=self.action_scale.tolist(), obs_dim=self.critic.encoder.dim)
        return dict(agent=copy.deepcopy(self.state_dict()), args={**vars(self.args)}) | spaces

    @classmethod
    def load(cls, path, device="cpu"):
        """The agent of a final_model.pth; its options come from there, too."""
        saved = load_checkpoint(path, "obs_dim")
        args, unknown = SimpleNamespace(**saved["args"]), np.ones(saved["obs_dim"])
        agent = cls(args, saved["action_scale"], unknown, unknown, device)
        agent.load_state_dict(saved["agent"])
        return agent


# --- rollout ---
class Collector:
    """The online environment. An episode is a function of the step it began at and its actions."""

    def __init__(self, args: Args, env):
        self.args, self.env = args, env
        self.obs, self.start, self.actions, self.episodes = None, 0, [], []  # return, length

    def begin(self, step: int):
        seed = int(np.random.SeedSequence([self.args.seed, 4, step]).generate_state(1)[0])
        self.obs, self.start, self.actions, self.total = self.env.reset(seed=seed)[0], step, [], 0.0

    def act(self, agent: WarmupAgent, step: int, random: bool):
        if self.obs is None:
            self.begin(step)
        if not np.isfinite(self.obs).all():  # it would be the arm's next command
            raise ValueError(f"{self.args.env_id} gave the observation {self.obs}")
        rng, size = np.random.default_rng([self.args.seed, 3, step]), len(self.env.scale)
        if random:
            return rng.uniform(-1, 1, size).astype(np.float32)
        return agent.act(self.obs, rng.standard_normal(size, np.float32))

    def step(self, action):
        """-> one row of the online buffer; its episode's quality and return are not known"""
        next_obs, reward, terminated, truncated, _ = self.env.step(action)
        if not np.isfinite([reward, *next_obs]).all():
            raise ValueError(f"{self.args.env_id} gave reward {reward}, observation {next_obs}")
        scaled = reward * self.args.reward_scale
        # a time limit bootstraps from its next_obs, only a termination ends the value
        row = (self.obs, next_obs, action, scaled, not terminated, 1, 0.5, -math.inf)
        self.obs, self.total = next_obs, self.total + float(reward)
        self.actions.append(action)
        if terminated or truncated:
            self.episodes = [*self.episodes[-19:], [self.total, len(self.actions)]]
            self.obs, self.actions = None, []
        return np.array([row], row_dtype(self.env))

    def state_dict(self) -> dict:
        obs = None if self.obs is None else torch.from_numpy(self.obs)
        actions = torch.tensor(np.array(self.actions, np.float32))
        return dict(obs=obs, actions=actions, start=self.start, episodes=self.episodes)

    def load_state_dict(self, state: dict):
        """Plays the episode again; where that leads elsewhere (a real arm), a new one begins."""
        self.begin(state["start"])
        for action in state["actions"].numpy():
            if self.obs is not None:
                self.step(action)
        if not np.array_equal(self.obs, state["obs"]):
            self.obs, self.actions = None, []
        self.episodes = state["episodes"]


# --- evaluate ---
def evaluate_policy(agent: WarmupAgent, env, num_episodes: int) -> dict[str, float]:
    """The mean action, the same episodes for every run."""
    plays = [play(env, 10_000 + episode, agent.act) for episode in range(num_episodes)]
    results = [(success, sum(float(row[2]) for row in rows), len(rows)) for rows, success in plays]
    names = ("eval/success_rate", "eval/episodic_return", "eval/episodic_length")
    return dict(zip(names, np.mean(results, 0).tolist(), strict=True))


# --- run folder ---
class Run:
    """A folder: args.json, metrics.jsonl, and at the end summary.json and curves.png."""

    def __init__(self, args, total: int, rows=(), exist_ok=False, enabled=True):
        name = f"{Path(__file__).stem}__{args.seed}__{int(time.time())}_{os.getpid()}"
        self.dir, self.rows, self.total = Path(args.run_dir or f"runs/{name}"), list(rows), total
        self.start = time.time() - (self.rows[-1]["time"] if self.rows else 0)
        self.enabled, self.wandb = enabled, None  # one process of torchrun writes
        self.bar = tqdm(total=total, disable=None, file=sys.stdout)  # None: unless a terminal
        if enabled:
            self.dir.mkdir(parents=True, exist_ok=exist_ok)  # no run overwrites another
            config = asdict(args) | dict(argv=sys.argv, torch=torch.__version__)
            (self.dir / "args.json").write_text(json.dumps(config, indent=2))
            lines = [json.dumps(row) + "\n" for row in self.rows]  # what a resumed run has done
            (self.dir / "metrics.jsonl").write_text("".join(lines))
        if enabled and args.track:
            import wandb

            where = dict(project=args.wandb_project_name, id=self.dir.name, dir=self.dir)
            self.wandb = wandb.init(**where, config=config, resume="allow")

    def log(self, metrics: dict):
        row = metrics | {"time": round(time.time() - self.start, 3)}
        self.rows.append({k: v if math.isfinite(v) else None for k, v in row.items()})  # no NaN in JSON
        if self.enabled:
            with open(self.dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")
        if self.wandb:
            self.wandb.log(self.rows[-1], step=row["global_step"])

    def status(self, line: str, done: int):
        """What a person watches: behind a bar on a terminal, else a plain line now and then."""
        self.bar.set_postfix_str(line, refresh=False)
        self.bar.update(done - self.bar.n)
        if self.bar.disable and (done % max(1, self.total // 15) == 0 or done == self.total):
            print(f"[{done}/{self.total}] {line}", flush=True)

    def close(self, xlabel: str, panels: dict[str, list[str]]):
        """summary.json, and curves.png: a panel per title, a line per metric."""
        self.bar.close()
        if not self.enabled:
            return
        (self.dir / "summary.json").write_text(json.dumps(self.rows[-1], indent=2))
        height = math.ceil(len(panels) / 4)
        figure = Figure(figsize=(16, 3.2 * height), layout="constrained")
        for i, (title, keys) in enumerate(panels.items(), 1):
            axis = figure.add_subplot(height, 4, i, title=title, xlabel=xlabel)
            for key in keys:
                points = {r["global_step"]: r[key] for r in self.rows if r.get(key) is not None}
                axis.plot(list(points), list(points.values()), ".-", label=key)
            axis.legend()
        figure.savefig(self.dir / "curves.png")
        if self.wandb:
            self.wandb.finish()


def save_checkpoint(path: Path, state: dict):
    """Whole or not at all: a kill at any moment leaves the previous checkpoint good."""
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def catch_signals() -> list[int]:
    """SIGINT and SIGTERM go into this list: save and end. A second one ends at once."""
    received = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(1) if received else received.append(number))
    return received


def means(window: list[dict]) -> dict[str, float]:
    """Of each metric, over the updates that had it; nothing waited for the device until here."""
    names = dict.fromkeys(name for stats in window for name in stats)
    columns = {k: [torch.as_tensor(row[k]).cpu() for row in window if k in row] for k in names}
    return {name: torch.stack(column).float().mean().item() for name, column in columns.items()}


def load_checkpoint(path, key: str) -> dict:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        return saved | {key: saved[key]}  # a file of another kind has no such entry
    except Exception as error:  # a damaged file raises almost any type
        sys.exit(f"{path} does not hold what is needed: {type(error).__name__}: {error}")


# --- main ---
def pick_device(name: str, built_in: bool) -> torch.device:
    """auto: the CPU for what is built in, which is fastest there; else an accelerator, if any."""
    if name != "auto":
        return torch.device(name)
    if built_in:
        return torch.device("cpu")
    # without check_available the answer is that of the build, on a machine without a GPU, too
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def main(args: Args) -> dict[str, float]:
    torch.set_num_threads(args.num_threads)
    device = pick_device(args.device, built_in=args.env_id == Args.env_id)
    env, judge = make_env(args.env_id), make_env(args.env_id)
    if args.make_data:
        sources = make_sources(args, SOURCES, Path(args.data_dir or "data"))
        load_offline_data(args, sources, env)  # prints their returns
        return {}
    path, saved = Path(args.run_dir or "") / "latest.pth", None
    going_on = args.resume and path.exists()
    if going_on or args.stage == "online":
        saved = load_checkpoint(path if going_on else args.checkpoint_path, "step")
        print(f"going on after step {saved['step']}")
        args.offline_steps = saved["args"]["offline_steps"]
    online_steps = args.warmup_rollout_steps + args.online_steps
    total = args.offline_steps + (online_steps if args.stage != "offline" else 0)
    dtype, returns = row_dtype(env), {}
    rows, number = np.zeros(0, dtype), np.zeros(0, int)
    if not saved and (args.offline_steps or args.retention_ratio):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(args.data_dir or folder)
            specs = args.offline_data or make_sources(args, args.sources, folder)
            rows, number, returns = load_offline_data(args, specs, env)
    for target in filter(None, (args.checkpoint_path, args.filtered_data_path)):
        Path(target).parent.mkdir(parents=True, exist_ok=True)  # now, not after the warm-up
    run = Run(args, total, saved["rows"] if going_on else (), exist_ok=args.resume)
    stop, step, window = catch_signals(), 0, []
    metrics = {name: value for row in run.rows for name, value in row.items()}  # the latest of each
    print(f"preset {args.preset}:", *(f"{name} {getattr(args, name)}" for name in OPTIONS))

    shuffled = np.random.default_rng([args.seed, 6]).permutation(np.unique(number))
    stops = args.early_stop_patience and args.offline_steps
    tenth = math.ceil(len(shuffled) / 10) if stops else 0
    held = np.isin(number, shuffled[:tenth])  # rows of a tenth of the episodes
    alpha = args.priority_alpha if args.use_prioritized_replay else 0.0
    offline_rb = PrioritizedReplayBuffer((~held).sum(), dtype, alpha, rows[~held])
    online_rb = PrioritizedReplayBuffer(args.buffer_size, dtype, alpha)
    mean, std = statistics(env.observation_space, rows["obs"])
    agent = WarmupAgent(args, env.scale, mean, std, device)
    collector = Collector(args, env)
    # early stop: what is held out, its least error, checks since then, the weights that had it
    early = dict(held=torch.tensor(rows[held].view(np.uint8)), least=math.inf, stale=0, best=None)
    del rows
    parts = dict(agent=agent, collector=collector, online_rb=online_rb, offline_rb=offline_rb)
    retention = (args.retention_ratio, args.retention_by, agent)

    def save(target: Path):
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= dict(rows=run.rows, step=step, progress=(early, returns, window))
        save_checkpoint(target, state | agent.checkpoint())

    if saved:
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        step, (early, returns, window) = saved["step"], saved["progress"]
        if args.filtered_data_path and not going_on:
            offline_rb.load_state_dict(load_checkpoint(args.filtered_data_path, "priorities"))
    elif not args.offline_steps:
        parts["offline_rb"] = offline_rb = filter_offline_data(offline_rb, *retention)

    if not step:
        start = {"global_step": 0, "charts/env_steps": 0}
        run.log(start | evaluate_policy(agent, judge, args.eval_episodes))
    while step < total and not stop:
        # 1 collect
        step, num_updates, ratio, row = step + 1, 1, 1.0, {}
        env_steps, last = max(0, step - args.offline_steps), step == total
        agent.enter(env_steps)
        if env_steps:
            try:
                action = collector.act(agent, step, random=env_steps <= args.learning_starts)
                online_rb.insert(collector.step(action))
            except BaseException:  # an arm that fails must not cost what was learned
                step -= 1
                save(run.dir / "latest.pth")
                raise
            idle = max(args.warmup_rollout_steps, args.learning_starts)
            num_updates = args.utd_ratio if env_steps > idle else 0
            decay = (args.initial_offline_ratio, args.offline_decay_rate, args.min_offline_ratio)
            ratio = offline_ratio_at(env_steps, *decay)
        progress = step / (args.offline_steps + online_steps)
        beta = priority_beta_schedule(progress, args.priority_beta)
        sizes = (len(offline_rb) if ratio else 0, len(online_rb))
        split = split_rows(args.batch_size, ratio, *sizes)

        # 2 update
        for i in range(num_updates):
            rng = np.random.default_rng([args.seed, 5, step, i])
            batch, draws = sample_mixed(args, (offline_rb, online_rb), split, beta, rng, device)
            if args.obs_noise and not env_steps:
                for name in ("obs", "next_obs"):
                    noise = torch.from_numpy(rng.standard_normal(batch[name].shape, np.float32))
                    batch[name] += args.obs_noise * agent.critic.encoder.std * noise.to(device)
            stats = agent.update(batch, full=i == num_updates - 1)
            errors = stats.pop("td_errors").cpu().numpy() if stats else None
            for rb, inds, place in draws if stats else ():
                rb.update_priorities(inds, errors[place])
            window.append(stats | {"buffer/offline_frac": split[0] / args.batch_size})

        # 3 go online
        if len(early["held"]) and not env_steps and step % max(1, args.offline_steps // 20) == 0:
            errors, target = agent.errors(tensors(early["held"].numpy().view(dtype), device))
            # relative: the bare error is least while all values are still 0
            error = float(errors.square().mean() / target.var().clamp(min=1e-8))
            row["losses/heldout_error"], early["stale"] = error, early["stale"] + 1
            if error < early["least"]:
                early |= dict(least=error, stale=0, best=agent.checkpoint()["agent"])
            if early["stale"] == args.early_stop_patience:
                tqdm.write(f"early stop after {step} updates: held-out error {error:.3f}")
                step = args.offline_steps
        switching = step == args.offline_steps
        if switching:
            if early["best"]:
                agent.load_state_dict(early["best"])
            early["best"] = batch = draws = rb = None  # they hold the old arrays
            parts["offline_rb"] = offline_rb = filter_offline_data(offline_rb, *retention)

        # 4 evaluate
        if switching or last or (args.eval_every and step % args.eval_every == 0):
            row |= evaluate_policy(agent, judge, args.eval_episodes)
        if switching:  # which deserves trust online, data or policy (arXiv:2510.01460)?
            data = " ".join(f"{name} {value:.1f}" for name, value in returns.items())
            own = row["eval/episodic_return"]
            trusted = "policy" if own >= max(returns.values()) else "data"
            tqdm.write(f"switch: return of {data}, of the policy {own:.1f}: trust the {trusted}")

        # 5 log
        if row or last or step % args.log_interval == 0:
            row |= {k if "/" in k else f"losses/{k}": mean for k, mean in means(window).items()}
            row |= {"charts/env_steps": env_steps, "charts/updates": agent.updates}
            row |= {"buffer/online_size": len(online_rb), "buffer/offline_size": len(offline_rb)}
            row["buffer/offline_bytes"] = offline_rb.rows.nbytes
            row["charts/SPS"] = step / (time.time() - run.start)
            row["losses/skipped_steps"] = agent.skipped_steps
            if collector.episodes:
                names = ("charts/episodic_return", "charts/episodic_length")
                row |= zip(names, np.mean(collector.episodes, 0).tolist(), strict=True)
            run.log({"global_step": step} | row)
            metrics, window = metrics | run.rows[-1], []
        known = [key for key in WATCHED if metrics.get(key) is not None]
        run.status(" ".join(f"{key.split('/')[1]} {metrics[key]:.3g}" for key in known), step)

        # 6 save; what is handed over comes first: resumed after the switch, nothing would write it
        if switching and args.filtered_data_path:
            save_checkpoint(Path(args.filtered_data_path), offline_rb.state_dict())
        if switching and args.checkpoint_path:
            save(Path(args.checkpoint_path))
        if last or stop or switching or step % args.save_every == 0:
            save(run.dir / "latest.pth")

    if step < total:
        print(f"stopped and saved; --resume --run-dir {run.dir} goes on")
        return metrics
    save_checkpoint(run.dir / "final_model.pth", agent.checkpoint())
    panels = {"return": ["eval/episodic_return", "charts/episodic_return"]}
    panels |= {"value": ["losses/q_values"], "temperature": ["losses/alpha"]}
    run.close("updates of the warm-up, then environment steps", panels)
    print(f"eval/episodic_return {metrics['eval/episodic_return']:.1f}: {run.dir}/final_model.pth")
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
