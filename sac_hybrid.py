# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "tyro==1.0.16",
#     "tqdm==4.70.1", "matplotlib==3.11.2", "wandb==0.31.0"]
# ///
"""sac_hybrid.py - SAC with a discrete gripper, demonstrations and human interventions.

HIL-SERL (arXiv:2410.21845v3): one thread acts, one learns, half of every batch are demonstrations.
    act -> a human may take over -> store, the human's steps also as demos -> update -> publish

The arm moves continuously (tanh-normal SAC); the gripper closes, stays or opens, by double DQN on
the same encoder. The built-in environment needs no download: arms over a table, cameras above. Its
human is slow, trembles and errs: imitation ends below him, reinforcement passes him.
Adds to the SAC core, which is word for word that of wsrl_warmup.py (markers in the code):
    hybrid: images  - encoder, trained by the critics only; random shifts
    hybrid: grasp   - double DQN over gripper commands
    hybrid: bc      - behaviour cloning on demo rows (--bc-weight; HIL-SERL does not have it)
Simplified on purpose: no pre-trained image backbone, no reward classifier, one arm per actor.
Shapes: N rows, A action dims, C of them continuous, E critics, F features; images (N,H,W,3) uint8.

An option with two defaults, (a or b): in the built-in environment, in any other.

    python sac_hybrid.py                       # pick up the bar, CPU, about two minutes
    python sac_hybrid.py --algorithm bc        # the same human, imitation only: HG-DAgger
    python sac_hybrid.py --human expert --setup-mode dual-arm-learned-gripper  # 12 + 2 action dims
    python sac_hybrid.py --env-id my_env.py:MyEnv --demo-paths demo.pkl --image-keys image
    torchrun --nproc-per-node 3 sac_hybrid.py  # rank 0 learns, ranks 1 and 2 act
"""

import copy
import inspect
import io
import json
import math
import os
import pickle
import pickletools
import runpy
import signal
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

BUILT_IN = "BarWorld-v0"
DEFAULTS = dict(  # what an option left at None becomes: (built-in environment, any other)
    max_steps=(6_000, 100_000), training_starts=(100, 1_000), random_steps=(0, 1_000),
    utd=(2.0, 1.0), batch_size=(32, 256), lr=(1e-3, 3e-4), gamma=(0.9, 0.97), tau=(0.01, 0.005),
    init_alpha=(5e-4, 0.01), bc_weight=(0.05, 0.0), hidden_size=(128, 256), augment_pad=(0, 4),
    encoder=("softmax", "conv"), buffer_size=(20_000, 200_000), intervention_steps=(3_000, 0),
    eval_every=(500, 5_000), eval_episodes=(50, 10), report_episodes=(100, 50), num_demos=(10, 0),
)
WITH_EXPERT = dict(bc_weight=0.5, batch_size=64, num_demos=50, intervention_steps=2_000)
TWO_ARMS = WITH_EXPERT | dict(max_steps=4_000, num_demos=200, intervention_steps=3_000)
MODES = {  # arms, grippers to learn, and what is best with --human expert
    "single-arm-fixed-gripper": (1, 0, WITH_EXPERT | dict(max_steps=2_000)),
    "single-arm-learned-gripper": (1, 1, WITH_EXPERT | dict(max_steps=3_000)),
    "dual-arm-fixed-gripper": (2, 0, TWO_ARMS),
    "dual-arm-learned-gripper": (2, 2, TWO_ARMS),
}
WATCHED = """losses/critic_loss losses/grasp_critic_loss losses/actor_loss losses/alpha_loss
    losses/alpha charts/intervention_rate eval/success_rate eval/steps_to_success""".split()


# --- args ---
@dataclass
class Args:
    # run
    seed: int = 1  # decides initial weights, data, sampling and shuffling; not the evaluation
    device: str = "auto"  # cpu, cuda, mps, ... (auto: cpu for built-in tasks, else an accelerator)
    num_threads: int = 1  # of torch on a CPU; tiny models are fastest with 1
    run_dir: str | None = None  # a new folder (None: runs/{script}__{seed}__{time})
    save_dir: str | None = None  # of checkpoint_{step}.pth and final_model.pth (None: run_dir)
    resume: bool = False  # go on with run_dir, or start it if there is nothing yet
    save_every: int = 10_000  # environment steps between checkpoints; the last is saved anyway
    save_buffers: bool = True  # in what --resume needs; without them a resumed run collects anew
    eval_every: int | None = None  # steps between evaluations of the policy (500 or 5000)
    eval_episodes: int | None = None  # of each; the best policy is kept (50 or 10; 0: the last one)
    report_episodes: int | None = None  # others, that judge final_model.pth (100 or 50; 0: not)
    log_interval: int = 100  # steps between lines of metrics.jsonl
    track: bool = False  # also log to wandb (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "stale-experience"  # where the runs of wandb are gathered
    create_data: bool = False  # write test_data/{success,failure}_demo.pkl, then end
    test: Literal["quick", "full"] | None = None  # a check-up; train on test_data
    # task
    env_id: str = BUILT_IN  # this one, a Gymnasium id, or file.py:Class(image_keys, action_dim)
    setup_mode: Literal[tuple(MODES)] = "single-arm-learned-gripper"  # action layout
    image_keys: tuple[str, ...] = ()  # camera images to use (none named: every one)
    demo_paths: tuple[str, ...] = ()  # .pkl or .npz demonstrations
    failure_paths: tuple[str, ...] = ()  # the same of failures: experience, not demonstrations
    human: Literal["clumsy", "expert"] = "clumsy"  # who demonstrates and takes over, if built in
    num_demos: int | None = None  # his episodes (10 or 0; expert 50, 200; demo_paths 0)
    intervention_steps: int | None = None  # he takes over an episode with chance 1 - step/this
    timeout_terminal: bool = False  # a time limit ends the value of a state, too
    # model
    encoder: Literal["softmax", "conv"] | None = None  # keypoints; 64-128 px
    hidden_size: int | None = None  # width of actor and critics (128 or 256)
    layer_norm: bool = True  # LayerNorm in actor and critics
    # rollout
    max_steps: int | None = None  # environment steps (6000 or 100000; expert fewer)
    training_starts: int | None = None  # steps before the first update (100 or 1000)
    random_steps: int | None = None  # steps with uniformly random actions (0 or 1000)
    utd: float | None = None  # updates per step; the faster thread waits (2 or 1)
    max_lead: int = 0  # steps that acting may be ahead; 0: they take turns, reproducible
    # optimization
    batch_size: int | None = None  # rows of an update (32 or 256; expert 64)
    lr: float | None = None  # Adam, for actor, critics and temperature (1e-3 or 3e-4)
    augment_pad: int | None = None  # random shift of images, in pixels (0 or 4)
    # SAC
    algorithm: Literal["sac", "bc"] = "sac"  # bc: regress the demos, nothing else (baseline)
    gamma: float | None = None  # discount per step (0.9 or 0.97)
    tau: float | None = None  # share of the new weights in the targets (0.01 or 0.005)
    cta_ratio: int = 2  # critic updates per actor update, each on a fresh batch
    num_critics: int = 2  # ensemble size
    num_sampled_critics: int = 2  # critics drawn for the minimum in the target
    init_alpha: float | None = None  # temperature at the start (5e-4 or 0.01)
    backup_entropy: bool = False  # entropy bonus in the critic's target
    grasp_penalty: float = -0.02  # added to the gripper's reward where it really opens or closes
    bc_weight: float | None = None  # of |tanh(mean) - action|^2 on demos (0.05 or 0; expert 0.5)
    # replay
    demo_ratio: float = 0.5  # share of demo rows in a batch, once both buffers hold something
    buffer_size: int | None = None  # frames: one a transition, one an episode (20000 or 200000)

    def __post_init__(self):  # tyro shows a ValueError from here in its error box
        built_in, expert = self.env_id == BUILT_IN, self.human == "expert"
        own = (self.num_demos, self.intervention_steps, self.create_data, self.test, expert)
        if not built_in and any(own):
            raise ValueError("only the built-in environment has a human and test data")
        if self.demo_paths and self.num_demos is None:
            self.num_demos = 0
        own = MODES[self.setup_mode][2] if expert else {}
        for name, pair in DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, own.get(name, pair[not built_in]))
        positive = """max_steps batch_size lr utd cta_ratio num_critics num_sampled_critics
            init_alpha hidden_size buffer_size log_interval save_every""".split()
        for name, value in vars(self).items():
            least = 1e-9 if name in positive else -1e9 if name == "grasp_penalty" else 0
            if type(value) in (int, float) and not least <= value < math.inf:
                raise ValueError(f"--{name} {value} is not allowed: at least {least:g}, and finite")
        sampled = self.num_sampled_critics / self.num_critics
        if max(self.gamma, self.tau, self.demo_ratio, sampled) > 1:
            raise ValueError("gamma, tau, demo-ratio, sampled critics per critic must be at most 1")
        if self.algorithm == "bc" and not (self.num_demos or self.demo_paths):
            raise ValueError("--algorithm bc needs demonstrations")
        if self.resume and not self.run_dir:
            raise ValueError("--resume needs --run-dir")


# --- task ---
class ActionLayout:
    """Which dims of an action are continuous, which are grippers: -1 close, 0 stay, +1 open."""

    def __init__(self, action_dim: int, num_grippers: int):
        self.action_dim, self.num_grippers = action_dim, num_grippers
        # one arm: the last dim; two arms: the last dim of each half
        self.gripper = [[], [action_dim - 1], [action_dim // 2 - 1, action_dim - 1]][num_grippers]
        self.continuous = [i for i in range(action_dim) if i not in self.gripper]
        self.grasp_dim = (0, 3, 9)[num_grippers]  # two grippers are one joint choice of nine

    def grasp_index(self, commands):
        """Rounded, or a human's 0.95 would be "stay"; left * 3 + right.  (N,G) -> (N,)"""
        digits = torch.as_tensor(commands).round().clamp(-1, 1).long() + 1
        return digits[..., 0] if self.num_grippers == 1 else digits[..., 0] * 3 + digits[..., 1]

    def grasp_commands(self, index: int) -> list[int]:
        return [index - 1] if self.num_grippers == 1 else [index // 3 - 1, index % 3 - 1]


def hold_grippers(commands, held):
    """"Stay" holds the last command. -> what is in force now, how many really opened or closed"""
    now = np.where(np.round(commands) == 0, held, commands)
    return now, int(((now < 0) != (held < 0)).sum())


class BarWorld(gym.Env):
    """Learned grippers: hold every bar, lift all above 0.5. Fixed ones: have every tool in its slot
    at the same time. Reward 1 and the end on success, else 0. A human may take over.
    Pose of an arm: x, y, z, roll, pitch, yaw in [-1,1], z in [0,1]; a step moves each by up to 0.3.
    Where bar or slot lie is in the picture only: one end red, the other blue, the arm green."""

    STEP, TIME_LIMIT, SIZE = 0.3, 20, 32
    LOW = np.array([-1, -1, 0, -1, -1, -1.0])  # of a pose; the highest is 1
    GRASP = np.array([0.2, 0.2, 0.2, 0.25, 0.25, 0.25])  # how exact the pose must be to hold a bar
    INSERT = np.array([0.15, 0.15, 0.12, 0.15, 0.15, 0.15])  # ... or to be in the slot
    allow_intervention, intervention_probability = True, 0.0

    def __init__(self, setup_mode: str = "single-arm-learned-gripper", human: str = "clumsy"):
        self.num_arms, grippers, _ = MODES[setup_mode]
        self.learned, self.clumsy = grippers > 0, human == "clumsy"
        self.image_keys = ["image"] if self.num_arms == 1 else ["left_image", "right_image"]
        self.action_space = gym.spaces.Box(-1, 1, (6 * self.num_arms + grippers,))
        line = (np.arange(self.SIZE) + 0.5) / self.SIZE * 2.4 - 1.2  # a margin: nothing is cut off
        self.px, self.py = np.meshgrid(line, line)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        n, rng = self.num_arms, self.np_random
        low, high = [-0.5, -0.5, 0.5, -0.7, -0.7, -0.5], [0.5, 0.5, 1.0, 0.7, 0.7, 0.5]
        self.pose, self.object = rng.uniform(low, high, (n, 6)), np.zeros((n, 6))  # it lies flat
        self.object[:, [0, 1, 5]] = rng.uniform([-0.8, -0.8, -0.7], [0.8, 0.8, 0.7], (n, 3))
        self.width, self.held, self.steps = np.ones(n), np.zeros(n, bool), 0
        helped, start = rng.random() < self.intervention_probability, rng.integers(4, 11)
        self.takeover = start if helped else math.inf
        return self.observe(), {}

    def observe(self):
        obs = {key: self.draw(arm) for arm, key in enumerate(self.image_keys)}
        own = [self.pose, self.width] if self.learned else [self.pose]
        return obs | {"state": np.column_stack(own).astype(np.float32).ravel()}

    def draw(self, arm: int):
        """Anti-aliased: a shift of a tenth of a pixel is visible.  -> (H,W,3) uint8"""
        x, y, yaw = self.object[arm, [0, 1, 5]]
        cos, sin, pixel = math.cos(yaw * math.pi / 2), math.sin(yaw * math.pi / 2), 2.4 / self.SIZE
        dx, dy = self.px - x, self.py - y
        along, across = dx * cos + dy * sin, dy * cos - dx * sin
        away = np.hypot(self.px - self.pose[arm, 0], self.py - self.pose[arm, 1])
        edges = np.stack([0.45 - abs(along), 0.1 - abs(across), along, 0.12 - away])
        length, breadth, red, spot = np.clip(edges / pixel + 0.5, 0, 1)  # each edge one pixel wide
        bar = length * breadth * (1 - spot)
        return (np.stack([bar * red, spot, bar * (1 - red)], -1) * 255).astype(np.uint8)

    def step(self, action):
        info = {}
        if self.allow_intervention and self.steps >= self.takeover:
            action = info["intervene_action"] = self.human()
        action = np.asarray(action, np.float64).reshape(self.num_arms, -1).clip(-1, 1)
        before, self.steps = self.pose, self.steps + 1
        self.pose = np.clip(self.pose + self.STEP * action[:, :6], self.LOW, 1)
        self.object[self.held] += (self.pose - before)[self.held]
        error = abs(self.pose - self.object)
        if self.learned:
            command = np.round(action[:, 6])
            closing, opening = (command < 0) & (self.width == 1), command > 0
            self.held = (self.held | (closing & (error < self.GRASP).all(1))) & ~opening
            self.object[opening, 2:5] = 0.0  # it falls flat
            self.width = np.where(opening, 1.0, np.where(closing, 0.4 * self.held, self.width))
            success = bool((self.held & (self.pose[:, 2] > 0.5)).all())
        else:
            success = bool((error < self.INSERT).all())
        truncated = self.steps >= self.TIME_LIMIT and not success
        return self.observe(), float(success), success, truncated, info | {"is_success": success}

    def expert(self):
        """Straight to the object, close on arrival, lift.  -> (arms, 6 or 7)"""
        lifted = self.pose * [1, 1, 0, 1, 1, 1] + [0, 0, 0.8, 0, 0, 0]
        target = np.where(self.held[:, None], lifted, self.object)
        move = np.clip((target - self.pose) / self.STEP, -1, 1)
        near = (abs(self.pose + self.STEP * move - target) < 0.5 * self.GRASP).all(1)
        grip = np.where(self.held, 0, np.where(self.width < 1, 1, np.where(near, -1, 0)))
        return np.column_stack([move, grip] if self.learned else [move])

    def human(self):
        """The expert; or half as fast, trembling, every tenth grip at random.  -> (A,)"""
        action, n, rng = self.expert(), self.num_arms, self.np_random
        if self.clumsy:
            tremble = rng.normal(0, 0.35 if n == 1 else 0.25, (n, 6))  # else he gets not both there
            action[:, :6] = np.clip(0.5 * action[:, :6] + tremble, -1, 1)
            slips = rng.random(n) < 0.1
            action[slips, 6:] = rng.integers(-1, 2, (n, 1))[slips]
        return action.ravel().astype(np.float32)


def make_demos(args: Args, num_demos: int, success: bool = True) -> list[dict]:
    """The manual's transitions: the human's successful episodes, or failures at random."""
    env, demos, episode = BarWorld(args.setup_mode, args.human), [], 0
    shape = env.action_space.shape
    while len(demos) < num_demos:
        seed = np.random.SeedSequence([args.seed, 2, episode]).generate_state(1)[0]
        (obs, _), done, rows, episode = env.reset(seed=int(seed)), False, [], episode + 1
        while not done:
            action = env.human() if success else env.np_random.uniform(-1, 1, shape)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            row = dict(observations=obs, actions=action, next_observations=next_obs, rewards=reward)
            rows.append(row | dict(masks=1.0 - terminated, dones=done))
            obs = next_obs
        demos += [rows] if terminated == success else []
    return sum(demos, [])


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


def read_demos(path: str, columns: dict, robot) -> np.ndarray:
    """Records for a buffer; actions come in the environment's units."""
    held = np.zeros(robot.layout.num_grippers)
    for name in {"observations", "next_observations"} & {*columns}:  # a bare vector is the state
        columns[f"{name}/state"] = columns.pop(name)
    try:
        records = np.zeros(len(columns["rewards"]), robot.record)
        for name, view in (("obs", "observations"), ("next_obs", "next_observations")):
            for key, (kind, _) in robot.record["obs"].fields.items():
                records[name][key] = check_column(columns, f"{view}/{key}", kind.shape, kind.base)
        columns.setdefault("masks", [1.0 - bool(done) for done in columns["dones"]])
        for name in ("actions", "rewards", "masks", "dones"):
            records[name] = check_column(columns, name, records[name].shape[1:])
        records["actions"] = ((records["actions"] - robot.center) / robot.scale).clip(-1, 1)
        for record in records:
            held, toggles = hold_grippers(record["actions"][robot.layout.gripper], held)
            record["grasp_penalty"] = robot.args.grasp_penalty * toggles
            held = held * (record["dones"] == 0)  # an episode starts open
    except (KeyError, ValueError) as error:
        missing = "there is no " if isinstance(error, KeyError) else ""
        sys.exit(f"data file {path}: {missing}{error}")
    return records


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


def embedding(in_dim: int, out_dim: int):
    return nn.Sequential(nn.Linear(in_dim, out_dim), nn.LayerNorm(out_dim), nn.Tanh())


class ImageEncoder(nn.Module):
    """One camera.  (N,3,H,W) in [-0.5,0.5] -> (N,F)"""

    def __init__(self, kind: str, image_shape: tuple):
        super().__init__()
        self.kind, (height, width, channels) = kind, image_shape
        if kind == "softmax":  # where things are, as coordinates: 16 keypoints of arXiv:1504.00702
            stem = nn.Conv2d(channels, 16, 3, 2, 1)
            self.conv = nn.Sequential(stem, nn.ReLU(inplace=True), nn.Conv2d(16, 16, 1))
            lines = (torch.linspace(-1, 1, math.ceil(size / 2)) for size in (height, width))
            rows, columns = torch.meshgrid(*lines, indexing="ij")
            grid = torch.stack([rows, columns, torch.ones_like(rows)]).flatten(1)  # (3,H*W)
            self.register_buffer("grid", grid, persistent=False)
            self.embed, self.dim = embedding(32, 64), 32 + 64
        else:  # the small encoder of SERL (arXiv:2401.16013): spatial weights instead of pooling
            widths = (channels, 32, 64, 96, 128)
            convs = [nn.Conv2d(*pair, 3, 2, 1) for pair in zip(widths, widths[1:], strict=False)]
            layers = [layer for conv in convs for layer in (conv, nn.ReLU(inplace=True))]
            self.conv, size = nn.Sequential(*layers), math.ceil(height / 16) * math.ceil(width / 16)
            self.spatial = nn.Parameter(torch.randn(128, size, 4) * size**-0.5)
            self.embed, self.dim = embedding(512, 256), 256

    def forward(self, image):
        x = self.conv(image)
        if self.kind == "softmax":
            x = x.permute(0, 2, 3, 1).flatten(1, 2)  # (N,H*W,16), as the images lie in memory
            moments = self.grid @ x.clamp(-30, 30).exp()  # (N,3,16): sums of row, column, 1
            points = (moments[:, :2] / moments[:, 2:]).flatten(1)  # (N,32): where it points
            return torch.cat([points, self.embed(points)], 1)  # raw, too: position is a feature
        x = torch.einsum("nkp,kpe->nke", x.flatten(2), self.spatial)  # (N,128,4)
        return self.embed(x.flatten(1))


class Encoder(nn.Module):  # hybrid: images
    """Cameras and vectors side by side. Only here images become floats.  obs -> (N,F)"""

    def __init__(self, image_keys, image_shape: tuple, state_dim: int, kind: str):
        super().__init__()
        self.image_keys, self.dim, self.embed_state = list(image_keys), state_dim, None
        if image_keys:  # without images the state is the feature
            self.image = ImageEncoder(kind, image_shape)  # the same for every camera
            self.embed_state = embedding(state_dim, 64) if state_dim else None
            self.dim += len(image_keys) * self.image.dim + 64 * bool(state_dim)

    def forward(self, obs):
        images = [obs[key].permute(0, 3, 1, 2).float() for key in self.image_keys]  # (N,3,H,W)
        parts = [self.image(image.div_(255).sub_(0.5)) for image in images]
        if vectors := sorted(set(obs) - set(self.image_keys)):
            state = torch.cat([obs[key] for key in vectors], 1)
            parts += [state, self.embed_state(state)] if self.embed_state else [state]
        return torch.cat(parts, 1)


# --- buffer ---
class FrameBuffer:
    """Each frame once: N transitions in E unbroken pieces are N + E frames. A ring of slots; a
    transition starts at one and ends at the next. Frames are shared only if they are equal."""

    def __init__(self, capacity: int, record: np.dtype):
        names = ("obs", "actions", "rewards", "masks", "grasp_penalty")
        self.slots = np.zeros(capacity, [(name, record[name]) for name in names])
        self.starts = np.zeros(capacity, bool)  # a transition starts at this slot
        self.written = 0  # frames so far

    def __len__(self):
        return int(self.starts.sum())

    def write(self, frame) -> int:
        slot = self.written % len(self.slots)
        self.slots["obs"][slot], self.starts[slot] = frame, False  # what started here is forgotten
        self.written += 1
        return slot

    def insert(self, record):
        start = (self.written - 1) % len(self.slots)
        if not self.written or self.slots["obs"][start].tobytes() != record["obs"].tobytes():
            start = self.write(record["obs"])
        self.write(record["next_obs"])
        self.slots[start], self.starts[start] = record[[*self.slots.dtype.names]], True

    def sample(self, n: int, rng: np.random.Generator):
        """With replacement.  -> (N,) slots, (N,) next frames"""
        start = rng.choice(np.flatnonzero(self.starts), n)
        return self.slots[start], self.slots["obs"][(start + 1) % len(self.slots)]

    def state_dict(self) -> dict:
        slots = torch.tensor(self.slots[: self.written].view(np.uint8))  # copies
        return dict(slots=slots, starts=torch.tensor(self.starts), written=self.written)

    def load_state_dict(self, state: dict):
        self.starts[:], self.written = state["starts"].numpy(), state["written"]
        self.slots[: self.written] = state["slots"].numpy().view(self.slots.dtype)


def random_shift(images, pad: int, rng):
    """Each image moved by up to `pad` pixels, edges repeated (arXiv:2107.09645).  (N,H,W,3)"""
    n, height, width, _ = images.shape
    dy, dx = rng.integers(-pad, pad + 1, (2, n, 1))
    rows = (np.arange(height) + dy).clip(0, height - 1)  # (N,H)
    columns = (np.arange(width) + dx).clip(0, width - 1)  # (N,W)
    return images[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def split_batch(batch_size: int, num_online: int, num_demo: int, demo_ratio: float):
    """Rows from (online, demo). An empty buffer gives nothing; small ones are drawn repeatedly."""
    if not num_demo or not num_online:
        return (batch_size, 0) if num_online else (0, batch_size if num_demo else 0)
    demo = math.floor(batch_size * demo_ratio)
    return batch_size - demo, demo


def tensors(rows: np.ndarray, device) -> dict[str, torch.Tensor]:
    names = rows.dtype.names
    return {k: torch.from_numpy(np.ascontiguousarray(rows[k])).to(device) for k in names}


def sample_batch(args, online_rb, demo_rb, layout, update: int, device) -> dict:
    """Online rows first, then demo rows; is_demo tells them apart. A function of (seed, update)."""
    rng = np.random.default_rng([args.seed, 5, update])
    demo_ratio = 1.0 if args.algorithm == "bc" else args.demo_ratio
    counts = split_batch(args.batch_size, len(online_rb), len(demo_rb), demo_ratio)
    parts = [rb.sample(n, rng) for rb, n in zip((online_rb, demo_rb), counts, strict=True) if n]
    slots, next_frames = map(np.concatenate, zip(*parts, strict=True))
    obs, next_obs = tensors(slots["obs"], device), tensors(next_frames, device)
    batch = tensors(slots[[*slots.dtype.names[1:]]], device) | dict(obs=obs, next_obs=next_obs)
    for view in (obs, next_obs) if args.augment_pad else ():
        images = {key: image for key, image in view.items() if image.ndim == 4}
        view |= {key: random_shift(image, args.augment_pad, rng) for key, image in images.items()}
    batch["is_demo"] = torch.arange(args.batch_size, device=device) >= counts[0]
    batch["weights"] = batch["actor_weights"] = torch.ones(args.batch_size, device=device)
    if layout.num_grippers:  # only continuous dims enter Q(s,a)
        batch["grasps"] = layout.grasp_index(batch["actions"][:, layout.gripper])
        batch["actions"] = batch["actions"][:, layout.continuous]
    return batch


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


def grasp_target(rewards, grasp_penalty, masks, next_q_online, next_q_target, gamma):
    """Double DQN: the online network chooses, the target rates; only here is the penalty.  (N,)"""
    assert next_q_online.shape == next_q_target.shape and rewards.shape == grasp_penalty.shape
    best = next_q_online.argmax(-1, keepdim=True)
    return rewards + grasp_penalty + gamma * masks * next_q_target.gather(-1, best).squeeze(-1)


class SACHybridAgent(SAC):
    """SAC on images, with grippers and a behaviour-cloning term."""

    def __init__(self, image_keys, continuous_action_dim: int, grasp_action_dim: int = 0,
                 device="cpu", args=None, image_shape=(32, 32, 3), state_dim: int = 0):
        args, grippers = args or Args(), {0: 0, 3: 1, 9: 2}[grasp_action_dim]
        torch.manual_seed(args.seed)
        encoder = Encoder(image_keys, image_shape, state_dim, args.encoder)
        net = (encoder.dim, grasp_action_dim, args.hidden_size, args.layer_norm)
        heads = dict(discrete_qf=mlp(*net)) if grippers else {}  # hybrid: grasp
        layout = ActionLayout(continuous_action_dim + grippers, grippers)
        entropy = -0.5 * layout.action_dim  # what the temperature steers to
        super().__init__(encoder, continuous_action_dim, entropy, device, args, **heads)
        self.layout, self.sizes = layout, (tuple(image_shape), state_dim)
        self.dims = (list(image_keys), continuous_action_dim, grasp_action_dim)

    def more_critic_losses(self, batch, features, next_features, next_features_target, q_values):
        if not self.layout.num_grippers:
            return {}
        with torch.no_grad():  # hybrid: grasp
            next_q = self.critic.discrete_qf(next_features)  # (N,G)
            next_q_target = self.critic_target.discrete_qf(next_features_target)
            rewards = (batch["rewards"], batch["grasp_penalty"], batch["masks"])
            target = grasp_target(*rewards, next_q, next_q_target, self.args.gamma)
        q = self.critic.discrete_qf(features).gather(1, batch["grasps"][:, None]).squeeze(1)
        return {"grasp_critic_loss": (q - target).square().mean()}

    def more_actor_losses(self, batch, mean):  # hybrid: bc
        if not self.args.bc_weight:
            return {}
        error = (mean.tanh() - batch["actions"]).square().sum(-1)  # (N,), counts on demo rows
        error = (error * batch["is_demo"]).sum() / batch["is_demo"].sum().clamp(min=1)
        return {"bc_loss": self.args.bc_weight * error}

    def clone(self, batch: dict) -> dict[str, torch.Tensor]:
        """--algorithm bc, the baseline: regress the arm, classify the gripper, on demo rows."""
        features = self.critic.encoder(batch["obs"])
        error = (self.policy(features)[0].tanh() - batch["actions"]).square().sum(-1)
        losses = {"actor_loss": error.mean()}
        if self.layout.num_grippers:
            scores = self.critic.discrete_qf(features)
            losses["grasp_critic_loss"] = F.cross_entropy(scores, batch["grasps"])
        groups = (self.critic_group, self.actor_group)
        return self.count(apply_gradients(sum(losses.values()), *groups), losses)

    def acting(self) -> list[nn.Parameter]:
        """All that acting needs: what the learner publishes"""
        heads = [head for name, head in self.critic.items() if name != "qf"]
        return [param for module in (self.actor, *heads) for param in module.parameters()]

    @torch.no_grad()
    def act(self, obs: dict[str, np.ndarray], noise=0.0) -> np.ndarray:
        """Continuous part at `noise` standard deviations from the mean, best grasp.  -> (A,)"""
        obs = {key: torch.from_numpy(value)[None].to(self.device) for key, value in obs.items()}
        features = self.critic.encoder(obs)
        mean, std = (x[0].cpu().numpy() for x in self.policy(features))
        action = np.empty(self.layout.action_dim, np.float32)
        action[self.layout.continuous] = np.tanh(mean + std * noise)
        if self.layout.num_grippers:
            best = int(self.critic.discrete_qf(features).argmax(-1))
            action[self.layout.gripper] = self.layout.grasp_commands(best)
        return action

    def checkpoint(self) -> dict:
        agent = copy.deepcopy(self.state_dict())
        return dict(agent=agent, args=asdict(self.args), dims=self.dims, sizes=self.sizes)

    def load(self, checkpoint):
        """A path, or what torch.load made of it. Widths and image sizes come from the file."""
        if not isinstance(checkpoint, dict):
            checkpoint = torch.load(checkpoint, map_location="cpu", weights_only=True)
        args = Args(**checkpoint["args"])
        self.__init__(*self.dims, self.device, args, *checkpoint["sizes"])
        self.load_state_dict(checkpoint["agent"])  # says so if the dims are not these


# --- rollout ---
# A transition is one numpy record: stored, compared and sent over the wire as bytes.
COUNTED = ["interventions", "takeovers", "dones"]
RESULTS = ["success_rate", "episodic_return", "episodic_length"]  # of the episode so far
SCALARS = ["rewards", "masks", "grasp_penalty", *COUNTED, *RESULTS]


class Robot:
    """An environment as the loops see it: uint8 images, float32 vectors, actions in [-1,1]; of an
    observation only `keys`. An episode is a function of the step it began at and its actions."""

    def __init__(self, args: Args, human: bool, rank: int = 0, keys=()):
        self.args, self.rank, self.keys, self.built_in = args, rank, keys, args.env_id == BUILT_IN
        arms, grippers, _ = MODES[args.setup_mode]
        size = 6 * arms + grippers
        if self.built_in:
            self.env = BarWorld(args.setup_mode, args.human)
        elif ".py:" in args.env_id:  # the manual's own environment: no base class, no spaces
            path, _, name = args.env_id.rpartition(":")
            self.env = runpy.run_path(path)[name](list(args.image_keys or ["image"]), size)
        else:
            self.env = gym.make(args.env_id)
        getattr(self.env, "unwrapped", self.env).allow_intervention = human
        space = getattr(self.env, "action_space", gym.spaces.Box(-1, 1, (size,)))
        box = isinstance(space, gym.spaces.Box) and space.is_bounded()
        if not box or space.shape[0] % arms:
            sys.exit(f"--env-id {args.env_id} has actions {space}: no bounded Box for {arms} arms")
        self.layout = ActionLayout(space.shape[0], grippers)
        self.center, self.scale = (space.high + space.low) / 2, (space.high - space.low) / 2
        self.begin(0)
        frame = [(key, x.dtype, x.shape) for key, x in self.obs.items()]
        head = [("obs", frame), ("next_obs", frame), ("actions", np.float32, space.shape)]
        self.record = np.dtype(head + [(name, np.float32) for name in SCALARS])
        # what SACHybridAgent wants to know
        images = {key: x.shape for key, x in self.obs.items() if x.ndim == 3}
        state_dim = sum(x.size for x in self.obs.values() if x.ndim == 1)
        self.dims = ([*images], len(self.layout.continuous), self.layout.grasp_dim)
        self.sizes, self.obs = (next(iter(images.values()), (0, 0, 3)), state_dim), None

    def observe(self, raw, reward: float = 0.0) -> dict[str, np.ndarray]:
        raw = raw if isinstance(raw, dict) else {"state": raw}
        arrays = {key: np.asarray(value) for key, value in raw.items()}
        images = self.args.image_keys or [key for key, x in arrays.items() if x.ndim == 3]
        if any(key not in arrays or arrays[key].dtype != np.uint8 for key in images):
            sys.exit(f"the environment has {[*arrays]}, not {[*images]} as uint8 (H,W,3)")
        obs = {key: arrays[key][:, :, :3].copy() for key in images}
        obs |= {key: x.ravel().astype(np.float32) for key, x in arrays.items() if x.ndim < 3}
        if not all(np.isfinite(x).all() for x in (reward, *obs.values())):
            raise ValueError("the environment gave an observation or reward that is not finite")
        self.unseen = [key for key in obs if self.keys and key not in self.keys]
        return {key: x for key, x in obs.items() if key not in self.unseen}

    def begin(self, global_step: int, seed: int | None = None):
        self.start, self.actions, self.total, self.was_human = global_step, [], 0.0, False
        self.held, fade = np.zeros(self.layout.num_grippers), self.args.intervention_steps  # open
        if self.built_in:
            self.env.intervention_probability = max(0, 1 - global_step / fade) if fade else 0
        key = [self.args.seed, 4, self.rank, global_step]
        seed = int(np.random.SeedSequence(key).generate_state(1)[0]) if seed is None else seed
        takes_seed = "seed" in inspect.signature(self.env.reset).parameters
        self.obs = self.observe(self.env.reset(**(dict(seed=seed) if takes_seed else {}))[0])

    def step(self, action):
        """-> record of what was executed, by policy or human"""
        obs, grippers, wanted = self.obs, self.layout.gripper, np.array(action, np.float64)
        wanted[grippers] = hold_grippers(wanted[grippers], self.held)[0]
        executed = (self.center + self.scale * wanted.clip(-1, 1)).astype(np.float32)
        raw, reward, terminated, truncated, info = self.env.step(executed)
        self.actions.append(action)
        is_human = info.get("intervene_action") is not None
        if is_human:
            human = torch.as_tensor(info["intervene_action"]).detach().cpu().float().numpy()
            if human.shape != executed.shape or not np.isfinite(human).all():
                raise ValueError(f"intervene_action must be {executed.shape} finite numbers")
            action = ((human - self.center) / self.scale).clip(-1, 1)
        self.obs, self.total = self.observe(raw, reward), self.total + reward
        self.held, toggles = hold_grippers(action[grippers], self.held)
        mask = 1.0 - (terminated or (truncated and self.args.timeout_terminal))
        success = info.get("is_success", info.get("success", terminated and reward > 0))
        takeover, self.was_human = is_human and not self.was_human, is_human
        scalars = (reward, mask, self.args.grasp_penalty * toggles, is_human, takeover)
        scalars += (terminated or truncated, success, self.total, len(self.actions))
        views = [tuple(view[key] for key in self.record["obs"].names) for view in (obs, self.obs)]
        return np.array((*views, action, *scalars), self.record)

    def take_turn(self, agent, step: int, weights):
        """The newest policy takes one step.  -> its record"""
        nn.utils.vector_to_parameters(weights, agent.acting())
        if self.obs is None:
            self.begin(step)
        layout, rng = self.layout, np.random.default_rng([self.args.seed, 3, self.rank, step])
        if step < self.args.random_steps:
            action = rng.uniform(-1, 1, layout.action_dim).astype(np.float32)
            action[layout.gripper] = rng.integers(-1, 2, layout.num_grippers)
        else:
            action = agent.act(self.obs, rng.standard_normal(len(layout.continuous), np.float32))
        record = self.step(action)
        if record["dones"]:
            self.obs, self.actions = None, []
        return record


class Link:
    """The learner's end of its actors, a thread for each. A turn is leave to take one step; each
    has max_lead + 1 of them at a time. `weights` is a copy, replaced and never changed."""

    def __init__(self, actors, steps):
        self.actors = {ThreadPoolExecutor(1): take_turn for take_turn in actors}
        self.pending, self.steps = {}, iter(steps)

    def publish(self, agent: SACHybridAgent):
        self.weights = nn.utils.parameters_to_vector(agent.acting()).detach().cpu()

    def grant(self, thread):
        if (step := next(self.steps, None)) is not None:
            # with the weights that are the newest when it comes to it
            turn = thread.submit(lambda: self.actors[thread](step, self.weights))
            self.pending[turn] = thread

    def receive(self):
        """Whose turn has ended, and its record. Raises what an actor raised."""
        wait(self.pending, return_when=FIRST_COMPLETED)
        ended = next(turn for turn in self.pending if turn.done())
        return self.pending.pop(ended), ended.result()


class Wire:
    """An actor on another rank: turn and weights go there, the bytes of a record come back."""

    def __init__(self, record: np.dtype, rank: int):
        # a group for each pair, so that no actor waits for another
        self.record, self.peer, self.group = record, rank, dist.new_group([0, rank])

    def take_turn(self, step: int, weights):
        """On rank 0; -1 ends the actor."""
        dist.send(torch.tensor([step]), self.peer, self.group)
        dist.send(weights, self.peer, self.group)
        if step >= 0:
            message = torch.zeros(self.record.itemsize, dtype=torch.uint8)
            dist.recv(message, self.peer, self.group)
            return np.frombuffer(message.numpy(), self.record)[0]

    def serve(self, robot, actor):
        """On the other rank, until the end."""
        weights = nn.utils.parameters_to_vector(actor.acting()).detach()
        step = torch.zeros(1, dtype=torch.int64)
        while True:
            dist.recv(step, 0, self.group)
            dist.recv(weights, 0, self.group)
            if step < 0:
                return
            message = bytearray(robot.take_turn(actor, step.item(), weights).tobytes())
            dist.send(torch.frombuffer(message, dtype=torch.uint8), 0, self.group)


# --- evaluate ---
def evaluate_robot(agent: SACHybridAgent, robot: Robot, first_seed: int, num_episodes: int):
    """Frozen policy, mean action, the same episodes for every run; no human's episode counts."""
    results = []
    for episode in range(num_episodes):
        robot.begin(0, seed=first_seed + episode)
        record, by_human = {"dones": False}, False
        while not record["dones"]:
            record = robot.step(agent.act(robot.obs))
            by_human = by_human or record["interventions"]
        results += [] if by_human else [[float(record[name]) for name in RESULTS]]
    if helped := num_episodes - len(results):
        print(f"eval: a human took over in {helped} of {num_episodes} episodes, these do not count")
    if not results:
        return {}
    success, _, length = columns = np.array(results).T
    metrics = {f"eval/{name}": float(c.mean()) for name, c in zip(RESULTS, columns, strict=True)}
    steps = float(length[success > 0].mean()) if success.any() else math.nan
    return metrics | {"eval/steps_to_success": steps}


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


# --- main ---
def create_data(args: Args) -> dict:
    """Writes the manual's two files of test data.  -> the options that train on them"""
    paths = ("test_data/success_demo.pkl", "test_data/failure_demo.pkl")
    Path("test_data").mkdir(exist_ok=True)
    for path, number in zip(paths, (args.num_demos or 10, 5), strict=True):
        Path(path).write_bytes(pickle.dumps(make_demos(args, number, success=path == paths[0])))
        print(f"{path}: {number} episodes, {args.setup_mode}")
    return dict(demo_paths=paths[:1], failure_paths=paths[1:], num_demos=0, test=None)


def pick_device(name: str, built_in: bool) -> torch.device:
    """auto: the CPU for what is built in, which is fastest there; else an accelerator, if any."""
    if name != "auto":
        return torch.device(name)
    if built_in:
        return torch.device("cpu")
    # without check_available the answer is that of the build, on a machine without a GPU, too
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def main(args: Args) -> dict[str, float]:
    if args.test == "quick":  # a check-up: demos, a short run, its model
        folder = tempfile.TemporaryDirectory()
        short = dict(max_steps=60, training_starts=20, eval_episodes=2, report_episodes=2)
        args = replace(args, **short, run_dir=f"{folder.name}/run")
    if args.create_data or args.test == "full":
        args = replace(args, **create_data(args))
        if args.create_data:
            return {}
    torch.set_num_threads(args.num_threads)
    device = pick_device(args.device, built_in=args.env_id == BUILT_IN)
    stop = catch_signals()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    files = {path: load_columns(path) for path in (*args.demo_paths, *args.failure_paths)}
    if args.num_demos:
        files["of the human"] = load_pickle(pickle.dumps(make_demos(args, args.num_demos)))
    names = {name for columns in files.values() for name in columns}
    keys = {name.partition("/")[2] or "state" for name in names if name.startswith("observations")}
    judged = args.eval_episodes or args.report_episodes  # if never: a real arm exists once
    judge = Robot(args, human=not judged, keys=keys)
    robot = Robot(args, human=True, rank=rank, keys=keys) if judged else judge
    if robot.unseen:
        print(f"the demos do not have {robot.unseen}: the policy does not see it, either")
    agent = SACHybridAgent(*judge.dims, device, args, *judge.sizes)
    actor = SACHybridAgent(*judge.dims, "cpu", args, *judge.sizes)
    needed = 2 * args.buffer_size * judge.record["obs"].itemsize
    memory = math.inf  # Windows does not say
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.9 * memory:
        sys.exit(f"--buffer-size {args.buffer_size}: {needed / 1e9:.1f} GB of frames do not fit")
    if world > 1:
        dist.init_process_group("gloo")
    wires = [Wire(judge.record, other) for other in range(1, world)]
    if rank > 0:
        wires[rank - 1].serve(robot, actor)
        dist.destroy_process_group()
        return {}
    online_rb, demo_rb = (FrameBuffer(args.buffer_size, judge.record) for _ in range(2))
    for path, columns in files.items():
        rb = online_rb if path in args.failure_paths else demo_rb
        for record in read_demos(path, columns, judge):
            rb.insert(record)
    best, best_score, window, rows, metrics = None, [-1.0], [], [], {}
    step, totals, episodes = 0, [0, 0, 0], []  # totals of COUNTED, the last 20 episodes
    path = Path(args.run_dir or "") / "latest.pth"
    if args.resume and path.exists():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        agent.load_state_dict(saved["agent"])
        best, best_score, window, rows, step, totals, episodes = saved["progress"]
        start, actions = saved["episode"]
        if len(actions) and robot.built_in:  # inside an episode; nobody moves a real arm so
            robot.begin(start)
            for action in actions.numpy():
                robot.step(action)
        for rb, state in zip((online_rb, demo_rb), saved["buffers"], strict=False):
            rb.load_state_dict(state)
        print(f"{path}: going on after step {step}")
    run = Run(args, args.max_steps, rows, exist_ok=args.resume)
    save_dir = Path(args.save_dir or run.dir)
    save_dir.mkdir(parents=True, exist_ok=True)

    def save():
        state = agent.checkpoint()
        save_checkpoint(save_dir / f"checkpoint_{step}.pth", state)
        progress = (best, best_score, window, run.rows, step, totals, episodes)
        episode = (robot.start, torch.from_numpy(np.array(robot.actions, np.float32)))
        buffers = [rb.state_dict() for rb in (online_rb, demo_rb)] if args.save_buffers else []
        state |= dict(progress=progress, episode=episode, buffers=buffers)
        save_checkpoint(run.dir / "latest.pth", state)

    actors = [wire.take_turn for wire in wires] or [partial(robot.take_turn, actor)]
    link = Link(actors, range(step, args.max_steps))
    link.publish(agent)
    for thread in [*link.actors] * (args.max_lead + 1):
        link.grant(thread)
    try:
        while step < args.max_steps and not stop:
            # 1 collect: the actors do, see Robot.take_turn; the human's steps go into both buffers
            started = time.time()
            thread, record = link.receive()
            for rb in (online_rb, demo_rb) if record["interventions"] else (online_rb,):
                rb.insert(record)
            totals = [total + int(record[k]) for total, k in zip(totals, COUNTED, strict=True)]
            if record["dones"]:
                episodes = [*episodes[-19:], [float(record[name]) for name in RESULTS]]
            step, last, row, received = step + 1, step + 1 == args.max_steps, {}, time.time()

            # 2 update
            while agent.updates < math.floor(args.utd * max(0, step - args.training_starts)):
                batch = sample_batch(args, online_rb, demo_rb, agent.layout, agent.updates, device)
                if args.algorithm == "bc":
                    stats = agent.clone(batch)
                else:  # critic-only updates, then a full one
                    stats = agent.update(batch, full=(agent.updates + 1) % args.cta_ratio == 0)
                    stats.pop("td_errors", None)
                stats["buffer/demo_rows"] = demo_rows = batch["is_demo"].float().sum()
                stats["buffer/online_rows"] = args.batch_size - demo_rows
                window.append(stats)
            link.publish(agent)
            seconds = {"time/rollout": received - started, "time/update": time.time() - received}
            window.append(seconds | {"charts/intervention_rate": float(record["interventions"])})

            # 3 log
            if step % args.log_interval == 0 or last:
                row = {k if "/" in k else f"losses/{k}": mean for k, mean in means(window).items()}
                names = ("charts/intervention_steps", "charts/intervention_count", "charts/episodes")
                row |= dict(zip(names, totals, strict=True)) | {"charts/updates": agent.updates}
                row |= {"buffer/online_size": len(online_rb), "buffer/demo_size": len(demo_rb)}
                row["charts/SPS"] = step / (time.time() - run.start)
                row["losses/skipped_steps"] = agent.skipped_steps
                for name, values in zip(RESULTS, zip(*episodes, strict=True), strict=False):
                    row[f"charts/{name}"] = float(np.mean(values))
                window = []

            # 4 evaluate: one set of episodes chooses the policy, another judges it at the end
            if args.eval_episodes and (last or (args.eval_every and step % args.eval_every == 0)):
                row |= evaluate_robot(agent, judge, 10_000, args.eval_episodes)
                score = [row.get(f"eval/{name}", -math.inf) for name in RESULTS]
                score[2] *= -1  # as good, and faster
                if score >= best_score:
                    best, best_score = agent.checkpoint()["agent"], score
            if row:
                run.log({"global_step": step} | row)
                metrics |= run.rows[-1]
            known = [key for key in WATCHED if metrics.get(key) is not None]
            run.status(" ".join(f"{key.split('/')[1]} {metrics[key]:.3g}" for key in known), step)

            # 5 save, before the actor may go on: the checkpoint is of one moment
            if step % args.save_every == 0:
                save()
            if not stop:
                link.grant(thread)
    finally:
        save()  # an arm that fails does not cost what was learned
        for thread in link.actors:
            thread.shutdown(cancel_futures=True)
        for wire in wires:
            wire.take_turn(-1, link.weights)
    if step < args.max_steps:
        print(f"stopped and saved; --resume --run-dir {run.dir} goes on")
        return metrics
    if best is not None:
        agent.load_state_dict(best)
    if args.report_episodes:
        run.log({"global_step": step} | evaluate_robot(agent, judge, 20_000, args.report_episodes))
        metrics |= run.rows[-1]
    save_checkpoint(save_dir / "final_model.pth", agent.checkpoint())
    panels = {"success": ["eval/success_rate"], "steps to success": ["eval/steps_to_success"]}
    panels |= {"share of steps by the human": ["charts/intervention_rate"]}
    run.close("environment steps", panels | {"values": ["losses/q_values", "losses/critic_loss"]})
    if world > 1:
        dist.destroy_process_group()
    shown = [f"{k[5:]} {metrics[k]:.3g}" for k in WATCHED[-2:] if metrics.get(k) is not None]
    print(f"without human: {' '.join(shown) or 'cannot judge'}; {save_dir}/final_model.pth")
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
