# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "tyro==1.0.16",
#     "tqdm==4.70.1", "matplotlib==3.11.2", "wandb==0.31.0"]
# ///
"""SAC with an offline warm-up before online training: WSRL (arXiv:2412.07762) and its relatives.

    read the offline data, give each row a weight                       (load_offline_data)
    warm-up, `warmup_steps` times:                                      (main, first loop)
        draw a batch of offline rows, update the networks               (learn)
    keep the offline rows with the largest TD errors                    (end_warmup)
    online, `online_steps` times:                                       (main, second loop)
        take a step in the environment, store it in online_rb           (take_step)
        `utd_ratio` times:
            draw a batch of offline and online rows, update             (learn)

The SAC core is that of sac_hybrid.py. Comments mark what is added:
    warm-up: weights       - weights of source, quality, success and importance in the losses
    warm-up: conservative  - CQL (arXiv:2006.04779) and Cal-QL (arXiv:2303.05479), offline only
    warm-up: cloning       - the actor imitates the demonstrations, or else the best rows
    warm-up: replay        - prioritized draws (arXiv:1511.05952), retention, decaying offline share
    warm-up: overfitting   - early stopping, dropout and noise on observations

A preset is a method: it sets the defaults of other options.
    design   weighted SAC offline; online, at least half of each batch are offline rows
    wsrl     after the paper: Cal-QL offline, steps of the frozen policy, SAC without offline rows
    rlpd     arXiv:2302.02948: no warm-up; half of each batch is offline
    bc       arXiv:2603.27400: clones the demonstrations; online, half of each batch is offline
    scratch  SAC without offline data

Here the warm-up is offline. The WSRL paper uses the word for the online steps of the frozen policy
(--warmup-rollout-steps). docs/wsrl_warmup.md lists what differs from the code of WSRL.

What differs from SAC (arXiv:1812.05905): the target of the critics has no entropy bonus, the actor
follows the mean of the critics, the target entropy is -C/2 instead of -C. Observations are
normalized. Networks have LayerNorm, and the critics share its scale and bias.

Shapes: N rows, D observation dims, C action dims, E critics, T steps of an episode, M actions of
the conservative term, K of them from each of three distributions.
The algorithm comes first and ends with `main`. Environment, data files and logging stand below it.

    python wsrl_warmup.py                    # Pendulum from poor data, without demonstrations
    python wsrl_warmup.py --env-id MountainCarContinuous-v0 --offline-data-path your_demos.npz
"""

import copy
import inspect
import io
import json
import math
import os
import pickle
import pickletools
import re
import signal
import sys
import threading
import time
import uuid
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

BUILT_IN = "Pendulum-v1"
PENDULUM = dict(  # default options for the built-in task
    warmup_steps=1_500,
    online_steps=2_000,
    lr=1e-3,
    tau=0.01,
    hidden_size=64,
    reward_scale=0.1,
    retention_ratio=0.5,
    buffer_size=50_000,
    eval_every=200,
)
UNWEIGHTED = dict(use_prioritized_replay=False, weighted_loss="none")
PRESETS = {  # default options of each method
    "design": {},
    "wsrl": dict(
        offline_objective="calql",
        warmup_rollout_steps=5_000,
        retention_ratio=0.0,
        initial_offline_ratio=0.0,
        min_offline_ratio=0.0,
        num_critics=10,
        utd_ratio=4,
        **UNWEIGHTED,
    ),
    "rlpd": dict(
        warmup_steps=0,
        warmup_rollout_steps=200,
        retention_ratio=1.0,
        initial_offline_ratio=0.5,
        num_critics=10,
        utd_ratio=20,
        **UNWEIGHTED,
    ),
    "bc": dict(
        offline_objective="bc",
        retention_ratio=1.0,
        initial_offline_ratio=0.5,
        **UNWEIGHTED,
    ),
    "scratch": dict(
        warmup_steps=0,
        warmup_rollout_steps=200,
        retention_ratio=0.0,
        initial_offline_ratio=0.0,
        min_offline_ratio=0.0,
        **UNWEIGHTED,
    ),
}
CONSERVATIVE = ("cql", "calql")  # objectives with a conservative term
POSITIVE = (
    "num_threads save_every eval_every eval_episodes hidden_size batch_size lr utd_ratio "
    "num_critics init_alpha buffer_size reward_scale demo_weight success_weight_bonus"
).split()
AT_MOST_ONE = (
    "dropout gamma tau initial_offline_ratio offline_decay_rate min_offline_ratio retention_ratio "
    "priority_alpha"
).split()


# --- args ---
@dataclass
class Args:
    # run
    seed: int = 1  # seed of training; the evaluation is the same for every seed
    device: str = "auto"  # cpu, cuda, mps, ... (auto: cpu for built-in tasks, else an accelerator)
    num_threads: int = 1  # CPU threads of torch; small networks are fastest with 1
    run_dir: str | None = None  # folder of this run (None: runs/{script}__{seed}__{time}_{pid})
    exp_name: str = Path(__file__).stem  # first part of the default run_dir
    resume: bool = False  # continue the run in run_dir with its options, or start it
    save_every: int = 10_000  # steps between checkpoints; online they are written between episodes
    eval_every: int = 5_000  # steps between evaluations; online they take place between episodes
    eval_episodes: int = 10  # episodes of an evaluation
    capture_video: bool = True  # film the policy before and after the online steps, as GIFs
    track: bool = False  # also log to wandb (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "stale-experience"  # project name in wandb
    preset: Literal[tuple(PRESETS)] = "design"  # method: sets the defaults of other options
    checkpoint_path: str | None = None  # file for the agent after the warm-up (read if --learner)
    demo_path: str | None = None  # file for the kept rows (None: filtered_demos.pkl, same folder)
    learner: bool = False  # second command: train online from checkpoint_path and demo_path
    make_data: str | None = None  # only write demos.pkl, suboptimal.pkl, random.pkl to this folder
    expert_path: str | None = None  # final_model.pth that --make-data plays (None: a script)
    # task
    env_id: str = BUILT_IN  # Gymnasium id; observations are vectors, actions a bounded Box
    offline_data_path: list[str] = field(default_factory=list)  # demonstrations: .pkl or .npz files
    suboptimal_data_path: list[str] = field(default_factory=list)  # other episodes, row weight 1.0
    random_data_path: list[str] = field(default_factory=list)  # random actions, row weight 0.5
    demo_weight: float = 2.0  # row weight of demonstrations; weights in a file replace it
    success_weight_bonus: float = 1.5  # factor on the row weights of successful episodes
    reward_scale: float = 1.0  # factor on rewards in updates, not on logged returns
    # model
    hidden_size: int = 256  # width of actor and critics
    layer_norm: bool = True  # LayerNorm in actor and critics
    dropout: float = 0.0  # dropout rate in the updates of the actor, offline and online
    # rollout
    warmup_steps: int = 50_000  # offline updates before the first environment step
    warmup_rollout_steps: int = 0  # first online steps, without updates (at random if untrained)
    online_steps: int = 100_000  # environment steps (0: end after the warm-up)
    # optimization
    batch_size: int = 256  # rows per update
    lr: float = 3e-4  # learning rate of actor, critics and temperature
    obs_noise: float = 0.0  # std of noise on normalized observations in the warm-up
    early_stop_patience: int = 0  # checks without improvement that end the warm-up (0: none)
    # SAC
    gamma: float = 0.99  # discount per step
    tau: float = 0.005  # weight of the new parameters in the target networks
    utd_ratio: int = 1  # updates per environment step; only the last one trains the actor
    num_critics: int = 2  # size of the ensemble
    init_alpha: float = 0.1  # temperature at the start
    offline_objective: Literal["sac", "cql", "calql", "bc"] = "sac"  # objective of the warm-up
    cql_alpha: float = 1.0  # weight of cql and calql; 1 is an alpha of 0.5 in the CQL paper
    bc_weight: float = 0.0  # weight of cloning the demonstrations in the actor's loss
    # replay
    buffer_size: int = 1_000_000  # transitions in the online buffer
    initial_offline_ratio: float = 1.0  # offline share of a batch when the online steps begin
    offline_decay_rate: float = 0.999  # factor on this share per online step
    min_offline_ratio: float = 0.5  # lower bound of this share
    retention_ratio: float = 0.2  # share of the offline rows that is kept after the warm-up
    retention_by: Literal["td_error", "reward", "quality"] = "td_error"  # highest values are kept
    weighted_loss: Literal["none", "critic", "both"] = "both"  # losses with row weights
    use_prioritized_replay: bool = True  # draw rows with a large TD error more often
    priority_alpha: float = 0.6  # 0: uniform draws, 1: in proportion to the TD error

    # Without a type these are constants, not options.
    num_sampled_critics = 2  # critics drawn for the minimum in the target
    log_interval = 100  # steps between lines of metrics.jsonl

    def __post_init__(self):
        """Check the options. tyro prints a ValueError from here as a command-line error."""
        for name, value in vars(self).items():
            if not isinstance(value, int | float):
                continue
            if not 0 <= value < math.inf:
                raise ValueError(f"{flag(name)} {value}: must be finite and not negative")
            if value == 0 and name in POSITIVE:
                raise ValueError(f"{flag(name)} {value}: must be positive")
            if value > 1 and name in AT_MOST_ONE:
                raise ValueError(f"{flag(name)} {value}: must be at most 1")
        refused = {
            "--min-offline-ratio must be at most --initial-offline-ratio": (
                self.min_offline_ratio > self.initial_offline_ratio
            ),
            "--online-steps must be above --warmup-rollout-steps, or 0": (
                0 < self.online_steps <= self.warmup_rollout_steps
            ),
            "--resume needs --run-dir": self.resume and not self.run_dir,
            "--expert-path needs --make-data": self.expert_path and not self.make_data,
            "--learner and --demo-path need --checkpoint-path": (
                (self.learner or self.demo_path) and not self.checkpoint_path
            ),
            "--checkpoint-path and --demo-path must be two files": (
                self.checkpoint_path and Path(self.checkpoint_path) == self.kept_rows_path()
            ),
            "--demo-path needs --initial-offline-ratio above 0": (
                self.demo_path and not self.initial_offline_ratio
            ),
            "--learner needs --online-steps": self.learner and not self.online_steps,
            "--cql-alpha needs --offline-objective cql or calql": (
                self.cql_alpha != Args.cql_alpha and self.offline_objective not in CONSERVATIVE
            ),
        }
        if not self.learner:
            has_warmup = self.warmup_steps > 0
            data_paths = self.offline_data_path + self.suboptimal_data_path + self.random_data_path
            refused |= {
                "--checkpoint-path and --online-steps 0 need --warmup-steps": (
                    not has_warmup and (self.checkpoint_path or not self.online_steps)
                ),
                "--early-stop-patience needs --warmup-steps": (
                    self.early_stop_patience and not has_warmup
                ),
                "data files and --bc-weight need --warmup-steps or --retention-ratio above 0": (
                    (data_paths or self.bc_weight) and not self.needs_data()
                ),
                "--retention-ratio 0 needs --initial-offline-ratio 0": (
                    self.initial_offline_ratio and not self.retention_ratio
                ),
                # An untrained critic would choose the rows.
                "--retention-by td_error needs --warmup-steps": (
                    not has_warmup
                    and 0 < self.retention_ratio < 1
                    and self.retention_by == "td_error"
                ),
            }
        for message, is_refused in refused.items():
            if is_refused:
                raise ValueError(message)

    def needs_data(self) -> bool:
        """Whether offline rows are used: in a warm-up, or in the online batches"""
        return not self.learner and (self.warmup_steps > 0 or self.retention_ratio > 0)

    def ends_after_warmup(self) -> bool:
        """Whether this is the first of two commands: --checkpoint-path without --learner"""
        return self.checkpoint_path is not None and not self.learner

    def kept_rows_path(self) -> Path:
        """The file in which the first command leaves the kept rows for the second one"""
        return Path(self.demo_path or Path(self.checkpoint_path).with_name("filtered_demos.pkl"))


WSRLConfig = Args  # the name of the design document


# --- networks ---
def mlp(in_dim, out_dim, hidden_size, layer_norm, linear=nn.Linear):
    layers = []
    for width in (in_dim, hidden_size):
        layers.append(linear(width, hidden_size))
        if layer_norm:
            layers.append(nn.LayerNorm(hidden_size))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers, linear(hidden_size, out_dim))


def add_dropout(network, dropout):  # warm-up: overfitting
    """Put dropout behind each ReLU. The weights have the same names with and without dropout."""
    for i, layer in enumerate(network):
        if isinstance(layer, nn.ReLU):
            network[i] = nn.Sequential(layer, nn.Dropout(dropout))
    return network


class EnsembleLinear(nn.Module):
    """E linear layers as one batched product.  (E,N,in) -> (E,N,out)"""

    def __init__(self, num_critics, in_dim, out_dim):
        super().__init__()
        bound = in_dim**-0.5  # initialized like nn.Linear
        self.weight = nn.Parameter(torch.empty(num_critics, in_dim, out_dim))
        self.bias = nn.Parameter(torch.empty(num_critics, 1, out_dim))
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x):
        x = x.expand(len(self.weight), -1, -1)  # the first layer gets (N,in), the others (E,N,in)
        if self.weight.shape[-1] == 1:  # the last layer: faster than baddbmm with one column
            return (x * self.weight.mT).sum(-1, keepdim=True) + self.bias
        return torch.baddbmm(self.bias, x, self.weight)


class QEnsemble(nn.Module):
    """E critics as one network of batched products.  (N,D), (N,C) -> (E,N)

    Each critic has linear layers of its own. All share the scale and bias of LayerNorm.
    """

    def __init__(self, num_critics, in_dim, hidden_size, layer_norm):
        super().__init__()
        linear = partial(EnsembleLinear, num_critics)
        self.layers = mlp(in_dim, 1, hidden_size, layer_norm, linear)

    def forward(self, features, actions):
        return self.layers(torch.cat([features, actions], -1)).squeeze(-1)


class Normalizer(nn.Module):
    """Subtract the mean of the observations, divide by their standard deviation.  -> (N,D)"""

    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.as_tensor(std, dtype=torch.float32))

    def forward(self, obs):
        return (obs - self.mean) / self.std


# --- math ---
def tanh_normal(mean, std, noise):
    """tanh(mean + std * noise) and its log-density, eq. 26 of arXiv:1812.05905.  -> (N,C), (N,)"""
    u = mean + std * noise
    logprobs = -0.5 * noise**2 - std.log() - 0.5 * math.log(2 * math.pi)
    logprobs = logprobs - 2 * (math.log(2) - u - F.softplus(-2 * u))  # finite for every u
    return u.tanh(), logprobs.sum(-1)


def td_target(rewards, masks, next_value, gamma):
    """y = r + gamma * mask * V(s').  3 x (N,) -> (N,)"""
    assert rewards.shape == masks.shape == next_value.shape  # broadcasting would hide a bug
    return rewards + gamma * masks * next_value


def conservative_gap(q_values, log_densities, data_q_values):
    """log sum_m exp(Q(s,a_m) - log mu(a_m)) - Q(s,a).  (E,M,N), (M,N), (E,N) -> (E,N)"""
    assert q_values.shape[1:] == log_densities.shape  # broadcasting would hide a bug
    assert q_values[:, 0].shape == data_q_values.shape
    return torch.logsumexp(q_values - log_densities, 1) - data_q_values


def normalize_weights(weights):
    """Divide by their mean: larger weights would act like a larger learning rate."""
    return weights / weights.mean()


def offline_ratio_at(args, env_steps) -> float:  # warm-up: replay
    """Offline share of a batch after this many online steps"""
    decayed = args.initial_offline_ratio * args.offline_decay_rate**env_steps
    return max(args.min_offline_ratio, decayed)


def priority_beta_schedule(t) -> float:  # warm-up: replay
    """Exponent of the importance weights: 0.4 at the start of the run (t = 0), 1 at its end"""
    return 0.4 + 0.6 * min(1.0, t)


def return_to_go(rewards, gamma):  # warm-up: conservative
    """G_t = r_t + gamma * G_t+1 within an episode.  (T,) -> (T,)

    The sum ends at a time limit, where the value of the next state is not 0. If all rewards are
    negative, as in Pendulum, G is therefore too high, and Cal-QL is less conservative."""
    returns = np.zeros(len(rewards))
    next_return = 0.0
    for t in reversed(range(len(rewards))):
        next_return = rewards[t] + gamma * next_return
        returns[t] = next_return
    return returns


# --- row weights ---
def has_succeeded(rewards, terminated, info=()) -> bool:
    """Whether an episode succeeded. Some environments say so in the info of the last step.
    Otherwise an episode succeeded if it terminated with its first positive reward."""
    for name in ("is_success", "success", "succeed"):
        if name in info:
            return bool(info[name])
    return bool(terminated and rewards[-1] > 0 and max(rewards[:-1], default=0) <= 0)


def compute_data_quality(  # warm-up: weights
    trajectory, return_range=(0.0, 1.0), max_length=1
) -> float:
    """Mean of three scores in [0,1]: success, return within its range, and length. Data files do
    not tell success. Where rewards are positive before the end, no episode counts as one."""
    low, high = return_range
    terminated = trajectory["masks"][-1] == 0
    success = has_succeeded(trajectory["rewards"], terminated)
    return_score = 0.5
    if high > low:
        return_score = np.clip((sum(trajectory["rewards"]) - low) / (high - low), 0, 1)
    lateness = min(1.0, len(trajectory["rewards"]) / max_length)
    length_score = 0.5
    if success:
        length_score = 1 - lateness / 2  # an early success is better
    elif terminated:
        length_score = lateness / 2  # a late failure is better
    return float((success + return_score + length_score) / 3)


def rate_episodes(args, episodes):
    """Fill the columns weights, quality, returns and is_cloned where a data file does not have them
    (NaN). `episodes` has pairs: source, rows of one episode.

        weight = weight of the source * (0.5 + quality) * success_weight_bonus if it succeeded

    A successful demonstration has a weight of up to 4.5, an online row of 1. If half of a batch are
    such demonstrations, about 80 % of the loss comes from them.
    """
    source_weights = {"demos": args.demo_weight, "suboptimal": 1.0, "random": 0.5}
    returns = [rows["rewards"].sum() for _, rows in episodes]
    return_range = (min(returns), max(returns))
    max_length = max(len(rows) for _, rows in episodes)
    for source, rows in episodes:
        quality = compute_data_quality(rows, return_range, max_length)
        weight = source_weights[source] * (0.5 + quality)  # warm-up: weights
        if has_succeeded(rows["rewards"], rows["masks"][-1] == 0):
            weight *= args.success_weight_bonus
        fill_in(rows, "weights", weight)
        fill_in(rows, "quality", quality)
        fill_in(rows, "returns", return_to_go(rows["rewards"], args.gamma))
    # warm-up: cloning; it imitates the demonstrations. Without them it imitates the quarter of the
    # rows with the best quality, and all rows whose quality equals the lowest of these.
    has_demos = any(source == "demos" for source, _ in episodes)
    limit = np.quantile(np.concatenate([rows["quality"] for _, rows in episodes]), 0.75)
    for source, rows in episodes:
        is_cloned = source == "demos" if has_demos else rows["quality"] >= limit
        fill_in(rows, "is_cloned", is_cloned)


def fill_in(rows, column, values):
    rows[column] = np.where(np.isnan(rows[column]), values, rows[column])


# --- update ---
def gradient_step(loss, *optimizers) -> torch.Tensor:
    """Make one step with each optimizer. If the norm of all gradients is not finite, change nothing.
    -> 1 if the step was skipped, else 0"""
    parameters = []
    for optimizer in optimizers:
        optimizer.zero_grad()
        parameters += optimizer.param_groups[0]["params"]
    # No other parameter gets a gradient: the loss of the actor leaves none in the critics.
    loss.backward(inputs=parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    is_skipped = (~nn.utils.get_total_norm(grads).isfinite()).float()
    if is_skipped.device.type == "mps" and is_skipped:  # there Adam ignores found_inf, see below
        return is_skipped
    for optimizer in optimizers:
        # Fused Adam does nothing if this tensor is 1. An `if` would wait for the GPU in each step.
        optimizer.found_inf = is_skipped
        optimizer.step()
    return is_skipped


class WarmupAgent(nn.Module):
    """Actor, critics and target networks. A batch is a dict of tensors:

    obs, next_obs              (N,D)
    actions                    (N,C)  in [-1,1]
    rewards, masks, returns    (N,)   masks: 0 where the episode terminated; returns: return_to_go
    critic_weights             (N,)   in the loss of the critics, with a mean of 1
    actor_weights              (N,)   in the loss of the actor, with a mean of 1
    is_cloned                  (N,)   1 on rows that cloning imitates (rate_episodes)

    For `update`, sample_mixed has multiplied rewards and returns by reward_scale. `row_errors` gets
    rows of a buffer and scales their rewards itself.
    """

    NUM_CQL_ACTIONS = 4  # from each of: uniform, policy at s, policy at s'

    def __init__(self, obs_mean, obs_std, action_dim, device="cpu", args=None):
        super().__init__()
        args = args or Args()
        torch.manual_seed(args.seed)
        self.args = args
        self.action_dim = action_dim
        obs_dim = len(obs_mean)
        self.target_entropy = -0.5 * action_dim
        self.normalizer = Normalizer(obs_mean, obs_std)
        self.critic = QEnsemble(
            args.num_critics, obs_dim + action_dim, args.hidden_size, args.layer_norm
        )
        self.critic_target = copy.deepcopy(self.critic).requires_grad_(False)
        self.actor = mlp(obs_dim, 2 * action_dim, args.hidden_size, args.layer_norm)
        if args.dropout:
            self.actor = add_dropout(self.actor, args.dropout)
        # alpha() takes the softplus of this parameter, so it starts at the inverse of softplus.
        self.raw_alpha = nn.Parameter(torch.tensor(math.log(math.expm1(args.init_alpha))))
        self.register_buffer("skipped_steps", torch.tensor(0.0))
        self.updates = 0
        self.to(device).eval()
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), args.lr, fused=True)
        self.actor_optimizer = torch.optim.Adam(
            [*self.actor.parameters(), self.raw_alpha], args.lr, fused=True
        )

    def alpha(self):
        return F.softplus(self.raw_alpha)  # stays positive

    def noise(self, like):
        return torch.randn(like.shape).to(like)  # drawn on the CPU: the same on all devices

    def policy(self, features):
        """The mean and the standard deviation before the tanh.  (N,D) -> 2 x (N,C)"""
        mean, log_std = self.actor(features).chunk(2, -1)
        return mean, log_std.clamp(math.log(1e-5), math.log(5)).exp()

    def update(self, batch: dict, train_actor: bool = True, method: str = "sac") -> dict:
        args = self.args
        # The seed depends on the number of the update: a resumed run draws the same numbers. It is
        # set on all devices, because dropout draws on the device of the network.
        torch.manual_seed(args.seed * 1_000_003 + self.updates)
        self.updates += 1

        # 1 critics
        with torch.no_grad():
            next_features = self.normalizer(batch["next_obs"])
            next_mean, next_std = self.policy(next_features)
            next_noise = self.noise(next_mean)
            if method == "bc":  # warm-up: cloning; the std is not trained: take the mean action
                next_noise = torch.zeros_like(next_noise)
            next_actions, _ = tanh_normal(next_mean, next_std, next_noise)
            next_q = self.critic_target(next_features, next_actions)  # (E,N)
            if args.num_sampled_critics < args.num_critics:  # REDQ (arXiv:2101.05982)
                drawn = torch.randperm(args.num_critics)[: args.num_sampled_critics]
                next_q = next_q[drawn.to(next_q.device)]
            next_value = next_q.min(0).values  # (N,)
            q_target = td_target(batch["rewards"], batch["masks"], next_value, args.gamma)

        features = self.normalizer(batch["obs"])
        q_values = self.critic(features, batch["actions"])  # (E,N)
        td_errors = q_values - q_target
        # warm-up: weights
        critic_losses = {"critic_loss": (batch["critic_weights"] * td_errors.square()).mean()}

        if method in CONSERVATIVE and args.cql_alpha:  # warm-up: conservative
            gap = self.conservative_term(batch, features, next_features, q_values, method)
            critic_losses["cql_loss"] = args.cql_alpha * gap

        self.skipped_steps += gradient_step(sum(critic_losses.values()), self.critic_optimizer)

        # 2 actor and temperature
        actor_losses = {}
        if train_actor:
            self.actor.train()  # warm-up: overfitting; dropout is active only here
            mean, std = self.policy(features)
            self.actor.eval()
            # warm-up: cloning; the weighted mean over the cloned rows, however few the batch has
            distance = (mean.tanh() - batch["actions"]).square().sum(1)  # (N,)
            clone_weights = batch["actor_weights"] * batch["is_cloned"]
            bc_loss = (clone_weights * distance).sum() / clone_weights.sum().clamp(min=1e-8)

            if method == "bc":  # warm-up: cloning; neither std nor temperature is trained
                actor_losses["actor_loss"] = bc_loss
            else:
                alpha = self.alpha()
                actions, logprobs = tanh_normal(mean, std, self.noise(mean))
                # SAC takes the minimum of the critics here. RLPD and HIL-SERL take the mean.
                objective = self.critic(features, actions).mean(0) - alpha.detach() * logprobs
                entropy = -logprobs.detach().mean()
                # warm-up: weights
                actor_losses["actor_loss"] = -(batch["actor_weights"] * objective).mean()
                actor_losses["alpha_loss"] = alpha * (entropy - self.target_entropy)
                if args.bc_weight:  # warm-up: cloning
                    actor_losses["bc_loss"] = args.bc_weight * bc_loss

            self.skipped_steps += gradient_step(sum(actor_losses.values()), self.actor_optimizer)

        # 3 target networks
        with torch.no_grad():
            slow = list(self.critic_target.parameters())
            torch._foreach_lerp_(slow, list(self.critic.parameters()), args.tau)
        stats = critic_losses | actor_losses
        stats |= {"q_values": q_values.mean(), "alpha": self.alpha()}
        stats["td_errors"] = td_errors.mean(0)  # warm-up: replay; (N,), the mean over the critics
        return {name: value.detach() for name, value in stats.items()}

    def conservative_term(self, batch, features, next_features, q_values, method):
        """The mean of conservative_gap over all rows. Row weights do not apply to it."""
        num_rows = len(features)
        shape = (self.NUM_CQL_ACTIONS, num_rows, self.action_dim)
        with torch.no_grad():
            uniform = 2 * torch.rand(shape).to(features) - 1
            actions = [uniform]
            log_densities = [torch.full_like(uniform, math.log(0.5)).sum(-1)]
            for states in (features, next_features):  # pi(s) and pi(s'), all evaluated in s
                mean, std = self.policy(states)
                noise = torch.randn(shape).to(features)
                sampled, logprobs = tanh_normal(mean, std, noise)  # (K,N,C), (K,N)
                actions.append(sampled)
                log_densities.append(logprobs)
        actions = torch.cat(actions)  # (M,N,C)
        log_densities = torch.cat(log_densities)  # (M,N)
        action_q = self.critic(features.repeat(len(actions), 1), actions.flatten(0, 1))
        action_q = action_q.unflatten(1, (-1, num_rows))  # (E,M,N)
        if method == "calql":  # Q of the policy's actions is at least the return of the data
            uniform_q, policy_q = action_q.split([len(uniform), 2 * len(uniform)], 1)
            action_q = torch.cat([uniform_q, policy_q.maximum(batch["returns"])], 1)
        return conservative_gap(action_q, log_densities, q_values).mean()

    @torch.no_grad()
    def row_errors(self, columns) -> dict:
        """Errors on rows of a buffer, given as tensors. Nothing is trained, and nothing is random.

        td_errors       (E,N)  the next action is the mean action
        targets         (N,)
        clone_errors    (N,)   squared distance between the mean action and the action of the row
        """
        parts = []
        for start in range(0, len(columns["rewards"]), 4096):  # all rows may not fit into memory
            end = start + 4096
            batch = {name: x[start:end].to(self.raw_alpha.device) for name, x in columns.items()}
            features = self.normalizer(batch["obs"])
            next_features = self.normalizer(batch["next_obs"])
            mean, _ = self.policy(features)
            next_mean, _ = self.policy(next_features)
            next_q = self.critic_target(next_features, next_mean.tanh())
            # The minimum is over as many critics as in training, here always the first ones.
            next_value = next_q[: self.args.num_sampled_critics].min(0).values
            rewards = self.args.reward_scale * batch["rewards"]
            targets = td_target(rewards, batch["masks"], next_value, self.args.gamma)
            errors = {
                "td_errors": self.critic(features, batch["actions"]) - targets,
                "targets": targets,
                "clone_errors": (mean.tanh() - batch["actions"]).square().sum(1),
            }
            parts.append(errors)
        return {name: torch.cat([part[name] for part in parts], -1).cpu() for name in errors}

    @torch.no_grad()
    def act(self, obs, noise=0.0):
        """The action tanh(mean + noise * std).  (D,) -> (C,) in [-1,1]"""
        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.raw_alpha.device)
        mean, std = self.policy(self.normalizer(obs[None]))
        return (mean.cpu() + std.cpu() * noise)[0].tanh().numpy()

    def checkpoint(self) -> dict:
        state = dict(
            model=self.state_dict(),
            critic_optimizer=self.critic_optimizer.state_dict(),
            actor_optimizer=self.actor_optimizer.state_dict(),
            updates=self.updates,
            action_dim=self.action_dim,
            args=asdict(self.args),
        )
        return copy.deepcopy(state)

    def restore(self, checkpoint):
        """Load weights, optimizers and counters. This agent keeps its options."""
        self.load_state_dict(checkpoint["model"])
        for name in ("critic_optimizer", "actor_optimizer"):
            optimizer = getattr(self, name)
            optimizer.load_state_dict(checkpoint[name])
            optimizer.param_groups[0]["lr"] = self.args.lr
        self.updates = checkpoint["updates"]

    @classmethod
    def load(cls, checkpoint, device="cpu", args=None):
        """The agent of final_model.pth, given as a path or as a loaded dict. It goes on with the
        options `args`, or with those of the file."""
        if not isinstance(checkpoint, dict):
            checkpoint = read_checkpoint(checkpoint)
        mean = checkpoint["model"]["normalizer.mean"]
        std = checkpoint["model"]["normalizer.std"]
        args = args or Args(**checkpoint["args"])
        agent = cls(mean, std, checkpoint["action_dim"], device, args)
        agent.restore(checkpoint)
        return agent


# --- buffer ---
class PrioritizedReplayBuffer:  # warm-up: replay
    """The newest rows replace the oldest. A row is drawn with a probability in proportion to
    (|TD error| + 1e-6)^alpha (arXiv:1511.05952). With alpha 0 the draws are uniform."""

    def __init__(self, capacity, dtype, alpha):
        self.rows = np.zeros(capacity, dtype)
        self.priorities = np.zeros(capacity)  # float64, with the exponent applied
        self.alpha = alpha
        self.max_priority = 1.0
        self.num_written = 0

    def __len__(self):
        return min(self.num_written, len(self.rows))

    def extend(self, rows):
        """Write rows after the newest one, with the highest priority that any row has had."""
        slots = (self.num_written + np.arange(len(rows))) % max(1, len(self.rows))
        self.rows[slots] = rows
        self.priorities[slots] = self.max_priority
        self.num_written += len(rows)

    def sample(self, num_rows, beta, rng):
        """Draw with replacement.  -> slots (N,), importance weights (N,)"""
        if num_rows == 0:
            return np.zeros(0, int), np.ones(0)
        if self.alpha == 0:
            return rng.integers(len(self), size=num_rows), np.ones(num_rows)
        cumsum = self.priorities[: len(self)].cumsum()
        slots = cumsum.searchsorted(rng.random(num_rows) * cumsum[-1], side="right")
        slots = slots.clip(max=len(self) - 1)  # rounding may lead beyond the last row
        probabilities = self.priorities[slots] / cumsum[-1]
        return slots, (len(self) * probabilities) ** -beta

    def update_priorities(self, slots, td_errors):
        errors = np.abs(td_errors).astype(np.float64)
        priorities = (errors + 1e-6) ** self.alpha
        self.priorities[slots] = np.where(np.isfinite(errors), priorities, self.max_priority)
        self.max_priority = float(self.priorities[slots].max(initial=self.max_priority))

    def select_top_k(self, priorities, k):
        """A new buffer of the k rows with the highest priorities; earlier rows win ties."""
        best = np.argsort(-priorities, kind="stable")[:k]
        kept = PrioritizedReplayBuffer(k, self.rows.dtype, self.alpha)
        kept.extend(self.rows[np.sort(best)])
        return kept

    def state_dict(self):
        """The rows that were written, and their priorities"""
        return dict(
            rows=torch.from_numpy(self.rows[: len(self)].view(np.uint8)),
            priorities=torch.from_numpy(self.priorities[: len(self)]),
            max_priority=self.max_priority,
            num_written=self.num_written,
        )

    def load_state_dict(self, state):
        """This buffer must have the capacity of the saved one."""
        self.num_written = state["num_written"]
        self.rows[: len(self)] = state["rows"].numpy().view(self.rows.dtype)
        self.priorities[: len(self)] = state["priorities"].numpy()
        self.max_priority = state["max_priority"]


def make_buffer(args, capacity, env):
    alpha = args.priority_alpha if args.use_prioritized_replay else 0.0
    return PrioritizedReplayBuffer(capacity, make_row_dtype(env), alpha)


def compute_priorities(buffer, retention_by, agent):
    """Values by which filter_offline_data sorts the rows.  -> (N,)"""
    rows = buffer.rows[: len(buffer)]
    if retention_by == "td_error":
        td_errors = agent.row_errors(to_tensors(rows, "cpu"))["td_errors"]  # (E,N)
        return td_errors.mean(0).abs().numpy()
    return rows["rewards" if retention_by == "reward" else "quality"]


def filter_offline_data(  # warm-up: replay
    buffer, retention_ratio=0.2, retention_by="quality", agent=None
):
    """A new buffer with this share of the rows: those with the highest values of `retention_by`.
    Only td_error needs the agent."""
    if retention_ratio == 0:
        return PrioritizedReplayBuffer(0, buffer.rows.dtype, buffer.alpha)
    top_k = max(1, int(len(buffer) * retention_ratio))
    return buffer.select_top_k(compute_priorities(buffer, retention_by, agent), top_k)


def split_rows(batch_size, offline_ratio, num_offline, num_online):
    """How many rows of a batch are (offline, online). If one buffer is empty, all are from the
    other. If the online buffer is short, offline rows fill the batch, unless their share is 0."""
    if num_online == 0:
        return batch_size, 0
    if num_offline == 0 or offline_ratio == 0:
        return 0, batch_size
    num_online_rows = min(batch_size - int(batch_size * offline_ratio), num_online)
    return batch_size - num_online_rows, num_online_rows


def to_tensors(rows, device):
    """A dict of tensors, nested like the dtype of the rows."""
    if rows.dtype.names:
        return {name: to_tensors(rows[name], device) for name in rows.dtype.names}
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device)


def random_numbers(seed, purpose: str, number):
    """A generator for each (seed, purpose, number). There is no generator state to save."""
    return np.random.default_rng([seed, *purpose.encode(), number])


def sample_mixed(agent, offline_rb, online_rb, offline_ratio, beta, obs_noise=0.0):
    """Draw offline rows and online rows, in this order.
    -> batch, slots of the offline rows, slots of the online rows"""
    args = agent.args
    rng = random_numbers(args.seed, "batch", agent.updates)
    num_offline, num_online = split_rows(
        args.batch_size, offline_ratio, len(offline_rb), len(online_rb)
    )
    offline_slots, offline_importance = offline_rb.sample(num_offline, beta, rng)
    online_slots, online_importance = online_rb.sample(num_online, beta, rng)
    rows = np.concatenate([offline_rb.rows[offline_slots], online_rb.rows[online_slots]])
    importance = np.concatenate([offline_importance, online_importance])
    if obs_noise:  # warm-up: overfitting
        noise_std = obs_noise * agent.normalizer.std.cpu().numpy()
        for name in ("obs", "next_obs"):
            rows[name] += noise_std * rng.standard_normal(rows[name].shape)

    # warm-up: weights; importance corrects the loss of the critics only
    critic_weights = importance
    actor_weights = np.ones(len(rows))
    if args.weighted_loss != "none":
        critic_weights = importance * rows["weights"]
    if args.weighted_loss == "both":
        actor_weights = rows["weights"]
    # These rows are copies. The buffers keep rewards and returns as they were.
    rows["rewards"] *= args.reward_scale
    rows["returns"] *= args.reward_scale
    batch = to_tensors(rows, agent.raw_alpha.device)
    for name, weights in (("critic_weights", critic_weights), ("actor_weights", actor_weights)):
        batch[name] = torch.as_tensor(normalize_weights(weights)).to(batch["rewards"])
    return batch, offline_slots, online_slots


def learn(state, offline_ratio, obs_noise=0.0, train_actor=True, method="sac"):
    """Draw a batch, make one update, and give the drawn rows new priorities."""
    args = state.agent.args
    progress = state.progress
    # The importance weights reach their full strength in the last step of the run.
    warmup_steps = progress.warmup_updates if progress.is_online else args.warmup_steps
    beta = priority_beta_schedule(progress.global_step / (warmup_steps + args.online_steps))
    batch, offline_slots, online_slots = sample_mixed(
        state.agent, state.offline_rb, state.online_rb, offline_ratio, beta, obs_noise
    )
    stats = state.agent.update(batch, train_actor, method)
    td_errors = stats.pop("td_errors")  # (N,)
    if args.use_prioritized_replay:  # warm-up: replay
        td_errors = td_errors.cpu().numpy()
        state.offline_rb.update_priorities(offline_slots, td_errors[: len(offline_slots)])
        state.online_rb.update_priorities(online_slots, td_errors[len(offline_slots) :])
    metrics = {f"losses/{name}": value for name, value in stats.items()}
    metrics["buffer/offline_frac"] = len(offline_slots) / args.batch_size
    progress.window.append(metrics)


# --- rollout ---
EVAL_SEED = 10_000  # seed of the first evaluation episode
VIDEO_SEED = 10_006  # seed of the filmed episode, in which the pendulum starts low


def play_episode(env, act, seed):
    """One episode of act(obs).  -> transitions as in data files, whether it succeeded"""
    obs, _ = env.reset(seed=seed)
    transitions = []
    is_over = False
    while not is_over:
        action = act(obs)
        next_obs, reward, terminated, truncated, info = env.step(action)
        is_over = terminated or truncated
        transition = dict(
            observations=obs,
            actions=env_units(env, action),
            next_observations=next_obs,
            rewards=float(reward),
            masks=float(not terminated),
            dones=bool(is_over),
        )
        transitions.append(transition)
        obs = next_obs
    rewards = [transition["rewards"] for transition in transitions]
    return transitions, has_succeeded(rewards, terminated, info)


def explore(agent, obs, env_step, rng):
    """A sample of the policy, or a random action in the first steps of an untrained agent"""
    if agent.updates == 0 and env_step <= agent.args.warmup_rollout_steps:
        return rng.uniform(-1, 1, agent.action_dim).astype(np.float32)
    return agent.act(obs, torch.from_numpy(rng.standard_normal(agent.action_dim, np.float32)))


def take_step(agent, env, obs, env_step):
    """One environment step. Without `obs` it is the first one of an episode.
    -> row of online_rb, next obs, whether the episode ended"""
    rng = random_numbers(agent.args.seed, "step", env_step)
    if obs is None:
        obs, _ = env.reset(seed=int(rng.integers(2**31)))
    action = explore(agent, obs, env_step, rng)
    next_obs, reward, terminated, truncated, _ = env.step(action)
    if not np.isfinite([reward, *next_obs]).all():
        raise ValueError("the environment gave a number that is not finite")
    columns = dict(
        obs=obs,
        next_obs=next_obs,
        actions=action,
        rewards=reward,
        masks=not terminated,  # after a time limit the target still has V(s')
        dones=terminated or truncated,
        weights=1.0,
    )
    row = np.zeros(1, make_row_dtype(env))
    for name, value in columns.items():
        row[name] = value
    return row, next_obs, terminated or truncated


# --- evaluate ---
def evaluate_policy(agent, env, num_episodes):
    """Play the mean action in episodes with fixed seeds, which are the same in every run."""
    results = []
    for episode in range(num_episodes):
        transitions, success = play_episode(env, agent.act, EVAL_SEED + episode)
        result = {
            "eval/episodic_return": sum(transition["rewards"] for transition in transitions),
            "eval/episodic_length": len(transitions),
            "eval/success_rate": success,
        }
        results.append(result)
    return mean_of_each(results)


def check_heldout(agent, progress) -> float:  # warm-up: overfitting
    """Error on held-out rows. If it is the smallest so far, keep a copy of the agent.

    With bc it is the squared distance between the actions of actor and rows. Otherwise it is the
    squared TD error of the critics, divided by the variance of their targets. Without the division
    it would be smallest at the start, when all values are near 0. It does not show values that are
    all too high."""
    errors = agent.row_errors(progress.heldout)
    if agent.args.offline_objective == "bc":
        is_cloned = progress.heldout["is_cloned"]
        error = (errors["clone_errors"] * is_cloned).sum() / is_cloned.sum()
    else:
        error = errors["td_errors"].square().mean() / errors["targets"].var().clamp(min=1e-8)
    progress.checks_since_best += 1
    if error < progress.best_error:
        progress.best_error = error.item()
        progress.best_agent = agent.checkpoint()
        progress.checks_since_best = 0
    return error.item()


# --- main ---
@dataclass
class Progress:
    """Counters of a run, numbers that are not logged yet, and what early stopping needs"""

    warmup_updates: int = 0
    is_online: bool = False  # the warm-up is over
    env_steps: int = 0  # of online training
    window: list = field(default_factory=list)  # statistics since the last logged line
    data_returns: dict = field(default_factory=dict)  # mean return of each data file
    heldout: dict = field(default_factory=dict)  # columns of rows that are not trained on
    best_error: float = math.inf  # smallest error on these rows
    best_agent: dict | None = None  # checkpoint of the agent that had it
    checks_since_best: int = 0

    @property
    def global_step(self):
        return self.warmup_updates + self.env_steps


@dataclass
class State:
    """The folder, the agent, the buffers and the counters of a run"""

    run: "Run"
    agent: WarmupAgent
    offline_rb: PrioritizedReplayBuffer
    online_rb: PrioritizedReplayBuffer
    progress: Progress


def main(args: Args) -> dict[str, float]:
    if args.make_data:
        return make_data(args)
    torch.set_num_threads(args.num_threads)
    device = pick_device(args.device, built_in=args.env_id == BUILT_IN)
    env = make_gym_env(args.env_id)
    if args.resume and Path(args.run_dir, "latest.pth").exists():
        state = load_run(args, env, device)
    else:
        state = start_run(args, env, device)
    agent = state.agent
    progress = state.progress
    signals = Signals()
    online_steps = 0 if args.ends_after_warmup() else args.online_steps
    bar = tqdm(
        total=args.warmup_steps + online_steps,
        initial=progress.global_step,
        disable=None,
        file=sys.stdout,
    )

    # Offline: the warm-up updates the agent on offline rows. With --learner it is already over.
    while not progress.is_online:
        # 1 update
        progress.warmup_updates += 1
        learn(state, offline_ratio=1.0, obs_noise=args.obs_noise, method=args.offline_objective)

        # 2 end the warm-up after its last step, or early
        row = {}
        is_last = progress.warmup_updates >= args.warmup_steps
        check_every = max(1, args.warmup_steps // 20)
        if args.early_stop_patience and (is_last or progress.warmup_updates % check_every == 0):
            row["losses/heldout_error"] = check_heldout(agent, progress)
        if is_last or 0 < args.early_stop_patience <= progress.checks_since_best:
            end_warmup(state)  # progress.is_online = True

        # 3 evaluate
        if progress.is_online or progress.warmup_updates % args.eval_every == 0:
            row |= evaluate_policy(agent, env, args.eval_episodes)
        if progress.is_online:
            print_switch(progress, row["eval/episodic_return"])

        # 4 log
        log_line(state, row, bar)

        # 5 save
        if progress.is_online or progress.warmup_updates % args.save_every == 0 or signals.received:
            save_run(state)
        if signals.received:
            break

    if progress.is_online and progress.env_steps == 0:
        if args.ends_after_warmup():
            hand_over(agent, state.offline_rb, env)
        elif args.capture_video:
            write_video(state.run.dir / "policy_before.gif", agent, env)

    # Online: the environment is stepped, and batches have rows of both buffers.
    bar.total = progress.warmup_updates + online_steps  # fewer after an early stop
    is_over = True  # the next step begins an episode
    while progress.is_online and progress.env_steps < online_steps:
        # 1 step the environment
        if is_over:
            obs = None
            episode_start = progress.env_steps
        env_step = progress.env_steps + 1
        try:
            transition, obs, is_over = take_step(agent, env, obs, env_step)
        except Exception:
            save_run(state)  # with the steps before this one
            raise
        progress.env_steps = env_step
        state.online_rb.extend(transition)
        if is_over:  # RecordEpisodeStatistics has summed up the episode
            episode = {
                "charts/episodic_return": float(env.return_queue[-1]),
                "charts/episodic_length": env.length_queue[-1],
            }
            progress.window.append(episode)

        # 2 update by SAC, whatever the objective of the warm-up was
        if env_step > args.warmup_rollout_steps:
            offline_ratio = offline_ratio_at(args, env_step)
            for i in range(args.utd_ratio):
                learn(state, offline_ratio, train_actor=i == args.utd_ratio - 1)

        # 3 evaluate between two episodes, and after the last step
        row = {}
        is_last = env_step == online_steps
        if is_last or (is_over and is_due(args.eval_every, episode_start, env_step)):
            row = evaluate_policy(agent, env, args.eval_episodes)

        # 4 log
        log_line(state, row, bar)

        # 5 save between two episodes, and after the last step
        is_stopped = is_over and signals.received
        if is_last or is_stopped or (is_over and is_due(args.save_every, episode_start, env_step)):
            save_run(state)
        if is_stopped:
            break

    is_finished = progress.is_online and progress.env_steps >= online_steps
    if is_finished and "eval/episodic_return" not in state.run.rows[-1]:
        # The run was stopped and is resumed with fewer --online-steps, so no step was left.
        log_line(state, evaluate_policy(agent, env, args.eval_episodes), bar)
    bar.close()
    signals.release()
    if is_finished:
        finish_run(state, env)
    else:
        print(f"stopped and saved; continue with --resume --run-dir {state.run.dir}")
    env.close()
    return state.run.rows[-1]


def is_due(every, start, step) -> bool:
    """Whether a multiple of `every` is among the steps after `start`, up to `step`"""
    return step // every > start // every


def end_warmup(state):
    """Take the best weights that were checked, and keep a share of the offline rows."""
    args = state.agent.args
    progress = state.progress
    progress.is_online = True
    progress.heldout = {}
    if progress.best_agent:
        # Both counters go on: the number of updates seeds the draws and the noise.
        best_agent = progress.best_agent | {"updates": state.agent.updates}
        best_agent["model"]["skipped_steps"] = state.agent.skipped_steps
        state.agent.restore(best_agent)
        progress.best_agent = None
    state.offline_rb = filter_offline_data(
        state.offline_rb, args.retention_ratio, args.retention_by, state.agent
    )


def print_switch(progress, policy_return):
    """Compare the returns of the policy and of the best data file (arXiv:2510.01460)."""
    data_return = max(progress.data_returns.values())
    advice = "the policy is better"
    if policy_return < data_return:
        advice = "the data are better, and --retention-ratio 1 keeps all of them"
    tqdm.write(
        f"after the warm-up of {progress.warmup_updates} updates the return of the policy is "
        f"{policy_return:.1f}, that of the best data {data_return:.1f}: {advice}"
    )


def mean_of_each(rows):
    """Mean of each statistic over the rows that have it, moved from the device once. It is NaN if
    one of the numbers is."""
    columns = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(torch.as_tensor(value))
    means = {}
    for name, column in columns.items():
        # A resumed run has read its first values to the CPU.
        column = [value.to(column[-1].device) for value in column]
        means[name] = torch.stack(column).float().mean().item()
    return means


def log_line(state, row, bar):
    """Log `row` and the means since the last line. Without `row`, do so every 100 steps."""
    run = state.run
    progress = state.progress
    bar.update(progress.global_step - bar.n)
    if not row and progress.global_step % state.agent.args.log_interval > 0:
        return
    # With --learner the first step is the last one of the warm-up.
    steps_done = progress.global_step - run.rows[0]["global_step"]
    row = row | mean_of_each(progress.window)
    row |= {
        "charts/env_steps": progress.env_steps,
        "charts/updates": state.agent.updates,
        "charts/SPS": steps_done / (time.time() - run.start_time),
        "losses/skipped_steps": state.agent.skipped_steps.item(),
        "buffer/online_size": len(state.online_rb),
        "buffer/offline_size": len(state.offline_rb),
    }
    progress.window = []
    run.log({"global_step": progress.global_step} | row)
    show_status(bar, run.newest)


STATUS = (  # the numbers beside the bar
    "losses/critic_loss losses/actor_loss losses/alpha_loss losses/alpha losses/skipped_steps "
    "buffer/offline_frac eval/episodic_return"
).split()


def show_status(bar, metrics: dict):
    """Show the newest numbers beside the bar, or in a line of their own if this is no terminal."""
    shown = []
    for name in STATUS:
        if metrics.get(name) is not None:
            shown.append(f"{name.split('/')[1]} {metrics[name]:.3g}")
    status = " ".join(shown)
    bar.set_postfix_str(status, refresh=False)
    if bar.disable:
        print(f"[{metrics['global_step']}/{bar.total}] {status}", flush=True)


CURVES = {
    "return of an episode": ["charts/episodic_return", "eval/episodic_return"],
    "offline share of a batch": ["buffer/offline_frac"],
    "mean Q value": ["losses/q_values"],
}


def finish_run(state, env):
    """Save the policy, and show it."""
    run = state.run
    args = state.agent.args
    write_checkpoint(run.dir / "final_model.pth", state.agent.checkpoint())
    if args.capture_video:
        write_video(run.dir / "policy.gif", state.agent, env)
    run.finish(CURVES, "updates of the warm-up, then environment steps")
    first_return = run.rows[0]["eval/episodic_return"]
    last_return = run.newest["eval/episodic_return"]
    print(
        f"eval/episodic_return {first_return:.1f} -> {last_return:.1f}, "
        f"{state.progress.env_steps} environment steps, {run.newest['time']:.0f} s"
    )
    print(f"metrics, pictures and final_model.pth (see WarmupAgent.load) are in {run.dir}")
    if args.ends_after_warmup():
        print(
            f"train online: python wsrl_warmup.py --learner --checkpoint-path {args.checkpoint_path}"
        )


# --- task: environments ---
def make_gym_env(env_id):
    """A Gymnasium environment with float32 vectors as observations and actions in [-1,1]"""
    env = gym.make(env_id)
    if "rgb_array" in env.metadata.get("render_modes", []):
        env.close()
        env = gym.make(env_id, render_mode="rgb_array")
    actions = env.action_space
    is_bounded = isinstance(actions, gym.spaces.Box) and actions.is_bounded()
    if not is_bounded or len(actions.shape) != 1 or (actions.low >= actions.high).any():
        sys.exit(f"{env_id} has actions {actions}: expected a bounded Box of one dimension")
    spaces = {"state": env.observation_space}
    if isinstance(env.observation_space, gym.spaces.Dict):
        spaces = env.observation_space.spaces
    for key, space in spaces.items():
        is_box = isinstance(space, gym.spaces.Box)
        if not is_box or max(space.shape, default=1) < math.prod(space.shape):  # (D,) or (1,D) fit
            sys.exit(f"{env_id} observes {key} as {space}: expected a Box with one axis")
    env = gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))
    env = gym.wrappers.DtypeObservation(gym.wrappers.FlattenObservation(env), np.float32)
    env = gym.wrappers.RecordEpisodeStatistics(env)
    env.action_center = (actions.high + actions.low) / 2
    env.action_scale = (actions.high - actions.low) / 2
    env.obs_keys = list(spaces)  # names of the vectors in data files
    return env


def make_row_dtype(env):
    """A row of a buffer: numbers, except for observations and actions"""
    shapes = {"obs": env.observation_space.shape, "actions": env.action_space.shape}
    shapes["next_obs"] = shapes["obs"]
    return np.dtype([(column, "f4", shapes.get(column, ())) for column in COLUMNS.values()])


def env_units(env, actions):
    """From [-1,1] to the units of the environment"""
    return (env.action_center + env.action_scale * actions).astype(np.float32)


def obs_statistics(space, obs):
    """Mean and standard deviation of the observations; without any, the center and the half range
    of their space.  -> (D,), (D,)"""
    is_bounded = space.high.astype(np.float64) - space.low < 1e6
    low = np.where(is_bounded, space.low, 0.0)
    high = np.where(is_bounded, space.high, 0.0)
    mean = (high + low) / 2
    std = (high - low) / 2  # 0 without bounds
    if len(obs) > 0:
        mean = obs.mean(0, dtype=np.float64)  # sums of a million float32 rows would be wrong
        # A demonstration may have one state only, such as a pendulum that stands upright. All other
        # states would then be huge numbers, so the standard deviation is at least 0.3 of the half
        # range. With bounds of +-1000 it is at least 300: give the bounds of real observations.
        std = np.maximum(obs.std(0, dtype=np.float64), 0.3 * std)
    return mean, np.where(std < 1e-6, 1.0, std)


# --- task: offline data ---
SOURCES = {  # noise on the actions of the expert, share of random actions
    "demos": (0.1, 0.0),
    "suboptimal": (0.5, 0.5),
    "random": (0.0, 1.0),
}
COLUMNS = {  # name in a data file: name in a buffer
    "observations": "obs",  # a vector, or a dict with the keys of the environment
    "actions": "actions",  # in units of the environment, in a buffer in [-1,1]
    "rewards": "rewards",
    "next_observations": "next_obs",
    "masks": "masks",  # 0 where the episode terminated (default: 1 - dones)
    "dones": "dones",  # 1 where the episode ended, by a time limit, too (default: 1 - masks)
    "weights": "weights",
    "quality": "quality",
    "returns": "returns",
    "is_cloned": "is_cloned",
}
# A data file may leave these out. to_rows fills masks or dones, rate_episodes the others.
OPTIONAL = "masks dones weights quality returns is_cloned".split()


def swing_up(obs):
    """Pendulum-v1: pump energy until it suffices to stand upright, then balance."""
    cos, sin, speed = obs
    energy = speed**2 / 2 + 15 * (cos - 1)  # 0: upright and at rest
    torque = -energy * speed
    if cos > 0.9:
        torque = -10 * math.atan2(sin, cos) - 2.5 * speed
    return np.array([np.clip(torque / 2, -1, 1)])


def make_source(env, expert, source, seed, num_rows=4_000):
    """Whole episodes of an expert with noise and random actions, num_rows or a few more"""
    rng = random_numbers(seed, source, 0)
    noise, random_share = SOURCES[source]

    def act(obs):
        action = rng.uniform(-1, 1, env.action_scale.shape)
        if rng.random() >= random_share:
            action = expert(obs) + noise * rng.normal(size=action.shape)
        return action.clip(-1, 1).astype(np.float32)

    transitions = []
    while len(transitions) < num_rows:
        episode, _ = play_episode(env, act, int(rng.integers(2**31)))
        transitions += episode
    return transitions


def make_data(args):
    """--make-data: a file of each source in a new folder"""
    env = make_gym_env(args.env_id)
    expert = swing_up
    if args.expert_path:
        expert = WarmupAgent.load(args.expert_path).act
    elif args.env_id != BUILT_IN:
        sys.exit("--make-data needs --expert-path: only Pendulum has a script")
    folder = Path(args.make_data)
    folder.mkdir(parents=True)  # an error if it exists: nothing is overwritten
    for source in SOURCES:
        transitions = make_source(env, expert, source, args.seed)
        path = folder / f"{source}.pkl"
        path.write_bytes(pickle.dumps(transitions))
        print(f"wrote {path}")
    env.close()
    return {}


class DemoUnpickler(pickle.Unpickler):
    """Unpickles numbers, arrays of numbers and plain containers, nothing else."""

    ALLOWED = (
        "numpy.ndarray",
        "numpy.dtype",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy._core.numeric._frombuffer",
        "_codecs.encode",
        "collections.OrderedDict",
    )
    DTYPES = "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split()

    def find_class(self, module, name):
        module = module.replace("numpy.core", "numpy._core")  # its name in older files
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        if name == "dtype":
            return self.find_dtype
        return super().find_class(module, name)

    def find_dtype(self, code, *flags):
        """A constant of numpy. A new dtype would take the flags of the file, which may be wrong."""
        if code not in self.DTYPES:
            raise pickle.UnpicklingError(f"it has an array of dtype {code}: not supported")
        return np.dtype(code)


def read_transitions(path) -> list[dict]:
    """Read a pickled list of transitions, or an .npz with an array for each of their keys."""
    if path.endswith(".npz"):
        columns = dict(np.load(path, allow_pickle=False))
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]
    data = Path(path).read_bytes()
    for _, argument, _ in pickletools.genops(data):
        if argument == ">":  # the mark of numpy for big-endian numbers
            raise ValueError("it has the string '>': big-endian numbers are not supported")
    return DemoUnpickler(io.BytesIO(data)).load()


def to_column(values, obs_keys):
    """Numbers, vectors or dicts of vectors as float32  -> (N,D)"""
    if isinstance(values[0], dict):
        parts = [to_column([value[key] for value in values], obs_keys) for key in obs_keys]
        return np.concatenate(parts, axis=1)
    return np.array(values, np.float32).reshape(len(values), -1)


def to_rows(transitions, env, path):
    """Check transitions and convert them to rows of a buffer. `path` is for messages."""
    if not transitions:
        raise ValueError("there are no transitions")
    given = transitions[0].keys()
    rows = np.full(len(transitions), np.nan, make_row_dtype(env))
    for name, column in COLUMNS.items():
        if name in OPTIONAL and name not in given:
            continue
        try:
            values = to_column([transition[name] for transition in transitions], env.obs_keys)
        except Exception as error:  # a key that is missing, text, rows of different lengths
            raise ValueError(f"{name}: expected numbers in each row: {error!r}") from error
        size = rows[column][0].size
        is_bad = ~np.isfinite(values).all(1) | (values.shape[1] != size)
        if is_bad.any():
            i = is_bad.argmax()  # the first one
            raise ValueError(f"{name} of row {i} is {values[i]}: expected {size} finite numbers")
        rows[column] = values.reshape(rows[column].shape)
    # Without masks each end of an episode is a termination. Without dones split_episodes finds the
    # ends at a time limit: there the next row does not continue the episode.
    if "masks" not in given:
        print(f"{path} has no masks: each end of an episode counts as a termination")
        rows["masks"] = 1 - rows["dones"]
    if "dones" not in given:
        rows["dones"] = 1 - rows["masks"]
    if not (rows["masks"] == rows["masks"].clip(0, 1)).all():  # NaN without masks and dones
        raise ValueError("it needs masks or dones, from 0 to 1")
    if rows["weights"].min() <= 0:  # NaN if the file has none
        raise ValueError("weights must be above 0")
    actions = (rows["actions"] - env.action_center) / env.action_scale
    rows["actions"] = actions.clip(-1, 1)
    share = (np.abs(actions) > 1.001).mean()
    if share > 0:
        print(f"{path}: {share:.1%} of the actions are out of bounds and are clipped")
    return rows


def read_source(path, env):
    """Rows of a .pkl or .npz file. Its actions are in the units of the environment."""
    try:
        transitions = read_transitions(path)
        size = len(transitions) * make_row_dtype(env).itemsize
        if path.endswith(".pkl") and size > 2**26 + 20 * Path(path).stat().st_size:
            raise ValueError(f"it would become {size} bytes in memory")
        return to_rows(transitions, env, path)
    except Exception as error:  # a damaged file can raise any type
        sys.exit(f"data file {path}: {type(error).__name__}: {error}")


def split_episodes(rows):
    """Split where an episode ended, and where a row does not continue the row before it: where obs
    differs from the last next_obs by more than a thousandth of the standard deviation."""
    ends = (rows["dones"] > 0) | (rows["masks"] == 0)
    tolerance = 1e-3 * rows["obs"].std(0)
    continues = np.isclose(rows["next_obs"][:-1], rows["obs"][1:], rtol=1e-5, atol=tolerance)
    ends[:-1] |= ~continues.all(1)
    return np.split(rows, np.flatnonzero(ends[:-1]) + 1)


def load_offline_data(args, env):
    """Rated episodes of all files.  -> rows, held-out rows, mean return of each file"""
    paths = {
        "demos": args.offline_data_path,
        "suboptimal": args.suboptimal_data_path,
        "random": args.random_data_path,
    }
    if args.learner:
        paths = {}
        if args.initial_offline_ratio > 0:
            paths["demos"] = [str(args.kept_rows_path())]
    files = [(source, path, read_source(path, env)) for source in paths for path in paths[source]]
    if not files and args.needs_data():
        if args.env_id != BUILT_IN:
            sys.exit(
                f"there are no offline data for {args.env_id}: give --offline-data-path, which "
                "--make-data can write, or --preset scratch"
            )
        for source in ("suboptimal", "random"):
            transitions = make_source(env, swing_up, source, args.seed)
            files.append((source, source, to_rows(transitions, env, source)))

    episodes = []  # pairs: source, rows
    mean_returns = {}
    for source, path, rows in files:
        parts = split_episodes(rows)
        episodes += [(source, part) for part in parts]
        mean_returns[path] = float(np.mean([part["rewards"].sum() for part in parts]))
        if not args.learner:  # the rows that a warm-up kept are not whole episodes
            returns = f"mean return {mean_returns[path]:.1f}"
            print(f"{path}: {len(parts)} episodes, {len(rows)} rows, {returns}")
    if episodes:
        rate_episodes(args, episodes)
    training = [rows for _, rows in episodes]
    heldout = []
    if args.early_stop_patience and not args.learner:  # warm-up: overfitting
        training, heldout = hold_out(training, args.offline_objective == "bc")
    no_rows = np.zeros(0, make_row_dtype(env))  # np.concatenate needs an array
    return np.concatenate([no_rows, *training]), np.concatenate([no_rows, *heldout]), mean_returns


def hold_out(episodes, is_clone):  # warm-up: overfitting
    """Hold out every tenth episode; for a clone, every tenth episode that it would imitate.
    -> training episodes, held-out episodes"""
    candidates = range(len(episodes))
    if is_clone:
        candidates = [i for i in candidates if episodes[i]["is_cloned"].any()]
    heldout = candidates[9::10]
    if not heldout:
        sys.exit(f"--early-stop-patience needs ten episodes, and the data have {len(candidates)}")
    training = [episode for i, episode in enumerate(episodes) if i not in heldout]
    return training, [episodes[i] for i in heldout]


def write_transitions(path, rows, env):
    """A pickled list of transitions in units of the environment, with their ratings"""
    transitions = []
    for row in rows:
        transition = {name: row[column] for name, column in COLUMNS.items()}
        transition["actions"] = env_units(env, row["actions"])
        transitions.append(transition)
    path.write_bytes(pickle.dumps(transitions))


# --- video ---
def draw_pendulum(obs):
    """A picture of the rod. Pendulum-v1 itself needs pygame to draw."""
    from PIL import Image, ImageDraw  # matplotlib installs it

    cos, sin, _ = obs
    picture = Image.new("RGB", (320, 320), "white")
    canvas = ImageDraw.Draw(picture)
    canvas.line((160, 160, 160 - 120 * sin, 160 - 120 * cos), fill="firebrick", width=20)
    return picture


def write_video(path, agent, env):
    """A GIF of an episode without noise, every fourth step"""
    from PIL import Image

    pictures = []

    def draw(obs):
        if env.spec.id == BUILT_IN:
            return draw_pendulum(obs)
        return Image.fromarray(env.render())

    def act_and_film(obs):
        pictures.append(draw(obs))
        return agent.act(obs)

    obs, _ = env.reset(seed=VIDEO_SEED)
    try:
        draw(obs)
    except Exception as error:  # a renderer can raise any type
        print(f"no {path.name}: {env.spec.id} cannot draw itself: {error!r}")
        return
    play_episode(env, act_and_film, VIDEO_SEED)
    frames = pictures[::4]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=80, loop=0)


# --- run folder ---
def pick_device(name: str, built_in: bool) -> torch.device:
    """auto: the CPU if what the run uses is built in, else an accelerator if there is one."""
    if name != "auto":
        return torch.device(name)
    if built_in:
        return torch.device("cpu")
    # Without check_available the CUDA build of torch answers "cuda" on a machine without a GPU.
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


class Run:
    """The folder of a run: options, metrics, and at the end a summary and curves."""

    def __init__(self, args, rows=()):
        """`rows` are the metrics that a resumed run logged before."""
        name = f"{args.exp_name}__{args.seed}__{int(time.time())}_{os.getpid()}"
        self.dir = Path(args.run_dir or f"runs/{name}")
        self.dir.mkdir(parents=True, exist_ok=args.resume)
        self.rows = []
        self.newest = {}  # the last value of each metric
        (self.dir / "metrics.jsonl").write_text("", encoding="utf-8")
        for row in rows:
            self.write(row)
        self.start_time = time.time() - self.newest.get("time", 0)

        config = asdict(args) | dict(argv=sys.argv, torch=torch.__version__)
        replace_text(self.dir / "args.json", json.dumps(config, indent=2))
        self.wandb = None
        if args.track:
            import wandb

            id_path = self.dir / "wandb_id.txt"  # a resumed run has the id of its first start
            if not id_path.exists():
                replace_text(id_path, uuid.uuid4().hex)
            self.wandb = wandb.init(
                project=args.wandb_project_name,
                name=self.dir.name,
                dir=self.dir,
                config=config,
                id=id_path.read_text(encoding="utf-8"),
                resume="allow",
            )

    def log(self, metrics: dict):
        row = metrics | {"time": round(time.time() - self.start_time, 3)}
        row = {name: x if math.isfinite(x) else None for name, x in row.items()}  # JSON has no NaN
        self.write(row)
        if self.wandb:
            self.wandb.log(row, step=row["global_step"])

    def write(self, row: dict):
        self.rows.append(row)
        self.newest |= row
        with open(self.dir / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def finish(self, panels: dict[str, list[str]], xlabel):
        """Write summary.json and curves.png: a panel per quantity, a curve per metric."""
        summary = json.dumps(self.newest, indent=2)
        (self.dir / "summary.json").write_text(summary, encoding="utf-8")
        os.environ.pop("MPLBACKEND", None)  # a notebook sets a backend that may not be installed
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4 * len(panels), 3.2), layout="constrained")
        for i, (ylabel, names) in enumerate(panels.items(), 1):
            axis = figure.add_subplot(1, len(panels), i, xlabel=xlabel, ylabel=ylabel)
            for name in names:
                rows = [row for row in self.rows if row.get(name) is not None]
                steps = [row["global_step"] for row in rows]
                axis.plot(steps, [row[name] for row in rows], ".-", label=name)
            axis.legend()
        figure.savefig(self.dir / "curves.png")
        if self.wandb:
            self.wandb.finish()


# --- command line ---
@contextmanager
def titled_help():
    """Print --help with a title above each group of options: `run`, `task` and so on.

    The titles are the comments between the lines of Args. tyro itself shows one long list.
    """
    captured = io.StringIO()
    try:
        with redirect_stdout(captured):
            yield
    finally:
        text = captured.getvalue()
        # A comment such as `# v1: schedule` is no title: it marks an addition within a group.
        titles = re.findall(r"\n    # (?!v\d:)(.+)\n    (\w+):", inspect.getsource(Args))
        for title, name in titles:
            first_option = rf"\n  --{name.replace('_', '-')}[ ,]"
            text = re.sub(first_option, rf"\n\n {title}\n\g<0>", text, count=1)
        print(text, end="")


@dataclass
class FirstOptions:
    """The defaults of the other options depend on these."""

    env_id: str = BUILT_IN
    preset: Literal[tuple(PRESETS)] = "design"
    run_dir: str | None = None
    resume: bool = False
    checkpoint_path: str | None = None
    learner: bool = False


def default_options(env_id=BUILT_IN, preset="design") -> dict:
    """Where the defaults of the command line differ from those of Args: by PENDULUM in the built-in
    task, then by the preset. In Python, Args(preset="wsrl") sets no other option: write
    Args(**default_options(env_id, "wsrl"))."""
    options = {"env_id": env_id, "preset": preset}
    if env_id == BUILT_IN:
        options |= PENDULUM
    options |= PRESETS[preset]
    if env_id == BUILT_IN and preset == "wsrl":
        options["warmup_rollout_steps"] = 500  # of 2,000 online steps
    return options


# The agent and the rows of a saved run depend on these options: they cannot change later.
FIXED = (
    "preset hidden_size layer_norm num_critics init_alpha gamma reward_scale "
    "offline_data_path suboptimal_data_path random_data_path demo_weight success_weight_bonus "
    "warmup_steps early_stop_patience offline_objective retention_ratio retention_by"
).split()
# --resume cannot change these either. A second command may choose them again.
FIXED_IN_A_RUN = (
    "env_id buffer_size use_prioritized_replay priority_alpha learner checkpoint_path demo_path"
).split()
FILES = "run_dir resume learner checkpoint_path demo_path".split()  # each command has its own


def parse_args() -> Args:
    """The defaults are the options of the run that --resume continues or of the warm-up that
    --learner continues, else those of default_options."""
    first, _ = tyro.cli(FirstOptions, return_unknown_args=True, add_help=False)
    args_path = Path(first.run_dir or "", "args.json")
    saved = {}
    fixed = FIXED
    if first.resume and first.run_dir and args_path.exists():
        fixed = FIXED + FIXED_IN_A_RUN
        saved = json.loads(args_path.read_text(encoding="utf-8"))
    elif first.learner and first.checkpoint_path:
        saved = read_checkpoint(first.checkpoint_path)["args"] | dict(run_dir=None, resume=False)
    options = saved or default_options(first.env_id, first.preset)
    # Without __init__ there are no checks: the command line may correct a saved option.
    defaults = object.__new__(Args)
    vars(defaults).update(asdict(Args()) | options)
    args = tyro.cli(Args, description=__doc__, default=defaults)
    for name, value in asdict(args).items():
        before = saved.get(name, value)
        if value == before:
            continue
        if name in fixed:
            sys.exit(f"a saved run cannot change {flag(name)} from {before}")
        if name not in FILES:
            print(f"changed: {flag(name)} {before} -> {value}")
    return args


def flag(name) -> str:
    """The option of the command line for a field of Args"""
    return "--" + name.replace("_", "-")


def replace_text(path: Path, text: str):
    """Write a temporary file, then rename it: a killed run has either the old or the new file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_checkpoint(path: Path, state: dict):
    """Write to a temporary name and rename: a kill leaves the previous checkpoint intact."""
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def start_run(args, env, device) -> State:
    """Begin with new networks, or with --learner where the first command ended."""
    new_paths = []
    if args.run_dir and not args.resume:
        new_paths.append(Path(args.run_dir))
    if args.ends_after_warmup():
        new_paths += [Path(args.checkpoint_path), args.kept_rows_path()]
    for path in new_paths:
        if path.exists():
            sys.exit(f"{path} already exists; nothing is overwritten")
    for name, value in PRESETS[args.preset].items():
        own_value = getattr(args, name)
        if own_value != value:
            print(f"preset {args.preset} has {flag(name)} {value}: this run has {own_value}")
    rows, heldout_rows, data_returns = load_offline_data(args, env)
    offline_rb = make_buffer(args, len(rows), env)
    offline_rb.extend(rows)
    online_rb = make_buffer(args, args.buffer_size, env)
    progress = Progress(data_returns=data_returns, heldout=to_tensors(heldout_rows, "cpu"))
    if args.learner:
        agent = WarmupAgent.load(args.checkpoint_path, device, args)
        progress.warmup_updates = agent.updates
        progress.is_online = True
    else:
        mean, std = obs_statistics(env.observation_space, rows["obs"])
        agent = WarmupAgent(mean, std, len(env.action_scale), device, args)

    # The folder is made after all files were read: if one cannot be used, there is no new folder.
    state = State(Run(args), agent, offline_rb, online_rb, progress)
    if args.warmup_steps == 0 and not args.learner:
        end_warmup(state)
    row = evaluate_policy(agent, env, args.eval_episodes)
    state.run.log({"global_step": progress.global_step, "charts/env_steps": 0} | row)
    return state


def hand_over(agent, offline_rb, env):
    """Write the two files that --learner reads, the agent last: if it exists, both are complete."""
    checkpoint_path = Path(agent.args.checkpoint_path)
    kept_rows_path = agent.args.kept_rows_path()
    if not checkpoint_path.exists():
        for path in (checkpoint_path, kept_rows_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_transitions(kept_rows_path, offline_rb.rows, env)
        write_checkpoint(checkpoint_path, agent.checkpoint())


def save_run(state):
    """What --resume needs"""
    checkpoint = dict(
        agent=state.agent.checkpoint(),
        offline_rb=state.offline_rb.state_dict(),
        online_rb=state.online_rb.state_dict(),
        progress=vars(state.progress),
        rows=state.run.rows,
    )
    write_checkpoint(state.run.dir / "latest.pth", checkpoint)


def load_run(args, env, device) -> State:
    """Continue a run from its latest.pth."""
    saved = torch.load(Path(args.run_dir, "latest.pth"), map_location="cpu", weights_only=True)
    agent = WarmupAgent.load(saved["agent"], device, args)
    progress = Progress(**saved["progress"])
    offline_rb = make_buffer(args, len(saved["offline_rb"]["priorities"]), env)
    offline_rb.load_state_dict(saved["offline_rb"])
    online_rb = make_buffer(args, args.buffer_size, env)
    online_rb.load_state_dict(saved["online_rb"])
    print(f"resuming after step {progress.global_step}")
    run = Run(args, saved["rows"])  # it writes args.json, so this comes after all that may fail
    return State(run, agent, offline_rb, online_rb, progress)


def read_checkpoint(path) -> dict:
    """An agent that the warm-up or a whole run saved"""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["model"]  # raises a KeyError if this is another file, such as latest.pth
    except Exception as error:  # a damaged file can raise any type
        sys.exit(f"{path} does not hold an agent: {type(error).__name__}: {error}")
    return checkpoint


class Signals:
    """SIGINT (Ctrl-C) and SIGTERM set `received`. The loop then saves and ends the run.

    After the first signal the previous handlers are back, so a second one ends the run at once.
    """

    def __init__(self):
        self.received = False
        self.previous_handlers = {}
        if threading.current_thread() is threading.main_thread():  # others get no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous_handlers[number] = signal.signal(number, self.handle)

    def handle(self, number, frame):
        self.received = True
        self.release()
        # not print(): the signal may have come in the middle of another one
        os.write(2, b"signal received: the run saves and ends soon; a second one ends it at once\n")

    def release(self):
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    with titled_help():
        args = parse_args()
    main(args)
