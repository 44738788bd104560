"""sac_hybrid.py - SAC with a discrete gripper, demonstrations and human interventions (HIL-SERL, arXiv:2410.21845v3).

One thread acts, one learns; half of every batch are demonstrations (RLPD, arXiv:2302.02948):
    act -> human may take over -> store (human's steps also as demos) -> critic-only updates, then one full -> publish

The arm moves continuously (tanh-normal SAC); the gripper closes, stays or opens, by double DQN on the same encoder.
The built-in environment needs no download: arms over a table, cameras above, a bar to pick up or a slot to hit.
Simplified on purpose: no pre-trained image backbone, no reward classifier, one environment per actor.
Differs from HIL-SERL: a behaviour-cloning term on demo rows (--bc-weight, 0: off); --algorithm bc is that term alone.
Shapes: N rows, A action dims, C of them continuous, E critics, F features; images (N,H,W,3) uint8.

    python sac_hybrid.py                                            # pick up the bar, CPU, a few minutes
    python sac_hybrid.py --setup-mode dual-arm-learned-gripper      # two arms, 12 + 2 action dims
    python sac_hybrid.py --demo-paths demo1.pkl demo2.pkl --image-keys image --setup-mode single-arm-fixed-gripper
    torchrun --nproc-per-node 3 sac_hybrid.py                       # rank 0 learns, ranks 1 and 2 act
"""

import contextlib
import copy
import ctypes
import importlib.util
import inspect
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
from collections import deque
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

SetupMode = Literal[
    "single-arm-fixed-gripper", "single-arm-learned-gripper", "dual-arm-fixed-gripper", "dual-arm-learned-gripper"
]
BUILT_IN = "BarWorld-v0"
DEFAULTS = {  # what an option left at None becomes: (built-in environment, any other)
    "max_steps": (3_000, 100_000),
    "num_demos": (50, 0),
    "intervention_steps": (2_000, 0),
    "training_starts": (100, 1_000),
    "random_steps": (0, 1_000),
    "batch_size": (64, 256),
    "lr": (1e-3, 3e-4),
    "utd": (2.0, 1.0),
    "gamma": (0.9, 0.97),
    "tau": (0.01, 0.005),
    "init_alpha": (5e-4, 0.01),
    "bc_weight": (0.5, 0.0),
    "hidden_size": (128, 256),
    "encoder": ("softmax", "conv"),
    "shared_encoder": (True, False),
    "augment_pad": (0, 4),
    "buffer_size": (20_000, 200_000),
    "eval_every": (500, 5_000),
    "eval_episodes": (50, 10),
    "report_episodes": (100, 50),
}
BUILT_IN_MODES = {  # where a mode of the built-in environment needs something else
    "single-arm-fixed-gripper": {"max_steps": 2_000},
    "dual-arm-fixed-gripper": {"max_steps": 4_000, "num_demos": 200, "intervention_steps": 3_000},
    "dual-arm-learned-gripper": {"max_steps": 4_000, "num_demos": 200, "intervention_steps": 3_000},
}


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
    save_buffers: bool = True
    """keep the newest checkpoint's replay buffers beside it; without them a resumed run collects anew"""
    create_data: bool = False
    """only write test_data/success_demo.pkl and test_data/failure_demo.pkl for --setup-mode, then end"""
    test: Literal["quick", "full"] | None = None
    """quick: a check-up in half a minute, in a temporary folder; full: make test_data, then train on it"""

    # task
    env_id: str = BUILT_IN
    """the built-in one, any Gymnasium id (package:Id imports the package), or file.py:Class(image_keys, action_dim)"""
    setup_mode: SetupMode = "single-arm-learned-gripper"
    """number of arms, and whether their grippers are part of the action"""
    image_keys: tuple[str, ...] = ()
    """camera images of the observation to use (none named: every one)"""
    use_state: bool = True
    """use the observation's vectors, joined into one `state`"""
    render_size: int = 0
    """side in pixels of a rendered view added as `image`, for environments without a camera (0: none)"""
    demo_paths: tuple[str, ...] = ()
    """.pkl or .npz demonstrations (none: --num-demos by the built-in expert)"""
    num_demos: int | None = None
    """demonstrations by the scripted expert of the built-in environment (None: 50, two arms 200)"""
    intervention_steps: int | None = None
    """the built-in human takes over an episode with probability 1 - steps/this; 0: never (None: 2000 or 3000)"""
    timeout_terminal: bool = False
    """a time limit ends the value of a state like success does, instead of bootstrapping from the last observation"""

    # model
    encoder: Literal["softmax", "conv"] | None = None
    """softmax: keypoints, for small images; conv: four layers, for 64-128 pixels (None: softmax built-in, else conv)"""
    hidden_size: int | None = None
    """width of actor and critics (None: 128 built-in, else 256)"""
    layer_norm: bool = True
    """LayerNorm in actor and critics"""
    shared_encoder: bool | None = None
    """one image encoder for all cameras, where they see alike (None: yes built-in, else one each)"""

    # rollout
    max_steps: int | None = None
    """environment steps of the run (None: 2000 to 4000 built-in, by mode; else 100000)"""
    training_starts: int | None = None
    """environment steps before the first update (None: 100 built-in, else 1000)"""
    random_steps: int | None = None
    """environment steps with uniformly random actions (None: 0 built-in, else 1000)"""
    utd: float | None = None
    """updates per environment step: the faster thread waits for the other (None: 2 built-in, else 1)"""
    max_lead: int = 0
    """environment steps that acting may be ahead of learning; 0: they take turns, and the run is reproducible"""
    publish_every: int = 2
    """updates between copies of the policy for the actor"""

    # optimization
    batch_size: int | None = None
    """rows of an update (None: 64 built-in, else 256)"""
    lr: float | None = None
    """Adam, for actor, critics and temperature (None: 1e-3 built-in, else 3e-4)"""
    augment_pad: int | None = None
    """random shift of the images by up to this many pixels (None: 0 built-in, else 4)"""
    max_skipped_steps: int = 10
    """end the run after this many optimizer steps in a row with a non-finite gradient"""

    # SAC
    algorithm: Literal["sac", "bc"] = "sac"
    """bc: no reinforcement learning, regress the demonstrations and nothing else (a baseline)"""
    gamma: float | None = None
    """discount per step (None: 0.9 built-in, else 0.97)"""
    tau: float | None = None
    """share of the new weights in the target networks per update (None: 0.01 built-in, else 0.005)"""
    cta_ratio: int = 2
    """critic updates per actor update; each on a fresh batch"""
    num_critics: int = 2
    """ensemble size"""
    num_sampled_critics: int = 2
    """critics drawn for the minimum in the target"""
    init_alpha: float | None = None
    """temperature at the start (None: 5e-4 built-in, else 0.01)"""
    target_entropy: float | None = None
    """the temperature steers towards it (None: minus half the action dims)"""
    backup_entropy: bool = False
    """entropy bonus in the critic's target"""
    grasp_penalty: float = -0.02
    """added to the gripper's reward where it really opens or closes"""
    bc_weight: float | None = None
    """weight of |tanh(mean) - action|^2 on demo rows in the actor's loss (None: 0.5 built-in, else 0)"""

    # replay
    demo_ratio: float = 0.5
    """share of demo rows in a batch, once both buffers hold something"""
    buffer_size: int | None = None
    """frames in the online buffer, one per transition and one more per episode (None: 20000 built-in, else 200000)"""
    demo_buffer_size: int = 20_000
    """frames in the demo buffer"""

    # logging
    eval_every: int | None = None
    """steps between frozen-policy evaluations (0: the first and the last policy only; None: 500 built-in, else 5000)"""
    eval_episodes: int | None = None
    """episodes of each; the best policy becomes final_model.pth (0: none, the last one; None: 50 built-in, else 10)"""
    report_episodes: int | None = None
    """other episodes, on which final_model.pth is judged at the end (0: not; None: 100 built-in, else 50)"""
    log_interval: int = 100
    """environment steps between lines of metrics.jsonl"""
    track: bool = False
    """also log to wandb (WANDB_MODE=offline works without an account)"""
    wandb_project_name: str = "stale-experience"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb team (None: your default one)"""

    # derived
    built_in: bool = field(init=False)
    """the environment is the one in this file"""

    def __post_init__(self):
        self.built_in = self.env_id == BUILT_IN
        if self.test == "quick":
            self.max_steps, self.training_starts = self.max_steps or 60, self.training_starts or 20
            self.eval_episodes, self.report_episodes = self.eval_episodes or 2, self.report_episodes or 2
        for name, (built_in, other) in DEFAULTS.items():
            if getattr(self, name) is None:
                built_in = BUILT_IN_MODES.get(self.setup_mode, {}).get(name, built_in)
                setattr(self, name, built_in if self.built_in else other)
        positive = "max_steps batch_size lr utd publish_every cta_ratio num_critics num_sampled_critics init_alpha"
        positive += " hidden_size max_skipped_steps log_interval"
        not_negative = "seed num_threads save_every render_size num_demos intervention_steps training_starts"
        not_negative += " random_steps max_lead augment_pad bc_weight eval_every eval_episodes report_episodes"
        for name in positive.split():
            check(0 < getattr(self, name) < math.inf, self, name, "a positive number")
        for name in not_negative.split():
            check(0 <= getattr(self, name) < math.inf, self, name, "0 or a positive number")
        check(self.seed < 2**32, self, "seed", "less than 2**32")
        for name in ("gamma", "tau", "demo_ratio"):
            check(0 <= getattr(self, name) <= 1, self, name, "between 0 and 1")
        for name in ("buffer_size", "demo_buffer_size"):
            check(getattr(self, name) >= 2, self, name, "2 or more frames")
        check(-math.inf < self.grasp_penalty <= 0, self, "grasp_penalty", "0 or a negative number")
        check(self.target_entropy is None or math.isfinite(self.target_entropy), self, "target_entropy", "a number")
        critics = f"at most --num-critics {self.num_critics}"
        check(self.num_sampled_critics <= self.num_critics, self, "num_sampled_critics", critics)
        only = f"left out with --env-id {self.env_id}: only the built-in environment has an expert"
        for name in ("num_demos", "intervention_steps", "create_data", "test"):
            check(self.built_in or not getattr(self, name), self, name, only)
        check(not (self.create_data and self.test), self, "create_data", "left out with --test")
        check(self.algorithm == "sac" or self.num_demos or self.demo_paths, self, "algorithm", "sac without demos")
        check(not (self.built_in and self.render_size), self, "render_size", "0 in the built-in environment")


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


# --- task ---
class ActionLayout:
    """Which dims of an action are continuous and which are gripper commands: -1 close, 0 stay, +1 open."""

    SIZES = dict(zip(SetupMode.__args__, (6, 7, 12, 14), strict=True))

    def __init__(self, action_dim: int, num_grippers: int):
        self.action_dim, self.num_grippers = action_dim, num_grippers
        # one arm: the last dim; two arms: the last dim of each half
        self.gripper = [[], [action_dim - 1], [action_dim // 2 - 1, action_dim - 1]][num_grippers]
        self.continuous = [i for i in range(action_dim) if i not in self.gripper]
        self.grasp_dim = 3**num_grippers if num_grippers else 0  # two grippers are one joint choice of nine

    @classmethod
    def of_mode(cls, setup_mode: str, action_dim: int | None = None):
        action_dim = cls.SIZES[setup_mode] if action_dim is None else action_dim
        arms = 2 if setup_mode.startswith("dual") else 1
        num_grippers = arms if setup_mode.endswith("learned-gripper") else 0
        if action_dim < arms + num_grippers or action_dim % arms:
            fail(f"--setup-mode {setup_mode} does not fit an environment with {action_dim} action dims")
        return cls(action_dim, num_grippers)

    def grasp_index(self, commands):
        """Rounds, because truncating would turn a human's 0.95 into "stay". left * 3 + right.  (N,G) -> (N,)"""
        digits = torch.as_tensor(commands).round().clamp(-1, 1).long() + 1
        return digits[..., 0] if self.num_grippers == 1 else digits[..., 0] * 3 + digits[..., 1]

    def grasp_commands(self, index: int) -> list[int]:
        return [index - 1] if self.num_grippers == 1 else [index // 3 - 1, index % 3 - 1]

    def split(self, actions):
        """(N,A) -> continuous (N,C), grasp index (N,) or None"""
        if not self.num_grippers:
            return actions, None
        return actions[..., self.continuous], self.grasp_index(actions[..., self.gripper])


def gripper_toggles(commands, closed):
    """How many grippers really change, and which are closed afterwards: to close twice is to close once."""
    commands = np.round(commands)
    now_closed = np.where(commands < 0, True, np.where(commands > 0, False, closed))
    return int((now_closed != closed).sum()), now_closed


class BarWorld(gym.Env):
    """Arms over a table, one camera from above each. Learned grippers: hold every bar, and lift all of them above 0.5.
    Fixed grippers: have every tool in its slot at the same time. Reward 1 and the end on success, else 0.

    Pose of an arm: x, y, z, roll, pitch, yaw, all in [-1,1] but z in [0,1]; a step moves each by up to 0.3. Where the
    bar or slot lies is in the picture only: red at one end, blue at the other; the arm is the green spot.
    """

    STEP, TIME_LIMIT, SIZE = 0.3, 20, 32
    LOW, HIGH = np.array([-1, -1, 0, -1, -1, -1.0]), np.ones(6)
    GRASP = np.array([0.2, 0.2, 0.2, 0.25, 0.25, 0.25])  # how exact the pose must be to hold a bar
    INSERT = np.array([0.15, 0.15, 0.12, 0.15, 0.15, 0.15])  # ... or to be in the slot

    def __init__(self, setup_mode: str = "single-arm-learned-gripper"):
        self.num_arms = 2 if setup_mode.startswith("dual") else 1
        self.learned = setup_mode.endswith("learned-gripper")
        self.image_keys = ["image"] if self.num_arms == 1 else ["left_image", "right_image"]
        spaces = {key: gym.spaces.Box(0, 255, (self.SIZE, self.SIZE, 3), np.uint8) for key in self.image_keys}
        spaces["state"] = gym.spaces.Box(-1, 1, (self.num_arms * (6 + self.learned),), np.float32)
        self.observation_space = gym.spaces.Dict(spaces)
        self.action_space = gym.spaces.Box(-1, 1, (self.num_arms * (6 + self.learned),), np.float32)
        line = (np.arange(self.SIZE) + 0.5) / self.SIZE * 2.4 - 1.2  # a margin, so that nothing is cut off
        self.px, self.py = np.meshgrid(line, line)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        n, rng = self.num_arms, self.np_random
        self.pose = rng.uniform([-0.5, -0.5, 0.5, -0.7, -0.7, -0.5], [0.5, 0.5, 1.0, 0.7, 0.7, 0.5], (n, 6))
        self.object = np.zeros((n, 6))  # flat on the table: z, roll and pitch are 0
        self.object[:, [0, 1, 5]] = rng.uniform([-0.8, -0.8, -0.7], [0.8, 0.8, 0.7], (n, 3))
        self.width, self.held, self.steps = np.ones(n), np.zeros(n, bool), 0
        return self.observe(), {}

    def observe(self):
        obs = {key: self.draw(arm) for arm, key in enumerate(self.image_keys)}
        own = [self.pose, self.width[:, None]] if self.learned else [self.pose]
        return obs | {"state": np.concatenate(own, 1).astype(np.float32).ravel()}

    def draw(self, arm: int):
        """Anti-aliased: a shift of a tenth of a pixel is visible.  -> (H,W,3) uint8"""
        x, y, yaw = self.object[arm, [0, 1, 5]]
        pixel, cos, sin = 2.4 / self.SIZE, math.cos(yaw * math.pi / 2), math.sin(yaw * math.pi / 2)
        dx, dy = self.px - x, self.py - y
        along, across = dx * cos + dy * sin, dy * cos - dx * sin
        bar = np.clip((0.45 - abs(along)) / pixel + 0.5, 0, 1) * np.clip((0.1 - abs(across)) / pixel + 0.5, 0, 1)
        red = np.clip(along / pixel + 0.5, 0, 1)
        dx, dy = self.px - self.pose[arm, 0], self.py - self.pose[arm, 1]
        spot = np.clip((0.12 - np.sqrt(dx * dx + dy * dy)) / pixel + 0.5, 0, 1)
        image = np.stack([bar * red * (1 - spot), spot, bar * (1 - red) * (1 - spot)], -1)
        return (image * 255).astype(np.uint8)

    def step(self, action):
        action = np.asarray(action, np.float64).reshape(self.num_arms, -1).clip(-1, 1)
        before = self.pose
        self.pose = np.clip(self.pose + self.STEP * action[:, :6], self.LOW, self.HIGH)
        self.object[self.held] += (self.pose - before)[self.held]
        self.steps += 1
        error = abs(self.pose - self.object)
        if self.learned:
            command = np.round(action[:, 6])
            fits = (error < self.GRASP).all(1)
            closing, opening = (command < 0) & (self.width == 1), command > 0
            self.held = (self.held | (closing & fits)) & ~opening
            self.object[opening, 2:5] = 0.0  # it falls flat
            self.width = np.where(opening, 1.0, np.where(closing, 0.4 * self.held, self.width))
            success = bool((self.held & (self.pose[:, 2] > 0.5)).all())
        else:
            success = bool((error < self.INSERT).all())
        truncated = self.steps >= self.TIME_LIMIT and not success
        return self.observe(), float(success), success, truncated, {"is_success": success}

    def expert(self):
        """The scripted demonstrator: straight to the object, close on arrival, lift."""
        action = np.zeros((self.num_arms, 6 + self.learned))
        for arm in range(self.num_arms):
            target = self.object[arm].copy()
            if self.held[arm]:
                target = self.pose[arm] * [1, 1, 0, 1, 1, 1] + [0, 0, 0.8, 0, 0, 0]
            move = np.clip((target - self.pose[arm]) / self.STEP, -1, 1)
            action[arm, :6] = move
            if self.learned and not self.held[arm]:
                near = abs(self.pose[arm] + self.STEP * move - target) < 0.5 * self.GRASP
                action[arm, 6] = 1 if self.width[arm] < 1 else -1 if near.all() else 0
        return action.ravel().astype(np.float32)


class SimulatedHuman(gym.Wrapper):
    """Watches, and takes over from some step to the end of an episode, as manual and HIL-SERL have it: the environment
    executes the human's action and reports it in info["intervene_action"]."""

    probability = 0.0  # of an intervention in the next episode

    def reset(self, **kwargs):
        result = self.env.reset(**kwargs)
        rng = self.unwrapped.np_random
        takes_over, start = rng.random() < self.probability, rng.integers(4, 11)
        self.start = start if takes_over else math.inf
        return result

    def step(self, action):
        if self.unwrapped.steps < self.start:
            return self.env.step(action)
        action = self.unwrapped.expert()
        *result, info = self.env.step(action)
        return *result, info | {"intervene_action": action}


class RobotEnv:
    """Any environment as the loop sees it: uint8 images (H,W,3) and one float32 `state`; actions lie in [-1,1]."""

    def __init__(self, args: Args, human: bool = False):
        self.args, self.human = args, None
        if args.built_in:
            self.env = BarWorld(args.setup_mode)
            if human:
                self.env = self.human = SimulatedHuman(self.env)
        elif ".py:" in args.env_id:  # the manual's own environment: no base class, no spaces, no seed needed
            path, _, name = args.env_id.rpartition(":")
            if not Path(path).is_file():
                fail(f"--env-id {args.env_id} must be file.py:Class of an existing file")
            spec = importlib.util.spec_from_file_location("own_env", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            if not callable(getattr(module, name, None)):
                fail(f"--env-id {args.env_id}: {path} has no class {name!r}")
            self.env = getattr(module, name)(list(args.image_keys or ("image",)), ActionLayout.SIZES[args.setup_mode])
            if missing := [method for method in ("reset", "step") if not hasattr(self.env, method)]:
                fail(f"--env-id {args.env_id}: {name} has no method {missing[0]}()")
        else:
            self.env = self.make(args)
        space = getattr(self.env, "action_space", None)
        if space is not None and not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1):
            fail(f"--env-id {args.env_id} has actions {space}: a flat Box is needed")
        self.layout = ActionLayout.of_mode(args.setup_mode, None if space is None else space.shape[0])
        shape = (self.layout.action_dim,)
        self.low, self.high = (-np.ones(shape), np.ones(shape)) if space is None else (space.low, space.high)
        self.center, self.scale = (self.high + self.low) / 2, (self.high - self.low) / 2
        if not np.isfinite(self.scale).all():
            fail(f"--env-id {args.env_id} has unbounded actions {space}: finite bounds are needed")
        self.takes_seed = "seed" in inspect.signature(self.env.reset).parameters or isinstance(self.env, gym.Env)
        obs = self.reset(seed=0)
        self.obs_spec = {key: (value.shape, value.dtype) for key, value in obs.items()}

    @staticmethod
    def make(args):
        with contextlib.suppress(ImportError):
            import gymnasium_robotics

            gym.register_envs(gymnasium_robotics)
        size = dict(width=args.render_size, height=args.render_size, render_mode="rgb_array")
        size = size if args.render_size else {}
        try:
            return gym.make(args.env_id, disable_env_checker=True, **size)
        except gym.error.Error as error:
            hint = "; Fetch needs: pip install gymnasium-robotics 'mujoco<3.12'" if "Fetch" in args.env_id else ""
            fail(f"--env-id {args.env_id} cannot be made: {str(error).splitlines()[0]}{hint}")
        except ImportError as error:
            fail(f"--env-id {args.env_id} cannot be made: {error}")
        except TypeError as error:  # not every environment can be told the size of its picture
            fail(f"--env-id {args.env_id} cannot be made with --render-size {args.render_size}: {error}")

    def observe(self, raw) -> dict[str, np.ndarray]:
        raw = raw if isinstance(raw, dict) else {"observation": raw}
        if self.args.render_size:
            raw = {**raw, "image": self.env.render()}
        obs, vectors = {}, []
        for key, value in raw.items():
            value = np.asarray(value)
            if value.ndim != 3:
                vectors.append(np.asarray(value, np.float32).ravel())
            elif value.dtype != np.uint8 or value.shape[2] not in (1, 3, 4):
                kind = f"image {key!r} is {value.dtype} {value.shape}"
                fail(f"--env-id {self.args.env_id}: {kind}: uint8 (H,W,3) is needed")
            elif not self.args.image_keys or key in self.args.image_keys:
                obs[key] = np.ascontiguousarray(value[:, :, :3])  # renderers flip by negative strides
        if missing := [key for key in self.args.image_keys if key not in obs]:
            fail(f"--image-keys {missing[0]} is no image of --env-id {self.args.env_id}; it has {list(raw)}")
        if vectors and self.args.use_state:
            obs["state"] = np.concatenate(vectors)
        if not obs:
            fail(f"--env-id {self.args.env_id}: nothing is left of an observation with {list(raw)}")
        return obs

    def close(self):
        if hasattr(self.env, "close"):
            self.env.close()

    def reset(self, seed: int, probability: float = 0.0):
        if self.human:
            self.human.probability = probability
        self.last_command = np.zeros(self.layout.num_grippers)
        raw, _ = self.env.reset(seed=seed) if self.takes_seed else self.env.reset()
        return self.observe(raw)

    def step(self, action):
        """-> next_obs, reward, terminated, truncated, success, the human's action or None"""
        action, held = np.array(action, np.float64), self.last_command
        if self.layout.num_grippers and not self.args.built_in:  # "stay" holds the last command
            command = action[self.layout.gripper]
            self.last_command = np.where(np.round(command) == 0, self.last_command, command)
            action[self.layout.gripper] = self.last_command
        executed = np.clip(self.center + self.scale * action, self.low, self.high).astype(np.float32)
        raw, reward, terminated, truncated, info = self.env.step(executed)
        if not math.isfinite(reward):
            fail(f"--env-id {self.args.env_id} gave the reward {reward}", code=1)
        success = bool(info.get("is_success", info.get("success", terminated and reward > 0)))
        human = info.get("intervene_action")
        if human is not None:
            human = np.asarray(human.detach().cpu() if isinstance(human, torch.Tensor) else human, np.float32)
            if human.shape != executed.shape or not np.isfinite(human).all():
                problem = f"shape {human.shape}" if human.shape != executed.shape else "a value that is not finite"
                fail(f'info["intervene_action"] has {problem}: {executed.shape} finite numbers are needed', code=1)
            human = ((np.clip(human, self.low, self.high) - self.center) / self.scale).astype(np.float32)
            command = human[self.layout.gripper]  # "stay" then holds what was executed: the policy's command was not
            self.last_command = np.where(np.round(command) == 0, held, command)
        return self.observe(raw), float(reward), bool(terminated), bool(truncated), success, human


def make_demos(args: Args, num_demos: int, seed: int, success: bool = True) -> list[dict]:
    """Transitions in the manual's format by the expert of the built-in environment, or failures by random actions."""
    env, rng, transitions = BarWorld(args.setup_mode), np.random.default_rng([seed, 1]), []
    for episode in range(num_demos):
        obs, _ = env.reset(seed=int(np.random.SeedSequence([seed, 2, episode]).generate_state(1)[0]))
        done = False
        while not done:
            action = env.expert() if success else rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            transition = dict(observations=obs, actions=action, next_observations=next_obs, rewards=reward)
            transitions.append(transition | dict(masks=1.0 - terminated, dones=done))
            obs = next_obs
    return transitions


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


def read_demos(path: str, env: RobotEnv, grasp_penalty: float) -> list[dict]:
    """Transitions of a .pkl or .npz file, checked one by one against what the environment has; actions in its units."""
    obs_spec, layout = env.obs_spec, env.layout
    if path.endswith(".npz"):
        try:
            with np.load(path, allow_pickle=False) as file:
                columns = {name: file[name] for name in file.files}
        except Exception as error:  # missing, cut off, or holding objects
            fail(f"demo file {path} is refused: {(str(error) or repr(error)).splitlines()[0]}")
        lengths = {len(column) if column.ndim else 0 for column in columns.values()}
        if len(lengths) != 1 or 0 in lengths:
            fail(f"demo file {path}: its arrays {list(columns)} must have one length, the number of transitions")
        transitions = []
        for i in range(lengths.pop()):
            transition = {"observations": {}, "next_observations": {}}
            for name, column in columns.items():
                head, _, key = name.partition("/")  # observations/image
                (transition[head] if key and head in transition else transition)[key or name] = column[i]
            transitions.append(transition)
    else:
        transitions = load_pickle(path)
    if not isinstance(transitions, list) or not transitions:
        fail(f"demo file {path}: a list of transitions is expected, not {type(transitions).__name__}")

    def number(value, where, i, shape, dtype=np.float32):
        value = value.array if isinstance(value, DemoArray) else value
        where = f"demo file {path}: transition {i}: {where}"
        if not isinstance(value, np.ndarray | np.generic | bool | int | float):
            fail(f"{where} is a {type(value).__name__}, expected numbers of shape {shape}")
        value = np.asarray(value)
        if value.shape != shape:
            swapped = len(shape) == 3 and value.shape == (shape[2], *shape[:2])
            hint = ": channels come last, (H,W,C)" if swapped else ""
            fail(f"{where} has shape {value.shape}, expected {shape}{hint}")
        if dtype == np.uint8 and value.dtype != np.uint8:
            fail(f"{where} is {value.dtype}, expected uint8")
        if not np.isfinite(value).all():
            fail(f"{where} holds a number that is not finite, expected {shape} finite numbers")
        return value.astype(dtype)

    demos, closed = [], np.zeros(layout.num_grippers, bool)
    for i, raw in enumerate(transitions):
        if not isinstance(raw, dict):
            fail(f"demo file {path}: transition {i} is a {type(raw).__name__}, expected a dict")
        for name in ("observations", "actions", "next_observations", "rewards"):
            if name not in raw:
                fail(f"demo file {path}: transition {i} lacks {name!r}; it has {[str(key) for key in raw][:9]}")
        demo = {}
        for name, source in (("obs", "observations"), ("next_obs", "next_observations")):
            views = raw[source]
            if not isinstance(views, dict):  # a plain vector is the state
                views = {"state": views}
            for key in obs_spec:
                if key not in views:
                    hint = " (or train with --no-use-state)" if key == "state" else ""
                    fail(f"demo file {path}: transition {i}: {source} lacks {key!r}, which the environment has{hint}")
            demo[name] = {key: number(views[key], f"{source}[{key!r}]", i, *spec) for key, spec in obs_spec.items()}
        action = number(raw["actions"], "actions", i, (layout.action_dim,))
        action = ((action - env.center) / env.scale).clip(-1, 1).astype(np.float32)
        dones = bool(number(raw.get("dones", False), "dones", i, ()))
        toggles, closed = gripper_toggles(action[layout.gripper], closed)
        closed = closed & (not dones)  # an episode starts open
        penalty = number(raw.get("grasp_penalty", grasp_penalty * toggles), "grasp_penalty", i, ())
        demo |= dict(actions=action, rewards=number(raw["rewards"], "rewards", i, ()), grasp_penalty=penalty)
        demos.append(demo | dict(masks=number(raw.get("masks", 1.0 - dones), "masks", i, ()), dones=dones))
    return demos


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


class ImageEncoder(nn.Module):
    """One camera.  (N,3,H,W) in [-0.5,0.5] -> (N,F)"""

    def __init__(self, kind: str, image_shape: tuple, embed_dim: int = 64, keypoints: int = 16):
        super().__init__()
        height, width, channels = image_shape
        self.kind = kind
        if kind == "softmax":  # where things are, as coordinates: keypoints of arXiv:1504.00702
            stem = nn.Conv2d(channels, 16, 3, 2, 1)
            self.conv = nn.Sequential(stem, nn.ReLU(inplace=True), nn.Conv2d(16, keypoints, 1))
            rows, columns = (torch.linspace(-1, 1, math.ceil(size / 2)) for size in (height, width))
            rows, columns = rows[:, None].expand(-1, len(columns)), columns.expand(len(rows), -1)
            grid = torch.stack([rows, columns, torch.ones_like(rows)]).reshape(3, -1)  # (3,H*W)
            self.register_buffer("grid", grid, persistent=False)
            self.embed = nn.Sequential(nn.Linear(2 * keypoints, embed_dim), nn.LayerNorm(embed_dim), nn.Tanh())
            self.dim = 2 * keypoints + embed_dim
        else:  # the small encoder of SERL (arXiv:2401.16013): spatial weights instead of pooling
            layers = []
            for fan_in, fan_out in ((channels, 32), (32, 64), (64, 96), (96, 128)):
                layers += [nn.Conv2d(fan_in, fan_out, 3, 2, 1), nn.ReLU()]
                height, width = math.ceil(height / 2), math.ceil(width / 2)
            self.conv = nn.Sequential(*layers)
            self.spatial = nn.Parameter(torch.randn(128, height * width, 4) * (height * width) ** -0.5)
            self.embed = nn.Sequential(nn.Linear(512, 256), nn.LayerNorm(256), nn.Tanh())
            self.dim = 256

    def forward(self, image):
        x = self.conv(image)
        if self.kind == "softmax":
            x = x.permute(0, 2, 3, 1).flatten(1, 2)  # (N,H*W,K), as the images lie in memory
            moments = self.grid @ x.clamp(-30, 30).exp()  # (N,3,K): sums of row, column, 1; exp stays finite
            points = (moments[:, :2] / moments[:, 2:]).flatten(1)  # (N,2K), where the softmax over the picture points
            return torch.cat([points, self.embed(points)], 1)  # raw, too: the position itself is a feature
        x = torch.einsum("nkp,kpe->nke", x.flatten(2), self.spatial)  # (N,128,4)
        return self.embed(x.flatten(1))


class Encoder(nn.Module):
    """Every camera and the state, side by side. Images become floats here and nowhere else.  obs dict -> (N,F)"""

    def __init__(self, image_keys, image_shape: tuple, state_dim: int, kind: str, shared: bool, embed_dim: int = 64):
        super().__init__()
        self.image_keys = list(image_keys)
        num_encoders = min(1, len(self.image_keys)) if shared else len(self.image_keys)
        self.images = nn.ModuleList([ImageEncoder(kind, image_shape, embed_dim) for _ in range(num_encoders)])
        self.dim = sum(self.images[i % num_encoders].dim for i in range(len(self.image_keys))) + state_dim
        self.embed_state = None
        if state_dim and self.image_keys:  # without images the state is the feature
            self.embed_state = nn.Sequential(nn.Linear(state_dim, embed_dim), nn.LayerNorm(embed_dim), nn.Tanh())
            self.dim += embed_dim

    def forward(self, obs):
        parts, per_pass = [], len(self.image_keys) // max(1, len(self.images))  # shared: all cameras in one pass
        for i, encoder in enumerate(self.images):
            images = [obs[key] for key in self.image_keys[i * per_pass : (i + 1) * per_pass]]
            images = torch.cat(images) if per_pass > 1 else images[0]
            images = images.permute(0, 3, 1, 2).float().div_(255).sub_(0.5)
            parts += encoder(images).chunk(per_pass)
        if "state" in obs:
            parts.append(obs["state"])
            if self.embed_state is not None:
                parts.append(self.embed_state(obs["state"]))
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


class Policy(nn.Module):
    """All that acting needs, and nothing else: this is what the learner publishes."""

    def __init__(self, encoder: Encoder, actor: Actor, discrete_qf: nn.Module | None, layout: ActionLayout):
        super().__init__()
        self.encoder, self.actor, self.discrete_qf, self.layout = encoder, actor, discrete_qf, layout

    @torch.no_grad()
    def act(self, obs: dict[str, np.ndarray], rng: torch.Generator | None = None) -> np.ndarray:
        """Sample the continuous part (its mean without rng), take the best grasp.  one observation -> (A,)"""
        device = next(self.parameters()).device
        features = self.encoder({key: torch.from_numpy(value).unsqueeze(0).to(device) for key, value in obs.items()})
        mean, std = self.actor(features)
        if rng is not None:
            mean = mean + std * torch.randn(mean.shape, generator=rng).to(device)
        action = np.empty(self.layout.action_dim, np.float32)
        action[self.layout.continuous] = mean.tanh()[0].cpu().numpy()
        if self.discrete_qf is not None:
            best = int(self.discrete_qf(features).argmax(-1))
            action[self.layout.gripper] = self.layout.grasp_commands(best)
        return action


# --- buffer ---
class FrameBuffer:
    """Replay that keeps each frame once: N transitions in E unbroken pieces are N + E frames, not 2 N.

    A ring of frame slots. A transition starts at slot i, its next frame is slot i + 1. Whether a new one continues the
    piece before it is decided by the frames themselves: shared only where they are equal, no gap, episode end,
    time limit or wrap can pair frames that do not belong together. `slots` lists the starts, to sample from.
    """

    def __init__(self, capacity: int, obs_spec: dict, action_dim: int):
        self.capacity, self.size, self.head, self.tail, self.filled = capacity, 0, 0, -1, 0
        self.frames = {key: np.zeros((capacity, *shape), dtype) for key, (shape, dtype) in obs_spec.items()}
        self.rows = {name: np.zeros(capacity, np.float32) for name in ("rewards", "masks", "grasp_penalty")}
        self.rows["actions"] = np.zeros((capacity, action_dim), np.float32)
        self.slots = np.zeros(capacity, np.int64)  # [:size]: slots at which a transition starts, in any order
        self.place = np.full(capacity, -1)  # slot -> its index in `slots`, -1: no transition starts here
        self.lock = threading.Lock()

    def __len__(self):
        return self.size

    def write(self, obs) -> int:
        slot = self.head
        if (place := self.place[slot]) >= 0:  # forget the transition that started here: the last one takes its place
            self.size -= 1
            last = self.slots[self.size]
            self.slots[place], self.place[last], self.place[slot] = last, place, -1
        for key, frames in self.frames.items():
            frames[slot] = obs[key]
        self.head, self.filled = (slot + 1) % self.capacity, min(self.filled + 1, self.capacity)
        return slot

    def insert(self, transition: dict):
        obs = transition["obs"]
        with self.lock:
            start = self.tail
            if start < 0 or any(not np.array_equal(frames[start], obs[key]) for key, frames in self.frames.items()):
                start = self.write(obs)
            self.tail = self.write(transition["next_obs"])
            for name, rows in self.rows.items():
                rows[start] = transition[name]
            self.slots[self.size], self.place[start] = start, self.size
            self.size += 1

    def sample(self, n: int, rng: np.random.Generator) -> dict:
        """With replacement."""
        with self.lock:
            start = self.slots[rng.integers(self.size, size=n)]
            following = (start + 1) % self.capacity
            batch = {name: rows[start] for name, rows in self.rows.items()}
            batch["obs"] = {key: frames[start] for key, frames in self.frames.items()}
            batch["next_obs"] = {key: frames[following] for key, frames in self.frames.items()}
        return batch

    def state_dict(self) -> dict:
        with self.lock:
            state = {name: torch.tensor(getattr(self, name)) for name in ("size", "head", "tail", "filled")}
            arrays = self.frames | self.rows | {"slots": self.slots, "place": self.place}
            return state | {"/" + key: torch.from_numpy(array[: self.filled].copy()) for key, array in arrays.items()}

    def load_state_dict(self, state: dict):
        arrays = self.frames | self.rows | {"slots": self.slots, "place": self.place}
        for name in ("size", "head", "tail", "filled"):
            setattr(self, name, int(state[name]))
        for key, array in arrays.items():
            array[: self.filled] = state["/" + key].numpy()


def check_memory(args: Args, obs_spec: dict):
    """Arrays are filled lazily: without this a run would be killed hours later."""
    frame = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in obs_spec.values())
    frame = (frame + 64) * (2 if args.save_buffers else 1)  # a checkpoint is a copy
    needed = (args.buffer_size + args.demo_buffer_size) * frame
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.9 * memory:
        smaller, larger = sorted(("buffer_size", "demo_buffer_size"), key=lambda name: getattr(args, name))
        fits = max(0, int(0.9 * memory / frame) - getattr(args, smaller))
        sizes = f"{needed / 1e9:.1f} GB of frames do not fit into {memory / 1e9:.1f} GB of memory"
        check(False, args, larger, f"at most {fits}: {sizes}")


def split_batch(batch_size: int, num_online: int, num_demo: int, demo_ratio: float) -> tuple[int, int]:
    """Rows from (online, demo). An empty buffer gives nothing; small ones are drawn with replacement."""
    if not num_demo or not num_online:
        return (batch_size, 0) if num_online else (0, batch_size if num_demo else 0)
    demo = math.floor(batch_size * demo_ratio)
    return batch_size - demo, demo


def sample_batch(online_rb, demo_rb, batch_size: int, demo_ratio: float, rng, device) -> dict:
    """Online rows first, then demo rows; is_demo tells them apart."""
    num_online, num_demo = split_batch(batch_size, len(online_rb), len(demo_rb), demo_ratio)
    parts = [rb.sample(n, rng) for rb, n in ((online_rb, num_online), (demo_rb, num_demo)) if n]

    def join(arrays):
        return torch.from_numpy(np.concatenate(arrays) if len(arrays) > 1 else arrays[0]).to(device)

    batch = {name: join([part[name] for part in parts]) for name in ("actions", "rewards", "masks", "grasp_penalty")}
    for name in ("obs", "next_obs"):
        batch[name] = {key: join([part[name][key] for part in parts]) for key in parts[0][name]}
    batch["is_demo"] = (torch.arange(batch_size) >= num_online).to(device)
    return batch


def random_shift(images, pad: int, rng: torch.Generator):
    """Each image moved by up to `pad` pixels, edges repeated (DrQ-v2, arXiv:2107.09645).  (N,H,W,3) -> (N,H,W,3)"""
    n, height, width, _ = images.shape
    dy, dx = torch.randint(-pad, pad + 1, (2, n, 1), generator=rng).to(images.device)
    rows = (torch.arange(height, device=images.device) + dy).clamp(0, height - 1)  # (N,H)
    columns = (torch.arange(width, device=images.device) + dx).clamp(0, width - 1)  # (N,W)
    inds = torch.arange(n, device=images.device)
    return images[inds[:, None, None], rows[:, :, None], columns[:, None, :]]


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


def grasp_target(rewards, grasp_penalty, masks, next_q_online, next_q_target, gamma):
    """Double DQN: the online network chooses, the target network rates. Only here does the penalty count.  -> (N,)"""
    assert next_q_online.shape == next_q_target.shape and rewards.shape == grasp_penalty.shape == masks.shape
    best = next_q_online.argmax(-1, keepdim=True)
    return rewards + grasp_penalty + gamma * masks * next_q_target.gather(-1, best).squeeze(-1)


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


class SACHybridAgent:
    """Networks, targets, optimizers and the update rule."""

    NETWORKS = ("policy", "qf", "critic_target", "temperature")

    def __init__(
        self,
        image_keys,
        continuous_action_dim: int,
        grasp_action_dim: int = 0,
        device="cpu",
        *,
        image_shape=(32, 32, 3),
        state_dim: int = 0,
        encoder: str = "softmax",
        shared_encoder: bool = False,
        hidden_size: int = 256,
        layer_norm: bool = True,
        num_critics: int = 2,
        num_sampled_critics: int = 2,
        lr: float = 3e-4,
        gamma: float = 0.97,
        tau: float = 0.005,
        init_alpha: float = 0.01,
        target_entropy: float | None = None,
        backup_entropy: bool = False,
        bc_weight: float = 0.0,
        algorithm: str = "sac",
        seed: int = 1,
    ):
        if grasp_action_dim not in (0, 3, 9):
            raise ValueError(f"grasp_action_dim {grasp_action_dim}: 0 (fixed), 3 (one gripper) or 9 (two) is allowed")
        self.network_config = dict(  # all that it takes to build the same networks
            image_keys=list(image_keys), continuous_action_dim=continuous_action_dim, grasp_action_dim=grasp_action_dim,
            image_shape=list(image_shape), state_dim=state_dim, encoder=encoder, shared_encoder=shared_encoder,
            hidden_size=hidden_size, layer_norm=layer_norm, num_critics=num_critics,
        )  # fmt: skip
        self.device, self.lr, self.gamma, self.tau = torch.device(device), lr, gamma, tau
        self.num_sampled_critics, self.backup_entropy = num_sampled_critics, backup_entropy
        self.bc_weight, self.algorithm, self.init_alpha = bc_weight, algorithm, init_alpha
        num_grippers = {0: 0, 3: 1, 9: 2}[grasp_action_dim]
        self.layout = ActionLayout(continuous_action_dim + num_grippers, num_grippers)
        self.target_entropy = -0.5 * self.layout.action_dim if target_entropy is None else target_entropy
        with torch.random.fork_rng(devices=[]):  # initial weights leave the global generator alone
            torch.manual_seed(seed)
            self.build(**self.network_config)
        self.noise_rng = torch.Generator().manual_seed(seed)
        self.updates = self.skipped_steps = self.skipped_in_a_row = 0

    def build(
        self, image_keys, continuous_action_dim, grasp_action_dim,
        image_shape, state_dim, encoder, shared_encoder, hidden_size, layer_norm, num_critics,
    ):  # fmt: skip
        trunk = Encoder(image_keys, image_shape, state_dim, encoder, shared_encoder)
        head = (hidden_size, layer_norm)
        discrete_qf = mlp(trunk.dim, hidden_size, grasp_action_dim, layer_norm) if grasp_action_dim else None
        self.policy = Policy(trunk, Actor(trunk.dim, continuous_action_dim, *head), discrete_qf, self.layout)
        self.policy = self.policy.to(self.device)
        self.qf = QEnsemble(num_critics, trunk.dim, continuous_action_dim, *head).to(self.device)
        critic = nn.ModuleList([self.policy.encoder, self.qf, *([discrete_qf] if grasp_action_dim else [])])
        self.critic = critic  # what the critic optimizer trains, and what has a slow copy
        self.critic_target = copy.deepcopy(critic).requires_grad_(False)
        self.temperature = Temperature(self.init_alpha).to(self.device)
        adam = dict(lr=self.lr, fused=True)
        self.flat_critic, self.flat_target = flatten(critic), flatten(self.critic_target)
        self.critic_optimizer = torch.optim.Adam([self.flat_critic], **adam)
        self.actor_optimizer = torch.optim.Adam([flatten(self.policy.actor)], **adam)
        self.alpha_optimizer = torch.optim.Adam([flatten(self.temperature)], **adam)

    def __deepcopy__(self, memo):
        raise TypeError("parameters are views of one vector, and a copy's would not be: make an agent and load into it")

    def noise(self, like):
        return torch.randn(like.shape, generator=self.noise_rng).to(self.device)

    def critic_losses(self, batch):
        """-> features (N,F), critic loss, grasp critic loss, mean Q"""
        actions, grasps = self.layout.split(batch["actions"])
        encoder, discrete_qf = self.policy.encoder, self.policy.discrete_qf
        encoder_target, qf_target = self.critic_target[0], self.critic_target[1]
        features = encoder(batch["obs"])
        with torch.no_grad():
            next_features = encoder(batch["next_obs"])
            next_features_target = encoder_target(batch["next_obs"])
            mean, std = self.policy.actor(next_features)
            next_actions, next_logprobs = tanh_normal(mean, std, self.noise(mean))
            next_q_values = qf_target(next_features_target, next_actions)  # (E,N)
            if self.num_sampled_critics < len(next_q_values):  # a random subset, as in REDQ (arXiv:2101.05982)
                chosen = torch.randperm(len(next_q_values), generator=self.noise_rng)[: self.num_sampled_critics]
                next_q_values = next_q_values[chosen.to(self.device)]
            bonus = -self.temperature() * next_logprobs if self.backup_entropy else 0.0
            target = td_target(batch["rewards"], batch["masks"], next_q_values, self.gamma, bonus)
        q_values = self.qf(features, actions)  # (E,N)
        critic_loss = (q_values - target).square().mean()
        grasp_loss = torch.zeros((), device=self.device)
        if grasps is not None:
            with torch.no_grad():
                next_qs = discrete_qf(next_features), self.critic_target[2](next_features_target)  # 2 x (N,G)
                goal = grasp_target(batch["rewards"], batch["grasp_penalty"], batch["masks"], *next_qs, self.gamma)
            grasp_q = discrete_qf(features).gather(1, grasps.unsqueeze(1)).squeeze(1)
            grasp_loss = (grasp_q - goal).square().mean()
        return features, critic_loss, grasp_loss, q_values.detach().mean()

    def actor_losses(self, batch, features):
        """Features carry no gradient: the critics alone shape the encoder.  -> actor loss, temperature loss, entropy"""
        mean, std = self.policy.actor(features)
        actions, logprobs = tanh_normal(mean, std, self.noise(mean))
        q_values = self.qf(features, actions).mean(0)  # differs from SAC: mean, not minimum, as RLPD and HIL-SERL do
        alpha = self.temperature()
        actor_loss = (alpha.detach() * logprobs - q_values).mean()
        if self.bc_weight:
            actor_loss = actor_loss + self.bc_weight * self.bc_loss(batch, mean)
        alpha_loss = alpha * (-logprobs.detach().mean() - self.target_entropy)  # more entropy than wanted: cool down
        return actor_loss, alpha_loss, -logprobs.detach().mean()

    def bc_loss(self, batch, mean):
        """|tanh(mean) - action|^2, mean over the demo rows"""
        demo_actions = self.layout.split(batch["actions"])[0]
        error = (mean.tanh() - demo_actions).square().sum(-1)  # (N,)
        return (error * batch["is_demo"]).sum() / batch["is_demo"].sum().clamp(min=1)

    def update(self, batch: dict, full: bool = True) -> dict[str, torch.Tensor]:
        """One update; `full` includes actor and temperature. A non-finite gradient is counted and goes nowhere."""
        if self.algorithm == "bc":
            return self.bc_update(batch)
        features, critic_loss, grasp_loss, q_values = self.critic_losses(batch)
        critic, actor = (self.critic, self.critic_optimizer), (self.policy.actor, self.actor_optimizer)
        applied = apply_gradients(critic_loss + grasp_loss, critic)
        stats = {"critic_loss": critic_loss.detach(), "q_values": q_values}
        if self.layout.num_grippers:
            stats["grasp_critic_loss"] = grasp_loss.detach()
        if full and applied:
            actor_loss, alpha_loss, entropy = self.actor_losses(batch, features.detach())
            applied = apply_gradients(actor_loss + alpha_loss, actor, (self.temperature, self.alpha_optimizer))
            stats |= {"actor_loss": actor_loss.detach(), "alpha_loss": alpha_loss.detach(), "entropy": entropy}
            stats["alpha"] = self.temperature().detach()
        if applied:
            polyak(self.flat_target, self.flat_critic, self.tau)
        return self.count(applied, stats)

    def bc_update(self, batch: dict) -> dict[str, torch.Tensor]:
        """The baseline without reinforcement learning: regress the arm, classify the gripper, on demo rows."""
        features = self.policy.encoder(batch["obs"])
        actor_loss = self.bc_loss(batch, self.policy.actor(features)[0])
        grasp_loss = torch.zeros((), device=self.device)
        if self.layout.num_grippers:
            _, grasps = self.layout.split(batch["actions"])
            grasp_loss = F.cross_entropy(self.policy.discrete_qf(features)[batch["is_demo"]], grasps[batch["is_demo"]])
        critic, actor = (self.critic, self.critic_optimizer), (self.policy.actor, self.actor_optimizer)
        applied = apply_gradients(actor_loss + grasp_loss, critic, actor)
        return self.count(applied, {"actor_loss": actor_loss.detach(), "grasp_critic_loss": grasp_loss.detach()})

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
        state = dict(network_config=self.network_config, networks=self.networks(), optimizers=optimizers)
        return state | dict(counters=counters, noise_rng=self.noise_rng.get_state())

    def load(self, checkpoint):
        """A path, or what torch.load made of it. Widths and image sizes come from the file."""
        if isinstance(checkpoint, str | Path):
            checkpoint = load_checkpoint(Path(checkpoint))
        state = checkpoint.get("agent", checkpoint)
        config = state["network_config"]
        for name in ("image_keys", "continuous_action_dim", "grasp_action_dim"):
            if config[name] != self.network_config[name]:
                raise ValueError(f"the checkpoint has {name} {config[name]}, this agent {self.network_config[name]}")
        if config != self.network_config:
            self.network_config = config
            self.build(**config)
        self.load_networks(state["networks"])
        optimizers = (self.critic_optimizer, self.actor_optimizer, self.alpha_optimizer)
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.updates, self.skipped_steps, self.skipped_in_a_row = state["counters"]
        self.noise_rng.set_state(state["noise_rng"])


# --- rollout ---
class Link:
    """Between the threads: transitions one way, the newest policy the other, and the rule who waits for whom.

    The learner handles environment steps in order. Before step s counts as handled, utd * (s - training_starts) updates
    are made; an actor may be max_lead steps ahead of that. Whoever fails puts its exception here, and everybody stops.
    """

    def __init__(self, args: Args, online_rb: FrameBuffer, demo_rb: FrameBuffer, num_actors: int = 1):
        self.args, self.online_rb, self.demo_rb, self.num_actors = args, online_rb, demo_rb, num_actors
        self.max_lead = max(args.max_lead, num_actors - 1)  # several actors are never quite in step
        self.condition = threading.Condition()
        self.env_steps = self.handled = self.acting = 0
        self.stopped, self.error = False, None
        self.weights, self.version = None, 0
        self.intervention_steps = self.intervention_count = self.num_episodes = 0
        self.episodes = deque(maxlen=20)  # (return, length, success) of the last ones
        self.current = {}  # actor -> [return, length, last step was the human's]

    def updates_due(self, env_steps: int) -> int:
        return math.floor(self.args.utd * max(0, env_steps - self.args.training_starts))

    def publish(self, policy: nn.Module):
        weights = nn.utils.parameters_to_vector(policy.parameters()).detach().cpu()  # a copy: never half-updated
        with self.condition:
            self.weights, self.version = weights, self.version + 1

    def wait_turn(self, version: int):
        """Actor: waits until a step may be taken.  -> (global_step, version, weights if newer), None at the end"""
        with self.condition:
            while not self.stopped:
                ahead = self.env_steps + self.acting - self.handled
                if ahead <= self.max_lead and self.env_steps + self.acting < self.args.max_steps:
                    self.acting += 1  # with several actors: steps promised, but not delivered yet
                    weights = self.weights if self.version > version else None
                    return self.env_steps, self.version, weights
                self.condition.wait(1.0)
        return None

    def send(self, transition: dict, actor: int = 0):
        """Actor: one executed step. The human's go into both buffers, the policy's own only into the online one."""
        self.online_rb.insert(transition)
        if transition["interventions"]:
            self.demo_rb.insert(transition)
        with self.condition:
            episode = self.current.setdefault(actor, [0.0, 0, False])
            episode[0] += float(transition["rewards"])
            episode[1] += 1
            self.intervention_steps += bool(transition["interventions"])
            self.intervention_count += bool(transition["interventions"]) and not episode[2]
            episode[2] = bool(transition["interventions"])
            if transition["dones"]:
                self.episodes.append((episode[0], episode[1], float(transition["success"])))
                self.num_episodes += 1
                del self.current[actor]
            self.env_steps += 1
            self.acting -= 1
            self.condition.notify_all()

    def wait_step(self, seconds: float = 0.2) -> bool:
        """Learner: is there a step to handle? Raises what an actor raised."""
        with self.condition:
            if not self.stopped and self.error is None and self.env_steps <= self.handled:
                self.condition.wait(seconds)
            if self.error is not None:
                raise self.error
            return self.env_steps > self.handled

    def step_handled(self):
        with self.condition:
            self.handled += 1
            self.condition.notify_all()

    def stop(self, error: BaseException | None = None):
        with self.condition:
            self.stopped, self.error = True, self.error or error
            self.condition.notify_all()

    def lost(self, actor: int, error: BaseException, had_turn: bool):
        """An actor process is gone: what it sent is whole and stays, its turn goes to the others."""
        with self.condition:
            self.acting -= had_turn
            self.num_actors -= 1
            self.current.pop(actor, None)
            self.condition.notify_all()
        print(f"actor {actor} is gone ({str(error).splitlines()[0]}); {self.num_actors} left", file=sys.stderr)
        if not self.num_actors:
            self.stop(RuntimeError("every actor process is gone"))

    def state_dict(self) -> dict:
        names = ("handled", "version", "intervention_steps", "intervention_count", "num_episodes")
        with self.condition:
            state = {name: getattr(self, name) for name in names}
            return state | dict(episodes=list(self.episodes), current=copy.deepcopy(self.current), weights=self.weights)

    def load_state_dict(self, state: dict):
        for name, value in state.items():
            setattr(self, name, deque(value, maxlen=20) if name == "episodes" else value)
        self.env_steps = self.handled


class Robot:
    """An actor's side: environment, copy of the policy, own random numbers, what it takes to continue an episode."""

    def __init__(self, args: Args, policy: Policy, index: int = 0, env: RobotEnv | None = None):
        self.args, self.policy, self.index, self.env = args, policy, index, env
        self.act_rng = torch.Generator().manual_seed(args.seed * 1000 + index)
        self.random_rng = np.random.default_rng([args.seed, index, 3])
        self.episode, self.actions, self.probability = 0, [], 0.0
        self.obs, self.version = None, -1
        self.layout = policy.layout
        self.closed = np.zeros(self.layout.num_grippers, bool)

    def reset(self):
        seed = np.random.SeedSequence([self.args.seed, 4, self.index, self.episode]).generate_state(1)[0]
        self.obs, self.closed = self.env.reset(int(seed), self.probability), np.zeros_like(self.closed)

    def run(self, link):
        """The actor's loop, in a thread of the learner's process or as a process of its own."""
        self.env = self.env or RobotEnv(self.args, human=True)  # here: a renderer belongs to the thread that made it
        if self.actions:  # resumed inside an episode: the same seed and the same actions lead to the same place
            self.reset()
            for action in self.actions:
                self.obs, *_, human = self.env.step(action)
                self.note_gripper(action if human is None else human)
        while (turn := link.wait_turn(self.version)) is not None:
            global_step, self.version, weights = turn
            if weights is not None:
                nn.utils.vector_to_parameters(weights, self.policy.parameters())
            link.send(self.step(global_step), self.index)
        self.env.close()

    def note_gripper(self, executed) -> int:
        toggles, self.closed = gripper_toggles(executed[self.layout.gripper], self.closed)
        return toggles

    def step(self, global_step: int) -> dict:
        if self.obs is None:
            self.probability = max(0.0, 1 - global_step / max(1, self.args.intervention_steps))
            self.probability *= self.args.intervention_steps > 0
            self.reset()
        if global_step < self.args.random_steps:
            action = self.random_rng.uniform(-1, 1, self.layout.action_dim).astype(np.float32)
            if self.layout.num_grippers:
                action[self.layout.gripper] = self.random_rng.integers(-1, 2, self.layout.num_grippers)
        else:
            action = self.policy.act(self.obs, self.act_rng)
        self.actions.append(action)
        obs = self.obs
        self.obs, reward, terminated, truncated, success, human = self.env.step(action)
        executed = action if human is None else human
        toggles = self.note_gripper(executed)
        ended = terminated or (truncated and self.args.timeout_terminal)  # a time limit bootstraps from its next_obs
        transition = dict(obs=obs, actions=executed, rewards=reward, next_obs=self.obs, masks=1.0 - ended)
        transition |= dict(grasp_penalty=self.args.grasp_penalty * toggles, interventions=human is not None)
        transition |= dict(dones=terminated or truncated, success=success)
        if terminated or truncated:
            self.obs, self.episode, self.actions = None, self.episode + 1, []
        return transition

    def state_dict(self) -> dict:
        rngs = dict(act_rng=self.act_rng.get_state(), random_rng=self.random_rng.bit_generator.state)
        actions = torch.from_numpy(np.array(self.actions, np.float32))
        return dict(episode=self.episode, actions=actions, probability=self.probability, **rngs)

    def load_state_dict(self, state: dict):
        self.act_rng.set_state(state["act_rng"])
        self.random_rng.bit_generator.state = state["random_rng"]
        self.episode, self.probability = state["episode"], state["probability"]
        self.actions = list(state["actions"].numpy())
        if self.actions and not self.args.built_in:  # nobody wants a real robot to repeat half an episode
            self.actions, self.episode = [], self.episode + 1


class WireLink:
    """Link of an actor in another process: a flat uint8 tensor a step to rank 0, turn and weights back. No pickles."""

    SCALARS = ("rewards", "masks", "grasp_penalty", "interventions", "dones", "success", "filled")

    def __init__(self, obs_spec: dict, action_dim: int, num_weights: int, rank: int, group):
        self.obs_spec, self.action_dim, self.rank, self.group = obs_spec, action_dim, rank, group
        obs_bytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in obs_spec.values())
        self.message = torch.zeros(2 * obs_bytes + 4 * (action_dim + len(self.SCALARS)), dtype=torch.uint8)
        self.turn = torch.zeros(4, dtype=torch.int64)  # go on, global_step, version, weights follow
        self.new_weights = torch.zeros(num_weights)

    def fields(self, transition: dict):
        """(name of the dict or None, key, array) in the order of the wire"""
        for name in ("obs", "next_obs"):
            yield from ((name, key, transition[name][key]) for key in self.obs_spec)
        yield None, "actions", transition["actions"]
        yield from ((None, key, transition[key]) for key in self.SCALARS)

    def pack(self, transition: dict):
        parts = []
        for name, _, value in self.fields(transition | {"filled": 1.0}):
            value = np.ascontiguousarray(value if name else np.asarray(value, np.float32))
            parts.append(value.reshape(-1).view(np.uint8))
        self.message.copy_(torch.from_numpy(np.concatenate(parts)))

    def unpack(self) -> dict:
        blank = {key: np.zeros(shape, dtype) for key, (shape, dtype) in self.obs_spec.items()}
        blank = dict(obs=blank, next_obs=blank, actions=np.zeros(self.action_dim, np.float32))
        blank |= {key: np.zeros((), np.float32) for key in self.SCALARS}
        transition, raw, at = dict(obs={}, next_obs={}), self.message.numpy(), 0
        for name, key, value in self.fields(blank):
            piece = raw[at : at + value.nbytes].copy().view(value.dtype).reshape(value.shape)
            at += value.nbytes
            (transition[name] if name else transition)[key] = piece
        return transition

    def wait_turn(self, version: int):
        if version < 0:  # the first message carries nothing
            self.message.zero_()
        dist.send(self.message, 0, group=self.group)
        dist.recv(self.turn, 0, group=self.group)
        go_on, global_step, version, weights_follow = self.turn.tolist()
        if not go_on:
            return None
        if weights_follow:
            dist.recv(self.new_weights, 0, group=self.group)
        return global_step, version, self.new_weights.clone() if weights_follow else None

    def send(self, transition: dict, actor: int = 0):
        self.pack(transition)  # leaves with the next question for a turn

    def serve(self, link: Link):
        """Rank 0, one thread per actor: stands in for it, so that the rest of the program sees threads only."""
        version, had_turn = -1, False
        try:
            while True:
                dist.recv(self.message, self.rank, group=self.group)
                transition = self.unpack()
                if transition["filled"]:
                    link.send(transition, self.rank)
                had_turn = False
                turn = link.wait_turn(version)
                if turn is None:
                    dist.send(torch.zeros(4, dtype=torch.int64), self.rank, group=self.group)
                    return
                had_turn = True
                global_step, version, weights = turn
                dist.send(torch.tensor([1, global_step, version, weights is not None]), self.rank, group=self.group)
                if weights is not None:
                    dist.send(weights, self.rank, group=self.group)
        except Exception as error:  # the connection broke
            link.lost(self.rank, error, had_turn)


# --- evaluate ---
def evaluate_policy(policy: Policy, env: RobotEnv, first_seed: int, num_episodes: int) -> dict[str, float]:
    """The frozen policy alone: mean action, best grasp, no human, the same episodes for every run."""
    successes, returns, lengths = [], [], []
    for episode in range(num_episodes):
        obs, done, success = env.reset(first_seed + episode), False, False
        returns.append(0.0)
        lengths.append(0)
        while not done:
            obs, reward, terminated, truncated, success, _ = env.step(policy.act(obs))
            returns[-1] += reward
            lengths[-1] += 1
            done = terminated or truncated
        successes.append(success)
    means = [float(np.mean(values)) if values else math.nan for values in (successes, returns, lengths)]
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
def create_test_data(args: Args) -> list[str]:
    paths = []
    for name, num_demos in (("success", args.num_demos or 50), ("failure", 5)):
        paths.append(f"test_data/{name}_demo.pkl")
        transitions = make_demos(args, num_demos, args.seed, success=name == "success")
        temporary = Path(paths[-1] + ".tmp")
        try:
            temporary.parent.mkdir(exist_ok=True)
            temporary.write_bytes(pickle.dumps(transitions))
            os.replace(temporary, paths[-1])  # whole or not at all
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            fail(f"cannot write {paths[-1]}: {error.strerror}", code=1)
        print(f"{paths[-1]}: {num_demos} episodes, {len(transitions)} transitions, {args.setup_mode}")
    return paths


def quick_test(args: Args) -> dict[str, float]:
    """A check-up: demos are written and read back, a short run trains, its model is loaded and acts the same."""
    with tempfile.TemporaryDirectory() as folder:
        demos = Path(folder) / "demo.pkl"
        demos.write_bytes(pickle.dumps(make_demos(args, 5, args.seed)))
        env = RobotEnv(args)
        print(f"ok  demo file: {len(read_demos(str(demos), env, args.grasp_penalty))} transitions")
        options = {name: value for name, value in asdict(args).items() if name not in ("built_in", "test")}
        metrics = main(Args(**options | dict(run_dir=folder + "/run", save_dir=None, demo_paths=(str(demos),))))
        print(f"ok  training: {args.max_steps} environment steps, {metrics['charts/updates']:.0f} updates")
        layout = env.layout
        images = [key for key in env.obs_spec if key != "state"]
        agents = [SACHybridAgent(images, len(layout.continuous), layout.grasp_dim, "cpu", seed=seed) for seed in (1, 2)]
        for agent in agents:
            agent.load(folder + "/run/checkpoints/final_model.pth")
        obs = env.reset(0)
        assert (agents[0].policy.act(obs) == agents[1].policy.act(obs)).all()
        print("ok  final_model.pth: loaded twice, acts the same")
    return metrics


def main(args: Args) -> dict[str, float]:
    if args.create_data:
        create_test_data(args)
        return {}
    if args.test == "quick":
        return quick_test(args)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    keep_memory()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    checkpoint_path = newest_checkpoint(args)
    saved = load_checkpoint(checkpoint_path) if checkpoint_path and rank == 0 else None
    if saved is not None and not (isinstance(saved, dict) and "run_dir" in saved):
        fail(f"--resume {checkpoint_path} holds a policy, not a run: a checkpoint_*.pth is needed")
    run_dir = args.run_dir or (saved["run_dir"] if saved else None)
    run_dir = Path(run_dir or f"runs/{args.exp_name}__{args.seed}__{int(time.time())}")
    save_dir = Path(args.save_dir or run_dir / "checkpoints")
    goes_on = args.resume and (saved is None or checkpoint_path.resolve().parent == save_dir.resolve())
    if rank == 0 and not goes_on and (run_dir / "metrics.jsonl").exists():
        fail(f"--run-dir {run_dir} holds a run already: choose another folder")
    if rank == 0 and args.resume and not saved:
        cut_back(run_dir / "metrics.jsonl", -1)  # killed before its first checkpoint
    for name, folder in (("run-dir", run_dir), ("save-dir", save_dir)):
        check_folder(name, folder)
    device = pick_device(args.device)
    env = RobotEnv(args)  # for evaluation: no human in it
    layout, image_keys = env.layout, [key for key in env.obs_spec if key != "state"]
    shapes = {env.obs_spec[key][0] for key in image_keys} or {(32, 32, 3)}
    if len(shapes) > 1:
        fail(f"--image-keys {' '.join(image_keys)} have the sizes {sorted(shapes)}: one size is needed")
    if args.test == "full" and rank == 0 and not args.demo_paths:
        args.demo_paths = tuple(create_test_data(args)[:1])
    if saved:
        check_same_run(args, saved["args"], checkpoint_path)
    check_memory(args, env.obs_spec)
    options = "encoder shared_encoder hidden_size layer_norm num_critics num_sampled_critics lr gamma tau init_alpha"
    options += " target_entropy backup_entropy bc_weight algorithm seed"
    options = {name: getattr(args, name) for name in options.split()}
    options |= dict(image_shape=shapes.pop(), state_dim=env.obs_spec.get("state", ((0,),))[0][0])
    agent = SACHybridAgent(image_keys, len(layout.continuous), layout.grasp_dim, device, **options)

    # torchrun: rank 0 learns, the others act; each has its own pair group, so that no actor waits for another
    wires = []
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        num_weights = sum(param.numel() for param in agent.policy.parameters())
        groups = [dist.new_group([0, other]) for other in range(1, world)]
        wires = [WireLink(env.obs_spec, layout.action_dim, num_weights, i, group) for i, group in enumerate(groups, 1)]
    if rank > 0:
        stop_signal = StopSignal()  # the learner decides when to end
        Robot(args, agent.policy.cpu(), index=rank).run(wires[rank - 1])
        stop_signal.restore()
        dist.destroy_process_group()
        return {}

    online_rb = FrameBuffer(args.buffer_size, env.obs_spec, layout.action_dim)
    demo_rb = FrameBuffer(args.demo_buffer_size, env.obs_spec, layout.action_dim)
    link = Link(args, online_rb, demo_rb, num_actors=max(1, world - 1))
    sample_rng = np.random.default_rng([args.seed, 5])  # one per purpose: more draws of one leave the other alone
    augment_rng = torch.Generator().manual_seed(args.seed + 1)
    never_judged = not (args.built_in or args.eval_episodes or args.report_episodes)  # a real arm exists once
    robot = Robot(args, copy.deepcopy(agent.policy).cpu(), env=env if never_judged else None) if world == 1 else None

    demos = [demo for path in args.demo_paths for demo in read_demos(path, env, args.grasp_penalty)]
    if not args.demo_paths and args.num_demos:
        with tempfile.TemporaryDirectory() as folder:  # through a file, as a user's own demos
            path = Path(folder) / "demos.pkl"
            path.write_bytes(pickle.dumps(make_demos(args, args.num_demos, args.seed)))
            demos = read_demos(str(path), env, args.grasp_penalty)
    if len(demos) >= args.demo_buffer_size / 2:
        size = f"--demo-buffer-size {args.demo_buffer_size} is not allowed"
        fail(f"{size}: it must be more than {2 * len(demos)}, twice the transitions of the demos")
    for demo in demos:
        demo_rb.insert(demo)

    best, best_score = None, (-1.0, -math.inf)
    last_interventions = (0, 0)  # environment steps, human's steps at the last log line
    sums, counts = {}, {}  # metric -> sum and number since the last log line; tensors: nothing waits for the device
    if saved:
        agent.load(saved)
        link.load_state_dict(saved["link"])
        sample_rng.bit_generator.state = saved["sample_rng"]
        augment_rng.set_state(saved["augment_rng"])
        best, best_score, sums, counts = saved["best"], saved["best_score"], saved["sums"], saved["counts"]
        last_interventions = saved["last_interventions"]
        if robot and saved["robot"]:
            robot.load_state_dict(saved["robot"])
        if not (robot and robot.actions):  # the half episode is not continued: its return must not enter the next one
            link.current = {}
        if saved["buffers"] and checkpoint_path.with_name(saved["buffers"]).exists():
            buffers = load_checkpoint(checkpoint_path.with_name(saved["buffers"]))
            online_rb.load_state_dict(buffers["online_rb"])
            demo_rb.load_state_dict(buffers["demo_rb"])
        else:
            print("no buffers beside this checkpoint: it learns from the demos and from what comes", flush=True)
        if checkpoint_path.parent.resolve() == save_dir.resolve():
            drop_later(save_dir, link.handled)
        cut_back(run_dir / "metrics.jsonl", link.handled)
        print(f"resumed {checkpoint_path}: {link.handled} environment steps, {agent.updates} updates", flush=True)

    def save(step: int):
        name = f"buffers_{step}.pth" if args.save_buffers else None
        if name:  # before the checkpoint that refers to it; only the newest is kept
            save_checkpoint(save_dir / name, dict(online_rb=online_rb.state_dict(), demo_rb=demo_rb.state_dict()))
        state = dict(agent=agent.state_dict(), link=link.state_dict() | {"handled": step})
        state |= dict(robot=robot.state_dict() if robot else None, last_interventions=last_interventions)
        state |= dict(sample_rng=sample_rng.bit_generator.state, augment_rng=augment_rng.get_state())
        state |= dict(best=best, best_score=best_score, sums=sums, counts=counts, buffers=name)
        save_checkpoint(save_dir / f"checkpoint_{step}.pth", state | dict(args=asdict(args), run_dir=str(run_dir)))
        for old in save_dir.glob("buffers_*.pth") if name else ():
            if old.name != name:
                old.unlink()

    writer = Writer(args, run_dir, total=args.max_steps)
    metrics, scores = {}, {"eval/success_rate": 0.0}
    if not saved:
        scores = evaluate_policy(agent.policy, env, 10_000, args.eval_episodes)
        if args.eval_episodes:
            writer.log(scores, 0)
        link.publish(agent.policy)
    start_step, start_updates = link.handled, agent.updates
    start_time = rollout_start = time.time()
    rollout_time = update_time = all_updates_time = 0.0  # the first two: seconds since the last log line

    def act():
        try:
            robot.run(link)
        except BaseException as error:  # also SystemExit: the learner raises it again
            link.stop(error)

    threads = [threading.Thread(target=act, daemon=True)] if robot else []
    threads += [threading.Thread(target=wire.serve, args=(link,), daemon=True) for wire in wires]
    stop_signal = StopSignal()
    try:
        for thread in threads:
            thread.start()
        while link.handled < args.max_steps:
            # 1 collect: the actors do, see Robot.run
            if not link.wait_step():
                if stop_signal.received and time.time() - rollout_start > 5:  # a robot that hangs must not cost the run
                    save(link.handled)
                    break
                continue
            step = link.handled + 1

            # 2 update
            update_start = time.time()
            rollout_time += update_start - rollout_start
            while agent.updates < link.updates_due(step):
                ratio = 1.0 if args.algorithm == "bc" else args.demo_ratio
                batch = sample_batch(online_rb, demo_rb, args.batch_size, ratio, sample_rng, device)
                if args.augment_pad:
                    for obs in (batch["obs"], batch["next_obs"]):
                        obs |= {key: random_shift(obs[key], args.augment_pad, augment_rng) for key in image_keys}
                stats = agent.update(batch, full=(agent.updates + 1) % args.cta_ratio == 0)
                stats |= {"demo_rows": batch["is_demo"].sum(), "online_rows": (~batch["is_demo"]).sum()}
                for name, value in stats.items():
                    sums[name], counts[name] = sums.get(name, 0) + value, counts.get(name, 0) + 1
                if agent.skipped_in_a_row >= args.max_skipped_steps:
                    fail(f"{agent.skipped_in_a_row} gradients in a row were not finite (step {step})", code=1)
                if agent.updates % args.publish_every == 0:
                    link.publish(agent.policy)
            update_time += time.time() - update_start

            # 3 log
            if step % args.log_interval == 0 or step == args.max_steps:
                all_updates_time += update_time
                metrics = {f"losses/{name}": float(sums[name]) / counts[name] for name in sums if "rows" not in name}
                metrics |= {f"buffer/{name}": float(sums[name]) / counts[name] for name in sums if "rows" in name}
                sums, counts = {}, {}
                last_step, last_steps = last_interventions
                metrics |= {
                    "losses/skipped_steps": agent.skipped_steps,
                    "buffer/online_size": len(online_rb),
                    "buffer/demo_size": len(demo_rb),
                    "charts/intervention_rate": (link.intervention_steps - last_steps) / max(1, step - last_step),
                    "charts/intervention_steps": link.intervention_steps,
                    "charts/intervention_count": link.intervention_count,
                    "charts/episodes": link.num_episodes,
                    "charts/updates": agent.updates,
                    "charts/SPS": (step - start_step) / (time.time() - start_time),
                    "charts/UPS": (agent.updates - start_updates) / max(1e-9, all_updates_time),
                    "time/rollout": rollout_time,
                    "time/update": update_time,
                }
                rollout_time = update_time = 0.0
                if link.episodes:
                    means = [float(x) for x in np.mean(link.episodes, 0)]
                    names = ("charts/episodic_return", "charts/episodic_length", "charts/success_rate")
                    metrics |= dict(zip(names, means, strict=True))
                last_interventions = (step, link.intervention_steps)
                writer.log(metrics, step)

            # 4 evaluate: one set of episodes chooses the policy, another judges it at the end
            judged = step == args.max_steps or (args.eval_every and step % args.eval_every == 0)
            if judged and args.eval_episodes:
                scores = evaluate_policy(agent.policy, env, 10_000, args.eval_episodes)
                writer.log(scores, step)
                if (scores["eval/success_rate"], scores["eval/episodic_return"]) >= best_score:
                    best, best_score = agent.networks(), (scores["eval/success_rate"], scores["eval/episodic_return"])
            human = metrics.get("charts/intervention_rate", 0.0)
            writer.status(f"success {scores['eval/success_rate']:.2f} human {human:.2f}", done=step)

            # 5 save
            due = args.save_every and step % args.save_every == 0
            stopping = stop_signal.received is not None  # read once: what ends here has been saved
            if due or step == args.max_steps or stopping:
                save(step)
            rollout_start = time.time()
            link.step_handled()  # not before: the actor waits, so the checkpoint is of one moment
            if stopping:
                break
    finally:
        link.stop()
        for thread in threads:
            thread.join(timeout=5)
        stop_signal.restore()

    if link.handled < args.max_steps:  # stopped by a signal
        writer.bar.close()
        env.close()
        if world > 1:
            dist.destroy_process_group()
        where = f"--run-dir {run_dir}" + (f" --save-dir {save_dir}" if args.save_dir else "")
        print(f"saved {save_dir / f'checkpoint_{link.handled}.pth'}; --resume auto {where} continues it")
        return metrics
    summary = {"global_step": link.handled, "updates": agent.updates, "seconds": round(time.time() - start_time, 1)}
    if best is not None:
        agent.load_networks(best)
    if args.report_episodes:
        metrics |= evaluate_policy(agent.policy, env, 20_000, args.report_episodes)
    save_checkpoint(save_dir / "final_model.pth", dict(agent=agent.state_dict(), args=asdict(args)))
    env.close()
    curves = ["eval/success_rate", "charts/success_rate", "charts/intervention_rate"]
    curves += ["losses/critic_loss", "losses/actor_loss", "losses/alpha"]
    writer.close(summary | metrics, curves)
    if world > 1:
        dist.destroy_process_group()
    work = f"{link.handled} environment steps, {agent.updates} updates in {summary['seconds']} s"
    print(f"{work}: actor {metrics.get('charts/SPS', 0):.0f} Hz, {metrics.get('charts/UPS', 0):.0f} updates/s")
    rate, episodes = metrics.get("eval/success_rate", math.nan), f"{args.report_episodes} fresh episodes without human"
    print(f"eval/success_rate {rate:.2f} on {episodes}: {save_dir}/final_model.pth")
    return metrics


if __name__ == "__main__":
    main(parse_args(Args))
