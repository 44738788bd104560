# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "numpy==2.4.6", "gymnasium==1.4.0", "tyro==1.0.16",
#     "tqdm==4.70.1", "matplotlib==3.11.2", "wandb==0.31.0"]
# ///
"""SAC with a discrete gripper, demonstrations and human interventions: HIL-SERL (arXiv:2410.21845).

    fill demo_rb with demonstrations                                          (start_run)
    actor thread, for each environment step:                                  (Robot.take_turn)
        sample the motion of the arm, take the best gripper command           (agent.act)
        step the environment; a human may replace the action                  (Robot.step)
    learner, for each transition that arrives:                                (train)
        store it in online_rb, and in demo_rb, too, if a human acted          (store)
        `utd` times: draw a batch from both buffers                           (sample_batch)
            1 critics                                                         (agent.update)
            2 actor and temperature (every `cta_ratio`-th update)
            3 target networks
        copy the weights to the actor

SAC moves the arm. A double DQN on the same encoder chooses the command of the gripper: close, stay
or open. Q(s,a) of the arm does not see this command, so it is an average over the commands in the
data. The gripper has no exploration noise: it explores in the first --random-steps only.

In the built-in environment an arm lifts a bar whose position only the image shows. Its scripted
human is slow and makes mistakes. A policy that imitates this human succeeds less often than the
human. Reinforcement learning succeeds as often, in half as many steps (docs/sac_hybrid.md).

wsrl_warmup.py has the same SAC without these parts. Comments mark their code:
    hybrid: images   - an encoder for cameras and vectors, random shifts of the images
    hybrid: grasp    - the critic of the gripper
    hybrid: cloning  - a behavior-cloning loss for the motion of the arm (--bc-weight)

What differs from HIL-SERL (the page has more): there is no reward classifier. The image encoder is
small and not pretrained. Actor and learner take turns, unless --utd is 0. A time limit bootstraps.
final_model.pth is the policy with the best evaluation.
What differs from SAC (arXiv:1812.05905): the actor follows the mean of the critics instead of the
minimum, the target of the critics has no entropy bonus, and the target entropy is -A/2.

Shapes: N rows, D features, A action dims, C continuous ones of these, G grasps, E critics. A grasp
is the index of a combined command to all grippers; with one gripper, 0 closes, 1 stays and 2 opens.

    python sac_hybrid.py                       # lift the bar: one or two minutes on a CPU
    python sac_hybrid.py --algorithm bc        # imitate this human instead (HG-DAgger)
    python sac_hybrid.py --env-id my_env.py:MyEnv --demo-paths demo.pkl --image-keys image pose
    torchrun --nproc-per-node 3 sac_hybrid.py  # rank 0 learns, ranks 1 and 2 act
"""

import copy
import inspect
import io
import itertools
import json
import math
import os
import pickle
import pickletools
import queue
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
import uuid
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

BUILT_IN = "BarWorld-v0"
SETUP_MODES = {  # number of arms, number of grippers that the policy controls
    "single-arm-fixed-gripper": (1, 0),
    "single-arm-learned-gripper": (1, 1),
    "dual-arm-fixed-gripper": (2, 0),
    "dual-arm-learned-gripper": (2, 2),
}
BAR_WORLD = dict(  # defaults for the built-in environment
    max_steps=6_000,
    training_starts=100,
    random_steps=0,
    utd=2.0,
    batch_size=32,
    lr=1e-3,
    gamma=0.9,
    tau=0.01,
    init_alpha=5e-4,
    bc_weight=0.05,
    hidden_size=128,
    augment_pad=0,
    buffer_size=20_000,
    num_demos=10,
    intervention_steps=3_000,
    save_every=1_000,
    eval_every=500,
    eval_episodes=50,
    report_episodes=100,
)
GYM_ID = dict(setup_mode="single-arm-fixed-gripper")  # defaults for a Gymnasium id
# Defaults for --env-id file.py:Class, which may move a real arm
OWN_CLASS = dict(
    eval_episodes=0, report_episodes=0, random_steps=0, training_starts=100, save_every=500
)
GRASP_PENALTY = -0.02  # added to the reward of the gripper's critic when a gripper opens or closes


# --- args ---
@dataclass
class Args:
    # An option has the value that is typed, else with --resume the value in the saved run, else
    # that in BAR_WORLD, GYM_ID or OWN_CLASS (--env-id selects one), else the default here.
    # run
    seed: int = 1  # seed of training; the evaluation is the same for every seed
    device: str = "auto"  # cpu, cuda, mps, ... (auto: cpu for built-in tasks, else an accelerator)
    num_threads: int = 1  # CPU threads of torch; small networks are fastest with 1
    run_dir: str | None = None  # folder of this run (None: runs/{script}__{seed}__{time}_{pid})
    save_dir: str | None = None  # folder of checkpoint_{step}.pth, final_model.pth (None: run_dir)
    resume: bool = False  # continue the run in run_dir with its options, or start it
    save_every: int = 10_000  # steps between checkpoints; records.bin grows with every step
    eval_every: int = 5_000  # steps between evaluations, which wait for the end of an episode
    eval_episodes: int = 10  # episodes per evaluation; the best policy is kept (0: the last)
    report_episodes: int = 50  # episodes of the final test, with other seeds (0: no test)
    capture_video: bool = True  # play three of the report episodes again, for policy.gif
    log_interval: int = 100  # steps between lines of metrics.jsonl
    track: bool = False  # also log to wandb (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "stale-experience"  # project name in wandb
    create_data: bool = False  # only write test_data/success_demo.pkl and failure_demo.pkl
    test: Literal["quick", "full"] | None = None  # quick: a few steps; full: train on test_data
    # task
    env_id: str = BUILT_IN  # BarWorld-v0, a Gymnasium id, or file.py:Class
    setup_mode: Literal[tuple(SETUP_MODES)] = "single-arm-learned-gripper"  # action layout
    image_keys: list[str] = field(default_factory=list)  # images and vectors to observe (none: all)
    demo_paths: list[str] = field(default_factory=list)  # demonstrations: .pkl or .npz files
    failure_paths: list[str] = field(default_factory=list)  # failed episodes: they go to online_rb
    human: Literal["clumsy", "expert"] = "clumsy"  # scripted human of the built-in environment
    num_demos: int = 0  # demonstrations by the scripted human, if there are no --demo-paths
    intervention_steps: int = 0  # steps until the probability of an intervention is 0
    timeout_terminal: bool = False  # do not bootstrap after a time limit
    # model
    hidden_size: int = 256  # width of actor and critics
    layer_norm: bool = True  # LayerNorm in actor and critics
    # rollout
    max_steps: int = 100_000  # environment steps
    training_starts: int = 1_000  # steps before the first update
    random_steps: int = 1_000  # first steps, with random actions
    utd: float = 1.0  # updates per environment step (0: neither actor nor learner waits)
    # optimization
    batch_size: int = 256  # rows per update
    lr: float = 3e-4  # learning rate of actor, critics and temperature
    augment_pad: int = 4  # shift images randomly by up to this many pixels
    # SAC
    algorithm: Literal["sac", "bc"] = "sac"  # bc: only imitate the human (a baseline)
    gamma: float = 0.97  # discount per step
    tau: float = 0.005  # weight of the new parameters in the target networks
    cta_ratio: int = 2  # critic updates per actor update, each on its own batch
    num_critics: int = 2  # size of the ensemble
    num_sampled_critics: int = 2  # critics drawn for the minimum in the target
    init_alpha: float = 0.01  # temperature at the start
    backup_entropy: bool = False  # add the entropy bonus to the critic's target
    bc_weight: float = 0.0  # weight of cloning the demonstrations in the actor's loss
    # replay
    demo_ratio: float = 0.5  # share of demo_rb in a batch, if both buffers have data
    buffer_size: int = 200_000  # frames in a buffer; an episode of n steps has n + 1 frames

    def __post_init__(self):
        """Check the options. tyro prints a ValueError from here as a command-line error."""
        must_be_positive = (
            "num_threads", "save_every", "eval_every", "log_interval", "hidden_size", "max_steps",
            "batch_size", "lr", "cta_ratio", "num_critics", "num_sampled_critics", "init_alpha",
            "buffer_size",
        )  # fmt: skip
        for name, value in vars(self).items():
            option = f"--{name.replace('_', '-')} {value}"
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{option}: must be finite and not negative")
            if name in must_be_positive and value == 0:
                raise ValueError(f"{option}: must be positive")
            if name in ("gamma", "tau", "demo_ratio") and value > 1:
                raise ValueError(f"{option}: must be in [0, 1]")
        if self.num_sampled_critics > self.num_critics:
            raise ValueError("--num-sampled-critics must be at most --num-critics")
        has_human = self.num_demos or self.intervention_steps or self.human == "expert"
        if self.env_id != BUILT_IN and (has_human or self.create_data or self.test):
            raise ValueError(
                "--num-demos, --intervention-steps, --human expert, --create-data and --test are"
                " for the built-in environment only"
            )
        if self.algorithm == "bc" and not (self.num_demos or self.demo_paths):
            raise ValueError("--algorithm bc needs demonstrations: --demo-paths or --num-demos")
        if self.resume and not self.run_dir:
            raise ValueError("--resume needs --run-dir")


# --- networks ---
class ActionLayout:  # hybrid: grasp
    """The dims of an action that are continuous, and those that are grippers.

    A gripper closes at -1, stays at 0 and opens at 1.
    """

    def __init__(self, action_dim, num_grippers):
        self.action_dim = action_dim
        self.num_grippers = num_grippers
        # The last dim of each arm. Two arms with 7 dims each have grippers at 6 and 13.
        self.gripper = [action_dim * i // num_grippers - 1 for i in range(1, num_grippers + 1)]
        self.continuous = [i for i in range(action_dim) if i not in self.gripper]
        # A grasp is a row of this table of all combined commands.  (G,grippers)
        self.grasps = torch.tensor([*itertools.product((-1.0, 0.0, 1.0), repeat=num_grippers)])
        self.grasp_dim = len(self.grasps) if num_grippers else 0

    def grasp_index(self, commands):
        """The row in the table of grasps.  (N,grippers) -> (N,)"""
        commands = commands.round().clamp(-1, 1)  # rounded: 0.95 opens
        is_equal = (commands[..., None, :] == self.grasps.to(commands)).all(-1)
        return is_equal.int().argmax(-1)


def mlp(in_dim, out_dim, hidden_size, layer_norm, linear=nn.Linear):
    layers = []
    for width in (in_dim, hidden_size):
        layers.append(linear(width, hidden_size))
        if layer_norm:
            layers.append(nn.LayerNorm(hidden_size))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers, linear(hidden_size, out_dim))


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


def embedding(in_dim, out_dim):
    return nn.Sequential(nn.Linear(in_dim, out_dim), nn.LayerNorm(out_dim), nn.Tanh())


class ImageEncoder(nn.Module):  # hybrid: images
    """Convolutions halve the image until it has at most 16 rows, and make 16 feature maps of it.
    The output has the mean position of each map (spatial softmax, arXiv:1504.00702) and an
    embedding of these positions.  (N,channels,H,W) in [-0.5,0.5] -> (N,96)"""

    def __init__(self, image_shape):
        super().__init__()
        num_rows, _, channels = image_shape
        layers = []
        while num_rows > 16:
            layers += [nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(inplace=True)]
            channels = 16
            num_rows = math.ceil(num_rows / 2)
        self.conv = nn.Sequential(*layers, nn.Conv2d(channels, 16, 1))
        self.embed = embedding(32, 64)
        self.dim = 32 + 64

    def forward(self, image):
        x = self.conv(image)  # (N,16,h,w)
        weights = x.flatten(2).softmax(-1).view_as(x)
        _, _, height, width = x.shape
        if min(height, width) == 1:
            raise ValueError("the convolutions leave one row or one column of an image")
        rows = torch.linspace(-1, 1, height, device=x.device)
        columns = torch.linspace(-1, 1, width, device=x.device)
        mean_row = weights.sum(3) @ rows  # (N,16)
        mean_column = weights.sum(2) @ columns  # (N,16)
        points = torch.cat([mean_row, mean_column], 1)  # (N,32): 16 positions
        return torch.cat([points, self.embed(points)], 1)


class Encoder(nn.Module):  # hybrid: images
    """The features of all cameras and vectors, side by side.
    (N,H,W,channels) uint8 and (N,n) float32 -> (N,D)"""

    def __init__(self, obs_shapes: dict[str, tuple]):
        super().__init__()
        self.image_keys = [key for key, shape in obs_shapes.items() if len(shape) == 3]
        self.vector_keys = [key for key in obs_shapes if key not in self.image_keys]
        state_dim = sum(obs_shapes[key][0] for key in self.vector_keys)
        self.dim = state_dim
        if self.image_keys:  # one encoder for all cameras, made for the one with the most rows
            self.image = ImageEncoder(max(obs_shapes[key] for key in self.image_keys))
            self.dim += self.image.dim * len(self.image_keys)
        if self.image_keys and self.vector_keys:
            self.embed_state = embedding(state_dim, 64)
            self.dim += 64

    def forward(self, obs):
        parts = []
        for key in self.image_keys:
            image = obs[key].permute(0, 3, 1, 2).float() / 255 - 0.5
            parts.append(self.image(image))
        if self.vector_keys:
            state = torch.cat([obs[key] for key in self.vector_keys], 1)
            parts.append(state)
            if self.image_keys:
                parts.append(self.embed_state(state))
        return torch.cat(parts, 1)


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


def grasp_target(rewards, grasp_penalty, masks, next_q, next_q_target, gamma):
    """Double DQN: the online network selects, the target network evaluates.  (N,G) -> (N,)"""
    best = next_q.argmax(1, keepdim=True)
    next_value = next_q_target.gather(1, best).squeeze(1)
    return td_target(rewards + grasp_penalty, masks, next_value, gamma)


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


class SACHybridAgent(nn.Module):
    """Actor, critics and target networks. A batch is a dict of tensors:

    obs, next_obs                     dicts of (N,H,W,channels) uint8 and (N,n) float32
    actions, grasps                   (N,C) in [-1,1]; (N,) index of the gripper command
    rewards, masks, grasp_penalty     (N,)   masks: 0 where the episode terminated
    is_demo                           (N,)   True on rows of demo_rb, interventions included
    """

    def __init__(
        self,
        image_keys,
        continuous_action_dim: int,
        grasp_action_dim: int = 0,
        device="cpu",
        args=None,
        obs_shapes: dict[str, tuple] | None = None,
    ):
        super().__init__()
        num_grippers = {0: 0, 3: 1, 9: 2}[grasp_action_dim]  # hybrid: grasp; three commands each
        self.layout = ActionLayout(continuous_action_dim + num_grippers, num_grippers)
        # Minus half of the number of action dims with grippers, as in HIL-SERL
        self.target_entropy = -0.5 * self.layout.action_dim
        obs_shapes = obs_shapes or dict.fromkeys(image_keys, (32, 32, 3))
        self.make_networks(args or Args(), obs_shapes, device)

    def make_networks(self, args, obs_shapes, device):
        """Make new weights and optimizers. `load` calls this again, with the sizes of its file."""
        torch.manual_seed(args.seed)
        self.args = args
        self.obs_shapes = obs_shapes
        action_dim = len(self.layout.continuous)
        encoder = Encoder(obs_shapes)
        self.critic = nn.Module()
        self.critic.encoder = encoder  # the actor uses it, too, but only the critics train it
        self.critic.qf = QEnsemble(
            args.num_critics, encoder.dim + action_dim, args.hidden_size, args.layer_norm
        )
        if self.layout.num_grippers:  # hybrid: grasp
            self.critic.discrete_qf = mlp(
                encoder.dim, self.layout.grasp_dim, args.hidden_size, args.layer_norm
            )
        self.critic_target = copy.deepcopy(self.critic).requires_grad_(False)
        self.actor = mlp(encoder.dim, 2 * action_dim, args.hidden_size, args.layer_norm)
        # alpha() is the softplus of this parameter. log(expm1(x)) is the inverse of softplus.
        self.raw_alpha = nn.Parameter(torch.tensor(math.log(math.expm1(args.init_alpha))))
        self.register_buffer("skipped_steps", torch.tensor(0.0))
        self.updates = 0
        self.to(device)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), args.lr, fused=True)
        self.actor_optimizer = torch.optim.Adam(
            [*self.actor.parameters(), self.raw_alpha], args.lr, fused=True
        )

    def alpha(self):
        return F.softplus(self.raw_alpha)  # stays positive

    def noise(self, like, rng):
        return torch.randn(like.shape, generator=rng).to(like)  # equal on every device

    def policy(self, features):
        """The mean and the standard deviation of an action before the tanh.  (N,D) -> 2 x (N,C)"""
        mean, log_std = self.actor(features).chunk(2, -1)
        return mean, log_std.clamp(math.log(1e-5), math.log(5)).exp()

    def update(self, batch: dict, train_actor: bool = True) -> dict:
        args = self.args
        # The seed depends on the number of the update, so --resume needs no state of a generator.
        rng = torch.Generator().manual_seed(args.seed * 1_000_003 + self.updates)
        self.updates += 1

        # 1 critics
        with torch.no_grad():
            next_features = self.critic.encoder(batch["next_obs"])
            next_features_target = self.critic_target.encoder(batch["next_obs"])
            next_mean, next_std = self.policy(next_features)
            noise = self.noise(next_mean, rng)
            next_actions, next_logprobs = tanh_normal(next_mean, next_std, noise)
            next_q = self.critic_target.qf(next_features_target, next_actions)  # (E,N)
            if args.num_sampled_critics < args.num_critics:  # REDQ (arXiv:2101.05982)
                drawn = torch.randperm(args.num_critics, generator=rng)[: args.num_sampled_critics]
                next_q = next_q[drawn.to(next_q.device)]
            next_value = next_q.min(0).values  # (N,)
            if args.backup_entropy:
                next_value = next_value - self.alpha() * next_logprobs
            q_target = td_target(batch["rewards"], batch["masks"], next_value, args.gamma)

        features = self.critic.encoder(batch["obs"])
        q_values = self.critic.qf(features, batch["actions"])  # (E,N)
        critic_losses = {"critic_loss": (q_values - q_target).square().mean()}

        if self.layout.num_grippers:  # hybrid: grasp
            with torch.no_grad():
                grasp_q_target = grasp_target(
                    batch["rewards"],
                    batch["grasp_penalty"],
                    batch["masks"],
                    self.critic.discrete_qf(next_features),
                    self.critic_target.discrete_qf(next_features_target),
                    args.gamma,
                )
            grasp_q = self.critic.discrete_qf(features).gather(1, batch["grasps"][:, None])
            grasp_critic_loss = (grasp_q.squeeze(1) - grasp_q_target).square().mean()
            critic_losses["grasp_critic_loss"] = grasp_critic_loss

        self.skipped_steps += gradient_step(sum(critic_losses.values()), self.critic_optimizer)

        # 2 actor and temperature
        actor_losses = {}
        if train_actor:
            # The features are from before the step of the encoder above, and qf is from after it. A
            # second pass through the encoder would give new features, and take time.
            features = features.detach()
            alpha = self.alpha()
            mean, std = self.policy(features)
            actions, logprobs = tanh_normal(mean, std, self.noise(mean, rng))
            # SAC takes the minimum of the critics here, RLPD and HIL-SERL take the mean.
            objective = self.critic.qf(features, actions).mean(0) - alpha.detach() * logprobs
            entropy = -logprobs.detach().mean()
            actor_losses["actor_loss"] = -objective.mean()
            actor_losses["alpha_loss"] = alpha * (entropy - self.target_entropy)

            if args.bc_weight:  # hybrid: cloning
                distance = (mean.tanh() - batch["actions"]).square().sum(1)  # (N,)
                num_demo_rows = batch["is_demo"].sum().clamp(min=1)
                bc_loss = (distance * batch["is_demo"]).sum() / num_demo_rows
                actor_losses["bc_loss"] = args.bc_weight * bc_loss

            self.skipped_steps += gradient_step(sum(actor_losses.values()), self.actor_optimizer)

        # 3 target networks
        with torch.no_grad():
            slow = list(self.critic_target.parameters())
            torch._foreach_lerp_(slow, list(self.critic.parameters()), args.tau)
        stats = critic_losses | actor_losses
        stats |= {"q_values": q_values.mean(), "alpha": self.alpha()}
        return {name: value.detach() for name, value in stats.items()}

    def update_bc(self, batch: dict) -> dict:  # hybrid: cloning
        """Imitate: regress the motion of the arm and classify the gripper command. Both losses
        train the encoder, too. Neither trains the standard deviation of the policy."""
        self.updates += 1
        features = self.critic.encoder(batch["obs"])
        mean, _ = self.policy(features)
        distance = (mean.tanh() - batch["actions"]).square().sum(1)  # (N,)
        losses = {"actor_loss": distance.mean()}
        if self.layout.num_grippers:  # hybrid: grasp
            logits = self.critic.discrete_qf(features)
            losses["grasp_critic_loss"] = F.cross_entropy(logits, batch["grasps"])
        self.skipped_steps += gradient_step(
            sum(losses.values()), self.critic_optimizer, self.actor_optimizer
        )
        return {name: value.detach() for name, value in losses.items()}

    @torch.no_grad()
    def act(self, obs: dict[str, np.ndarray], noise=0.0):
        """The arm gets tanh(mean + noise * std), the grippers get the best grasp.
        -> (A,) in [-1,1]"""
        tensors = {}
        for key, value in select_obs(obs, self.obs_shapes).items():
            tensors[key] = torch.from_numpy(value)[None].to(self.raw_alpha.device)
        features = self.critic.encoder(tensors)
        mean, std = self.policy(features)
        action = torch.empty(self.layout.action_dim)
        action[self.layout.continuous] = (mean.cpu() + std.cpu() * noise)[0].tanh()
        if self.layout.num_grippers:  # hybrid: grasp
            best = self.critic.discrete_qf(features).argmax().item()
            action[self.layout.gripper] = self.layout.grasps[best]
        return action.numpy()

    def acting_parameters(self):
        """The parameters that `act` needs"""
        parameters = [*self.actor.parameters(), *self.critic.encoder.parameters()]
        if self.layout.num_grippers:  # hybrid: grasp
            parameters += self.critic.discrete_qf.parameters()
        return parameters

    def acting_weights(self):
        """A copy of these parameters on the CPU, as one vector"""
        return nn.utils.parameters_to_vector(self.acting_parameters()).detach().cpu()

    def checkpoint(self) -> dict:
        state = dict(
            model=self.state_dict(),
            critic_optimizer=self.critic_optimizer.state_dict(),
            actor_optimizer=self.actor_optimizer.state_dict(),
            updates=self.updates,
            args=asdict(self.args),
            obs_shapes=self.obs_shapes,
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

    def load(self, checkpoint):
        """Load final_model.pth, given as a path or as a loaded dict. Options and shapes come from
        the file; the action dims must be those of this agent."""
        if not isinstance(checkpoint, dict):
            checkpoint = torch.load(checkpoint, map_location="cpu", weights_only=True)
        args = Args(**checkpoint["args"])
        self.make_networks(args, checkpoint["obs_shapes"], self.raw_alpha.device)
        self.restore(checkpoint)


# --- buffer ---
# A transition is one numpy record. As bytes it is written to records.bin and sent to rank 0.
# of the episode so far, whose success rate is 0 or 1
RESULTS = ("success_rate", "episodic_return", "episodic_length")
SCALARS = (
    "rewards",
    "masks",  # 0 where the episode terminated
    "dones",  # 1 where the episode ended, also by a time limit
    "grasp_penalty",
    "interventions",  # 1 if a human replaced the action
    "takeovers",  # 1 on the first step of an intervention
    "demos",  # 1 in a demonstration
    *RESULTS,
)


def make_record_dtype(obs_shapes: dict[str, tuple], action_dim):
    frame = []
    for key, shape in obs_shapes.items():
        frame.append((key, np.uint8 if len(shape) == 3 else np.float32, shape))
    columns = [("obs", frame), ("next_obs", frame), ("actions", np.float32, (action_dim,))]
    return np.dtype(columns + [(name, np.float32) for name in SCALARS])


class FrameBuffer:
    """A ring of frames that stores each frame once. An episode of n transitions takes n + 1 slots
    in a row.

    The slot of a frame also has the action, the reward and so on of the transition that ends with
    this frame. The transition starts with the frame in the slot before.
    """

    def __init__(self, capacity, record_dtype):
        names = ("next_obs", "actions", "rewards", "masks", "grasp_penalty")
        slot_dtype = [(name, record_dtype[name]) for name in names]
        self.slots = np.zeros(capacity, slot_dtype)  # memory is taken when a slot is written
        self.is_end = np.zeros(capacity, bool)  # a transition ends in this slot
        self.num_frames = 0  # written so far

    def __len__(self):
        return len(self.ends())

    def ends(self):
        """The slots in which a transition ends"""
        return np.flatnonzero(self.is_end)

    def write_frame(self, frame, is_end):
        """Write the next slot.  -> its number"""
        slot = self.num_frames % len(self.slots)
        self.slots["next_obs"][slot] = frame
        self.is_end[slot] = is_end
        self.is_end[(slot + 1) % len(self.slots)] = False  # the first frame of this one is gone
        self.num_frames += 1
        return slot

    def insert(self, record):
        """Write the frames of a transition. If its first frame equals the newest one, the episode
        continues, and this frame is not written again."""
        newest = self.slots["next_obs"][(self.num_frames - 1) % len(self.slots)]
        if self.num_frames == 0 or newest.tobytes() != record["obs"].tobytes():
            self.write_frame(record["obs"], False)
        end = self.write_frame(record["next_obs"], True)
        for name in ("actions", "rewards", "masks", "grasp_penalty"):
            self.slots[name][end] = record[name]

    def read(self, ends):
        """The transitions that end in these slots.  -> the slots (N,), their first frames (N,)"""
        return self.slots[ends], self.slots["next_obs"][ends - 1]


def store(record, online_rb, demo_rb):
    """An intervention goes into both buffers."""
    if not record["demos"]:
        online_rb.insert(record)
    if record["demos"] or record["interventions"]:
        demo_rb.insert(record)


def split_batch(batch_size, num_online, num_demo, demo_ratio):
    """The number of rows from online_rb and from demo_rb. No rows come from an empty buffer."""
    if num_demo == 0:
        return batch_size, 0
    if num_online == 0:
        return 0, batch_size
    num_demo_rows = math.floor(batch_size * demo_ratio)
    return batch_size - num_demo_rows, num_demo_rows


def random_shift(images, pad, rng):  # hybrid: images
    """Move each image by up to `pad` pixels and repeat its edges (arXiv:2107.09645).
    (N,H,W,channels)"""
    num_images, height, width, _ = images.shape
    tops, lefts = rng.integers(0, 2 * pad + 1, (2, num_images))
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), "edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), (1, 2))
    shifted = windows[np.arange(num_images), tops, lefts]  # (N,channels,H,W)
    return shifted.transpose(0, 2, 3, 1)


def to_tensors(rows, device):
    """A dict of tensors, nested like the dtype of the rows."""
    if rows.dtype.names:
        return {name: to_tensors(rows[name], device) for name in rows.dtype.names}
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device)


def random_numbers(seed, purpose: str, number):
    """A generator for each (seed, purpose, number). There is no generator state to save."""
    return np.random.default_rng([seed, *purpose.encode(), number])


def sample_batch(agent, online_rb, demo_rb) -> dict:
    """The online rows come first, then the demonstrations. The seed and the number of the update
    decide which rows these are."""
    args = agent.args
    layout = agent.layout
    device = agent.raw_alpha.device
    rng = random_numbers(args.seed, "batch", agent.updates)
    demo_ratio = 1.0 if args.algorithm == "bc" else args.demo_ratio
    online_ends = online_rb.ends()
    demo_ends = demo_rb.ends()
    num_online, num_demo = split_batch(
        args.batch_size, len(online_ends), len(demo_ends), demo_ratio
    )
    # with replacement
    online_slots, online_frames = online_rb.read(rng.choice(online_ends, num_online))
    demo_slots, demo_frames = demo_rb.read(rng.choice(demo_ends, num_demo))
    slots = np.concatenate([online_slots, demo_slots])
    frames = np.concatenate([online_frames, demo_frames])
    if args.augment_pad:  # hybrid: images
        for obs in (frames, slots["next_obs"]):
            for key in agent.critic.encoder.image_keys:
                obs[key] = random_shift(obs[key], args.augment_pad, rng)
    batch = to_tensors(slots, device)
    batch["obs"] = to_tensors(frames, device)
    batch["is_demo"] = torch.arange(len(slots), device=device) >= num_online
    if layout.num_grippers:  # hybrid: grasp; Q(s,a) gets the continuous dims only
        batch["grasps"] = layout.grasp_index(batch["actions"][:, layout.gripper])
        batch["actions"] = batch["actions"][:, layout.continuous]
    return batch


def learn(state):
    """Make one update."""
    agent = state.agent
    args = agent.args
    batch = sample_batch(agent, state.online_rb, state.demo_rb)
    if args.algorithm == "bc":
        stats = agent.update_bc(batch)
    else:
        train_actor = (agent.updates + 1) % args.cta_ratio == 0  # update() adds 1 to agent.updates
        stats = agent.update(batch, train_actor)
    stats = {f"losses/{name}": value for name, value in stats.items()}
    stats["buffer/demo_rows"] = batch["is_demo"].sum()
    stats["buffer/online_rows"] = args.batch_size - stats["buffer/demo_rows"]
    state.progress.add(stats)


# --- rollout ---
def hold_grippers(commands, last_commands):
    """Round the commands, and replace 0, which is "stay", by the last command.
    -> commands, number of grippers that open or close now"""
    commands = np.round(commands)  # 0.51 opens completely
    commands = np.where(commands == 0, last_commands, commands)
    return commands, int((commands != last_commands).sum())


class Robot:
    """An environment with its current episode, and a copy of the policy that acts in it. Actions
    are in [-1,1]; `step` converts them to the units of the environment."""

    def __init__(self, args):
        self.env = make_env(args)
        try:
            self.inspect_env(args)
        except BaseException:  # sys.exit() included
            self.close()
            raise
        self.is_done = True  # the first turn starts an episode
        self.acting_agent = self.make_agent("cpu")

    def inspect_env(self, args):
        """Read the spaces of the environment, and check that they fit the options."""
        space = self.env.action_space
        num_arms, num_grippers = SETUP_MODES[args.setup_mode]
        is_vector = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
        if (
            not (is_vector and space.is_bounded())
            or len(space.low) % num_arms
            or len(space.low) <= num_grippers
        ):
            sys.exit(
                f"--env-id {args.env_id} has actions {space}: expected a bounded Box that fits "
                f"--setup-mode {args.setup_mode}"
            )
        parameters = inspect.signature(self.env.reset).parameters
        self.takes_seed = bool({"seed", "kwargs"} & parameters.keys())
        first_obs = self.reset_env(seed=0)
        keys = args.image_keys or sorted(first_obs)
        first_obs = select_obs(first_obs, dict.fromkeys(keys))
        obs_shapes = {key: list(value.shape) for key, value in first_obs.items()}
        spaces = dict(obs_shapes=obs_shapes, low=space.low.tolist(), high=space.high.tolist())
        self.set_spaces(args, spaces)

    def set_spaces(self, args, spaces):
        self.args = args
        self.spaces = spaces
        self.obs_shapes = {key: tuple(shape) for key, shape in spaces["obs_shapes"].items()}
        self.low = np.float32(spaces["low"])  # bounds of the actions of the environment
        self.high = np.float32(spaces["high"])
        self.center = (self.high + self.low) / 2
        self.scale = (self.high - self.low) / 2
        self.layout = ActionLayout(len(self.low), SETUP_MODES[args.setup_mode][1])
        self.record_dtype = make_record_dtype(self.obs_shapes, len(self.low))

    def make_agent(self, device):
        return SACHybridAgent(
            image_keys=list(self.obs_shapes),
            continuous_action_dim=len(self.layout.continuous),
            grasp_action_dim=self.layout.grasp_dim,
            device=device,
            args=self.args,
            obs_shapes=self.obs_shapes,
        )

    def normalize(self, name, action):
        """Convert an action of the environment to [-1,1]."""
        action = to_array(name, action, self.center.shape)
        return ((action - self.center) / self.scale).clip(-1, 1)

    def reset_env(self, seed):
        if self.takes_seed:
            raw, _ = self.env.reset(seed=seed)
        else:
            raw, _ = self.env.reset()
        return as_dict(raw)

    def reset(self, seed, allow_intervention=False):
        env = self.env
        while hasattr(env, "step"):  # the human may be in any wrapper
            env.allow_intervention = allow_intervention
            env = getattr(env, "env", None)
        self.obs = select_obs(self.reset_env(seed), self.obs_shapes)
        self.is_done = False
        self.last_commands = np.ones(self.layout.num_grippers)  # open
        self.was_human = False
        self.rewards = []

    def step(self, action):
        """Make one step of the environment.  -> its record, which has the action of the human if a
        human acted"""
        # 1 send the action of the policy; instead of "stay" a gripper gets its last command
        grippers = self.layout.gripper  # hybrid: grasp
        command = action.copy()
        command[grippers], _ = hold_grippers(action[grippers], self.last_commands)
        command = to_array("the action", self.center + self.scale * command)  # it is finite
        command = command.clip(self.low, self.high)  # rounding may exceed the bounds
        raw, reward, terminated, truncated, info = self.env.step(command)
        next_obs = select_obs(as_dict(raw), self.obs_shapes)

        # 2 if a human acted instead, `action` is from here on the action of the human
        is_human = info.get("intervene_action") is not None
        if is_human:
            human_action = torch.as_tensor(info["intervene_action"]).detach().cpu().numpy()
            action = self.normalize("intervene_action", human_action)
        self.last_commands, num_toggles = hold_grippers(action[grippers], self.last_commands)
        self.rewards.append(to_array("reward", reward, (1,)).item())

        # 3 record what happened; `action` still has "stay", because the record is for learning
        penalty = info.get("grasp_penalty", GRASP_PENALTY * num_toggles)
        columns = dict(
            obs=tuple(self.obs.values()),
            next_obs=tuple(next_obs.values()),
            actions=action,
            rewards=self.rewards[-1],
            masks=not (terminated or (truncated and self.args.timeout_terminal)),
            dones=terminated or truncated,
            grasp_penalty=to_array("grasp_penalty", penalty, (1,)).item(),
            interventions=is_human,
            takeovers=is_human and not self.was_human,
            success_rate=has_succeeded(self.rewards, terminated, info),
            episodic_return=sum(self.rewards),
            episodic_length=len(self.rewards),
        )
        record = np.zeros((), self.record_dtype)
        for name, value in columns.items():
            record[name] = value
        self.was_human = is_human
        self.obs = next_obs
        self.is_done = bool(record["dones"])
        return record

    def take_turn(self, step, weights):
        """Make one step with these weights. Its number decides its noise.  -> its record"""
        nn.utils.vector_to_parameters(weights, self.acting_agent.acting_parameters())
        rng = random_numbers(self.args.seed, "step", step)
        if self.is_done:
            if self.args.intervention_steps:
                self.env.intervention_probability = 1 - step / self.args.intervention_steps
            self.reset(int(rng.integers(2**31)), allow_intervention=True)
        return self.step(explore(self.acting_agent, self.obs, step, rng))

    def play(self, act, seed):
        """Play an episode of act(obs) without interventions.  -> its records"""
        self.reset(seed)
        records = []
        while not self.is_done:
            records.append(self.step(act(self.obs)))
        return np.stack(records)

    def play_policy(self, seed, weights):
        """Play an episode of the policy without noise.
        -> the last record; `interventions` is 1 if a human acted in the episode"""
        nn.utils.vector_to_parameters(weights, self.acting_agent.acting_parameters())
        records = self.play(self.acting_agent.act, seed)
        records[-1]["interventions"] = records["interventions"].max()
        return records[-1]

    def close(self):
        if hasattr(self.env, "close"):
            self.env.close()


def explore(agent, obs, step, rng):
    """A sample of the policy, or a random action in the first random_steps"""
    layout = agent.layout
    if step < agent.args.random_steps:
        action = rng.uniform(-1, 1, layout.action_dim).astype(np.float32)
        action[layout.gripper] = rng.integers(-1, 2, layout.num_grippers)  # hybrid: grasp
        return action
    if agent.args.algorithm == "bc":  # no loss has trained the standard deviation
        return agent.act(obs)
    return agent.act(obs, torch.from_numpy(rng.standard_normal(len(layout.continuous), np.float32)))


class ActorThread(threading.Thread):
    """Takes environment steps with the newest weights, and hands their records to the learner.

    After each step the actor waits until the learner has updated. With --utd 0 it waits only where
    an episode ends, until the learner has evaluated and saved.
    """

    def __init__(self, robot, steps, newest, arrivals):
        super().__init__(daemon=True)
        self.robot = robot
        self.steps = steps
        self.newest = newest
        self.arrivals = arrivals
        self.may_continue = threading.Semaphore(0)
        self.start()

    def run(self):
        try:
            for step in self.steps:  # all actors share this iterator
                record = self.robot.take_turn(step, self.newest["weights"])
                self.arrivals.put((self, record))
                if self.waits_after(record):
                    self.may_continue.acquire()
        except BaseException as error:
            self.arrivals.put((self, error))  # instead of a record; the learner raises it

    def waits_after(self, record):
        return self.robot.args.utd > 0 or record["dones"] > 0


# --- evaluate ---
def evaluate_policy(agent, robot, group, first_seed, num_episodes):
    """Play the policy without noise. Every run has the same episodes if reset() takes a seed.

    Episodes in which a human acted are failures, and the other means leave them out.
    """
    weights = agent.acting_weights()
    results = np.zeros(num_episodes, robot.record_dtype)
    for i in range(num_episodes):
        results[i] = robot.play_policy(first_seed + i, weights)
    results = results[results["interventions"] == 0]
    num_helped = num_episodes - len(results)
    if num_helped:
        print(f"a human took over in {num_helped} of {num_episodes} episodes: no success there")
    if len(results) == 0:
        return {}
    metrics = {f"{group}/{name}": float(results[name].mean()) for name in RESULTS}
    metrics[f"{group}/success_rate"] *= len(results) / num_episodes
    lengths = results["episodic_length"][results["success_rate"] > 0]
    metrics[f"{group}/steps_to_success"] = float(lengths.mean()) if len(lengths) else math.nan
    return metrics


def select_policy(state, robot):
    """Evaluate the policy, and keep it if no earlier one was better: by success, then by return,
    then by speed.  -> the metrics of the evaluation"""
    agent = state.agent
    progress = state.progress
    row = evaluate_policy(agent, robot, "eval", 10_000, agent.args.eval_episodes)
    if row:
        score = [row["eval/success_rate"], row["eval/episodic_return"]]
        score.append(-row["eval/episodic_length"])
        # Python compares lists by the first entry that differs; an empty list is the smallest.
        if score >= progress.best_score:
            progress.best_score = score
            progress.best_agent = agent.checkpoint()
    return row


# --- main ---
@dataclass
class Progress:
    """The state of a run besides the agent and the buffers"""

    global_step: int = 0  # environment steps
    updates_due: float = 0.0
    num_bytes: int = 0  # of records.bin
    human_steps: int = 0
    human_takeovers: int = 0
    sums: dict = field(default_factory=dict)  # of each statistic since the last logged line
    counts: dict = field(default_factory=dict)  # numbers in each sum
    best_score: list[float] = field(default_factory=list)
    best_agent: dict | None = None
    spaces: dict = field(default_factory=dict)  # of the robot; --resume compares them

    def add(self, stats):
        for name, value in stats.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def take_means(self):
        """The mean of each statistic since the last call. It is NaN if one of the numbers is."""
        means = {name: float(value) / self.counts[name] for name, value in self.sums.items()}
        self.sums = {}
        self.counts = {}
        return means


@dataclass
class State:
    """What a run consists of"""

    run: "Run"
    agent: SACHybridAgent
    online_rb: FrameBuffer
    demo_rb: FrameBuffer
    progress: Progress
    save_dir: Path  # of checkpoint_{step}.pth and final_model.pth


def train(args, device, robots):
    """The learner: receive transitions, update, evaluate, log and save.  -> the last metrics"""
    state = start_run(args, device, robots[0])
    run = state.run
    agent = state.agent
    progress = state.progress
    record_file = open(run.dir / "records.bin", "ab")
    newest = {"weights": agent.acting_weights()}  # the actors read this entry before each step
    arrivals = queue.Queue()  # pairs (actor, record)
    steps = iter(range(progress.global_step, args.max_steps))
    is_eval_due = progress.global_step == 0  # the first evaluation follows the first episode
    is_save_due = False
    signals = Signals()
    bar = tqdm(total=args.max_steps, initial=progress.global_step, disable=None, file=sys.stdout)
    actors = [ActorThread(robot, steps, newest, arrivals) for robot in robots]
    try:
        while progress.global_step < args.max_steps:
            # 1 receive a transition; with --utd 0 update until one arrives
            if args.utd == 0 and progress.global_step > args.training_starts:
                while arrivals.empty():
                    learn(state)
            actor, record = arrivals.get()
            if isinstance(record, BaseException):  # the actor has failed
                raise record
            progress.global_step += 1
            is_last = progress.global_step == args.max_steps
            episode_ended = record["dones"] > 0
            store(record, state.online_rb, state.demo_rb)
            record_file.write(record.tobytes())

            # 2 update `utd` times, and copy the weights to the actors
            if progress.global_step > args.training_starts:
                # With --utd 0 one update per episode, because records may always wait in step 1
                progress.updates_due += args.utd or float(episode_ended)
            while progress.updates_due >= 1:
                progress.updates_due -= 1
                learn(state)
            newest["weights"] = agent.acting_weights()

            # 3 evaluate between two episodes; these episodes select the best policy
            row = {}
            is_eval_due = is_eval_due or progress.global_step % args.eval_every == 0
            if is_last or (episode_ended and is_eval_due):
                row = select_policy(state, actor.robot)
                is_eval_due = False

            # 4 log
            count_record(progress, record)
            if is_last or progress.global_step % args.log_interval == 0:
                row |= take_metrics(state)
            if row:
                run.log({"global_step": progress.global_step} | row)
                show_status(bar, run.newest)
            bar.update()

            # 5 save; what --resume needs is saved between two episodes
            if progress.global_step % args.save_every == 0:
                name = f"checkpoint_{progress.global_step}.pth"
                write_checkpoint(state.save_dir / name, agent.checkpoint())
                is_save_due = True
            if is_save_due and episode_ended:
                save_run(state, record_file)
                is_save_due = False
            if signals.received and episode_ended:
                break
            if actor.waits_after(record):
                actor.may_continue.release()
    finally:  # after the last step, a signal or an error: keep what was learned
        list(steps)  # takes the other steps away: each robot ends its step and begins no other one
        save_run(state, record_file)
        for actor in actors:
            actor.may_continue.release()
            actor.join()  # the thread leaves the environment; another Ctrl-C does not wait for it
        record_file.close()
        signals.release()
    bar.close()
    if progress.global_step >= args.max_steps:
        finish_run(state, robots[0])
    else:
        print(f"stopped and saved; continue with --run-dir {run.dir} --resume")
    return run.newest


def count_record(progress, record):
    """A human may have helped in these episodes: evaluations show what the policy can do."""
    progress.human_steps += int(record["interventions"])
    progress.human_takeovers += int(record["takeovers"])
    progress.add({"charts/intervention_rate": float(record["interventions"])})
    if record["dones"]:
        progress.add({f"charts/{name}": float(record[name]) for name in RESULTS})


def take_metrics(state):
    """The means since the last call, and the newest numbers"""
    progress = state.progress
    return progress.take_means() | {
        "charts/intervention_steps": progress.human_steps,
        "charts/intervention_count": progress.human_takeovers,
        "charts/updates": state.agent.updates,
        "charts/SPS": progress.global_step / (time.time() - state.run.start_time),
        "losses/skipped_steps": state.agent.skipped_steps.item(),
        "buffer/online_size": len(state.online_rb),
        "buffer/demo_size": len(state.demo_rb),
    }


def main(args: Args) -> dict[str, float]:
    if args.create_data or args.test:
        return create_data_or_test(args)
    is_new = args.run_dir is None or not Path(args.run_dir).exists()
    if not is_new and not args.resume:
        sys.exit(f"--run-dir {args.run_dir} already exists; runs are never overwritten")
    if is_new and args.save_dir and any(Path(args.save_dir).glob("*.pth")):
        sys.exit(
            f"--save-dir {args.save_dir} has models of another run; they are never overwritten"
        )
    torch.set_num_threads(args.num_threads)
    device = pick_device(args.device, built_in=args.env_id == BUILT_IN)
    groups = join_ranks()
    if rank() > 0:
        Signals()  # the learner decides when the run ends
        with closing(Robot(args)) as robot:
            serve(robot, groups[rank()])
        return {}
    robots = [RemoteRobot(args, peer, group) for peer, group in groups.items()] or [Robot(args)]
    try:
        return train(args, device, robots)
    finally:
        for robot in robots:
            robot.close()


# --- task: environments ---
def make_env(args: Args):
    """The built-in environment, a class in file.py:Class, or a Gymnasium id.

    A class needs reset() and step(). Its constructor gets --image-keys (by default ["image"]) and
    the number of action dims. action_space, render() and close() are optional. The attribute
    `allow_intervention` is set from outside: if it is False, no human may act. After a reset the
    grippers are open. The info of step() may have

        intervene_action                 the action of a human, which replaced the given one
        grasp_penalty                    replaces the penalty of this script
        succeed, success, is_success     whether the episode succeeded
    """
    num_arms, num_grippers = SETUP_MODES[args.setup_mode]
    if args.env_id == BUILT_IN:
        return BarWorld(args.setup_mode, args.human)
    if ".py:" in args.env_id:
        path, _, name = args.env_id.rpartition(":")
        sys.path.insert(0, str(Path(path).resolve().parent))  # the file may import its neighbors
        env_class = runpy.run_path(path)[name]
        action_dim = 6 * num_arms + num_grippers
        env = env_class(list(args.image_keys or ["image"]), action_dim)
        if not hasattr(env, "action_space"):
            env.action_space = gym.spaces.Box(-1, 1, (action_dim,))
    else:
        env = gym.make(args.env_id)
        if "rgb_array" in env.metadata.get("render_modes", []):
            env.close()
            env = gym.make(args.env_id, render_mode="rgb_array")
    return env


def to_array(name, value, shape: tuple | None = None):
    """A copy: an image as uint8 (H,W,channels), anything else as a float32 vector. A leading axis
    of 1 is removed."""
    if not isinstance(value, np.ndarray | np.generic | int | float):
        raise ValueError(f"{name} is a {type(value).__name__}: expected an array or a number")
    value = np.atleast_1d(value)
    if value.ndim in (2, 4) and len(value) == 1:
        value = value[0]
    is_image = value.dtype == np.uint8 and value.ndim == 3 and value.shape[-1] <= min(value.shape)
    if not (is_image or value.ndim == 1) or shape not in (None, value.shape):
        raise ValueError(
            f"{name} is {value.dtype} {value.shape}: expected {shape or 'a vector or (H,W,channels)'}"
            "; images are uint8"
        )
    value = value.astype(np.uint8 if is_image else np.float32)
    if not np.isfinite(value).all():
        raise ValueError(f"{name} is not finite in float32")
    return value


def as_dict(raw):
    return raw if isinstance(raw, dict) else {"state": raw}


def select_obs(raw: dict, obs_shapes):
    """The part of an observation that the policy sees"""
    if not raw.keys() >= obs_shapes.keys():
        raise ValueError(f"the observation has {sorted(raw)}: expected {[*obs_shapes]}")
    return {key: to_array(key, raw[key], shape) for key, shape in obs_shapes.items()}


def has_succeeded(rewards, terminated, info=()) -> bool:
    """Whether an episode succeeded. Some environments say so in the info of the last step.
    Otherwise an episode succeeded if it terminated with its first positive reward."""
    for name in ("is_success", "success", "succeed"):
        if name in info:
            return bool(info[name])
    return bool(terminated and rewards[-1] > 0 and max(rewards[:-1], default=0) <= 0)


def direction(yaw):
    """The unit vector of this heading; a quarter turn is 1.  -> (x, y, z)"""
    angle = yaw * math.pi / 2
    return np.array([math.cos(angle), math.sin(angle), 0])


class BarWorld(gym.Env):
    """Each arm has a bar. With learned grippers, grip the bars and raise the arms above 0.5. With
    fixed grippers, move each arm to the pose of its bar.

    A pose is x, y, z, roll, pitch, yaw in [-1,1], with z in [0,1]. Only the image shows where the
    bar is. The reward is 1 on success, which ends the episode, and 0 before.
    """

    STEP = 0.3  # the longest motion of a step, in each dim of the pose
    TIME_LIMIT = 20
    SIZE = 32  # pixels
    LOWEST = np.array([-1, -1, 0, -1, -1, -1])  # pose; the highest is 1
    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}
    render_mode = "rgb_array"
    allow_intervention = True
    intervention_probability = 0.0  # of an episode; the human then acts until the episode ends

    def __init__(self, setup_mode="single-arm-learned-gripper", human="clumsy"):
        self.num_arms, self.num_grippers = SETUP_MODES[setup_mode]
        self.is_clumsy = human == "clumsy"
        self.tolerance = 0.2 if self.num_grippers else 0.15  # in every dim of the pose
        self.image_keys = ["image"] if self.num_arms == 1 else ["left_image", "right_image"]
        image_space = gym.spaces.Box(0, 255, (self.SIZE, self.SIZE, 3), np.uint8)
        spaces = dict.fromkeys(self.image_keys, image_space)
        spaces["state"] = gym.spaces.Box(-1, 1, (8 * self.num_arms,))
        self.observation_space = gym.spaces.Dict(spaces)
        self.action_space = gym.spaces.Box(-1, 1, (6 * self.num_arms + self.num_grippers,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_steps = 0
        self.pose = self.np_random.uniform(-0.5, 0.5, (self.num_arms, 6))
        self.pose[:, 2] += 0.8  # above the table
        self.pose = np.clip(self.pose, self.LOWEST, 1)
        self.bar = self.np_random.uniform(-0.75, 0.75, (self.num_arms, 6))
        self.bar[:, 2:5] = 0.0  # it lies flat
        self.is_open = np.ones(self.num_arms, bool)
        self.is_held = np.zeros(self.num_arms, bool)
        self.takeover_step = math.inf
        if self.np_random.random() < self.intervention_probability:
            self.takeover_step = self.np_random.integers(4, 11)
        return self.observe(), {}

    def observe(self):
        obs = {key: self.camera(arm) for arm, key in enumerate(self.image_keys)}
        state = np.column_stack([self.pose, self.is_open, self.is_held])
        obs["state"] = state.astype(np.float32).ravel()
        return obs

    def camera(self, arm):
        """The view from above: a red and a blue dot at the ends of the bar, a green dot at the arm.
        -> (H,W,3)"""
        half = 0.4 * direction(self.bar[arm, 5])
        center = self.bar[arm, :3]
        dots = np.stack([center + half, self.pose[arm, :3], center - half])[:, :2]  # (color,2)
        line = np.linspace(-1.2, 1.2, self.SIZE)[:, None, None]
        brightness = np.exp(-(((line - dots) / 0.15) ** 2))  # (SIZE,color,2)
        image = brightness[:, None, :, 1] * brightness[None, :, :, 0]  # (row,column,color)
        return (255 * image).astype(np.uint8)

    def render(self):
        """Each arm from above and, in the lower half, from the side; tilt does not show.
        -> (640,320*arms,3) uint8"""
        from PIL import Image, ImageDraw  # matplotlib installs it

        image = Image.new("RGB", (320 * self.num_arms, 640), "white")
        canvas = ImageDraw.Draw(image)
        for arm in range(self.num_arms):
            center = self.bar[arm, :3]
            half = 0.4 * direction(self.bar[arm, 5])
            finger = (0.22 if self.is_open[arm] else 0.08) * direction(self.pose[arm, 5] + 1)
            palm = np.array([0, 0, 0.3])
            lines = {
                "firebrick": [center, center + half],
                "royalblue": [center, center - half],
                "black": self.pose[arm, :3] + [-finger, palm - finger, palm + finger, finger],
            }
            for color, points in lines.items():
                x, y, z = 120 * np.transpose(points)  # pixels
                x += 320 * arm + 160
                canvas.line([*zip(x, 160 + y, strict=True)], color, 12)
                canvas.line([*zip(x, 595 - z, strict=True)], color, 12)
        return np.asarray(image)

    def step(self, action):
        info = {}
        if self.allow_intervention and self.num_steps >= self.takeover_step:
            action = info["intervene_action"] = self.human()
        action = np.reshape(action, (self.num_arms, -1))
        before = self.pose
        self.pose = np.clip(before + self.STEP * action[:, :6], self.LOWEST, 1)
        self.bar[self.is_held] += (self.pose - before)[self.is_held]
        is_near = (abs(self.pose - self.bar) < self.tolerance).all(1)
        success = is_near.all()
        if self.num_grippers:
            command = np.round(action[:, 6])
            closes = self.is_open & (command < 0)
            opens = command > 0
            self.is_held = (self.is_held | (closes & is_near)) & ~opens
            self.is_open = (self.is_open & ~closes) | opens
            self.bar[opens, 2:5] = 0.0  # an open gripper drops its bar, which then lies flat
            success = (self.is_held & (self.pose[:, 2] > 0.5)).all()
        self.num_steps += 1
        info["is_success"] = bool(success)
        truncated = self.num_steps >= self.TIME_LIMIT and not success
        return self.observe(), float(success), bool(success), bool(truncated), info

    def human(self):
        """Go straight to the bar, close the gripper, lift. The clumsy human moves with noise, at
        half speed, and sometimes gives a random command to the gripper."""
        target = self.bar.copy()
        target[self.is_held, 2] = 0.8
        move = np.clip((target - self.pose) / self.STEP, -1, 1)
        arrives = (abs(self.pose + self.STEP * move - self.bar) < self.tolerance / 2).all(1)
        grip = np.where(arrives & self.is_open, -1, 0)  # close
        grip[~self.is_open & ~self.is_held] = 1  # it closed on nothing, so it opens again
        if self.is_clumsy:
            noise = 0.35 if self.num_arms == 1 else 0.25
            move = 0.5 * move + self.np_random.normal(0, noise, move.shape)
            is_mistake = self.np_random.random(self.num_arms) < 0.1
            grip[is_mistake] = self.np_random.integers(-1, 2)
        if self.num_grippers:
            move = np.column_stack([move, grip])
        return np.clip(move, -1, 1).ravel().astype(np.float32)


# --- task: demonstrations ---
def make_demos(args, num_demos, success=True):
    """Episodes in which the scripted human succeeds, or random actions fail.  -> records"""
    if num_demos == 0:  # an environment without a scripted human
        return []
    robot = Robot(args)

    def act(obs):
        if success:
            return robot.env.human()
        return robot.env.np_random.uniform(-1, 1, robot.layout.action_dim).astype(np.float32)

    episodes = []
    attempt = 0
    while len(episodes) < num_demos:
        seed = random_numbers(args.seed, "demo", attempt).integers(2**31)
        episode = robot.play(act, int(seed))
        attempt += 1
        if episode["success_rate"][-1] == success:
            episodes.append(episode)
    return list(np.concatenate(episodes))


def write_demos(path, records):
    """Write a pickled list of transitions, as HIL-SERL does."""
    transitions = []
    for record in records:
        keys = record["obs"].dtype.names
        transition = dict(
            observations={key: record["obs"][key] for key in keys},
            actions=record["actions"],
            next_observations={key: record["next_obs"][key] for key in keys},
            rewards=float(record["rewards"]),
            masks=float(record["masks"]),
            dones=bool(record["dones"]),
        )
        transitions.append(transition)
    Path(path).write_bytes(pickle.dumps(transitions))


QUICK_TEST = dict(
    test=None, max_steps=60, training_starts=20, log_interval=20, eval_episodes=2, report_episodes=2
)


def create_data_or_test(args: Args):
    """--test quick trains in a temporary folder. --create-data makes data, --test full trains on
    it."""
    if args.test == "quick":
        with tempfile.TemporaryDirectory() as folder:
            return main(replace(args, **QUICK_TEST, run_dir=f"{folder}/run"))
    success_path = "test_data/success_demo.pkl"
    failure_path = "test_data/failure_demo.pkl"
    Path("test_data").mkdir(exist_ok=True)
    write_demos(success_path, make_demos(args, args.num_demos or 10))
    write_demos(failure_path, make_demos(args, 5, success=False))
    print(f"wrote {success_path} and {failure_path}, {args.setup_mode}")
    if args.create_data:
        return {}
    return main(replace(args, test=None, demo_paths=[success_path], failure_paths=[failure_path]))


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


def read_obs(transition, name, obs_shapes):
    """Read observations or next_observations: a dict, a vector, or columns of an .npz."""
    raw = transition.get(name)
    if raw is None:
        raw = {key.removeprefix(f"{name}/"): value for key, value in transition.items()}
    return tuple(select_obs(as_dict(raw), obs_shapes).values())


def read_file(path, robot):
    """The records of a .pkl or .npz file, whose actions are in the units of the environment.

    If `masks` is missing, it is 1 - dones: the target bootstraps at no end of an episode. If
    `grasp_penalty` is missing, it is computed from the commands of the gripper.
    """
    transitions = read_transitions(path)
    size = len(transitions) * robot.record_dtype.itemsize
    # A small pickle can name one array in many rows, and each row becomes a copy of it.
    if path.endswith(".pkl") and size > 2**26 + 20 * Path(path).stat().st_size:
        raise ValueError(f"it would take {size} bytes of memory")
    if not transitions:
        raise ValueError("there are no transitions")
    open_grippers = np.ones(robot.layout.num_grippers)
    last_commands = open_grippers
    for transition in transitions:
        record = np.zeros((), robot.record_dtype)
        record["obs"] = read_obs(transition, "observations", robot.obs_shapes)
        record["next_obs"] = read_obs(transition, "next_observations", robot.obs_shapes)
        record["actions"] = robot.normalize("actions", transition["actions"])
        commands = record["actions"][robot.layout.gripper]
        last_commands, num_toggles = hold_grippers(commands, last_commands)
        numbers = {"masks": 1.0 - transition["dones"], "grasp_penalty": GRASP_PENALTY * num_toggles}
        numbers |= transition.get("infos", {}) | transition  # HIL-SERL has the penalty in its infos
        for name in ("rewards", "dones", "masks", "grasp_penalty"):
            record[name] = to_array(name, numbers[name], (1,)).item()
        if not 0 <= record["masks"] <= 1:
            raise ValueError("masks must be in [0,1]")
        if record["dones"]:
            last_commands = open_grippers
        yield record


def read_demos(paths, robot):
    """The records of all files. A file that cannot be read ends the run with a sentence."""
    records = []
    for path in paths:
        row = 0
        try:
            for record in read_file(path, robot):
                records.append(record)
                row += 1
        except Exception as error:  # a damaged file can raise any type
            sys.exit(f"{path}, row {row}: {type(error).__name__}: {error}")
    return records


def read_records(path, record_dtype):
    """The records in a file, one by one"""
    with open(path, "rb") as file:
        while data := file.read(record_dtype.itemsize):
            yield np.frombuffer(data, record_dtype)[0]


def check_memory(num_bytes):
    """Refuse buffers that would not fit. They take memory only as they fill up: without this check
    a run would fail after many steps."""
    if hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if num_bytes > 0.9 * memory:
            sys.exit(f"--buffer-size: {num_bytes / 1e9:.0f} GB of frames do not fit into memory")


# --- video ---
def take_picture(robot, caption: str):
    """render() of the environment, or else the images that the policy sees, under a caption"""
    from PIL import Image, ImageDraw, ImageOps  # matplotlib installs it

    render = getattr(robot.env, "render", lambda: None)
    picture = render()
    if picture is None:
        picture = np.concatenate([value for value in robot.obs.values() if value.ndim == 3], 1)
    zoom = math.ceil(320 / len(picture))
    image = ImageOps.scale(Image.fromarray(picture), zoom, Image.Resampling.NEAREST)
    image = ImageOps.expand(image, (0, 30, 0, 0), "white")
    ImageDraw.Draw(image).text((14, 4), caption, "black", font_size=18)
    return image


def film(robot, player: str, act, seed):
    """Play an episode.  -> its pictures"""
    robot.reset(seed)
    pictures = [take_picture(robot, player)]
    while not robot.is_done:
        robot.step(act(robot.obs))
        pictures.append(take_picture(robot, player))
    return pictures


def write_video(path, robot, agent):
    """A GIF of the first three test episodes. In the built-in environment, the scripted human plays
    them beside the policy."""
    from PIL import Image

    players = {"policy": agent.act}
    if robot.args.env_id == BUILT_IN:
        players = {"human": lambda obs: robot.env.human(), "policy": agent.act}
    frames = []
    for seed in range(20_000, 20_000 + min(3, robot.args.report_episodes)):
        clips = [film(robot, player, act, seed) for player, act in players.items()]
        num_pictures = max(len(clip) for clip in clips) + 3  # the last picture stays for a moment
        for i in range(num_pictures):
            pictures = [clip[min(i, len(clip) - 1)] for clip in clips]
            frames.append(Image.fromarray(np.concatenate(pictures, 1)))
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=250, loop=0)


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
        name = f"{Path(__file__).stem}__{args.seed}__{int(time.time())}_{os.getpid()}"
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


STATUS = (
    "losses/critic_loss",
    "losses/grasp_critic_loss",
    "losses/actor_loss",
    "losses/alpha_loss",
    "losses/alpha",
    "losses/skipped_steps",
    "charts/intervention_rate",
    "eval/success_rate",
    "eval/steps_to_success",
)


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
    "success rate": ["charts/success_rate", "eval/success_rate"],  # with and without the human
    "environment steps to success": ["eval/steps_to_success"],
    "share of steps by the human": ["charts/intervention_rate"],
    "mean Q value (discounted return)": ["losses/q_values"],
}


def finish_run(state, robot):
    """Save the best policy, test it on new episodes, and draw the pictures."""
    run = state.run
    agent = state.agent
    args = agent.args
    global_step = state.progress.global_step
    if state.progress.best_agent is not None:
        agent.restore(state.progress.best_agent)
    write_checkpoint(state.save_dir / "final_model.pth", agent.checkpoint())
    report = evaluate_policy(agent, robot, "report", 20_000, args.report_episodes)
    success = "not tested"
    if report:
        success = f"{report['report/success_rate']:.2f}"
        run.log({"global_step": global_step} | report)
    run.finish(CURVES, "environment steps")
    if report and args.capture_video and not isinstance(robot, RemoteRobot):
        try:
            write_video(run.dir / "policy.gif", robot, agent)
        except Exception as error:  # a renderer can raise any type
            print(f"there is no policy.gif: {error}")
    seconds = run.newest["time"]
    print(f"success rate {success}, {global_step} environment steps, {seconds:.0f} s")
    print(f"metrics and pictures are in {run.dir}")
    print(f"the model: {state.save_dir}/final_model.pth; SACHybridAgent.load reads it")


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
    run_dir: str | None = None
    resume: bool = False


def default_options(env_id):
    if env_id == BUILT_IN:
        return BAR_WORLD
    return OWN_CLASS if ".py:" in env_id else GYM_ID


# --resume cannot change these options: they shape the start of a run, its records and networks.
ONLY_AT_START = (
    "seed",
    "env_id",
    "setup_mode",
    "image_keys",
    "demo_paths",
    "failure_paths",
    "num_demos",
    "init_alpha",
    "hidden_size",
    "layer_norm",
    "num_critics",
    "save_dir",
)


def parse_args() -> Args:
    """The defaults are the options of the run that --resume continues, else those of --env-id."""
    first, _ = tyro.cli(FirstOptions, return_unknown_args=True, add_help=False)
    path = Path(first.run_dir or "", "args.json")
    is_resumed = first.resume and path.exists()
    defaults = default_options(first.env_id)
    if is_resumed:
        saved = json.loads(path.read_text(encoding="utf-8"))
        defaults = {name: saved[name] for name in vars(Args()) if name in saved}
    args = tyro.cli(Args, description=__doc__, default=Args(**defaults))
    print(f"defaults: {defaults}")
    for name, default in defaults.items():
        value = getattr(args, name)
        if value != default:
            option = f"--{name.replace('_', '-')}"
            if is_resumed and name in ONLY_AT_START:
                sys.exit(f"--resume cannot change {option} from {default}")
            print(f"changed: {option} {default} -> {value}")
    return args


def replace_text(path: Path, text: str):
    """Write a temporary file, then rename it: a killed run has either the old or the new file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_checkpoint(path: Path, state: dict):
    """Write to a temporary name and rename: a kill leaves the previous checkpoint intact."""
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def start_run(args, device, robot) -> State:
    """Open the folder of a run, or continue it. records.bin has the demonstrations and all that
    happened since."""
    agent = robot.make_agent(device)
    print(
        f"the policy sees {robot.obs_shapes}; the action dims {robot.layout.gripper} are grippers"
    )
    check_memory(2 * args.buffer_size * robot.record_dtype["obs"].itemsize)
    if args.resume and Path(args.run_dir, "latest.pth").exists():
        run, progress = load_run(args, agent, robot)
    else:
        # The files are read first: a file that cannot be used leaves no folder behind.
        failures = read_demos(args.failure_paths, robot)
        demos = read_demos(args.demo_paths, robot) or make_demos(args, args.num_demos)
        for record in demos:
            record["demos"] = 1
        run = Run(args)
        progress = Progress(spaces=robot.spaces)
        data = b"".join(record.tobytes() for record in failures + demos)
        (run.dir / "records.bin").write_bytes(data)

    online_rb = FrameBuffer(args.buffer_size, robot.record_dtype)
    demo_rb = FrameBuffer(args.buffer_size, robot.record_dtype)
    for record in read_records(run.dir / "records.bin", robot.record_dtype):
        store(record, online_rb, demo_rb)
    num_frames = max(online_rb.num_frames, demo_rb.num_frames)
    if progress.global_step == 0 and num_frames > args.buffer_size:
        sys.exit(f"--buffer-size {args.buffer_size}: the demonstrations have {num_frames} frames")
    save_dir = Path(args.save_dir or run.dir)
    save_dir.mkdir(parents=True, exist_ok=True)
    return State(run, agent, online_rb, demo_rb, progress, save_dir)


def save_run(state, record_file):
    """Write what --resume needs. records.bin has the transitions, latest.pth all the rest."""
    record_file.flush()
    progress = state.progress
    progress.num_bytes = record_file.tell()
    saved = dict(agent=state.agent.checkpoint(), progress=vars(progress), rows=state.run.rows)
    write_checkpoint(state.run.dir / "latest.pth", saved)


def load_run(args, agent, robot) -> tuple[Run, Progress]:
    """Restore a run as it was when latest.pth was saved. Later records of records.bin are dropped,
    because the run repeats these steps."""
    # Some sums in Progress are tensors on the device of the agent: map_location moves them there.
    path = Path(args.run_dir, "latest.pth")
    saved = torch.load(path, map_location=agent.raw_alpha.device, weights_only=True)
    progress = Progress(**saved["progress"])
    if progress.spaces != robot.spaces:
        sys.exit(f"--resume: the run has {progress.spaces}, the environment has {robot.spaces}")
    agent.restore(saved["agent"])
    run = Run(args, saved["rows"])
    os.truncate(run.dir / "records.bin", progress.num_bytes)
    print(f"resuming after step {progress.global_step}")
    return run, progress


class Signals:
    """SIGINT (Ctrl-C) and SIGTERM set `received`; the loop saves and ends after the episode.

    After the first signal the previous handlers are back: a second Ctrl-C is a KeyboardInterrupt,
    after which `train` saves, and a second SIGTERM ends the process at once.
    """

    def __init__(self):
        self.received = False
        self.previous_handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous_handlers[number] = signal.signal(number, self.handle)

    def handle(self, number, frame):
        self.received = True
        self.release()
        # not print(): the signal may have come in the middle of another one
        os.write(
            2,
            b"signal received: when a robot finishes its episode, the run saves and ends;"
            b" press Ctrl-C again to save and end after the current step\n",
        )

    def release(self):
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)


# --- ranks ---
def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def join_ranks():
    """Join the other processes of torchrun, if there are any.  -> {rank of an actor: its group}"""
    if world_size() > 1:
        dist.init_process_group("gloo")
    # Each actor has its own group with the learner, so no actor waits for another. The timeout is
    # long because a human may have to reset the robot.
    groups = {}
    for peer in range(1, world_size()):
        groups[peer] = dist.new_group([0, peer], timeout=timedelta(days=30))
    return groups


class RemoteRobot(Robot):
    """A robot of another rank, to which rank 0 sends requests and from which it receives records.

    The request (step, 0) asks for the record of this environment step, the request (seed, 1) for
    the last record of an episode with this seed. The weights follow.
    """

    SPACES_SIZE = 2**16  # bytes of the message with the shapes and bounds of the robot

    def __init__(self, args, peer, group):
        self.peer = peer
        self.group = group
        message = torch.empty(self.SPACES_SIZE, dtype=torch.uint8)
        dist.recv(message, peer, group)
        self.set_spaces(args, json.loads(message.numpy().tobytes()))

    def ask(self, number, is_episode, weights):
        dist.send(torch.tensor([number, is_episode]), self.peer, self.group)
        dist.send(weights, self.peer, self.group)
        record = np.zeros(1, self.record_dtype)
        dist.recv(torch.from_numpy(record.view(np.uint8)), self.peer, self.group)
        return record[0]

    def take_turn(self, step, weights):
        return self.ask(step, 0, weights)

    def play_policy(self, seed, weights):
        return self.ask(seed, 1, weights)

    def close(self):
        try:
            dist.send(torch.tensor([-1, 0]), self.peer, self.group)
        except RuntimeError as error:
            print(f"actor {self.peer} has failed: {error}")


def serve(robot, group):
    """Send rank 0 the shapes and bounds of the robot, then answer its requests."""
    message = json.dumps(robot.spaces).ljust(RemoteRobot.SPACES_SIZE).encode()
    dist.send(torch.tensor(list(message), dtype=torch.uint8), 0, group)
    weights = robot.acting_agent.acting_weights()
    request = torch.tensor([0, 0])
    while True:
        dist.recv(request, 0, group)
        number, is_episode = request.tolist()
        if number < 0:
            return
        dist.recv(weights, 0, group)
        play = robot.play_policy if is_episode else robot.take_turn
        record = np.atleast_1d(play(number, weights))
        dist.send(torch.from_numpy(record.view(np.uint8)), 0, group)


if __name__ == "__main__":
    with titled_help():
        args = parse_args()
    main(args)
    if dist.is_initialized():
        dist.destroy_process_group()
