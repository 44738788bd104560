"""het_grpo.py - GRPO agents (arXiv:2402.03300) with hybrid experience training and trajectory replay.

An agent plays a text game over several turns and is helped by two kinds of experience, each of which can be off:
    text experience    - advice from a pool stands before the question in part of each group's rollouts; for training it
                         is kept, stripped or, task by task, mixed (AgentEvolver, arXiv:2511.10395): --method
    trajectory replay  - recorded successes come back into the group of their task, so that a group which fails has
                         something to learn (ExGRPO, arXiv:2510.02245; LUFFY, arXiv:2504.14945): --use-experience-replay

Everything off is plain GRPO. The built-in game needs no download: a tiny Llama opens locks whose secrets it must find.
Simplified on purpose: no vLLM, no LoRA; an experience is what a success did, no second model writes it.
Shapes: B rollouts in groups of n, P prompt tokens (left-padded), R tokens of all turns (right-padded), V vocabulary.

    python het_grpo.py                                              # locks, HET, CPU, minutes
    python het_grpo.py --method baseline                            # plain GRPO
    python het_grpo.py --use-experience-replay --env lock-parts     # both kinds, secrets made of parts that recombine
    python het_grpo.py --env FrozenLake-v1 --max-turns 10           # a Gymnasium toy-text environment, in words
    torchrun --nproc-per-node 2 het_grpo.py --fsdp                  # two processes, sharded
    python het_grpo.py --model-name FOLDER --chat-template --env FrozenLake-v1 --max-turns 10 --max-turn-tokens 12
"""

import atexit
import contextlib
import copy
import ctypes
import importlib
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn, get_args, get_origin, get_type_hints

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import transformers
import tyro
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed.checkpoint import state_dict as sharded_state
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging


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
    resume: str | None = None
    """auto: go on from the newest checkpoint of run_dir, or of exp_name and seed; PATH: that one (None: start fresh)"""
    save_every: int = 50
    """steps between checkpoints (iterations in the language-model scripts); 0: only at the end"""
    keep_checkpoints: int = 3
    """newest checkpoints to keep; the best model is kept apart and never deleted"""
    fsdp: bool = False
    """under torchrun, shard weights, gradients and optimizer over the ranks instead of replicating them (FSDP2)"""

    # task
    env: str = "lock"
    """lock, lock-parts (validation recombines known parts), a Gymnasium id, or module:Class with text observations"""
    num_families: int = 12
    """lock: secrets to find, at most 24; lock-parts: its square root parts of each kind; toy-text: maps"""
    num_rooms: int = 20
    """rooms of a family for training; validation uses others; environments without families: 10 seeds for each room"""
    max_turns: int = 7
    """actions per episode"""
    success_reward: float = 1.0
    """an episode whose summed reward reaches this counts as solved"""
    nan_rewards: Literal["fail", "skip"] = "skip"
    """a reward that is not finite ends the run with a message (fail) or costs the updates it would enter (skip)"""

    # model
    model_name: str | None = None
    """hub name or folder of a causal LM (None: a tiny Llama made from a config)"""
    chat_template: bool = False
    """wrap each prompt as a user turn with the tokenizer's own chat template"""
    hidden_size: int = 64
    """tiny model: width, a multiple of 16"""
    num_layers: int = 2
    """tiny model: depth"""
    warm_start_steps: int = 400
    """tiny model: supervised steps on games with random secrets, which teach to follow advice (0: random weights)"""
    warm_start_follow: float = 0.8
    """warm start: how often the teacher does what the advice says; without advice it acts at random"""

    # rollout
    num_tasks: int = 8
    """tasks per iteration"""
    group_size: int = 8
    """n, rollouts per task, replayed ones included"""
    max_turn_tokens: int = 1
    """tokens of one action, EOS included"""
    max_context: int = 2_048
    """tokens; an episode ends where the next turn would not fit"""
    temperature: float = 1.0
    """of sampling and of every log-prob; evaluation is greedy"""

    # optimization
    num_iterations: int = 250
    """rollout + update rounds"""
    num_rollouts: int | None = None
    """end after this many rollouts instead, those that fill the pool included, for the schedules, too"""
    learning_rate: float = 1e-3
    """at the start; by default it falls linearly to 0 over the run"""
    update_epochs: int = 1
    """passes over the rollouts of an iteration"""
    num_minibatches: int = 2
    """optimizer steps per epoch"""
    max_grad_norm: float = 1.0
    """clip the gradient's global norm here"""
    max_skipped_steps: int = 10
    """end the run after this many optimizer steps in a row with a non-finite gradient"""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "plateau"] = "linear"
    """shape after the warm-up, over the iterations of this run; plateau: halved whenever evaluation stands still"""
    warmup_steps: int = 0
    """iterations in which the learning rate rises linearly from 0"""
    plateau_patience: int = 2
    """plateau: evaluations without improvement before the rate is halved"""
    gradient_accumulation_steps: int = 1
    """micro-batches per minibatch; changes memory, not the gradient"""
    bf16: bool = False
    """run the networks under bfloat16 autocast (weights, log-probs and losses stay float32)"""
    gradient_checkpointing: bool = False
    """keep one activation per layer and compute the rest again in the backward pass"""

    # GRPO
    clip_low: float = 0.2
    """the ratio of on-policy tokens is clipped from 1 - this"""
    clip_high: float = 0.28
    """to 1 + this"""
    clip_c: float = 3.0
    """bound on the ratio for negative advantages, above 1 (dual clip)"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    kl_loss_coef: float = 0.0
    """weight of the k3 KL to the start policy in the loss (0: no reference model at all)"""

    # experience: text before the question
    enable: bool = True
    """hybrid experience training as a whole; --no-enable is --method baseline"""
    method: Literal["baseline", "ec", "ei", "het"] = "het"
    """fills the next five where they are left out: no experience, always kept, always stripped, mixed by task"""
    val_rollout_expmode: Literal["mixed", "all", "woexp"] | None = None
    """validation rollouts with experience: none, all, or every held-out task both with and without"""
    train_rollout_expmode: Literal["mixed", "all", "woexp"] | None = None
    """training rollouts with experience: none, all, or the share rollout_expratio of each group"""
    rollout_expratio: float | None = None
    """mixed: floor(n * this) rollouts of a group are guided, at random places (None: 0.5)"""
    train_sample_expmode: Literal["keep", "discard", "hybrid"] | None = None
    """experience in training samples: kept, stripped, or kept for some tasks and stripped for the others"""
    train_sample_keepratio: float | None = None
    """hybrid: floor(num_tasks * this) tasks keep (None: 0.5)"""
    experience_template: str = "\n\nSome Related Experience to help you to complete the task:<EXP>{}</EXP>\n\n"
    """stands before the query; {} is the experience"""
    updated_freq: int = 0
    """iterations between additions to the pool, readable from the iteration after (0: never)"""
    val_summarizer_save: bool = False
    """put validation successes into the pool, too: a leak, for whoever wants to measure it"""
    retrieve_top_k: int = 3
    """experiences per query"""
    experience_pool: str | None = None
    """JSONL file to read at the start and to write with each checkpoint (None: in memory only)"""
    experience_pool_size: int = 1_000
    """experiences to hold; the oldest goes first"""
    init_exp_before_training: bool = True
    """an empty pool is filled from rollouts of training tasks before the first iteration"""
    init_exp_tasks: int = 96
    """tasks of these rollouts, n each; they count in global_step"""
    off_cliprange_high: float = 0.6
    """upper clip of off-policy tokens (stripped or replayed)"""
    off_old_logp: Literal["stripped", "behavior"] = "stripped"
    """old log-prob of a stripped sample: without the experience (published form, ratio starts at 1) or as sampled"""
    off_policy_neg: Literal["keep", "mask"] = "keep"
    """mask: stripped samples with a negative advantage are not trained on"""
    off_policy_loss: Literal["clip", "shape", "tis"] = "clip"
    """surrogate of stripped samples: clipped, ratio/(ratio+shaping_beta), or clipped times min(w, tis_cap)"""
    tis_cap: float = 2.0
    """tis: bound on w = pi_old(y|x) / pi_old(y|x,experience) per token"""

    # replay; the published values, which the study found worse: --replay-old-logp recorded --replay-loss shape
    # --retire-solved --experience-lbound 0 --bucket-weights normal --replay-start success --replay-start-ratio 0.35
    use_experience_replay: bool = False
    """bring back recorded successes"""
    exp_ratio: float = 0.5
    """share of an iteration's tasks taken from the replay pool"""
    exp_select_mode: Literal["argmin", "argmax", "random"] = "argmin"
    """which trajectories of a task, by mean token entropy; decides what a full memory drops, too"""
    experience_lbound: int = -1
    """tasks with more successes than this may be replayed (-1: also those that only succeeded in older rollouts)"""
    experience_rbound: int | None = None
    """and with at most this many (None: n - 1)"""
    offpolicy_trajectories_per_task: int = 1
    """replayed per replay task, below n"""
    max_trajectories_per_task: int = 8
    """memory of a task"""
    replay_start: Literal["success", "progress"] = "progress"
    """replay begins, for good, when the success rate of a batch, or the share of the run, passes replay_start_ratio"""
    replay_start_ratio: float = 0.0
    """see replay_start"""
    bucket_weights: Literal["normal", "uniform"] = "uniform"
    """tasks of which success count: exp(-(s - n/2)^2 / 2), or any alike"""
    use_current_policy_entropy: bool = True
    """choose by the entropy under the current policy instead of the stored one"""
    replay_loss: Literal["shape", "clip"] = "clip"
    """surrogate of replayed tokens"""
    shaping_beta: float = 0.1
    """shape: w/(w+this)"""
    replay_old_logp: Literal["recorded", "current"] = "current"
    """old log-prob of a replayed token: recorded when it was sampled (published), or today's, so that a ratio near 0
    does not silence the success that the policy has moved away from"""
    retire_solved: bool = False
    """a task whose fresh rollouts all succeed is not drawn again while others are left, and loses its trajectories"""
    max_staleness: int | None = None
    """iterations after which a trajectory may not be replayed (None: never)"""
    debug_replay: bool = False
    """convert what was just stored back into samples and stop unless every trained token has ratio 1"""
    debug_replay_tolerance: float = 1e-5
    """debug_replay: distance from 1 that passes; other padding is float noise, above 1e-5 in a model of 30 layers"""

    # logging
    eval_every: int = 50
    """iterations between greedy evaluations on held-out prompts (0: the first and the last policy only)"""
    eval_size: int = 504
    """held-out prompts per evaluation"""
    log_interval: int = 1
    """iterations between lines of metrics.jsonl"""
    track: bool = False
    """also log to wandb (WANDB_MODE=offline works without an account)"""
    wandb_project_name: str = "stale-experience"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb team (None: your default one)"""

    # derived
    batch_size: int = field(init=False)
    """answers sampled per iteration"""
    minibatch_size: int = field(init=False)
    """batch_size / num_minibatches"""

    def __post_init__(self):
        positive = "keep_checkpoints num_families num_rooms max_turns num_tasks group_size max_turn_tokens max_context"
        positive += " temperature num_iterations learning_rate update_epochs num_minibatches max_grad_norm"
        positive += " max_skipped_steps plateau_patience gradient_accumulation_steps clip_low clip_high retrieve_top_k"
        positive += " experience_pool_size init_exp_tasks off_cliprange_high tis_cap offpolicy_trajectories_per_task"
        positive += " max_trajectories_per_task shaping_beta eval_size log_interval hidden_size num_layers"
        positive += " debug_replay_tolerance"
        not_negative = "seed num_threads save_every warm_start_steps warmup_steps ent_coef kl_loss_coef updated_freq"
        not_negative += " eval_every"
        for name in positive.split():
            check(0 < getattr(self, name) < math.inf, self, name, "a positive number")
        for name in not_negative.split():
            check(0 <= getattr(self, name) < math.inf, self, name, "0 or a positive number")
        for name in "rollout_expratio train_sample_keepratio exp_ratio replay_start_ratio warm_start_follow".split():
            check(getattr(self, name) is None or 0 <= getattr(self, name) <= 1, self, name, "between 0 and 1")
        for name, hint in get_type_hints(Args).items():  # tyro checks the command line; this is for callers of main()
            allowed = sum((get_args(part) for part in (hint, *get_args(hint)) if get_origin(part) is Literal), ())
            unset = type(None) in get_args(hint) and getattr(self, name) is None
            check(not allowed or unset or getattr(self, name) in allowed, self, name, f"one of {', '.join(allowed)}")

        if not self.enable:
            self.method = "baseline"
            for name in ("val_rollout_expmode", "train_rollout_expmode"):
                check(getattr(self, name) in (None, "woexp"), self, name, "woexp or left out with --no-enable")
        # A preset fills what was left out; a share follows from the modes where they leave no choice.
        rollout = "woexp" if self.method == "baseline" else "mixed"
        self.val_rollout_expmode = self.val_rollout_expmode or rollout
        self.train_rollout_expmode = self.train_rollout_expmode or rollout
        sample = {"ec": "keep", "ei": "discard"}.get(self.method, "hybrid")
        self.train_sample_expmode = self.train_sample_expmode or sample
        share = {"mixed": 0.5, "all": 1.0, "woexp": 0.0}[self.train_rollout_expmode]  # validation has no share
        self.rollout_expratio = share if self.rollout_expratio is None else self.rollout_expratio
        fits = self.train_rollout_expmode == "mixed" or self.rollout_expratio == share
        allowed = f"{share} or left out with --train-rollout-expmode {self.train_rollout_expmode}"
        check(fits, self, "rollout_expratio", allowed)
        share = {"keep": 1.0, "discard": 0.0, "hybrid": 0.5}[self.train_sample_expmode]
        self.train_sample_keepratio = share if self.train_sample_keepratio is None else self.train_sample_keepratio
        fits = self.train_sample_expmode == "hybrid" or self.train_sample_keepratio == share
        allowed = f"{share} or left out with --train-sample-expmode {self.train_sample_expmode}"
        check(fits, self, "train_sample_keepratio", allowed)

        if self.experience_template.count("{}") != 1:
            fail(f"--experience-template {self.experience_template!r} is not allowed: it must hold exactly one {{}}")
        if self.experience_rbound is None:
            self.experience_rbound = self.group_size - 1
        check(self.group_size >= 2, self, "group_size", "2 or more: an advantage is a difference within a group")
        check(-1 <= self.experience_lbound < self.group_size, self, "experience_lbound", "from -1 to n - 1")
        allowed = f"above --experience-lbound {self.experience_lbound} and at most n = {self.group_size}"
        fits = self.experience_lbound < self.experience_rbound <= self.group_size
        check(fits, self, "experience_rbound", allowed)
        default = not self.use_experience_replay and self.offpolicy_trajectories_per_task == 1  # a group of one is none
        fits = self.offpolicy_trajectories_per_task < self.group_size or default
        check(fits, self, "offpolicy_trajectories_per_task", f"below --group-size {self.group_size}")
        for name in ("num_rollouts", "max_staleness"):
            check(getattr(self, name) is None or getattr(self, name) > 0, self, name, "a positive number, or left out")
        twice = self.off_old_logp == "behavior" and self.off_policy_loss == "tis"
        check(not twice, self, "off_policy_loss", "clip or shape with --off-old-logp behavior, whose ratio has w in it")
        check(1 < self.clip_c < math.inf, self, "clip_c", "a number above 1")
        check(math.isfinite(self.success_reward), self, "success_reward", "a finite number")
        check(self.seed < 2**32, self, "seed", "less than 2**32")
        check(self.clip_low < 1, self, "clip_low", "below 1")
        check(self.num_families <= len(NAMES), self, "num_families", f"at most {len(NAMES)}")
        check(self.num_rooms < 100, self, "num_rooms", "below 100")
        check(self.hidden_size % 16 == 0, self, "hidden_size", "a multiple of 16")
        self.batch_size = self.num_tasks * self.group_size
        if self.num_rollouts is not None:
            self.num_iterations = math.ceil(self.num_rollouts / self.batch_size)  # without replay; for schedules
        check(self.warmup_steps < self.num_iterations, self, "warmup_steps", f"below {self.num_iterations} iterations")
        divisor = f"a divisor of {self.batch_size}, the rollouts of an iteration"
        check(self.batch_size % self.num_minibatches == 0, self, "num_minibatches", divisor)
        self.minibatch_size = self.batch_size // self.num_minibatches
        divides = self.minibatch_size % self.gradient_accumulation_steps == 0
        check(divides, self, "gradient_accumulation_steps", f"a divisor of {self.minibatch_size}, the minibatch")


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
@dataclass(frozen=True)
class AgentTask:
    task_id: str
    query: str
    topic: str  # what retrieval compares: the words that say what advice could be about
    rules: tuple  # what make_env needs to build the game


@dataclass
class World:
    train: list[AgentTask]
    validation: list[AgentTask]
    make_env: Callable[[AgentTask], object]  # reset() -> text, step(text) -> (text, reward, done)
    words: list[str]  # vocabulary of the tiny model
    practice: Callable  # (rng, guided) -> query, experience, game, advised actions: a warm-start episode, random rules


NAMES = "amber brass cedar delta ember flint grove hazel ivory jade kelp lunar maple north opal pearl".split()
NAMES += "quartz river slate topaz umber violet willow yarrow".split()
BUTTONS = ("red", "green", "blue", "gold")


class LockEnv:
    """Press the secret's buttons in order. A wrong one jams and costs a turn; the slot stays."""

    def __init__(self, name: str, secret: tuple[int, ...]):
        self.name, self.secret, self.slot = name, secret, 0

    def reset(self) -> str:
        self.slot = 0
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        if action.strip() != BUTTONS[self.secret[self.slot]]:
            return f"jam {self.slot}", 0.0, False
        self.slot += 1
        opened = self.slot == len(self.secret)
        return ("open" if opened else f"click {self.slot}"), float(opened), opened

    def summary(self, actions: list[str]) -> str:
        return lock_advice(self.name, self.secret[: self.slot])  # what clicked, without the jams

    def progress(self, turn: int) -> int:
        return self.slot


def lock_advice(name: str, presses) -> str:
    return f"{name} : " + " ".join(BUTTONS[press] for press in presses)


def make_lock_world(args) -> World:
    """Families share a secret of 4 presses, so advice from one room helps in the others.

    lock-parts: a family is a pair of parts, each good for 2 presses, and validation has pairs that training never saw.
    """
    rng = np.random.default_rng(0)  # the secrets are the task, not the run: the same for every seed
    parts = args.env == "lock-parts"
    if parts:
        side = max(2, math.isqrt(args.num_families))
        halves = [[tuple(rng.integers(0, 4, 2).tolist()) for _ in range(side)] for _ in range(2)]
        pairs = [(i, j) for i in range(side) for j in range(side)]
        families = {f"{NAMES[i]} {NAMES[-1 - j]}": halves[0][i] + halves[1][j] for i, j in pairs}
        held_out = {f"{NAMES[i]} {NAMES[-1 - i]}" for i in range(side)}  # every part is trained
    else:
        families = {NAMES[i]: tuple(rng.integers(0, 4, 4).tolist()) for i in range(args.num_families)}
        held_out = set()

    def task(name, room):
        return AgentTask(f"{name}/{room}", f"lock {name} room {room:02d}", name, (name, families[name]))

    train = [task(name, room) for room in range(args.num_rooms) for name in families if name not in held_out]
    others = [task(name, room) for room in range(args.num_rooms, 100) for name in held_out or families]
    others.sort(key=lambda task: (int(task.task_id.split("/")[1]), task.task_id))

    def practice(rng, guided):
        secret = tuple(rng.integers(0, 4, 4).tolist())
        left, right = rng.integers(0, len(NAMES), 2)
        while parts and left == right:
            right = rng.integers(0, len(NAMES))
        name = f"{NAMES[left]} {NAMES[right]}" if parts else NAMES[left]
        lines = [lock_advice(name, secret)]
        if parts:  # advice about other pairs, of which one half fits
            i, j = rng.integers(0, len(NAMES), 2)
            a, b = (tuple(rng.integers(0, 4, 2).tolist()) for _ in range(2))
            lines = [lock_advice(f"{NAMES[left]} {NAMES[i]}", secret[:2] + a)]
            lines += [lock_advice(f"{NAMES[j]} {NAMES[right]}", b + secret[2:])]
            lines = [lines[i] for i in rng.permutation(2)]
        query = f"lock {name} room {rng.integers(0, 100):02d}"
        return query, "\n".join(lines) if guided else "", LockEnv(name, secret), [BUTTONS[i] for i in secret]

    words = [*NAMES, *BUTTONS, *"lock room click jam open : 0 1 2 3 4 5 6 7 8 9".split()]
    return World(train, others[: args.eval_size], lambda task: LockEnv(*task.rules), words, practice)


TOY_ACTIONS = {
    "FrozenLake": "left down right up",
    "CliffWalking": "up right down left",
    "Taxi": "south north east west pickup dropoff",
    "Blackjack": "stick hit",
}


class GymEnv:
    """A Gymnasium environment in words: toy-text states are spelled out, text observations pass as they are."""

    def __init__(self, env, kind: str, name: str, seed: int):
        self.env, self.kind, self.name, self.seed = env, kind, name, seed
        self.actions = TOY_ACTIONS.get(kind, "").split()
        if not self.actions and isinstance(env.action_space, gym.spaces.Discrete):
            self.actions = [str(i) for i in range(env.action_space.n)]

    def call(self, method: str, *args, **kwargs):
        """Somebody else's code: an error in it ends the run with one line."""
        try:
            return getattr(self.env, method)(*args, **kwargs)
        except Exception as error:
            shown = ", ".join(map(repr, (*args, *kwargs.values())))
            fail(f"--env: {method}({shown}) of {self.env} raised {error!r}", code=1)

    def reset(self) -> str:
        return self.tell(self.call("reset", seed=self.seed)[0])

    def step(self, action: str) -> tuple[str, float, bool]:
        if self.actions:  # the last action word of a sentence counts
            said = [word for word in re.findall(r"\w+", action.lower()) if word in self.actions]
            if not said:
                return "not an action : " + " ".join(self.actions), 0.0, False
            action = self.actions.index(said[-1]) + int(getattr(self.env.action_space, "start", 0))
        obs, reward, terminated, truncated, _ = self.call("step", action)
        return self.tell(obs), float(reward), bool(terminated or truncated)

    def tell(self, obs) -> str:
        inner = self.env.unwrapped
        if self.kind == "FrozenLake":
            return f"row {obs // inner.ncol} column {obs % inner.ncol}"
        if self.kind == "CliffWalking":
            return f"row {obs // 12} column {obs % 12}"
        if self.kind == "Taxi":
            row, column, passenger, goal = inner.decode(obs)
            where = "taxi" if passenger == 4 else f"stop {passenger}"
            return f"row {row} column {column} passenger at {where} goal stop {goal}"
        if self.kind == "Blackjack":
            return f"hand {obs[0]} dealer {obs[1]} ace {'yes' if obs[2] else 'no'}"
        return str(obs)

    def summary(self, actions: list[str]) -> str:
        return f"{self.name} : " + " ".join(" ".join(actions).split())

    def progress(self, turn: int) -> int:
        return turn


def make_gym_world(args) -> World:
    """A Gymnasium id or module:Class. FrozenLake: hidden, not slippery maps as families; others: one task per seed."""
    kind = args.env.split("-")[0]
    module, _, name = args.env.partition(":")
    lake = kind == "FrozenLake" and not name

    def build(number, seed, label) -> GymEnv:
        try:
            if name:
                made = getattr(importlib.import_module(module), name)()
            else:
                options = dict(desc=generate_random_map(4, seed=number), is_slippery=False) if lake else {}
                made = gym.make(args.env, disable_env_checker=True, **options)
        except Exception as error:  # unknown id, missing module, a constructor that fails: many types, one meaning
            reason = (str(error) or repr(error)).splitlines()[0]
            fail(f"--env {args.env} is neither lock, lock-parts, a Gymnasium id nor module:Class: {reason}")
        if isinstance(getattr(made, "observation_space", None), gym.spaces.Box):
            fail(f"--env {args.env}: its observations are arrays of numbers; an agent that reads needs text or choices")
        return GymEnv(made, kind, label, seed)

    def task(family, number):  # number: room of a lake, seed of anything else
        label = f"lake {NAMES[family]}" if lake else args.env.split(":")[-1].split("-")[0]
        room = f" room {number:02d}" if lake else ""
        query = f"{label}{room} . actions : {' '.join(probe.actions)} ."
        return AgentTask(f"{label}/{number}", query, label, (family, 0 if lake else number, label))

    if name and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # module:Class of the folder the user stands in
    probe = build(0, 0, "")
    families = range(args.num_families if lake else 1)
    last = args.num_rooms if lake else 10 * args.num_rooms
    train = [task(family, number) for number in range(last) for family in families]
    others = range(last, 100 if lake else last + args.eval_size)
    held_out = [task(family, number) for number in others for family in families]

    def practice(rng, guided):
        game = build(int(rng.integers(10**6, 10**9)), int(rng.integers(10**6, 10**9)), "")
        advice = [str(word) for word in rng.choice(game.actions or ["ok"], args.max_turns)]
        example = train[rng.integers(len(train))]
        return example.query, f"{example.topic} : " + " ".join(advice) if guided else "", game, advice

    seen, rng = Counter("not an action :".split()), np.random.default_rng(0)
    if args.model_name is None:  # the tiny model's vocabulary: whatever random play brings up
        for t in train[:200]:
            game = build(*t.rules)
            texts, done = [t.query, game.reset()], False
            for _ in range(args.max_turns):
                if not done:
                    text, _, done = game.step(str(rng.choice(game.actions or ["ok"])))
                    texts.append(text)
            seen.update(word for text in texts for word in split_words(text))
    words = sorted({*seen, *map(str, range(10)), *NAMES})
    return World(train, held_out[: args.eval_size], lambda task: build(*task.rules), words, practice)


def split_words(text: str) -> list[str]:
    return re.findall(WORD, text)


WORD = r"\d|[^\W\d]+|[^\w\s]"  # of the tiny model: digits and marks one by one, letters together


# --- networks ---
class LanguagePolicy(nn.Module):
    """A causal LM."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(
        self, prompt_ids, prompt_mask, response_ids, response_mask, loss_mask, temperature, entropy_grad=False
    ):
        """Log-prob and entropy of each token the agent chose, 0 on the environment's.  -> 2 x (B,R)"""
        length, valid = response_ids.shape[1], loss_mask.bool()
        # The last token predicts nothing and is not fed: of the last R outputs, number t predicts response token t.
        mask = torch.cat([prompt_mask, response_mask], 1)[:, :-1]  # (B,P+R-1)
        inputs = dict(input_ids=torch.cat([prompt_ids, response_ids], 1)[:, :-1], attention_mask=mask)
        inputs |= dict(position_ids=positions(mask), use_cache=False)
        hidden = self.lm.base_model(**inputs).last_hidden_state[:, -length:]  # (B,R,H)
        # The LM head is the largest layer, so it sees the agent's own tokens only.
        lm_head = self.lm.get_output_embeddings()
        logprobs, entropy = token_logprobs(lm_head, hidden[valid], response_ids[valid], temperature, entropy_grad)
        zeros = torch.zeros(valid.shape, device=hidden.device)
        return zeros.masked_scatter(valid, logprobs), zeros.masked_scatter(valid, entropy)

    def step(self, ids, mask, position_ids, cache):
        """Logits of the next token, given the cache and the ids that are not in it yet.  (B,T) -> (B,V)"""
        inputs = dict(input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache)
        hidden = self.lm.base_model(**inputs, use_cache=True).last_hidden_state[:, -1]
        return self.lm.get_output_embeddings()(hidden)


def positions(mask):
    """Count real tokens only, so that left padding does not shift a prompt.  (B,T) -> (B,T)"""
    return (mask.cumsum(1) - 1).clamp(min=0)


def token_logprobs(lm_head, hidden, ids, temperature, entropy_grad=False, max_logits=2**25):
    """Log-prob of each id under softmax(logits / temperature), and its entropy.  (N,H), (N,) -> (N,), (N,)"""

    def chunk(hidden, ids):
        logits = lm_head(hidden).float() / temperature  # (n,V)
        lse = logits.logsumexp(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
            entropy = lse - (logits.softmax(-1) * logits).sum(-1)
        return logits.gather(-1, ids[:, None]).squeeze(-1) - lse, entropy

    size = max(1, max_logits // lm_head.out_features)
    if len(ids) <= size:
        return chunk(hidden, ids)
    # Large vocabulary: keep one chunk of logits (128 MB) alive, and compute it again in the backward pass.
    pieces = zip(hidden.split(size), ids.split(size), strict=True)
    outputs = [checkpoint(chunk, *piece, use_reentrant=False) for piece in pieces]
    return tuple(map(torch.cat, zip(*outputs, strict=True)))


def make_word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token per word, as a Hugging Face tokenizer, so that one code path serves all models."""
    vocab = dict.fromkeys(["<pad>", "<eos>", "<unk>", *words])
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def load_pretrained(auto_class, name: str, option: str):
    if name[0] in "./~" and not Path(name).is_dir():
        fail(f"{option} {name}: there is no such folder")
    kwargs = {} if auto_class is AutoTokenizer else {"dtype": torch.float32}
    try:
        loaded = auto_class.from_pretrained(name, **kwargs)
    except Exception as error:  # missing, damaged, of another kind: many types, one meaning
        reason = (str(error) or repr(error)).strip().splitlines()[0]
        fail(f"{option} {name} is neither a model folder nor a model on the hub: {reason}")
    return loaded.eval() if isinstance(loaded, nn.Module) else loaded  # eval() for good: dropout is noise in ratios


def load_agent(args, world: World):
    """-> policy, tokenizer, the ids that end a turn (E,), the id to pad with"""
    with torch.random.fork_rng(devices=[]):  # weights come from the global generator; leave that as it was
        torch.manual_seed(args.seed)
        if args.model_name is None:
            tokenizer = make_word_tokenizer(world.words + split_words(args.experience_template))
            special = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
            sizes = dict(hidden_size=args.hidden_size, intermediate_size=3 * args.hidden_size)
            sizes |= dict(num_hidden_layers=args.num_layers, num_attention_heads=args.hidden_size // 16)
            lm = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **special)).eval()
        else:
            tokenizer = load_pretrained(AutoTokenizer, args.model_name, "--model-name")
            lm = load_pretrained(AutoModelForCausalLM, args.model_name, "--model-name")
        policy = LanguagePolicy(lm).eval()
    if args.chat_template and not tokenizer.chat_template:
        fail(f"--chat-template: the tokenizer of {args.model_name or 'the tiny model'} has no chat template")
    most = getattr(lm.config, "max_position_embeddings", None) or math.inf
    check(args.max_context <= most, args, "max_context", f"at most {most}, the positions of the model")
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        ours = policy.step(ids, torch.ones_like(ids), positions(torch.ones_like(ids)), DynamicCache())
        if not torch.allclose(lm(ids).logits[:, -1], ours, atol=1e-3):  # soft-capped or scaled logits (Gemma 2, Cohere)
            fail(f"--model-name {args.model_name}: its logits are not its LM head applied to its last hidden state")
    # The generation config is read for its EOS ids only: its top_k or repetition penalty must not leak into sampling.
    eos = getattr(lm.generation_config, "eos_token_id", None)
    eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    if not eos_ids:
        fail(f"--model-name {args.model_name}: neither its tokenizer nor its generation config names an EOS token")
    pad_id = min(eos_ids) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return policy, tokenizer, torch.tensor(sorted(eos_ids)), pad_id


# --- buffer ---
@dataclass
class Trajectory:
    """One episode, in token ids: nothing is ever tokenised again."""

    trajectory_id: str
    task_id: str
    data_id: int  # group in the batch
    rollout_id: int  # place in the group
    prompt_ids: list[int]  # of the query alone
    rollout_prompt_ids: list[int]  # what the policy read: the same, or with experience in front
    steps: list[tuple[str, list[int]]]  # ("assistant", sampled ids) and ("env", ids that were not), in turn
    sampler_logprobs: list[float]  # one per sampled id
    reward: float
    success: bool
    injected: bool  # experience really stood in the prompt: retrieval was not empty
    summary: str  # of a success, for the pool
    keep: bool = True  # the training sample keeps the experience
    is_experience_replay: bool = False
    old_log_probs: list[float] = field(default_factory=list)  # of the response on the training view, when it was saved
    entropy: float = math.nan  # mean over the agent's tokens, then
    version: int = -1  # iteration that sampled it


class ExperiencePool:
    """Text experience: what successes on training tasks did, found by the words of the task at hand."""

    def __init__(self, template: str, size: int, forbidden: set[str]):
        self.records: list[dict] = []  # task_id, topic, text, step
        self.size, self.forbidden = size, forbidden  # ids of validation tasks
        before, _, after = template.partition("{}")
        self.marker = before.strip() or after.strip()

    def refusal(self, record) -> str | None:
        """Why this may not be stored; None if it may."""
        names = ("task_id", "topic", "text")
        if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in names):
            return "lacks one of the texts " + ", ".join(names)
        if not record["text"].strip():
            return "has an empty text"
        if self.marker and self.marker in record["text"]:
            return "has a text that contains the experience template"
        if record["task_id"] in self.forbidden:
            return f"belongs to the validation task {record['task_id']}"
        return None

    def add(self, record: dict) -> bool:
        same = lambda old: (old["topic"], old["text"]) == (record["topic"], record["text"])  # noqa: E731
        if self.refusal(record) or any(map(same, self.records)):
            return False
        self.records = [*self.records, record][-self.size :]
        return True

    def add_successes(self, trajectories: list[Trajectory], topics: dict[str, str], step: int):
        for t in trajectories:
            if t.success:
                self.add(dict(task_id=t.task_id, topic=topics[t.task_id], text=t.summary, step=step))

    def retrieve(self, topic: str, top_k: int, step: int) -> str:
        """The experiences that share most words with the topic, rare words first; "" if none shares any.

        Of the words that one experience covers, the next gets half: advice about another part beats more of the same.
        """
        readable = [record for record in self.records if record["step"] < step]  # written at t, readable from t + 1
        words = {id(record): set(split_words(record["topic"])) for record in readable}
        counts = Counter(word for found in words.values() for word in found)
        worth = {w: 1 + math.log(len(readable) / counts[w]) for w in set(split_words(topic)) if w in counts}
        chosen = []
        while len(chosen) < top_k:
            left = [record for record in reversed(readable) if record not in chosen]  # the newest wins a tie
            value = lambda record: sum(worth.get(word, 0) for word in words[id(record)])  # noqa: E731, B023
            best = max(left, key=value, default=None)
            if best is None or value(best) == 0:
                break
            chosen.append(best)
            worth = {word: x / 2 if word in words[id(best)] else x for word, x in worth.items()}
        return "\n".join(record["text"] for record in chosen)

    def load(self, path: Path):
        try:
            with open(path, encoding="utf-8") as file:
                lines = file.readlines()  # unlike splitlines(), it leaves U+2028 inside a text alone
        except (OSError, UnicodeDecodeError) as error:
            fail(f"--experience-pool {path}: cannot read the file: {error}")
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # also numbers and nesting beyond what Python reads
                fail(f"--experience-pool {path}: line {number} is not JSON: {error}")
            if reason := self.refusal(record):
                fail(f"--experience-pool {path}: line {number} {reason}")
            self.add({name: record[name] for name in ("task_id", "topic", "text")} | {"step": -1})

    def save(self, path: Path):
        temporary = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "w", encoding="utf-8") as file:
                file.write("".join(json.dumps(record) + "\n" for record in self.records))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            fail(f"cannot write --experience-pool {path}: {error.strerror}", code=1)


class TaskQueue:
    """Training tasks in passes, each in an order of its own: a pure function of seed and position, plus leftovers."""

    def __init__(self, tasks: list[AgentTask], seed: int):
        self.tasks, self.seed = tasks, seed
        self.position, self.returned = 0, []  # of the stream; indices of tasks that came back

    def next_index(self) -> int:
        if self.returned:
            return self.returned.pop(0)
        turn, place = divmod(self.position, len(self.tasks))
        self.position += 1
        return int(np.random.default_rng([self.seed, 3, turn]).permutation(len(self.tasks))[place])

    def take(self, count: int, skip: set[str]) -> list[AgentTask]:
        """Distinct tasks. Retired ones are passed over as long as others are left."""
        taken, twice, retired = [], [], []
        for _ in range(2 * len(self.tasks) + len(self.returned)):
            if len(taken) == count:
                break
            index = self.next_index()
            if index in taken:
                twice.append(index)
            elif self.tasks[index].task_id in skip:
                retired.append(index)
            else:
                taken.append(index)
        self.returned = twice + self.returned
        taken += list(dict.fromkeys(retired))[: count - len(taken)]  # too few left: look at solved ones again
        return [self.tasks[index] for index in taken]

    def put_back(self, tasks: list[AgentTask]):
        index = {task.task_id: i for i, task in enumerate(self.tasks)}
        self.returned = [index[task.task_id] for task in tasks] + self.returned


class ExperienceManager:
    """Trajectory replay: which tasks are half-known, and their recorded successes. Keyed by task and trajectory ids."""

    def __init__(self, args):
        self.args = args
        self.difficulty2task_dict: dict[int, list[str]] = {}  # successes among the last fresh rollouts -> task ids
        self.skip_uid_set: set[str] = set()  # tasks whose fresh rollouts all succeeded
        self.memory: dict[str, list[Trajectory]] = {}
        self.started = False  # replay has begun, for good

    def update_difficulty2task_dict(self, trajectories: list[Trajectory]):
        """Every task of the fresh rollouts goes to the bucket of its number of successes, and leaves its old one."""
        fresh = [t for t in trajectories if not t.is_experience_replay]
        for task_id in dict.fromkeys(t.task_id for t in fresh):
            results = [t.success for t in fresh if t.task_id == task_id]
            # Replay leaves a group n - k fresh ones: all solved is solved, not n - k of n.
            count = self.args.group_size if all(results) else sum(results)
            self.leave_bucket(task_id)
            self.difficulty2task_dict.setdefault(count, []).append(task_id)

    def leave_bucket(self, task_id: str):
        buckets = {s: [t for t in tasks if t != task_id] for s, tasks in self.difficulty2task_dict.items()}
        self.difficulty2task_dict = {s: tasks for s, tasks in buckets.items() if tasks}

    def update_skip_uid_set_and_filter_trajectories(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Solved tasks retire with their trajectories; an imperfect result brings one back.  -> what may be stored"""
        fresh = [t for t in trajectories if not t.is_experience_replay]
        failed = {t.task_id for t in fresh if not t.success}
        for task_id in dict.fromkeys(t.task_id for t in fresh):
            if task_id in failed:
                self.skip_uid_set.discard(task_id)
            elif self.args.retire_solved:
                self.skip_uid_set.add(task_id)
                self.leave_bucket(task_id)
                self.memory.pop(task_id, None)
        return [t for t in fresh if t.success and t.task_id not in self.skip_uid_set]

    def save_trajectories_to_memory(self, trajectories: list[Trajectory]):
        mode, most = self.args.exp_select_mode, self.args.max_trajectories_per_task
        for new in trajectories:
            assert new.success and not new.is_experience_replay and new.old_log_probs, "only fresh, recorded successes"
            stored = self.memory.setdefault(new.task_id, [])
            if len(stored) < most:
                stored.append(new)
            elif mode == "random":
                stored[:] = [*stored[1:], new]
            else:
                sign = 1 if mode == "argmin" else -1
                worst = max(range(most), key=lambda i: sign * stored[i].entropy)
                if sign * new.entropy < sign * stored[worst].entropy:
                    stored[worst] = new

    def readable(self, task_id: str, version: int) -> list[Trajectory]:
        oldest = -math.inf if self.args.max_staleness is None else version - self.args.max_staleness
        return [t for t in self.memory.get(task_id, []) if t.version >= oldest]

    def valid_tasks(self, version: int) -> dict[int, list[str]]:
        """Buckets of the tasks that may be replayed now."""
        low, high = self.args.experience_lbound, self.args.experience_rbound
        buckets = {s: tasks for s, tasks in sorted(self.difficulty2task_dict.items()) if low < s <= high}
        usable = lambda task_id: task_id not in self.skip_uid_set and self.readable(task_id, version)  # noqa: E731
        return {s: found for s, tasks in buckets.items() if (found := sorted(filter(usable, tasks)))}

    def sample_tasks_from_replaypool(self, count: int, version: int, rng) -> list[str]:
        """Without replacement: a bucket by its weight, then one of its tasks."""
        buckets, chosen = self.valid_tasks(version), []
        while len(chosen) < count and buckets:
            weights = bucket_weights(list(buckets), self.args.group_size, self.args.bucket_weights)
            tasks = buckets[list(buckets)[rng.choice(len(weights), p=weights)]]
            chosen.append(tasks.pop(rng.integers(len(tasks))))
            buckets = {s: tasks for s, tasks in buckets.items() if tasks}
        return chosen

    def get_offpolicy_trajectories_from_memory(self, task_id: str, version: int, rng, entropy_of=None):
        """At most k of a task, one place in the group being left for a fresh one.  -> list of Trajectory"""
        stored = self.readable(task_id, version)
        count = min(self.args.offpolicy_trajectories_per_task, self.args.group_size - 1, len(stored))
        if self.args.exp_select_mode == "random":
            return [stored[i] for i in rng.choice(len(stored), count, replace=False)]
        current = self.args.use_current_policy_entropy and entropy_of is not None and len(stored) > count
        entropys = entropy_of(stored) if current else [t.entropy for t in stored]
        sign = 1 if self.args.exp_select_mode == "argmin" else -1
        order = sorted(range(len(stored)), key=lambda i: (sign * entropys[i], stored[i].trajectory_id))
        return [stored[i] for i in order[:count]]

    def get_offpolicy_batch(self, task_ids: list[str], version: int, rng, entropy_of=None) -> list[Trajectory]:
        """What replay adds to a batch whose first tasks these are, at the end of each group."""
        batch = []
        for data_id, task_id in enumerate(task_ids):
            found = self.get_offpolicy_trajectories_from_memory(task_id, version, rng, entropy_of)
            first = self.args.group_size - len(found)
            batch += [convert_offpolicy_to_cmt(t, data_id, first + i) for i, t in enumerate(found)]
        return batch

    def state(self) -> dict:
        memory = {task_id: [asdict(t) for t in stored] for task_id, stored in self.memory.items()}
        buckets = {s: list(tasks) for s, tasks in self.difficulty2task_dict.items()}
        return dict(buckets=buckets, skip=sorted(self.skip_uid_set), memory=memory, started=self.started)

    def load(self, state: dict):
        self.difficulty2task_dict, self.skip_uid_set = state["buckets"], set(state["skip"])
        self.memory = {task_id: [Trajectory(**t) for t in stored] for task_id, stored in state["memory"].items()}
        self.started = state["started"]


class ExperienceMixCollateFn:
    """B drawn tasks -> (experience_tasks, on_policy_tasks), B in all, none twice; what is not used goes back."""

    def __init__(self, manager: ExperienceManager, queue: TaskQueue, exp_ratio: float):
        self.manager, self.queue, self.exp_ratio = manager, queue, exp_ratio

    def __call__(self, drawn: list[AgentTask], version: int, rng) -> tuple[list[AgentTask], list[AgentTask]]:
        by_id = {task.task_id: task for task in self.queue.tasks}
        count = share(len(drawn), self.exp_ratio)
        chosen = self.manager.sample_tasks_from_replaypool(count, version, rng)
        others = [task for task in drawn if task.task_id not in chosen]
        fresh = len(drawn) - len(chosen)
        self.queue.put_back(others[fresh:])
        return [by_id[task_id] for task_id in chosen], others[:fresh]


def convert_offpolicy_to_cmt(stored: Trajectory, data_id: int, rollout_id: int) -> Trajectory:
    """A stored trajectory as a member of a group of this batch, on the view its log-probs were recorded on."""
    prompt_ids = stored.rollout_prompt_ids if stored.keep else stored.prompt_ids
    views = dict(prompt_ids=prompt_ids, rollout_prompt_ids=prompt_ids)
    return replace(stored, data_id=data_id, rollout_id=rollout_id, is_experience_replay=True, **views)


def tokenize_steps(prompt_ids, steps, is_experience_replay=False) -> tuple[list[int], list[int], list[int], list[int]]:
    """-> prompt, response, loss mask and prefix mask of the response, split at the first token of the agent.

    Replayed or not, the split is the same. The prefix mask marks what comes from memory: with it at len(input_ids),
    where the checklist has the split, a replayed trajectory would not train at all.
    """
    first = next(i for i, (role, _) in enumerate(steps) if role == "assistant")
    prompt = sum((ids for _, ids in steps[:first]), list(prompt_ids))
    response = [token for _, ids in steps[first:] for token in ids]
    loss_mask = [int(role == "assistant") for role, ids in steps[first:] for _ in ids]
    return prompt, response, loss_mask, [bit * int(is_experience_replay) for bit in loss_mask]


def get_extra(trajectory: Trajectory) -> dict:
    """What a sample has to say besides its tokens."""
    stripped = trajectory.injected and not trajectory.keep and not trajectory.is_experience_replay
    extra = dict(trajectory_id=trajectory.trajectory_id, is_experience_replay=trajectory.is_experience_replay)
    return extra | dict(stripped=stripped, off_policy=stripped or trajectory.is_experience_replay)


def samples_to_dataproto(trajectories: list[Trajectory], pad_id: int, device, view="training") -> dict:
    """Tensors of the training view (experience kept or stripped), or of the view the policy read (view="rollout").

    exp_mask picks the surrogate (stripped or replayed), replay_mask the recorded log-probs. They are two: with one, the
    stripped samples would get log-probs that nobody recorded.
    """
    extras = [get_extra(t) for t in trajectories]
    prompts, responses, masks, prefixes = [], [], [], []
    for t in trajectories:
        whole = view == "rollout" or (t.keep and not t.is_experience_replay)
        row = tokenize_steps(t.rollout_prompt_ids if whole else t.prompt_ids, t.steps, t.is_experience_replay)
        for rows, ids in zip((prompts, responses, masks, prefixes), row, strict=True):
            rows.append(ids)
    data = dict(zip(("prompt_ids", "prompt_mask"), pad(prompts, pad_id, "left"), strict=True))
    data |= dict(zip(("response_ids", "response_mask"), pad(responses, pad_id, "right"), strict=True))
    data["loss_mask"], data["replay_mask"] = pad(masks, 0, "right")[0], pad(prefixes, 0, "right")[0]
    off = torch.tensor([extra["off_policy"] for extra in extras])[:, None]
    data["exp_mask"] = data["loss_mask"] * off  # (B,R)
    data["recorded_old_log_probs"] = torch.zeros(data["loss_mask"].shape)
    for i, t in enumerate(trajectories):
        if t.is_experience_replay:
            data["recorded_old_log_probs"][i, : len(t.old_log_probs)] = torch.tensor(t.old_log_probs)
    data["group_ids"] = torch.tensor([t.data_id for t in trajectories])
    data["rewards"] = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)
    return {name: x.to(device) for name, x in data.items()} | {"trajectory_ids": [e["trajectory_id"] for e in extras]}


TOKENS = ("prompt_ids", "prompt_mask", "response_ids", "response_mask", "loss_mask")


def attach_log_probs(trajectories: list[Trajectory], data: dict, old_log_probs, entropys, version: int):
    """What step 8 measured, on the trajectories it belongs to: by id, whatever order the batch has."""
    row = {trajectory_id: i for i, trajectory_id in enumerate(data["trajectory_ids"])}
    lengths, means = data["response_mask"].sum(1).tolist(), entropys.tolist()
    values = old_log_probs.tolist()
    for t in trajectories:
        i = row[t.trajectory_id]
        t.old_log_probs, t.entropy, t.version = values[i][: lengths[i]], means[i], version


def _replace_recorded_old_log_probs(data: dict, old_log_probs):
    """Replayed tokens get the log-probs they were recorded with, all others keep theirs.  (B,R) -> (B,R)"""
    return torch.where(data["replay_mask"].bool(), data["recorded_old_log_probs"], old_log_probs)


# --- math ---
def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def share(count: int, ratio: float) -> int:
    """floor(count * ratio); 100 * 0.29 is 28.999999999999996 and means 29"""
    return math.floor(count * ratio + 1e-9)


def bucket_weights(successes: list[int], group_size: int, kind: str) -> list[float]:
    """Chance of each bucket; normal: tasks solved half of the time come first."""
    raw = [math.exp(-((s - group_size / 2) ** 2) / 2) if kind == "normal" else 1.0 for s in successes]
    return [x / sum(raw) for x in raw]


def group_advantages(rewards, group_ids):
    """(R - mean) / (std + 1e-6) in each group, ddof 1; a group of one and equal rewards give 0.  2 x (B,) -> (B,)"""
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        inside = group_ids == group
        r = rewards[inside]
        if len(r) > 1 and not (r == r[0]).all():  # the mean of equal floats need not be that float
            advantages[inside] = (r - r.mean()) / (r.std() + 1e-6)
    return advantages


def draw_kept_tasks(count: int, mode: str, ratio: float, rng) -> list[bool]:
    """Which tasks keep their experience in training samples: decided per task, never per rollout."""
    kept = {"keep": count, "discard": 0, "hybrid": share(count, ratio)}[mode]
    return [bool(place < kept) for place in rng.permutation(count)]


def draw_guided(count: int, mode: str, ratio: float, rng) -> list[bool]:
    """Which rollouts of a group get experience, at random places."""
    guided = {"woexp": 0, "all": count, "mixed": share(count, ratio)}[mode]
    return [bool(place < guided) for place in rng.permutation(count)]


def k3_kl(logprobs, ref_logprobs):
    """KL(pi | pi_ref) per token, never negative (Schulman, "Approximating KL Divergence").  2 x (B,R) -> (B,R)"""
    logratio = ref_logprobs - logprobs
    return logratio.exp() - 1 - logratio


def policy_loss(new_logprobs, logprobs, advantages, mask, weights, num_tokens, clip_low, clip_high, clip_c):
    """Clipped surrogate, eq. 7 of arXiv:1707.06347v2, as a loss; clip_c < inf adds the dual clip of arXiv:1912.09729.

    all (B,R) -> loss (), ratio (B,R), clipped (B,R).  `num_tokens` is the whole minibatch's, so micro-batches add up.
    """
    # broadcasting hides bugs
    assert new_logprobs.shape == logprobs.shape == advantages.shape == mask.shape == weights.shape
    logratio = ((new_logprobs - logprobs) * mask).clamp(-20, 20)  # masked before exp: inf * 0 is a NaN gradient
    ratio = logratio.exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    too_far = (advantages < 0) & (ratio > clip_c)  # without a bound, one stale token can own the gradient
    surrogate = torch.where(too_far, min(clip_c, 1e6) * advantages, surrogate)
    clipped = too_far | ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    # token mean over the batch, not per sequence: that would under-weight long answers (DAPO, arXiv:2503.14476)
    return -(surrogate * weights * mask).sum() / num_tokens, ratio.detach(), clipped


def shaped_loss(new_logprobs, logprobs, advantages, mask, weights, num_tokens, beta):
    """-A w / (w + beta), LUFFY's shaping (arXiv:2504.14945): unlikely tokens keep a gradient.  (B,R) -> ()"""
    assert new_logprobs.shape == logprobs.shape == advantages.shape == mask.shape == weights.shape
    ratio = ((new_logprobs - logprobs) * mask).clamp(-20, 20).exp()
    return -(ratio / (ratio + beta) * advantages * weights * mask).sum() / num_tokens


def learning_rate_at(iteration, num_iterations, learning_rate, kind, warmup_steps, plateau_scale):
    """Rate of one iteration, the first being 1; linear and cosine end at 0."""
    if iteration <= warmup_steps:
        return learning_rate * iteration / warmup_steps
    progress = (iteration - 1 - warmup_steps) / (num_iterations - warmup_steps)
    shape = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "plateau": plateau_scale}
    return learning_rate * shape.get(kind, 1)


def finished(args, iteration: int, global_step: int) -> bool:
    return iteration >= args.num_iterations if args.num_rollouts is None else global_step >= args.num_rollouts


# --- rollout ---
def inject_experience(query: str, experience: str, template: str) -> str:
    """Experience before the query. By partition, since str.format would read the braces of either text."""
    before, _, after = template.partition("{}")
    return before + experience + after + query if experience else query


def encode_prompts(tokenizer, prompts: list[str], chat_template: bool) -> list[list[int]]:
    if chat_template:
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return tokenizer(texts, add_special_tokens=False).input_ids
    rows = tokenizer(list(prompts)).input_ids
    # some tokenizers end what they read
    return [row[:-1] if len(row) > 1 and row[-1] == tokenizer.eos_token_id else row for row in rows]


def pad(rows: list[list[int]], pad_id: int, side: Literal["left", "right"]):
    """-> ids and mask, (B,T) each. The mask comes from lengths: pad_id may be a real token, often it is eos."""
    gaps = [max(map(len, rows)) - len(row) for row in rows]
    left = side == "left"
    ids = [[pad_id] * (gap * left) + row + [pad_id] * (gap * (not left)) for gap, row in zip(gaps, rows, strict=True)]
    mask = [[0] * (gap * left) + [1] * len(row) + [0] * (gap * (not left)) for gap, row in zip(gaps, rows, strict=True)]
    return torch.tensor(ids), torch.tensor(mask)


def sample_token(logits, uniforms):
    """Inverse-CDF draw. One uniform per row: an answer does not depend on the rows beside it.  (B,V), (B,) -> (B,)"""
    cdf = logits.softmax(-1).cumsum(-1)
    token = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    return token.clamp(max=logits.shape[-1] - 1)


class Dialogue:
    """Turns <-> token ids, with the tokenizer's chat template or as plain text."""

    def __init__(self, tokenizer, chat_template: bool, eos_ids):
        self.tokenizer, self.chat_template, self.eos_ids = tokenizer, chat_template, set(eos_ids.tolist())
        self.known: dict = {}  # prompts repeat in a group, observations everywhere

    def prompt(self, text: str) -> list[int]:
        if len(self.known) > 10_000:
            self.known.clear()
        if text not in self.known:
            self.known[text] = encode_prompts(self.tokenizer, [text], self.chat_template)[0]
        return self.known[text]

    def reply(self, observation: str, ended: bool) -> list[int]:
        """What follows the agent's turn: its end where it has none, the observation, the start of the next turn."""
        if (observation, ended) not in self.known:
            text = f"\n{observation}\n"
            if self.chat_template:  # what the template puts behind an answer, and nothing that it puts before
                turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "@@"}]
                more = [*turns, {"role": "user", "content": observation}]
                text = self.tokenizer.apply_chat_template(more, tokenize=False, add_generation_prompt=True)
                text = text.partition("@@")[2]
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
            self.known[observation, ended] = ids[1:] if ended and ids[0] in self.eos_ids else ids
        return self.known[observation, ended]

    def read(self, ids: list[int]) -> str:
        return self.tokenizer.decode([i for i in ids if i not in self.eos_ids], skip_special_tokens=True)


@dataclass
class Job:
    """One rollout to do."""

    task: AgentTask
    data_id: int
    rollout_id: int
    experience: str  # "" for none
    keep: bool = True


@torch.no_grad()
def rollout(policy, jobs: list[Job], make_env, dialogue, pad_id, args, label: str, uniforms=None) -> list[Trajectory]:
    """Play every job to its end, sampling, or greedily where `uniforms` (B, turns * tokens) is None.

    One cache over all turns: the environment's tokens are fed with the next step. Rows may be in different turns, so a
    step feeds blocks of unequal length, padded on the left; ended rows are dropped.
    """
    device = next(policy.parameters()).device
    done, games, actions, counts, turn_ids, waiting = [], [], [], [0] * len(jobs), [[] for _ in jobs], []
    for job in jobs:
        game = make_env(job.task)
        query = f"{job.task.query}\n{first}" if (first := game.reset()) else job.task.query
        clean = dialogue.prompt(query)
        shown = dialogue.prompt(inject_experience(query, job.experience, args.experience_template))
        if len(shown) + args.max_turn_tokens > args.max_context:
            needs = f"{job.task.task_id} starts with {len(shown)} tokens, a turn takes {args.max_turn_tokens}"
            fail(f"--max-context {args.max_context} is too small: {needs}")
        ids = f"{label}/{job.task.task_id}/{job.rollout_id}"
        common = (job.task.task_id, job.data_id, job.rollout_id, clean, shown)
        done.append(Trajectory(ids, *common, [], [], 0.0, False, bool(job.experience), "", job.keep))
        games.append(game)
        actions.append([])
        waiting.append(shown)
    alive, cache = list(range(len(jobs))), DynamicCache()
    mask = torch.zeros(len(jobs), 0, dtype=int, device=device)
    while alive:
        ids, block_mask = (x.to(device) for x in pad([waiting[i] for i in alive], pad_id, "left"))
        mask = torch.cat([mask, block_mask], 1)
        position_ids = positions(mask)[:, -ids.shape[1] :]
        logits = policy.step(ids, mask, position_ids, cache).float() / args.temperature  # (A,V)
        if uniforms is None:
            token = logits.argmax(-1)
        else:
            token = sample_token(logits, uniforms[alive, [counts[i] for i in alive]].to(device))
        logprobs = (logits.gather(-1, token[:, None]).squeeze(-1) - logits.logsumexp(-1)).tolist()
        going = []
        for place, (i, tok, logprob) in enumerate(zip(alive, token.tolist(), logprobs, strict=True)):
            t, job = done[i], jobs[i]
            counts[i] += 1
            turn_ids[i].append(tok)
            t.sampler_logprobs.append(logprob)
            ended = tok in dialogue.eos_ids
            waiting[i] = [tok]
            if ended or len(turn_ids[i]) == args.max_turn_tokens:
                action = dialogue.read(turn_ids[i])
                actions[i].append(action)
                observation, reward, over = games[i].step(action)
                t.reward += reward
                t.steps.append(("assistant", turn_ids[i]))
                turn_ids[i] = []
                told = dialogue.reply(observation, ended)
                length = len(t.rollout_prompt_ids) + sum(len(x) for _, x in t.steps) + len(told)
                if over or len(actions[i]) == args.max_turns or length + args.max_turn_tokens > args.max_context:
                    t.success = args.success_reward <= t.reward < math.inf
                    t.summary = games[i].summary(actions[i]) if t.success else ""
                    continue
                t.steps.append(("env", told))
                waiting[i] = [tok, *told]
            going.append(place)
        if 0 < len(going) < len(alive):
            cache.batch_select_indices(torch.tensor(going, device=device))
            mask = mask[going]
        alive = [alive[place] for place in going]
    return done


def collect(policy, jobs, make_env, dialogue, pad_id, args, label, uniforms, rank, world_size, chunk=512):
    """rollout() of all jobs, each rank playing its own.  -> every rank's trajectories, by (data_id, rollout_id)"""
    mine, trajectories = list(range(len(jobs)))[rank::world_size], []
    for start in range(0, len(mine), chunk):
        inds = mine[start : start + chunk]
        drawn = None if uniforms is None else uniforms[inds]
        part = [jobs[i] for i in inds]
        trajectories += rollout(policy, part, make_env, dialogue, pad_id, args, label, drawn)
    if world_size > 1:
        parts = [None] * world_size
        dist.all_gather_object(parts, trajectories)
        trajectories = [t for part in parts for t in part]
    return sorted(trajectories, key=lambda t: (t.data_id, t.rollout_id))


@torch.no_grad()
def compute_log_prob(policy, data: dict, temperature, chunk: int, rank: int = 0, world_size: int = 1):
    """Log-probs and full-vocabulary entropy of the agent's tokens, each rank doing its rows.  -> (B,R), (B,R)

    By the training forward, not by the sampler: the first minibatch then has a ratio of 1.
    """
    mine = torch.arange(len(data["group_ids"]), device=data["group_ids"].device)[rank::world_size]
    chunks = [{name: data[name][inds] for name in TOKENS} for inds in mine.split(chunk)]
    outputs = [policy(**tokens, temperature=temperature) for tokens in chunks]
    outputs = map(torch.cat, zip(*outputs, strict=True))
    return tuple(gather_rows(x, "right", world_size) if world_size > 1 else x for x in outputs)


# --- evaluate ---
def validate(policy, world, pool, dialogue, pad_id, args, step, rank, world_size):
    """Greedy episodes on held-out tasks, guided and unguided apart.  -> metrics, trajectories

    Reads the pool, writes nothing and draws no random number, so it cannot change training.
    """
    kinds = {"woexp": [False], "all": [True], "mixed": [False, True]}[args.val_rollout_expmode]
    jobs = []
    for i, task in enumerate(world.validation):
        advice = pool.retrieve(task.topic, args.retrieve_top_k, step) if True in kinds else ""
        jobs += [Job(task, i, int(guided), advice if guided else "") for guided in kinds]
    label = f"validation{step}"
    done = collect(policy, jobs, world.make_env, dialogue, pad_id, args, label, None, rank, world_size)
    metrics = {}
    for guided, name in ((True, "guided"), (False, "unguided")):  # the last one present is the headline
        found = [t.success for t in done if t.rollout_id == int(guided)]
        if found:
            metrics[f"eval/success_{name}"] = metrics["eval/success_rate"] = sum(found) / len(found)
    return metrics, done


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


def check_folder(option: str, folder: Path):
    """A folder that cannot be made is found now, not when the first checkpoint is due."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        fail(f"--{option} {folder} is not allowed: {there} is not a folder that can be written to")


def keep_memory():
    """glibc gives blocks over 128 kB back to the kernel at once and asks again: half the time of a small conv net."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**28)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


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


def find_checkpoint(args) -> Path | None:
    """What --resume means: the newest complete checkpoint, or None where there is none."""
    if args.resume not in (None, "auto") and not Path(args.resume).is_dir():
        return Path(args.resume)
    folders = [Path(args.run_dir)] if args.run_dir else Path("runs").glob(f"{args.exp_name}__{args.seed}__*")
    if args.resume != "auto":
        folders = [Path(args.resume)] if args.resume else []
    runs = [sorted(folder.glob("checkpoints/checkpoint_*.pt")) for folder in folders]
    runs = [paths for paths in runs if paths]
    if not runs and args.resume not in (None, "auto"):
        fail(f"--resume {args.resume}: no checkpoints/checkpoint_*.pt in this folder")
    # the run by its time, the checkpoint by its number: a copied folder has new times in any order
    return max(runs, key=lambda paths: paths[-1].stat().st_mtime, default=[None])[-1]


def cut_back(path: Path, global_step: int):
    """Drop the rows of metrics.jsonl that the resumed run will write again, and a half-written last one."""
    if path.exists():
        rows = [line for line in path.read_text().splitlines() if line.endswith("}")]
        rows = [line for line in rows if json.loads(line)["global_step"] <= global_step]
        path.with_suffix(".tmp").write_text("".join(row + "\n" for row in rows))
        os.replace(path.with_suffix(".tmp"), path)  # killed here, too, nothing is lost


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


def gather_rows(x, side: Literal["left", "right"], world_size: int):
    """Every rank's rows, in the order of one process: rank r holds rows r, r + world_size, ...  (b,T) -> (B,max T)"""
    width = torch.tensor(x.shape[1], device=x.device)
    dist.all_reduce(width, dist.ReduceOp.MAX)
    gap = int(width) - x.shape[1]
    x = nn.functional.pad(x, (gap, 0) if side == "left" else (0, gap)).contiguous()
    parts = [torch.empty_like(x) for _ in range(world_size)]
    dist.all_gather(parts, x)
    return torch.stack(parts, 1).flatten(0, 1)


def shard(policy, device):
    """FSDP2, layer by layer."""
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    trunks = filter(None, (policy.lm, getattr(policy, "critic", None)))
    layers = [max((m for m in trunk.modules() if isinstance(m, nn.ModuleList)), key=len) for trunk in trunks]
    for module in (*sum(map(list, layers), []), policy):
        fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(policy, "step")
    return policy


def keep_whole(policy, whole: bool):
    """Sampling stays free of communication: ranks end at different lengths, so sharded steps would wait for ever."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(not whole, recurse=False)
            if not whole:
                module.reshard()


def sync_gradients(policy, world_size: int):
    """Sum over ranks: each loss was divided by the tokens of all. FSDP has averaged already, so that is scaled back."""
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    if isinstance(policy, FSDPModule):
        for gradient in gradients:
            gradient.mul_(world_size)
    elif world_size > 1:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def sum_over_ranks(stats: dict, world_size: int, device) -> dict:
    if world_size == 1:
        return stats
    values = torch.stack([torch.as_tensor(value, dtype=torch.float32, device=device) for value in stats.values()])
    dist.all_reduce(values)
    return dict(zip(stats, values, strict=True))


def whole_state(policy, optimizer) -> tuple[dict, dict]:
    """State dicts of model and optimizer; sharded ones are gathered on rank 0."""
    if not isinstance(policy, FSDPModule):
        return policy.state_dict(), optimizer.state_dict()
    options = sharded_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return sharded_state.get_state_dict(policy, optimizer, options=options)


def load_state(policy, optimizer, model_state: dict, optimizer_state: dict):
    if not isinstance(policy, FSDPModule):
        policy.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        return
    options = sharded_state.StateDictOptions(full_state_dict=True)
    states = dict(model_state_dict=model_state, optim_state_dict=optimizer_state)
    sharded_state.set_state_dict(policy, optimizer, **states, options=options)


def save_model(policy, tokenizer, folder: Path, rank: int):
    """An ordinary Hugging Face folder, swapped in whole."""
    state = None
    if isinstance(policy, FSDPModule):
        options = sharded_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = sharded_state.get_model_state_dict(policy, options=options)
        state = {name.removeprefix("lm."): x for name, x in state.items() if name.startswith("lm.")}
    if rank > 0:
        return
    temporary, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    shutil.rmtree(temporary, ignore_errors=True)
    policy.lm.save_pretrained(temporary, state_dict=state)
    tokenizer.save_pretrained(temporary)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a save that was killed while it cleaned up
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


# --- main ---
def practise(policy, world: World, dialogue, pad_id, args):
    """Warm start: supervised steps on games with random rules. What comes out can play, and follows advice; it knows no
    secret. Without advice the teacher acts at random."""
    print(f"warm start: {args.warm_start_steps} supervised steps on games with random rules", flush=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)
    rng = np.random.default_rng([args.seed, 1])
    device = next(policy.parameters()).device
    turns = {}  # action -> ids; a turn that does not fill its tokens has to say that it ends
    for _ in range(args.warm_start_steps):
        rows = []
        for _ in range(64):
            query, experience, game, advice = world.practice(rng, rng.random() < 0.6)
            first = game.reset()
            query = f"{query}\n{first}" if first else query
            prompt_ids = dialogue.prompt(inject_experience(query, experience, args.experience_template))
            steps, over = [], False
            choices = getattr(game, "actions", BUTTONS) or ["ok"]  # an environment with free text lists none
            for turn in range(args.max_turns):
                action = str(choices[rng.integers(len(choices))])
                if experience and rng.random() < args.warm_start_follow:
                    action = advice[game.progress(turn)]
                observation, _, over = game.step(action)
                if action not in turns:
                    ids = dialogue.tokenizer(action, add_special_tokens=False).input_ids
                    turns[action] = [*ids, min(dialogue.eos_ids)][: args.max_turn_tokens]
                ids = turns[action]
                steps.append(("assistant", ids))
                if over:
                    break
                steps.append(("env", dialogue.reply(observation, ids[-1] in dialogue.eos_ids)))
            rows.append(Trajectory("", "", 0, 0, prompt_ids, prompt_ids, steps, [], 0.0, False, False, ""))
        data = samples_to_dataproto(rows, pad_id, device)
        logprobs, _ = policy(**{name: data[name] for name in TOKENS}, temperature=1.0)
        optimizer.zero_grad()
        (-masked_mean(logprobs, data["loss_mask"])).backward()
        optimizer.step()


def check_resumed_run(args, saved: dict, path: Path):
    """Other options are listed; ones that would make it another run are refused."""
    if not isinstance(saved, dict) or not {"args", "policy", "optimizer", "counters", "replay", "pool"} <= saved.keys():
        fail(f"checkpoint {path} is not one of {Path(__file__).name}'s")
    fixed = "seed env num_families num_rooms model_name hidden_size num_layers warm_start_steps num_tasks group_size"
    fixed += " experience_template max_turns"  # the tiny model's words come from them
    if args.fsdp and not saved["args"]["fsdp"]:
        fail(f"--fsdp does not fit {path}, which was saved without it (the other way round works)")
    ignored = ("resume", "run_dir", "exp_name")
    for name, now in asdict(args).items():
        before = saved["args"].get(name)
        if name in fixed.split() and before != now:
            fail(f"--{name.replace('_', '-')} {now} does not fit {path}, which was trained with {before}")
        if name not in ignored and before != now:
            print(f"resuming with another --{name.replace('_', '-')}: {before} before, {now} now")


def main(args: Args) -> dict[str, float]:
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    keep_memory()  # the gradients of a real model go and come with every update: a third of its backward pass
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    run_dir = Path(args.run_dir or f"runs/{args.exp_name}__{args.seed}__{int(time.time())}")
    resume_path = find_checkpoint(args)
    saved = load_checkpoint(resume_path) if resume_path else None
    if saved:
        check_resumed_run(args, saved, resume_path)
        home = resume_path.resolve().parent
        run_dir = home.parent if home.name == "checkpoints" and not args.run_dir else run_dir
    elif args.resume:
        print("nothing to resume: starting fresh")
    check_folder("run-dir", run_dir)
    goes_on = args.resume and (saved is None or run_dir.resolve() == home.parent)
    if (run_dir / "metrics.jsonl").exists() and not goes_on:
        fail(f"--run-dir {run_dir} holds a run already: choose another folder")
    device = pick_device(args.device)
    rank, world_size, device = init_distributed(device)
    if args.minibatch_size % (world_size * args.gradient_accumulation_steps):
        fail(f"{args.batch_size} rollouts do not divide into {world_size} ranks x minibatches x micro-batches")
    if args.fsdp and world_size == 1:
        fail("--fsdp True is not allowed: it needs torchrun with two processes or more")
    world = make_lock_world(args) if args.env in ("lock", "lock-parts") else make_gym_world(args)
    check(args.num_tasks <= len(world.train), args, "num_tasks", f"at most {len(world.train)}, the training tasks")
    topics = {task.task_id: task.topic for task in world.train + world.validation}
    forbidden = set() if args.val_summarizer_save else {task.task_id for task in world.validation}
    pool = ExperiencePool(args.experience_template, args.experience_pool_size, forbidden)
    pool_path = Path(args.experience_pool) if args.experience_pool else None
    if pool_path and pool_path.exists() and not saved:
        pool.load(pool_path)
    if args.val_summarizer_save:
        print("--val-summarizer-save: validation tasks enter the pool, so validation measures memory, too")
    policy, tokenizer, eos_ids, pad_id = load_agent(args, world)
    policy, eos_ids = policy.to(device), eos_ids.to(device)
    dialogue = Dialogue(tokenizer, args.chat_template, eos_ids)

    if args.model_name is None and not saved:
        practise(policy, world, dialogue, pad_id, args)
    if saved:  # the start policy, from which a reference is made below
        policy.load_state_dict(saved["start"] or saved["policy"])
    for parameter in policy.parameters() if world_size > 1 else ():
        dist.broadcast(parameter.data, 0)
    reference = copy.deepcopy(policy).requires_grad_(False) if args.kl_loss_coef else None
    start = {name: x.cpu() for name, x in reference.state_dict().items()} if reference else None
    if args.fsdp:
        policy, reference = shard(policy, device), reference and shard(reference, device)
    if args.gradient_checkpointing:
        policy.lm.gradient_checkpointing_enable()
        for module in policy.modules():  # it works in train() mode only, and dropout would be noise in ratios
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name in [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]:
                setattr(module, name, 0.0)  # some models call F.dropout with a number of theirs
    if args.bf16:
        autocast = torch.autocast(device.type, torch.bfloat16)
        for model in filter(None, (policy, reference)):
            model.forward, model.step = autocast(model.forward), autocast(model.step)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, eps=1e-5, weight_decay=0.0, fused=True)
    sample_rng = torch.Generator().manual_seed(args.seed)  # one per purpose: more draws of one leave the other alone
    shuffle_rng = torch.Generator().manual_seed(args.seed + 1)
    queue, manager = TaskQueue(world.train, args.seed), ExperienceManager(args)
    mix = ExperienceMixCollateFn(manager, queue, args.exp_ratio)

    writer = Writer(args, run_dir, total=args.num_iterations, enabled=rank == 0)
    iteration = global_step = skipped_steps = skipped_in_a_row = 0
    best_score, plateau_evals, plateau_scale = -math.inf, 0, 1.0
    if saved:
        load_state(policy, optimizer, saved["policy"], saved["optimizer"])
        sample_rng.set_state(saved["sample_rng"])
        shuffle_rng.set_state(saved["shuffle_rng"])
        iteration, global_step, skipped_steps, skipped_in_a_row = saved["counters"]
        best_score, plateau_evals, plateau_scale = saved["controls"]
        queue.position, queue.returned = saved["queue"]
        manager.load(saved["replay"])
        pool.records, metrics = saved["pool"], saved["metrics"]
        print(f"resumed {resume_path} at iteration {iteration}")
    if args.resume and rank == 0:
        for path in sorted((run_dir / "checkpoints").glob("checkpoint_*.pt")):
            if path.name > f"checkpoint_{iteration:08d}.pt":  # of a branch given up; killed here, one of them is whole
                path.unlink()
        cut_back(run_dir / "metrics.jsonl", global_step if saved else -1)
        if (run_dir / "best.old").exists() and not (run_dir / "best").exists():
            (run_dir / "best.old").rename(run_dir / "best")  # killed between the two renames of save_model
    stop, stopping = StopSignal(), False
    keep_whole(policy, True)
    where = (world.make_env, dialogue, pad_id, args)
    width = args.max_turns * args.max_turn_tokens
    if iteration == 0:
        uses_pool = {args.val_rollout_expmode, args.train_rollout_expmode} != {"woexp"}
        if args.init_exp_before_training and uses_pool and not pool.records:
            order = np.random.default_rng([args.seed, 2]).permutation(len(world.train))[: args.init_exp_tasks]
            slots = [(world.train[order[i]], i, j) for i in range(len(order)) for j in range(args.group_size)]
            jobs = [Job(*slot, experience="") for slot in slots]
            uniforms = torch.rand(len(jobs), width, generator=torch.Generator().manual_seed(args.seed + 2))
            pool.add_successes(collect(policy, jobs, *where, "init", uniforms, rank, world_size), topics, step=-1)
            global_step += len(jobs)
        metrics, _ = validate(policy, world, pool, dialogue, pad_id, args, 0, rank, world_size)
        metrics["exp/pool_size"] = len(pool.records)
        writer.log(metrics, global_step)
        best_score = metrics["eval/success_rate"]
    start_time, start_step = time.time(), global_step
    versions = {m.__name__: m.__version__ for m in (torch, transformers, np)} | {"python": sys.version.split()[0]}
    config = {"args": asdict(args), "argv": sys.argv, "versions": versions, "world_size": world_size}
    writer.write("training_config.json", json.dumps(config, indent=2) + "\n")

    while not (last := finished(args, iteration, global_step)):
        iteration += 1
        iteration_start = time.time()
        # Schedules go by iterations, or by rollouts, counted in iterations without replay.
        place = iteration if args.num_rollouts is None else 1 + global_step / args.batch_size
        schedule = (args.num_iterations, args.learning_rate, args.lr_scheduler_type, args.warmup_steps)
        lr = learning_rate_at(place, *schedule, plateau_scale)
        optimizer.param_groups[0]["lr"] = lr
        # A pure function of seed and iteration: nothing to save, and what is off draws nothing.
        replay_rng, exp_rng = (np.random.default_rng([args.seed, purpose, iteration]) for purpose in (4, 5))

        # 1 take tasks, retired ones skipped
        drawn = queue.take(args.num_tasks, manager.skip_uid_set)

        # 2 mix with tasks of the replay pool
        if args.use_experience_replay and args.replay_start == "progress":
            manager.started |= place / args.num_iterations >= args.replay_start_ratio
        experience_tasks, on_policy_tasks = [], drawn
        if args.use_experience_replay and manager.started:
            experience_tasks, on_policy_tasks = mix(drawn, iteration, replay_rng)
        tasks = experience_tasks + on_policy_tasks
        assert len({task.task_id for task in tasks}) == args.num_tasks

        # 3 fetch replayed trajectories; the rest of a group is played
        def entropy_of(stored):
            data = samples_to_dataproto([convert_offpolicy_to_cmt(t, 0, 0) for t in stored], pad_id, device)
            _, entropys = compute_log_prob(policy, data, args.temperature, args.minibatch_size)
            return ((entropys * data["loss_mask"]).sum(1) / data["loss_mask"].sum(1)).tolist()

        task_ids = [task.task_id for task in experience_tasks]
        replayed = manager.get_offpolicy_batch(task_ids, iteration, replay_rng, entropy_of)
        rollout_n = [args.group_size] * args.num_tasks
        for t in replayed:
            rollout_n[t.data_id] -= 1

        # 4 draw keep or discard per task, guided or not per rollout
        kept = draw_kept_tasks(args.num_tasks, args.train_sample_expmode, args.train_sample_keepratio, exp_rng)
        modes = (args.train_rollout_expmode, args.rollout_expratio)
        guided = [draw_guided(n, *modes, exp_rng) for n in rollout_n]

        # 5 retrieve, inject, roll out, score
        jobs, asked, empty = [], 0, 0
        for data_id, task in enumerate(tasks):
            advice = pool.retrieve(task.topic, args.retrieve_top_k, iteration) if any(guided[data_id]) else ""
            asked, empty = asked + any(guided[data_id]), empty + (any(guided[data_id]) and not advice)
            for rollout_id, with_experience in enumerate(guided[data_id]):
                jobs.append(Job(task, data_id, rollout_id, advice if with_experience else "", kept[data_id]))
        uniforms = torch.rand(args.num_tasks, args.group_size, width, generator=sample_rng)
        uniforms = torch.stack([uniforms[job.data_id, job.rollout_id] for job in jobs])  # (fresh, turns * tokens)
        fresh = collect(policy, jobs, *where, str(iteration), uniforms, rank, world_size)
        global_step += len(fresh)
        for t in fresh:
            if not math.isfinite(t.reward) and args.nan_rewards == "fail":
                fail(f"the reward of an episode of task {t.task_id} is {t.reward}")

        # 6 difficulty, from fresh rollouts only
        success_rate = sum(t.success for t in fresh) / len(fresh)
        if args.use_experience_replay:
            manager.update_difficulty2task_dict(fresh)
            if args.replay_start == "success":
                manager.started |= success_rate > args.replay_start_ratio

        # 7 training samples: experience kept or stripped, replayed ones in their group
        trajectories = sorted(fresh + replayed, key=lambda t: (t.data_id, t.rollout_id))
        data = samples_to_dataproto(trajectories, pad_id, device)

        # 8 log-probs and entropy of the current policy on the training view
        ranks = (rank, world_size)
        old_log_probs, entropys = compute_log_prob(policy, data, args.temperature, args.minibatch_size, *ranks)  # (B,R)
        mask = data["loss_mask"].float()
        ref_logprobs = old_log_probs
        if reference is not None:
            ref_logprobs, _ = compute_log_prob(reference, data, args.temperature, args.minibatch_size, *ranks)
        stripped = data["exp_mask"] * (1 - data["replay_mask"])
        off_weights = torch.ones_like(mask)
        behavior_logprobs = old_log_probs
        if args.off_old_logp == "behavior" or args.off_policy_loss == "tis":  # pi_old(y|x,e), on what the policy read
            seen = samples_to_dataproto(trajectories, pad_id, device, view="rollout")
            behavior_logprobs, _ = compute_log_prob(policy, seen, args.temperature, args.minibatch_size, *ranks)
        if args.off_policy_loss == "tis":
            logratio = ((old_log_probs - behavior_logprobs) * stripped).clamp(-20, 20)
            off_weights = logratio.exp().clamp(max=args.tis_cap)

        # 9 save, before anything is replaced
        if args.use_experience_replay:
            mean_entropys = (entropys * mask).sum(1) / mask.sum(1)
            attach_log_probs(fresh, data, old_log_probs, mean_entropys, iteration)
            storable = manager.update_skip_uid_set_and_filter_trajectories(fresh)
            manager.save_trajectories_to_memory(storable)
            if args.debug_replay and storable:
                back = samples_to_dataproto([convert_offpolicy_to_cmt(t, 0, 0) for t in storable], pad_id, device)
                again, _ = compute_log_prob(policy, back, args.temperature, args.minibatch_size)
                error = ((again - back["recorded_old_log_probs"]).exp() - 1).abs().max().item()
                if not error < args.debug_replay_tolerance or not torch.equal(back["replay_mask"], back["loss_mask"]):
                    fail(f"--debug-replay: a stored trajectory comes back with a ratio off by {error:.2g}", code=1)

        # 10 then recorded log-probs for what is replayed; two masks, see samples_to_dataproto
        logprobs = old_log_probs
        if args.replay_old_logp == "recorded":
            logprobs = _replace_recorded_old_log_probs(data, old_log_probs)
        if args.off_old_logp == "behavior":
            logprobs = torch.where(stripped.bool(), behavior_logprobs, logprobs)

        # 11 group advantages, over guided, unguided and replayed members alike
        advantages = group_advantages(data["rewards"], data["group_ids"])
        batch = {name: data[name] for name in TOKENS} | dict(logprobs=logprobs, ref_logprobs=ref_logprobs)
        batch["advantages"] = advantages[:, None] * torch.ones_like(mask)  # (B,R)
        batch["trained"] = mask
        if args.off_policy_neg == "mask":
            batch["trained"] = mask * (1 - stripped * (batch["advantages"] < 0))
        shape_stripped, shape_replayed = args.off_policy_loss == "shape", args.replay_loss == "shape"
        shaped = stripped * shape_stripped + data["replay_mask"] * shape_replayed
        batch["on_weights"] = 1.0 - data["exp_mask"]
        batch["shape_weights"] = shaped.float()
        batch["clip_weights"] = (data["exp_mask"] - shaped) * off_weights
        has_off = bool(data["exp_mask"].any())
        rollout_time = time.time() - iteration_start

        # 12 minibatch updates
        keep_whole(policy, False)
        policy.train(args.gradient_checkpointing)
        sums = {}  # metric -> sum over the minibatches of this update
        num_updates = num_applied = 0
        spoiled = not data["rewards"].isfinite().all()  # one bad reward reaches every row of its group
        first_ratio_error = torch.zeros((), device=device)
        off_ratios = []
        for epoch in range(args.update_epochs):
            minibatches = torch.randperm(args.batch_size, generator=shuffle_rng).to(device).chunk(args.num_minibatches)
            for mb_inds in minibatches:
                trained = batch["trained"][mb_inds]
                num_tokens = trained.sum().clamp(min=1)
                num_on = (trained * batch["on_weights"][mb_inds]).sum()
                stats = {}
                optimizer.zero_grad()
                for micro_inds in mb_inds[rank::world_size].chunk(args.gradient_accumulation_steps):
                    mb = {name: tensor[micro_inds] for name, tensor in batch.items()}
                    mb_tokens = {name: mb[name] for name in TOKENS}
                    new_logprobs, new_entropy = policy(
                        **mb_tokens, temperature=args.temperature, entropy_grad=args.ent_coef > 0
                    )
                    known = (new_logprobs, mb["logprobs"], mb["advantages"], mb["trained"])
                    clips = dict(clip_low=args.clip_low, clip_c=args.clip_c)
                    on_loss, ratio, clipped = policy_loss(
                        *known, mb["on_weights"], num_tokens, clip_high=args.clip_high, **clips
                    )
                    off_loss, off_clipped = torch.zeros_like(on_loss), torch.zeros_like(clipped)
                    if has_off:
                        off_loss, _, off_clipped = policy_loss(
                            *known, mb["clip_weights"], num_tokens, clip_high=args.off_cliprange_high, **clips
                        )
                        off_loss = off_loss + shaped_loss(*known, mb["shape_weights"], num_tokens, args.shaping_beta)
                    entropy_loss = (new_entropy * mb["trained"]).sum() / num_tokens
                    loss = on_loss + off_loss if has_off else on_loss
                    if args.ent_coef:
                        loss = loss - args.ent_coef * entropy_loss
                    if reference is not None:
                        kl = (k3_kl(new_logprobs, mb["ref_logprobs"]) * mb["trained"]).sum() / num_tokens
                        loss = loss + args.kl_loss_coef * kl
                    loss.backward()
                    on = mb["on_weights"] * mb["trained"]
                    off = (1 - mb["on_weights"]) * mb["trained"]
                    if has_off:
                        off_ratios.append(ratio[off.bool()])
                    micro_stats = {
                        "losses/policy_loss": (on_loss + off_loss).detach(),
                        "losses/on_policy_loss": on_loss.detach(),
                        "losses/off_policy_loss": off_loss.detach(),
                        "losses/entropy": entropy_loss.detach(),
                        "losses/approx_kl": ((ratio - 1 - ratio.log()) * on).sum() / num_on.clamp(min=1),
                        "losses/clipfrac_on": (clipped * on).sum() / num_on.clamp(min=1),
                        "losses/clipfrac_off": (off_clipped * off * (mb["clip_weights"] > 0)).sum()
                        / (num_tokens - num_on).clamp(min=1),
                    }
                    stats = {name: stats.get(name, 0) + value for name, value in micro_stats.items()}
                    if num_updates == 0:
                        first_ratio_error = torch.maximum(first_ratio_error, ((ratio - 1) * on).abs().max())
                sync_gradients(policy, world_size)
                stats = sum_over_ranks(stats, world_size, device)
                stats["losses/grad_norm"] = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                if args.fsdp:
                    stats["losses/grad_norm"] = stats["losses/grad_norm"].full_tensor()
                num_updates += 1
                watched = ("losses/policy_loss", "losses/grad_norm")
                if not all(math.isfinite(stats[name]) for name in watched):  # a NaN must not reach the weights
                    skipped_steps += 1
                    skipped_in_a_row += not spoiled or num_updates == 1  # a bad reward costs its updates, not the run
                    if skipped_in_a_row >= args.max_skipped_steps:
                        fail(f"{skipped_in_a_row} updates in a row were not finite (iteration {iteration})", code=1)
                    continue
                optimizer.step()
                num_applied, skipped_in_a_row = num_applied + 1, 0
                sums = {name: sums.get(name, 0) + value for name, value in stats.items()}
        policy.eval()
        keep_whole(policy, True)

        metrics = {name: float(value) / num_applied for name, value in sums.items()}  # none if all were skipped
        sampled = torch.zeros_like(mask)
        sampled[mask.bool()] = torch.tensor(
            [x for t in trajectories for x in t.sampler_logprobs], dtype=torch.float32, device=device
        )
        own = mask * (1 - data["exp_mask"])  # stripped tokens were sampled on another prompt, replayed ones long ago
        metrics |= {
            "losses/first_ratio_error": first_ratio_error.item(),
            "losses/skipped_steps": skipped_steps,
            "rollout/logprob_mismatch": masked_mean((old_log_probs - sampled).abs(), own).item(),
            "rollout/entropy": masked_mean(entropys, mask).item(),
            "charts/episodic_return": sum(t.reward for t in fresh) / len(fresh),
            "charts/episodic_length": sum(sum(r == "assistant" for r, _ in t.steps) for t in fresh) / len(fresh),
            "charts/success_rate": success_rate,
            "charts/learning_rate": lr,
            "charts/SPS": (global_step - start_step) / (time.time() - start_time),
            "time/rollout": rollout_time,
            "time/update": time.time() - iteration_start - rollout_time,
        }
        if reference is not None:
            metrics["losses/ref_kl"] = masked_mean(k3_kl(old_log_probs, ref_logprobs), mask).item()
        kinds = {"guided": [t for t in fresh if t.injected], "unguided": [t for t in fresh if not t.injected]}
        kinds["replayed"] = replayed
        metrics |= {f"success/{kind}": sum(t.success for t in ts) / len(ts) for kind, ts in kinds.items() if ts}
        if asked:
            metrics["exp/retrieval_empty_frac"] = empty / asked
        off_tasks = {t.data_id for t in fresh if get_extra(t)["stripped"]}
        metrics |= {
            "exp/off_frac": sum(get_extra(t)["off_policy"] for t in trajectories) / len(trajectories),
            "exp/kept_tasks": len({t.data_id for t in fresh if t.injected} - off_tasks),
            "exp/stripped_tasks": len(off_tasks),
            "exp/pool_size": len(pool.records),
        }
        if has_off:
            off_ratio = torch.cat(off_ratios)
            if world_size > 1:
                parts = [None] * world_size
                dist.all_gather_object(parts, off_ratio.cpu())
                off_ratio = torch.cat(parts)
            if len(off_ratio):
                p99 = off_ratio.quantile(0.99) if len(off_ratio) < 2**24 else off_ratio.max()
                worst = {"mean": off_ratio.mean(), "p99": p99, "max": off_ratio.max()}
                metrics |= {f"ratio/off_{name}": value.item() for name, value in worst.items()}
        results = [[t.success for t in fresh if t.data_id == data_id] for data_id in range(args.num_tasks)]
        rescued = {t.data_id for t in replayed if not any(results[t.data_id])}
        metrics |= {
            "groups/all_fail": sum(not any(result) for result in results) / args.num_tasks,
            "groups/all_success": sum(all(result) for result in results) / args.num_tasks,
            "groups/rescued": len(rescued) / args.num_tasks,
        }
        if args.use_experience_replay:
            ages = [iteration - t.version for t in replayed]
            metrics |= {
                "replay/pool_tasks": sum(map(len, manager.valid_tasks(iteration + 1).values())),
                "replay/trajectories": sum(map(len, manager.memory.values())),
                "replay/skip_set": len(manager.skip_uid_set),
                "replay/experience_tasks": len(experience_tasks),
            }
            if ages:
                metrics |= {"replay/age_mean": sum(ages) / len(ages), "replay/age_max": max(ages)}
            buckets = manager.difficulty2task_dict
            metrics |= {f"replay/bucket_{s}": len(buckets.get(s, [])) for s in range(args.group_size + 1)}

        # 13 pool, validation, checkpoint
        if args.updated_freq and iteration % args.updated_freq == 0:
            pool.add_successes(fresh, topics, iteration)
        last = finished(args, iteration, global_step)
        if last or (args.eval_every and iteration % args.eval_every == 0):
            scores, seen = validate(policy, world, pool, dialogue, pad_id, args, iteration, rank, world_size)
            metrics |= scores
            if args.val_summarizer_save:
                pool.add_successes(seen, topics, iteration)
            improvement = metrics["eval/success_rate"] - best_score
            plateau_evals = 0 if improvement > 0.001 else plateau_evals + 1
            if plateau_evals >= args.plateau_patience:
                plateau_scale, plateau_evals = plateau_scale / 2, 0
            if improvement > 0:
                best_score = metrics["eval/success_rate"]
                save_model(policy, tokenizer, run_dir / "best", rank)
        if "eval/success_rate" in metrics or iteration % args.log_interval == 0:
            writer.log(metrics, global_step)
        line = f"PL:{metrics.get('losses/policy_loss', math.nan):.2f} success:{success_rate:.2f}"
        line += "".join(f" {k}:{metrics[f'success/{k}']:.2f}" for k in kinds if f"success/{k}" in metrics)
        line += f" eval:{metrics['eval/success_rate']:.2f}" if "eval/success_rate" in metrics else ""
        writer.status(line, done=iteration)
        stopping = sum_over_ranks({"stop": stop.received is not None}, world_size, device)["stop"] > 0
        if last or stopping or (args.save_every and iteration % args.save_every == 0):
            model_state, optimizer_state = whole_state(policy, optimizer)
            state = {"args": asdict(args), "policy": model_state, "optimizer": optimizer_state, "metrics": metrics}
            state |= {"sample_rng": sample_rng.get_state(), "shuffle_rng": shuffle_rng.get_state(), "start": start}
            state["counters"] = (iteration, global_step, skipped_steps, skipped_in_a_row)
            state["controls"] = (best_score, plateau_evals, plateau_scale)
            state |= {"queue": (queue.position, queue.returned), "replay": manager.state(), "pool": pool.records}
            if rank == 0:
                save_checkpoint(run_dir / "checkpoints" / f"checkpoint_{iteration:08d}.pt", state)
                for path in sorted((run_dir / "checkpoints").glob("checkpoint_*.pt"))[: -args.keep_checkpoints]:
                    path.unlink()
                if pool_path:  # after the checkpoint: a run killed before its first one starts from the same file
                    pool.save(pool_path)
        if stopping:
            print(f"stopped after iteration {iteration} and saved; --resume auto --run-dir {run_dir} goes on")
            break
    stop.restore()
    if stopping and not last:
        return metrics
    if "eval/success_rate" not in metrics:  # resumed with nothing left to do, from a checkpoint without an evaluation
        metrics |= validate(policy, world, pool, dialogue, pad_id, args, iteration, rank, world_size)[0]

    save_model(policy, tokenizer, run_dir / "final_model", rank)
    curves = ["eval/success_unguided", "eval/success_guided", "charts/success_rate"]
    curves += ["success/unguided", "success/guided", "ratio/off_p99"]
    seconds = round(time.time() - start_time, 1)
    writer.close({"global_step": global_step, "iterations": iteration, "seconds": seconds, **metrics}, curves)
    score = metrics["eval/success_rate"]
    print(f"eval/success_rate {score:.3f} after {global_step} rollouts and {seconds} s: {run_dir}")
    return metrics


if __name__ == "__main__":
    try:
        main(parse_args(Args))
    except KeyboardInterrupt:
        fail("interrupted", code=130)
