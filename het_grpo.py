# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "transformers==5.22.2", "tyro==1.0.16",
#     "wandb==0.31.0", "tqdm==4.70.1", "matplotlib==3.11.2", "tokenizers==0.23.3"]
# ///
"""GRPO agents (arXiv:2402.03300) with hybrid experience training and trajectory replay.

A language model plays a text game over several turns. A task is one start of the game. The model
plays each task several times, and the reward of an episode is compared with the mean of its group.

    pool = notes about a first round of episodes                         first_round
    repeat:
        1. choose tasks; replay adds a recorded success to some of them  ExperienceMixCollateFn
        2. decide who gets advice, and play the episodes of each task    plan_episodes, Player.play
        3. join a prompt and each completion: a training sample          training_prompt  <- HET
        4. measure the log-probs of the completion after that prompt     compute_log_prob
        5. advantage = (reward - mean of the group) / std of the group;  group_advantages
           it is weaker for failures whose advice was stripped           weaken_stripped_failures
        6. several epochs of clipped policy-gradient steps               grpo_update
        7. evaluate                                                      validate
        8. pool += notes about the new episodes                          ExperiencePool.fill_pool
        9. log and save

Advice is a few notes from the pool, placed before the question. Hybrid experience training (HET;
AgentEvolver, arXiv:2511.10395) decides which prompt a completion follows in the training sample.
Here is an episode of the lock game, with the two samples that it can become. A sample is a prompt,
then |, then the response:

    prompt when played     Some Related Experience ... amber : red blue gold red  lock amber room 03
    turns                  red -> click 1, gold -> jam 1, blue -> click 2, ...
    sample that keeps      advice, lock amber room 03 | red click 1 gold jam 1 blue click 2 ...
    sample that strips             lock amber room 03 | red click 1 gold jam 1 blue click 2 ...
    response_mask                                       1   0     0 1    0   0 1    0     0

--method decides who gets advice, and which samples keep it:

    baseline  no episode gets advice: GRPO
    ec        half of a group's new episodes get advice; all samples keep it: learn to use advice
    ei        the same half gets advice; all samples strip it: learn to do without advice
    het       the same half gets advice; half of the tasks keep it, the other half strip it
    sft       plays like het, but imitates the run's own successes; the simplest rival of het

Replay (ExGRPO, arXiv:2510.02245): --use-experience-replay puts a recorded success into the groups
of some tasks that the policy did not fully solve, in the place of one new episode. If the new
episodes fail, the group still has a gradient.

The loss is not that of the GRPO paper: the clip is wider above than below, there is no KL penalty,
and the mean is over all tokens of a minibatch. docs/het_grpo.md lists what differs from the papers.
Names such as `samples_to_dataproto` come from the design documents; docs/design.md explains them.

Shapes: B episodes in groups of n, P prompt tokens (left-padded), R response tokens (right-padded),
V vocabulary, T tokens of a row. The response holds all turns. Only tokens of the agent have a loss.
The algorithm comes first and ends with `main`. Metrics, environments, models and logging follow.

    python het_grpo.py                                       # locks, CPU, about a minute
    python het_grpo.py --method baseline --use-experience-replay
    python het_grpo.py --model-name FOLDER --chat-template --max-turn-tokens 8 --learning-rate 1e-6
"""

import copy
import functools
import importlib
import inspect
import io
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import gymnasium as gym
import tokenizers
import torch
import torch.distributed as dist
import transformers
import tyro
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

TEMPLATE = "\n\nSome Related Experience to help you to complete the task:<EXP>{}</EXP>\n\n"
# The ratio of an on-policy token is clipped to [1 - CLIP_LOW, 1 + CLIP_HIGH]. The upper clip range
# of the other tokens is --off-cliprange-high.
CLIP_LOW = 0.2
CLIP_HIGH = 0.28
DUAL_CLIP = 3.0  # with a negative advantage, a ratio above this has no gradient
MAX_GRAD_NORM = 1.0
RETRIEVE_TOP_K = 3  # notes per question
MAX_NOTES = 1_000  # a full pool drops the oldest note
MAX_TRAJECTORIES_PER_TASK = 8  # recorded successes
TIME_LIMIT = 300.0  # seconds that a summarizer may take
RETRIEVER_TIME_LIMIT = 10.0  # seconds that a retriever may take for a question
MAX_TIMEOUTS = 3  # after so many time-outs a function is not called again
WARM_START_STEPS = 400  # supervised steps of the tiny model before training, in `practice`
PRACTICE = 1_000_000  # it practices on tasks from this number on; each of these locks has a secret

# Who gets advice, and which training samples keep it.
METHODS = {
    "baseline": dict(
        val_rollout_expmode="woexp",
        train_rollout_expmode="woexp",
        train_sample_expmode="keep",
        train_sample_keepratio=1.0,
    ),
    "ec": dict(
        val_rollout_expmode="mixed",
        train_rollout_expmode="mixed",
        train_sample_expmode="keep",
        train_sample_keepratio=1.0,
    ),
    "ei": dict(
        val_rollout_expmode="mixed",
        train_rollout_expmode="mixed",
        train_sample_expmode="discard",
        train_sample_keepratio=0.0,
    ),
    "het": dict(
        val_rollout_expmode="mixed",
        train_rollout_expmode="mixed",
        train_sample_expmode="hybrid",
        train_sample_keepratio=0.5,
    ),
}
METHODS["sft"] = METHODS["het"]  # with another loss: cross-entropy on the run's own successes


# --- args ---
Method = Literal["baseline", "ec", "ei", "het", "sft"]
RolloutMode = Literal["mixed", "all", "woexp"]
SampleMode = Literal["keep", "discard", "hybrid"]
SelectMode = Literal["argmin", "argmax", "random"]
OldLogp = Literal["current", "recorded"]
Dtype = Literal["float32", "bfloat16"]


@dataclass
class Args:
    # run
    seed: int = 1  # seed of training; the evaluation is the same for every seed
    device: str = "auto"  # cpu, cuda, mps, ... (auto: cpu for the built-in model, else accelerator)
    num_threads: int = 1  # CPU threads of torch; the tiny model is fastest with 1
    run_dir: str | None = None  # folder of this run (None: runs/{script}__{seed}__{time}_{pid})
    eval_every: int = 50  # iterations between evaluations
    eval_size: int = 480  # number of held-out tasks
    track: bool = False  # also log to wandb (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "stale-experience"  # project name in wandb
    resume: bool = False  # continue the run in run_dir with its options, or start it
    save_every: int = 50  # iterations between checkpoints
    fsdp: bool = False  # shard gradients and optimizer over the processes of torchrun (FSDP2)
    # task
    env: str = "lock"  # lock, a Gymnasium id, module:Class, file.py:Class, file.py:Class{"size": 5}
    num_train_tasks: int = 240  # number of training tasks; the held-out tasks follow them
    max_turns: int = 7  # actions per episode
    success_reward: float = 1.0  # lowest return of a success, without info["success"]
    # model
    model_name: str | None = None  # name or folder of a causal LM (None: a tiny Llama from scratch)
    chat_template: bool = False  # format each prompt as a user message
    system_prompt: str = ""  # with --chat-template: system message before each prompt
    # rollout
    num_tasks: int = 8  # tasks per iteration (B / n)
    group_size: int = 8  # episodes per task (n), replayed ones included
    max_turn_tokens: int = 1  # tokens of one action, including EOS if it is sampled
    temperature: float = 1.0  # temperature of sampling and of log-probs; evaluation is greedy
    # optimization
    num_iterations: int = 150  # rounds of sampling and updating
    learning_rate: float = 1e-3  # highest learning rate; it falls linearly to 0
    update_epochs: int = 2  # passes over the batch
    num_minibatches: int = 2  # optimizer steps per epoch
    gradient_accumulation_steps: int = 1  # micro-batches per minibatch
    bf16: bool = False  # multiply matrices in bfloat16; with LoRA, add --weights-dtype bfloat16
    lora_rank: int = 0  # train adapters of this rank beside the frozen model (0: train the model)
    weights_dtype: Dtype = "float32"  # format of frozen weights (LoRA); with --bf16 use bfloat16
    # GRPO
    adv_std: bool = True  # divide advantages by the standard deviation of the group
    ent_coef: float = 0.0  # weight of the entropy bonus
    imitate_iterations: int = 0  # train the first iterations with --method sft
    # experience: notes before the question
    method: Method = "het"  # who gets advice and who keeps it, see above; sft: imitation
    enable: bool = True  # use advice; --no-enable is --method baseline
    val_rollout_expmode: RolloutMode | None = None  # who gets advice in evaluation
    train_rollout_expmode: RolloutMode | None = None  # and in training; woexp: without experience
    rollout_expratio: float = 0.5  # mixed: share of the episodes that get advice
    train_sample_expmode: SampleMode | None = None  # what samples do with it (None: see method)
    train_sample_keepratio: float | None = None  # hybrid: share of the tasks that keep it
    experience_template: str = TEMPLATE  # text before the question; {} is the advice
    experience_pool: str | None = None  # JSONL file with the first notes: topic and text
    init_exp_before_training: int = 96  # tasks that are played to fill the pool (0: none)
    updated_freq: int = 1  # iterations between additions of notes (0: never)
    val_summarizer_save: bool = False  # add notes about held-out tasks: a leak into training
    summarizer: str | None = None  # file.py:function(episodes, ask) -> list of (topic, text)
    retriever: str | None = None  # file.py:function(question, top_k) -> text
    off_cliprange_high: float = 0.6  # upper clip range of stripped and replayed tokens
    # replay: recorded successes
    use_experience_replay: bool = False  # put a recorded success into some groups
    exp_ratio: float = 0.5  # largest share of the tasks of an iteration that are replayed
    exp_select_mode: SelectMode = "argmin"  # success to replay, by entropy (sft: keep by length)
    experience_rbound: int | None = None  # most successes of a replayed task (None: n - 1)
    replay_old_logp: OldLogp = "current"  # denominator of the ratios of replayed tokens
    retire_solved: bool = False  # skip tasks whose last group had only successes

    def __post_init__(self):
        if not self.enable:
            if self.method not in ("het", "baseline"):  # het is the default
                raise ValueError(f"--no-enable contradicts --method {self.method}")
            self.method = "baseline"
        for name, value in METHODS[self.method].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.experience_rbound is None:
            self.experience_rbound = self.group_size - 1
        check_method(self)
        check_options(self)

    @property
    def batch_size(self) -> int:
        return self.num_tasks * self.group_size

    @property
    def num_parts(self) -> int:
        """Micro-batches of an epoch, on all ranks."""
        return self.num_minibatches * self.gradient_accumulation_steps * world_size()

    @property
    def uses_advice(self) -> bool:
        modes = {self.val_rollout_expmode, self.train_rollout_expmode}
        return modes != {"woexp"} or self.imitate_iterations > 0

    @property
    def writes_notes(self) -> bool:
        """With a retriever nobody would read the notes of the built-in summarizer."""
        return self.uses_advice and bool(self.summarizer or not self.retriever)

    def at(self, iteration: int) -> "Args":
        """The options of an iteration: those of --method sft in the first --imitate-iterations."""
        if iteration > self.imitate_iterations:
            return self
        changes = dict(METHODS["sft"], method="sft", imitate_iterations=0)
        if self.method == "het":  # only there this share is an option; elsewhere it is 0 or 1
            changes["train_sample_keepratio"] = self.train_sample_keepratio
        return replace(self, **changes)


# --- networks ---
# A batch is a dict of tensors, one row per episode:
#     ids, mask                      (B,P+R)  prompt and response; the mask is 0 on padding
#     response_mask                  (B,R)    1 on the tokens that the agent sampled
#     exp_mask                       (B,R)    1 on those that are off-policy: stripped or replayed
#     replay_mask                    (B,R)    1 on those that are replayed
#     sampler_logprobs               (B,R)    measured by the sampler, with the prompt that was read
#     old_logprobs                   (B,R)    measured before the update, with the training prompt
#     recorded_old_log_probs         (B,R)    old_logprobs when the episode was recorded
#     advantages                     (B,R)
#     rewards, successes, group_ids  (B,)


class Policy(nn.Module):
    """A causal language model."""

    def __init__(self, lm, eos_ids, temperature: float):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.register_buffer("eos_ids", eos_ids)  # (E,) any of these tokens ends a turn
        self.eval()  # during training, too: dropout would be noise in the policy ratio

    def forward(self, ids, mask, num_last: int, cache=None, use_cache: bool = False):
        """Logits of the next token at the last `num_last` positions.  -> (B,num_last,V), cache

        `ids` are the tokens that are not in the cache yet. `mask` covers all tokens.
        """
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding on the left must not count
        output = self.lm(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions[:, -ids.shape[1] :],
            past_key_values=cache,
            use_cache=use_cache,
            logits_to_keep=num_last,
        )
        logits = output.logits[:, -num_last:].float() / self.temperature
        return logits, output.past_key_values


def logprobs_and_entropy(policy, batch: dict):
    """Log-prob and entropy of each token that the agent sampled, 0 elsewhere.  -> 2 x (B,R)"""
    ids = batch["ids"]
    num_response_tokens = batch["response_mask"].shape[1]
    # Position t predicts token t + 1. So the last token is not an input, and the last R positions
    # predict the R response tokens.
    logits, _ = policy(ids[:, :-1], batch["mask"][:, :-1], num_response_tokens)
    all_logprobs = logits.log_softmax(-1)  # (B,R,V)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    response_ids = ids[:, -num_response_tokens:]
    logprobs = all_logprobs.gather(-1, response_ids[..., None]).squeeze(-1)
    is_sampled = batch["response_mask"] == 1
    return logprobs.where(is_sampled, 0.0), entropy.where(is_sampled, 0.0)


@torch.no_grad()
def compute_log_prob(policy, batch: dict, args):
    """logprobs_and_entropy() of a whole batch, without gradients.  -> 2 x (B,R)

    Each rank fills in its rows, in micro-batches. The sum over ranks then has all rows.
    """
    logprobs = torch.zeros_like(batch["sampler_logprobs"])
    entropy = torch.zeros_like(logprobs)
    my_rows = my_share(torch.arange(len(logprobs), device=logprobs.device))
    for rows in my_rows.split(args.batch_size // args.num_parts):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        logprobs[rows], entropy[rows] = logprobs_and_entropy(policy, part)
    sum_over_ranks([logprobs, entropy])
    return logprobs, entropy


# --- hybrid experience training: who gets advice, and which prompt is trained ---
@dataclass
class Trajectory:
    """One episode. Token ids are stored as they were sampled; no text is tokenized again."""

    task: int  # seed of the environment
    data_id: int = 0  # number of its group in the batch
    rollout_id: int = 0  # its place in the group
    guided: bool = False  # should get advice (the pool may have none)
    keep: bool = True  # the training sample keeps the advice
    version: int = 0  # iteration that sampled it
    question: str = ""
    topic: str = ""  # the words by which a note about this episode is found
    advice: str = ""  # the advice that it got ("": none)
    prompt_ids: list[int] = field(default_factory=list)  # the question alone
    advised_ids: list[int] = field(default_factory=list)  # what was read: advice, if any, question
    steps: list = field(default_factory=list)  # ("assistant", sampled ids), ("env", other ids), ...
    turns: list[dict] = field(default_factory=list)  # action, observation and reward of each turn
    sampler_logprobs: list[float] = field(default_factory=list)  # one per token of the steps
    reward: float = 0.0  # sum over the turns
    success: bool = False
    experience: str = ""  # what was done, in words
    is_experience_replay: bool = False
    old_log_probs: list[float] = field(default_factory=list)  # one per token, when recorded
    entropy: float = 0.0  # mean over the sampled tokens, when recorded

    def tokens(self) -> list[int]:
        """Everything that the policy reads before its next action."""
        return self.advised_ids + [token for _, ids in self.steps for token in ids]


def inject_experience(question: str, advice: str, template: str) -> str:
    """Put the advice before the question. Not str.format: the texts may have braces."""
    if not advice:
        return question
    before, _, after = template.partition("{}")
    return before + advice + after + question


def training_prompt(t: Trajectory) -> list[int]:
    """The prompt of the training sample. This is the idea of hybrid experience training.

    If the advice is kept, the sample is on-policy: the policy learns to use advice. If it is
    stripped, the same tokens are off-policy: the policy learns to act without advice.
    """
    return t.advised_ids if t.keep else t.prompt_ids


def get_extra(t: Trajectory) -> dict:
    """Whether a sample is replayed, and whether it is off-policy: stripped or replayed."""
    is_stripped = bool(t.advice) and not t.keep
    is_replayed = t.is_experience_replay
    return dict(is_experience_replay=is_replayed, off_policy=is_stripped or is_replayed)


def share_of(mode: str, ratio: float) -> float:
    """How many episodes get advice, or how many tasks keep it."""
    fixed_shares = {"woexp": 0.0, "discard": 0.0, "all": 1.0, "keep": 1.0}
    return fixed_shares.get(mode, ratio)  # mixed, hybrid: the ratio


def num_chosen(count: int, share: float) -> int:
    return math.floor(count * share + 1e-9)  # floats: 100 x 0.29 is 28.999999999999996


def draw(count: int, share: float, rng) -> list[bool]:
    """Choose a share of `count` items at random."""
    chosen = rng.sample(range(count), num_chosen(count, share))
    return [i in chosen for i in range(count)]


def groups_that_keep(num_groups: int, replayed: list[Trajectory], args, rng) -> set[int]:
    """The data_ids of the groups whose samples keep the advice. The other groups strip it.

    A recorded success that had advice decides for its group: it keeps the prompt of its time, to
    which its recorded log-probs belong, and all members of a group have the same kind of prompt.
    Among the other groups we draw as many as the share still needs.
    """
    decided = {t.data_id for t in replayed if t.advice}
    keeping = {t.data_id for t in replayed if t.advice and t.keep}
    undecided = sorted(set(range(num_groups)) - decided)
    share = share_of(args.train_sample_expmode, args.train_sample_keepratio)
    num_missing = max(0, num_chosen(num_groups, share) - len(keeping))
    drawn = rng.sample(undecided, min(num_missing, len(undecided)))
    return keeping | set(drawn)


def plan_episodes(tasks, replayed: list[Trajectory], args, iteration: int, rng):
    """The episodes to play: a group for each task, without the member that is replayed."""
    keeping = groups_that_keep(len(tasks), replayed, args, rng)
    guided_share = share_of(args.train_rollout_expmode, args.rollout_expratio)
    planned = []
    for data_id, task in enumerate(tasks):
        num_fresh = args.group_size - sum(t.data_id == data_id for t in replayed)
        for i, guided in enumerate(draw(num_fresh, guided_share, rng)):
            keep = data_id in keeping
            planned.append(Trajectory(task, data_id, i, guided, keep, version=iteration))
    return planned


def weaken_stripped_failures(batch: dict):
    """Multiply negative advantages of stripped tokens by pi(y|question) / pi(y|advice, question).

    The token y was sampled with the advice, but is trained without it. The factor is the importance
    weight between the two prompts, at most 1. So a token that was likely only because of the advice
    is hardly made less likely. Positive advantages stay, because stripping is meant to make such
    tokens likely without advice. The advantages of a group then no longer add up to 0.
    """
    is_stripped = (batch["exp_mask"] == 1) & (batch["replay_mask"] == 0)
    weights = (batch["old_logprobs"] - batch["sampler_logprobs"]).exp().clamp(max=1.0)
    weights = weights.where(is_stripped & (batch["advantages"] < 0), 1.0)
    batch["advantages"] = batch["advantages"] * weights


# --- rollout ---
def sample_token(logits, uniforms):
    """The first token whose cumulative probability is above the uniform number.  -> (B,)

    A response depends on its own row of uniform numbers only. With torch.multinomial it would also
    depend on which other rows are still in the batch.
    """
    cdf = logits.softmax(-1).cumsum(-1)  # (B,V)
    # Because of rounding the last entry may be below 1, so we scale the uniform number to it.
    return (cdf <= uniforms[:, None] * cdf[:, -1:]).sum(-1)


@torch.no_grad()
def sample_turn(policy, contexts: list[list[int]], max_tokens: int, uniforms=None):
    """Continue each context: sample with uniform numbers (rows,max_tokens), or greedily without.

    Returns two lists with a row per context: token ids up to and including EOS, their log-probs.
    """
    padded = pad(contexts, "left", -1).to(policy.eos_ids.device)
    ids = padded.clamp(min=0)
    mask = (padded >= 0).long()
    cache = None  # the model makes a cache of its own kind
    eos_ids = policy.eos_ids.tolist()
    turn_ids = [[] for _ in contexts]
    turn_logprobs = [[] for _ in contexts]
    has_ended = [False] * len(contexts)
    for place in range(max_tokens):
        logits, cache = policy(ids, mask, 1, cache, use_cache=max_tokens > 1)
        logits = logits[:, 0]  # (rows,V)
        if uniforms is None:
            tokens = logits.argmax(-1)
        else:
            tokens = sample_token(logits, uniforms[:, place])
        logprobs = logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)
        new_logprobs = logprobs.tolist()
        for row, token in enumerate(tokens.tolist()):
            if not has_ended[row]:
                turn_ids[row].append(token)
                turn_logprobs[row].append(new_logprobs[row])
                has_ended[row] = token in eos_ids
        if all(has_ended):
            break
        ids = tokens[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return turn_ids, turn_logprobs


@dataclass
class Player:
    """Plays episodes: a policy, environments, and notes to take advice from."""

    policy: Policy
    dialogue: "Dialogue"
    envs: list
    pool: "ExperiencePool"
    args: Args

    def start_game(self, t: Trajectory, env, retrieve):
        t.question, info = env.reset(t.task)
        t.topic = str(info["topic"])
        if t.guided:
            t.advice = retrieve(t.question)
        prompt = inject_experience(t.question, t.advice, self.args.experience_template)
        t.prompt_ids = self.dialogue.prompt(t.question)
        t.advised_ids = self.dialogue.prompt(prompt)

    def take_turn(self, t: Trajectory, env, ids: list[int], logprobs: list[float]) -> bool:
        """Tell the environment what the policy said.  -> whether the episode goes on"""
        action = self.dialogue.read(ids)
        observation, reward, terminated, truncated, info = env.step(action)
        t.steps.append(("assistant", ids))
        t.sampler_logprobs += logprobs
        t.turns.append(dict(action=action, observation=observation, reward=reward))
        t.reward += reward
        if terminated or truncated or len(t.turns) == self.args.max_turns:
            t.success = info.get("success", False)
            actions = " ".join(turn["action"] for turn in t.turns)
            t.experience = str(info.get("experience", f"{t.topic} : {actions}"))
            return False
        reply_ids = self.dialogue.reply(observation, ids)
        t.steps.append(("env", reply_ids))
        t.sampler_logprobs += [0.0] * len(reply_ids)
        return True

    def play_part(self, trajectories: list[Trajectory], uniforms):
        """Play one episode in each environment. All take a turn, then all take the next one."""
        retrieve = functools.cache(self.pool.retrieve)  # a group has one question: ask once
        games = list(zip(trajectories, self.envs, strict=False))  # ends with the shorter list
        for t, env in games:
            self.start_game(t, env, retrieve)
        num_tokens = self.args.max_turn_tokens
        first_token = 0  # of this turn, in the uniform numbers
        while games:
            turn_uniforms = None
            if uniforms is not None:
                rows = [uniforms[t.data_id, t.rollout_id] for t, _ in games]
                turn_uniforms = torch.stack(rows)[:, first_token : first_token + num_tokens]
            contexts = [t.tokens() for t, _ in games]
            turn_ids, turn_logprobs = sample_turn(self.policy, contexts, num_tokens, turn_uniforms)
            unfinished = []
            for (t, env), ids, logprobs in zip(games, turn_ids, turn_logprobs, strict=True):
                if self.take_turn(t, env, ids, logprobs):
                    unfinished.append((t, env))
            games = unfinished
            first_token += num_tokens

    def play(self, trajectories: list[Trajectory], generator=None):
        """Sample with random numbers of the generator, or play greedily without one.

        Every rank plays its share.  -> the episodes of all ranks, by (data_id, rollout_id)
        """
        uniforms = None
        if generator is not None:  # (groups, n, tokens of an episode)
            num_groups = 1 + max(t.data_id for t in trajectories)
            num_tokens = self.args.max_turns * self.args.max_turn_tokens
            shape = (num_groups, self.args.group_size, num_tokens)
            uniforms = torch.rand(shape, generator=generator).to(self.policy.eos_ids.device)
        gather_weights(self.policy)
        mine = my_share(trajectories)
        # --bf16: within one autocast each trained weight is cast once, and not for every token.
        device_type = self.policy.eos_ids.device.type
        with torch.autocast(device_type, torch.bfloat16, enabled=self.args.bf16):
            for start in range(0, len(mine), len(self.envs)):
                self.play_part(mine[start : start + len(self.envs)], uniforms)
        played = sum(gather_objects(mine), [])
        return sorted(played, key=lambda t: (t.data_id, t.rollout_id))


# --- training samples ---
def convert_offpolicy_to_cmt(stored: Trajectory, data_id: int, rollout_id: int) -> Trajectory:
    """A recorded episode as a member of a group of this batch."""
    return replace(stored, data_id=data_id, rollout_id=rollout_id, is_experience_replay=True)


def tokenize_steps(steps, is_experience_replay: bool = False) -> dict:
    """Join the token ids of all turns. The response starts at the agent's first token."""
    response_ids = []
    response_mask = []
    for role, ids in steps:
        response_ids += ids
        response_mask += [int(role == "assistant")] * len(ids)
    replay_mask = response_mask if is_experience_replay else [0] * len(response_mask)
    return dict(response_ids=response_ids, response_mask=response_mask, replay_mask=replay_mask)


def pad(rows: list[list], side: str = "right", value: float = 0):
    """Lists of numbers, of different lengths -> (rows,T)"""
    tensors = [torch.as_tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def samples_to_dataproto(trajectories: list[Trajectory], device) -> dict:
    """Make the batch of tensors that is described above `Policy`."""
    columns = defaultdict(list)
    for t in trajectories:
        extra = get_extra(t)
        row = tokenize_steps(t.steps, extra["is_experience_replay"])
        row["exp_mask"] = [x * extra["off_policy"] for x in row["response_mask"]]
        row["sampler_logprobs"] = t.sampler_logprobs
        row["recorded_old_log_probs"] = t.old_log_probs or t.sampler_logprobs
        for name, values in row.items():
            columns[name].append(values)
    prompt_ids = pad([training_prompt(t) for t in trajectories], "left", -1)
    response_ids = pad(columns.pop("response_ids"), "right", -1)
    ids = torch.cat([prompt_ids, response_ids], 1)
    batch = {name: pad(rows) for name, rows in columns.items()}
    batch["ids"] = ids.clamp(min=0)
    batch["mask"] = (ids >= 0).long()
    batch["rewards"] = torch.tensor([float(t.reward) for t in trajectories])
    batch["successes"] = torch.tensor([float(t.success) for t in trajectories])
    batch["group_ids"] = torch.tensor([t.data_id for t in trajectories])
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _replace_recorded_old_log_probs(batch: dict, old_logprobs):
    """Use the recorded log-probs for replayed tokens, and the others as they are.  -> (B,R)"""
    is_replayed = batch["replay_mask"] == 1
    return torch.where(is_replayed, batch["recorded_old_log_probs"], old_logprobs)


# --- math ---
def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def group_advantages(rewards, group_ids, adv_std: bool = True):
    """(reward - mean) / (std + 1e-6) in each group; 0 where all rewards are equal.  -> (B,)"""
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = group_ids == group
        group_rewards = rewards[members]
        if (group_rewards == group_rewards[0]).all():
            continue  # with rounding, reward - mean would not be exactly 0
        advantages[members] = group_rewards - group_rewards.mean()
        if adv_std:
            advantages[members] /= group_rewards.std() + 1e-6
    return advantages


def k3_kl(logp, logq):
    """Estimate of KL(p || q) from samples of p; k3 of joschu.net/blog/kl-approx.html.  -> (B,R)"""
    logratio = (logq - logp).clamp(-20, 20)
    return logratio.exp() - 1 - logratio


# --- experience pool: notes ---
def episode_of(t: Trajectory) -> dict:
    """An episode in words, for summarizers and episodes.jsonl."""
    lines = [t.question]
    for turn in t.turns:
        lines += [f"> {turn['action']}", turn["observation"]]
    names = ("task", "topic", "advice", "turns", "reward", "success", "experience")
    return {name: getattr(t, name) for name in names} | dict(text="\n".join(lines))


def summarize_successes(episodes: list[dict], ask) -> list[tuple[str, str]]:
    """The built-in summarizer: a note tells what was done in a success."""
    return [(episode["topic"], episode["experience"]) for episode in episodes if episode["success"]]


@functools.lru_cache(100_000)
def words_of(text: str) -> frozenset:
    return frozenset(re.findall(r"\w+", text.lower()))


class ExperiencePool:
    """Notes about earlier episodes. A summarizer writes them, and `search` finds them.

    With --retriever the user's function finds the advice, and nobody searches these notes.
    """

    def __init__(self, args):
        self.records: list[dict] = []  # notes: topic and text
        self.num_failed_calls = 0  # on this rank
        self.num_timeouts = Counter()  # by option
        self.ask = None  # function(prompts) -> answers of the policy; make_player sets it
        # A note must not contain the template. We look for the longer half of it.
        self.template_text = max(args.experience_template.split("{}"), key=len).strip()
        self.summarizer = summarize_successes
        if args.summarizer:
            self.summarizer = load_object(args.summarizer)
        self.retriever = load_object(args.retriever) if args.retriever else None

    def is_note(self, note) -> bool:
        """Whether it is a topic and a text, and the text has no template."""
        is_pair = isinstance(note, list | tuple) and [type(part) for part in note] == [str, str]
        if not is_pair or "" in note:
            return False
        is_long = len(self.template_text) > 20  # a short one may be in a text by chance
        return not (is_long and self.template_text in note[1])

    def add(self, topic: str, text: str):
        """Add a note, if it is new."""
        record = dict(topic=topic, text=text)
        if record not in self.records:
            self.records.append(record)
            del self.records[:-MAX_NOTES]

    def fill_pool(self, trajectories: list[Trajectory]):
        """Add what the summarizer writes about these episodes. Only rank 0 asks the summarizer."""
        notes = []
        if rank() == 0 and self.num_timeouts["--summarizer"] < MAX_TIMEOUTS:
            episodes = [episode_of(t) for t in trajectories]
            result = call_within_limit(TIME_LIMIT, self.summarizer, episodes, self.ask)
            written = result if isinstance(result, list) else [result]
            notes = [note for note in written if self.is_note(note)]
            if len(notes) < len(written):
                self.count_failure("--summarizer", result)
        for topic, text in gather_objects(notes)[0]:
            self.add(topic, text)

    def retrieve(self, question: str) -> str:
        """Advice for a question, "" if there is none."""
        if self.retriever is None:
            return self.search(question)
        if self.num_timeouts["--retriever"] == MAX_TIMEOUTS:
            return ""
        advice = call_within_limit(RETRIEVER_TIME_LIMIT, self.retriever, question, RETRIEVE_TOP_K)
        if isinstance(advice, str):
            return str(advice)  # a checkpoint cannot hold a subclass such as numpy.str_
        self.count_failure("--retriever", advice)
        return ""

    def count_failure(self, option: str, result):
        self.num_failed_calls += 1
        self.num_timeouts[option] += isinstance(result, TimeoutError)
        print(f"{option} returned {result!r:.300}; the run goes on without what it cannot use")
        if self.num_timeouts[option] == MAX_TIMEOUTS:
            print(f"{MAX_TIMEOUTS} calls took too long: {option} is not called again")

    def search(self, question: str) -> str:
        """Notes whose topics share the most words with the question; rare words count more."""
        counts = Counter(word for record in self.records for word in words_of(record["topic"]))

        def score(record: dict) -> float:
            shared = words_of(record["topic"]) & words_of(question)
            # fsum: the result does not depend on the order of a set
            return math.fsum(math.log(1 + len(self.records) / counts[word]) for word in shared)

        newest_first = reversed(self.records)  # sorting keeps this order in a tie
        best = sorted(newest_first, key=score, reverse=True)[:RETRIEVE_TOP_K]
        return "\n".join(record["text"] for record in best if score(record) > 0)

    def load(self, path: str):
        for number, line in enumerate(open(path, "rb"), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                note = (record["topic"], record["text"])
            except (ValueError, KeyError, TypeError, RecursionError):
                note = None
            if not self.is_note(note):
                sys.exit(
                    f"--experience-pool {path}: line {number} must be a JSON object with a topic "
                    "and a text, and without the template"
                )
            self.add(*note)

    def state_dict(self) -> dict:
        return dict(records=self.records, num_failed_calls=self.failed_calls())

    def load_state_dict(self, state: dict):
        self.records = state["records"]
        if rank() == 0:
            self.num_failed_calls = state["num_failed_calls"]

    def failed_calls(self) -> int:
        """Calls that failed on all ranks."""
        return sum(gather_objects(self.num_failed_calls))


# --- replay: recorded successes ---
class ExperienceManager:
    """Which tasks are partly solved, and recorded successes of each task."""

    def __init__(self, args):
        self.args = args
        self.num_successes: dict[int, int] = {}  # task -> number of successes in its last group
        self.skip_uid_set: set[int] = set()  # retired tasks
        self.memory: dict[int, list[Trajectory]] = {}  # task -> successes

    def update_difficulty2task_dict(self, fresh: list[Trajectory]):
        """Count the successes of each group, without the replayed members."""
        for task in {t.task for t in fresh}:
            results = [t.success for t in fresh if t.task == task]
            # A solved task has the number n, even if a replayed member left only n - 1 fresh ones.
            self.num_successes[task] = self.args.group_size if all(results) else sum(results)

    def update_skip_uid_set_and_filter_trajectories(self, fresh: list[Trajectory]):
        """Returns the successes that may be recorded. With --retire-solved, solved tasks retire.

        A retired task comes back if it is played and fails. This happens if all tasks are retired.
        """
        failed = {t.task for t in fresh if not t.success}
        self.skip_uid_set -= failed
        if self.args.retire_solved:
            self.skip_uid_set |= {t.task for t in fresh} - failed
        for task in self.skip_uid_set:
            self.memory.pop(task, None)
        return [t for t in fresh if t.success and t.task not in self.skip_uid_set]

    def preference(self, t: Trajectory) -> float:
        """The success with the lowest value is replayed. A full memory drops the highest value.

        The value is the entropy. --method sft records no entropies, and takes the length.
        """
        if self.args.exp_select_mode == "random":
            return 0.0  # a full memory drops the oldest
        value = t.entropy if self.args.use_experience_replay else len(t.steps)
        return value if self.args.exp_select_mode == "argmin" else -value

    def save_trajectories_to_memory(self, trajectories: list[Trajectory]):
        """Store successes of each task, as many as fit."""
        for t in trajectories:
            stored = self.memory.setdefault(t.task, [])
            stored.append(t)
            if len(stored) > MAX_TRAJECTORIES_PER_TASK:
                stored.remove(max(stored, key=self.preference))

    def valid_tasks(self) -> dict[int, list[int]]:
        """Tasks that may be replayed, in buckets: number of successes -> tasks.

        Bucket 0 has tasks that failed in all of their last group, but succeeded before.
        """
        buckets = defaultdict(list)
        for task, num_successes in sorted(self.num_successes.items()):
            if num_successes <= self.args.experience_rbound and task in self.memory:
                buckets[num_successes].append(task)
        return buckets

    def sample_tasks_from_replaypool(self, count: int, rng) -> list[int]:
        """Draw tasks for replay: a bucket, then one of its tasks, without replacement."""
        buckets = self.valid_tasks()
        chosen = []
        while buckets and len(chosen) < count:
            num_successes = rng.choice(sorted(buckets))
            tasks = buckets[num_successes]
            chosen.append(tasks.pop(rng.randrange(len(tasks))))
            if not tasks:
                del buckets[num_successes]
        return chosen

    def get_offpolicy_trajectories_from_memory(self, task: int, rng) -> list[Trajectory]:
        """The preferred success of a task, as a list; among equal ones a random one."""
        shuffled = rng.sample(self.memory[task], len(self.memory[task]))
        return [min(shuffled, key=self.preference)]

    def get_offpolicy_batch(self, tasks: list[int], rng) -> list[Trajectory]:
        """A recorded success of each task, as the last member of its group."""
        batch = []
        for data_id, task in enumerate(tasks):
            for stored in self.get_offpolicy_trajectories_from_memory(task, rng):
                batch.append(convert_offpolicy_to_cmt(stored, data_id, self.args.group_size - 1))
        return batch

    def state_dict(self) -> dict:
        memory = {task: [vars(t) for t in stored] for task, stored in self.memory.items()}
        return dict(num_successes=self.num_successes, skip_uid_set=self.skip_uid_set, memory=memory)

    def load_state_dict(self, state: dict):
        self.num_successes = state["num_successes"]
        self.skip_uid_set = state["skip_uid_set"]
        for task, stored in state["memory"].items():
            self.memory[task] = [Trajectory(**values) for values in stored]


class ExperienceMixCollateFn:
    """Chooses the tasks of an iteration: some for replay, the others in passes over all tasks."""

    def __init__(self, args, manager: ExperienceManager, tasks: list[int]):
        self.args = args
        self.manager = manager
        self.tasks = tasks
        self.num_passes = 0
        self.waiting: list[int] = []  # tasks that this pass has not played yet, in order

    def __call__(self, rng) -> tuple[list[int], list[int]]:
        """-> (experience_tasks, on_policy_tasks): together num_tasks different tasks"""
        experience_tasks = []
        if self.args.use_experience_replay:
            max_replayed = num_chosen(self.args.num_tasks, self.args.exp_ratio)
            experience_tasks = self.manager.sample_tasks_from_replaypool(max_replayed, rng)
        num_others = self.args.num_tasks - len(experience_tasks)
        return experience_tasks, self.next_tasks(num_others, experience_tasks)

    def next_tasks(self, count: int, experience_tasks: list[int]) -> list[int]:
        """The next tasks of the pass. Retired tasks are left out, unless there are no others.

        If a task is already in this iteration, it stays in the queue for the next one.
        """
        not_retired = set(self.tasks) - self.manager.skip_uid_set
        used = set(experience_tasks)  # tasks of this iteration
        chosen = []
        postponed = []
        while len(chosen) < count:
            if not self.waiting:
                rng = random.Random(f"{self.args.seed}/pass {self.num_passes}")
                self.waiting = rng.sample(self.tasks, len(self.tasks))
                self.num_passes += 1
            task = self.waiting.pop(0)
            if task in used:
                postponed.append(task)
            elif task in not_retired or not_retired <= used:
                chosen.append(task)
                used.add(task)
        self.waiting = postponed + self.waiting
        return chosen

    def state_dict(self) -> dict:
        return dict(num_passes=self.num_passes, waiting=self.waiting)

    def load_state_dict(self, state: dict):
        vars(self).update(state)


def record_episodes(manager: ExperienceManager, trajectories, batch: dict, entropy):
    """Replay: count the successes of new episodes, and store them with log-probs and entropy."""
    fresh = []
    for i, t in enumerate(trajectories):
        if not t.is_experience_replay:
            t.old_log_probs = batch["old_logprobs"][i, : len(t.sampler_logprobs)].tolist()
            t.entropy = masked_mean(entropy[i], batch["response_mask"][i]).item()
            fresh.append(t)
    manager.update_difficulty2task_dict(fresh)
    storable = manager.update_skip_uid_set_and_filter_trajectories(fresh)
    manager.save_trajectories_to_memory(storable)


# --- imitation: --method sft ---
def draw_successes(manager, args, rng) -> list[Trajectory]:
    """A batch of the stored successes, with replacement; keep or strip is drawn for each sample."""
    keep_share = share_of(args.train_sample_expmode, args.train_sample_keepratio)
    keeps = draw(args.batch_size, keep_share, rng)
    stored = [t for task in sorted(manager.memory) for t in manager.memory[task]]
    if not stored:
        return []
    chosen = rng.choices(stored, k=args.batch_size)
    return [replace(t, keep=keep) for t, keep in zip(chosen, keeps, strict=True)]


# --- update ---
def grpo_token_losses(new_logprobs, minibatch: dict, args) -> dict:
    """Clipped surrogate of each token (eq. 7 of PPO), with a dual clip (arXiv:1912.09729).

    Off-policy tokens have an upper clip range of their own.
    """
    advantages = minibatch["advantages"]
    is_off = minibatch["exp_mask"] == 1
    max_ratio = 1 + torch.where(is_off, args.off_cliprange_high, CLIP_HIGH)
    logratio = new_logprobs - minibatch["old_logprobs"]
    ratio = logratio.clamp(-20, 20).exp()  # without the clamp exp can overflow
    clipped_ratio = torch.minimum(ratio.clamp(min=1 - CLIP_LOW), max_ratio)
    unclipped = -advantages * ratio
    loss = torch.max(unclipped, -advantages * clipped_ratio)
    # If the advantage is negative, max() does not limit the loss of a large ratio.
    loss = torch.where(advantages < 0, torch.min(loss, -advantages * DUAL_CLIP), loss)
    is_clipped = (loss != unclipped).float()
    return dict(
        policy_loss=loss,
        clipfrac_on=is_clipped.where(~is_off, 0.0),
        clipfrac_off=is_clipped.where(is_off, 0.0),
    )


def minibatch_loss(policy, minibatch: dict, num_tokens, args):
    """-> loss, dict of statistics, log-ratios (B,R)

    Loss and statistics are sums over these rows, divided by the number of tokens of the whole
    minibatch, so that micro-batches and ranks add up. Each clipfrac is a share of all tokens.
    approx_kl estimates a KL divergence only if all samples are on-policy.
    """
    mask = minibatch["response_mask"].float()
    exp_mask = minibatch["exp_mask"].float()
    old_logprobs = minibatch["old_logprobs"]
    new_logprobs, entropy = logprobs_and_entropy(policy, minibatch)
    if not args.ent_coef:
        entropy = entropy.detach()  # only for the log: no backward pass
    if args.method == "sft":  # cross-entropy on successes: their advantage is 1, others have 0
        per_token = dict(policy_loss=-minibatch["advantages"] * new_logprobs)
    else:
        per_token = grpo_token_losses(new_logprobs, minibatch, args)
    per_token["on_policy_loss"] = per_token["policy_loss"] * (1 - exp_mask)
    per_token["off_policy_loss"] = per_token["policy_loss"] * exp_mask
    per_token["entropy"] = entropy
    per_token["approx_kl"] = k3_kl(old_logprobs, new_logprobs.detach())
    means = {name: (x * mask).sum() / num_tokens for name, x in per_token.items()}
    loss = means["policy_loss"] - args.ent_coef * means["entropy"]
    stats = {name: mean.detach() for name, mean in means.items()}
    return loss, stats, new_logprobs.detach() - old_logprobs


def minibatch_gradient(policy, batch: dict, indices, logratios, args) -> dict:
    """Compute the gradient of a minibatch, summed over micro-batches and ranks.  -> statistics

    Also fills in the log-ratios (B,R) of this rank's rows.
    """
    num_tokens = batch["response_mask"][indices].sum()
    stats = defaultdict(float)
    for part in my_share(indices).tensor_split(args.gradient_accumulation_steps):
        micro_batch = {name: tensor[part] for name, tensor in batch.items()}
        loss, micro_stats, logratio = minibatch_loss(policy, micro_batch, num_tokens, args)
        loss.backward()
        logratios[part] = logratio
        for name, value in micro_stats.items():
            stats[name] += value
    sum_over_ranks(stats.values())
    sum_gradients(policy)
    return stats


def grpo_update(policy, optimizer, batch: dict, args, generator) -> dict[str, float]:
    """Take several epochs of minibatch steps.  -> metrics: means over the steps"""
    parameters = optimizer.param_groups[0]["params"]
    steps = []
    num_skipped = 0
    for _ in range(args.update_epochs):
        logratios = torch.zeros_like(batch["old_logprobs"])  # measured before each step
        shuffled = torch.randperm(args.batch_size, generator=generator).to(logratios.device)
        for indices in shuffled.chunk(args.num_minibatches):
            optimizer.zero_grad()
            stats = minibatch_gradient(policy, batch, indices, logratios, args)
            grad_norm = nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            stats["grad_norm"] = grad_norm.full_tensor() if args.fsdp else grad_norm
            if not all(value.isfinite() for value in stats.values()):
                num_skipped += 1  # a NaN must not reach the weights
                continue
            steps.append(stats)
            optimizer.step()
    if not steps:
        sys.exit("no step of this update had a finite loss and gradient")
    metrics = {"losses/skipped_steps": num_skipped}
    for name in steps[0]:
        per_step = torch.stack([stats[name] for stats in steps])
        metrics[f"losses/{name}"] = per_step.mean().item()
    sum_over_ranks([logratios])
    ratios = logratios[batch["exp_mask"] == 1].exp()  # of off-policy tokens, in the last epoch
    if len(ratios):
        metrics["ratio/off_mean"] = ratios.mean().item()
        metrics["ratio/off_p99"] = ratios.quantile(0.99).item()
        metrics["ratio/off_max"] = ratios.max().item()
    return metrics


# --- evaluate ---
def validate(player: Player, held_out: list[int]):
    """Play held-out tasks greedily, a share of them with advice.  -> metrics, episodes

    eval/success_rate counts the tasks without advice, or all tasks if there are none. Episodes that
    should get advice but found no note are neither in success_guided nor in success_unguided. These
    two are measured on different tasks, so their difference has the noise of the tasks.
    """
    args = player.args
    guided_share = share_of(args.val_rollout_expmode, args.rollout_expratio)
    guided = draw(len(held_out), guided_share, random.Random(0))
    planned = [Trajectory(task, i, guided=guided[i]) for i, task in enumerate(held_out)]
    played = player.play(planned)
    unguided = [t for t in played if not t.guided]
    headline = unguided or played
    kinds = {
        "eval/success_rate": headline,
        "eval/success_unguided": unguided,
        "eval/success_guided": [t for t in played if t.advice],
    }
    metrics = {name: fmean([t.success for t in kind]) for name, kind in kinds.items() if kind}
    metrics["eval/episodic_return"] = fmean([t.reward for t in headline])
    return metrics, played


def logprob_mismatch(batch: dict, iteration: int) -> dict:
    """How far log-probs of sampler and training pass differ, on average over on-policy tokens."""
    is_on_policy = batch["response_mask"] * (1 - batch["exp_mask"])
    if not is_on_policy.any():
        return {}
    difference = (batch["old_logprobs"] - batch["sampler_logprobs"]).abs()
    mismatch = masked_mean(difference, is_on_policy).item()
    if mismatch > 0.1 and iteration == 1:
        sys.exit(f"log-probs of sampling and training differ by {mismatch:.2f} nats on average")
    return {"rollout/logprob_mismatch": mismatch}


# --- main ---
def main(args: Args) -> dict[str, float]:
    if args.run_dir and Path(args.run_dir).exists() and not is_resumable(args):
        sys.exit(f"--run-dir {args.run_dir} already exists; runs are never overwritten")
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    transformers.utils.logging.disable_progress_bar()
    device = pick_device(args.device, built_in=args.model_name is None)
    device = init_distributed(device)

    tasks = list(range(args.num_train_tasks))
    held_out = list(range(args.num_train_tasks, args.num_train_tasks + args.eval_size))
    player = make_player(args, tasks, held_out, device)
    policy = player.policy
    pool = player.pool
    if args.model_name is None:
        practice(player)  # a checkpoint then replaces the weights, except those that LoRA freezes
    optimizer = prepare_training(policy, args, device)
    manager = ExperienceManager(args)
    mix = ExperienceMixCollateFn(args, manager, tasks)

    # A checkpoint holds weights, optimizer, logged metrics, and the state of these three parts.
    parts = dict(pool=pool, manager=manager, mix=mix)
    state = dict(iteration=0)  # load_checkpoint adds what it finds
    logged_rows = load_checkpoint(policy, optimizer, state, args)
    run = Run(args, logged_rows)
    if logged_rows:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    else:
        first_round(player, tasks, held_out, run)
    metrics = run.rows[-1]
    samples = []
    global_step = metrics["global_step"]
    signals = Signals()
    done = state["iteration"]
    progress = tqdm(initial=done, total=args.num_iterations, disable=None, file=sys.stdout)
    for iteration in range(done + 1, args.num_iterations + 1):
        start_time = time.time()
        # The random numbers of an iteration depend on the seed and the iteration only. They have
        # generators of their own, which environments and functions of the user cannot disturb.
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + iteration)
        exp_rng = random.Random(f"{args.seed}/{iteration}/e")
        replay_rng = random.Random(f"{args.seed}/{iteration}/r")
        learning_rate = args.learning_rate * (1 - (iteration - 1) / args.num_iterations)
        optimizer.param_groups[0]["lr"] = learning_rate
        options = args.at(iteration)  # those of --method sft in the first --imitate-iterations

        # 1. choose tasks; with replay some come with a recorded success
        experience_tasks, on_policy_tasks = mix(replay_rng)
        replayed = manager.get_offpolicy_batch(experience_tasks, replay_rng)

        # 2. play the other episodes of each group, some of them with advice
        num_notes = len(pool.records)  # notes that these episodes can get
        tasks_of_groups = experience_tasks + on_policy_tasks  # data_ids of `replayed` come first
        planned = plan_episodes(tasks_of_groups, replayed, options, iteration, exp_rng)
        fresh = player.play(planned, generator)
        global_step += len(fresh)

        # 3. training samples: a training prompt and a completion
        trajectories = sorted(fresh + replayed, key=lambda t: (t.data_id, t.rollout_id))
        if options.method == "sft":
            manager.save_trajectories_to_memory([t for t in fresh if t.success])
            trajectories = draw_successes(manager, options, exp_rng) or fresh
        batch = samples_to_dataproto(trajectories, device)

        # 4. log-probs before the update. First compare them with those of the sampler, then record
        # them. Only after that recorded ones may replace them.
        batch["old_logprobs"], entropy = compute_log_prob(policy, batch, args)
        mismatch = {}
        if options.method != "sft" or iteration == 1:  # later its samples may be old
            mismatch = logprob_mismatch(batch, iteration)
        if args.use_experience_replay:
            record_episodes(manager, trajectories, batch, entropy)
        if args.replay_old_logp == "recorded":
            batch["old_logprobs"] = _replace_recorded_old_log_probs(batch, batch["old_logprobs"])

        # 5. advantages
        if options.method == "sft":
            advantages = batch["successes"]  # 1 or 0
        else:
            advantages = group_advantages(batch["rewards"], batch["group_ids"], args.adv_std)
        batch["advantages"] = advantages[:, None] * batch["response_mask"]
        weaken_stripped_failures(batch)
        rollout_time = time.time() - start_time

        # 6. update
        losses = grpo_update(policy, optimizer, batch, options, generator)
        update_time = time.time() - start_time - rollout_time

        # 7. evaluate
        is_last = iteration == args.num_iterations
        scores = {}
        samples = []
        if is_last or iteration % args.eval_every == 0:
            scores, episodes = validate(player, held_out)
            samples = sample_episodes(episodes)

        # 8. notes about the new episodes; the next iteration reads them
        if args.writes_notes and args.updated_freq and iteration % args.updated_freq == 0:
            pool.fill_pool(fresh)
        if args.val_summarizer_save and args.writes_notes and scores:
            pool.fill_pool(episodes)

        # 9. log and save
        metrics = {
            "global_step": global_step,
            "exp/pool_size": num_notes,
            "exp/failed_calls": pool.failed_calls(),
            "charts/learning_rate": learning_rate,
            "charts/SPS": len(fresh) / (rollout_time + update_time),  # episodes per second
            "time/rollout": rollout_time,
            "time/update": update_time,
        }
        metrics |= rollout_metrics(fresh, replayed, trajectories) | mismatch | losses | scores
        if args.use_experience_replay:
            metrics |= replay_metrics(manager, replayed, iteration)
        run.log(metrics, samples)
        print_status(progress, iteration, metrics, options)
        is_interrupted = any_rank(signals.received, device)
        if is_last or is_interrupted or iteration % args.save_every == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            save_checkpoint(run, policy, optimizer, states | dict(iteration=iteration))
        if is_interrupted and not is_last:
            progress.close()
            print(f"stopped and saved; continue with --run-dir {run.dir} --resume")
            return metrics

    progress.close()
    signals.release()
    save_model(policy, player.dialogue.tokenizer, run.dir / "final_model")
    if samples:  # a resumed run may have had nothing left to do
        print_episodes(samples)
    run.finish()
    return metrics


def make_player(args, tasks: list[int], held_out: list[int], device) -> Player:
    """Load or make the model, the environments and the pool of notes."""
    envs = [TextEnv(args) for _ in range(args.batch_size)]
    pool = ExperiencePool(args)
    if args.experience_pool:
        pool.load(args.experience_pool)
    words = []
    if args.model_name is None:
        words = vocabulary(envs[0], tasks[:200] + held_out[:200], pool.records, args)
    lm, tokenizer, eos_ids = load_agent(args, words)
    policy = Policy(lm, eos_ids, args.temperature).to(device)
    dialogue = Dialogue(tokenizer, args, eos_ids)
    pool.ask = functools.partial(ask_policy, policy, dialogue)
    return Player(policy, dialogue, envs, pool, args)


def prepare_training(policy: Policy, args, device):
    """Add adapters, switch to bfloat16, shard, as the options say.  -> the optimizer"""
    if args.lora_rank:
        add_adapters(policy, args)
        policy.to(device)
    broadcast_weights(policy)
    if args.bf16:
        use_bf16(policy)
    if args.fsdp:
        shard(policy)
    trained = [x for x in policy.parameters() if x.requires_grad]  # with LoRA: not the base model
    num_parameters = sum(x.numel() for x in trained)
    print(f"device {device}, {num_parameters:,} parameters are trained")
    return torch.optim.AdamW(trained, args.learning_rate, eps=1e-5, weight_decay=0.0, fused=True)


def first_round(player: Player, tasks: list[int], held_out: list[int], run):
    """Before training: play tasks without advice for the first notes, then evaluate and log."""
    args = player.args
    played = []
    if args.writes_notes and args.init_exp_before_training:
        num_tasks = min(args.init_exp_before_training, len(tasks))
        planned = []
        for data_id, task in enumerate(random.Random(args.seed).sample(tasks, num_tasks)):
            planned += [Trajectory(task, data_id, i) for i in range(args.group_size)]
        played = player.play(planned, torch.default_generator)
        player.pool.fill_pool(played)
    metrics, episodes = validate(player, held_out)
    metrics["exp/pool_size"] = len(player.pool.records)
    run.log({"global_step": len(played)} | metrics, sample_episodes(episodes))


# --- metrics ---
def rollout_metrics(fresh, replayed, samples) -> dict:
    """Means over new episodes, replayed episodes and samples. Without values there is no metric."""
    values = defaultdict(list)
    groups = defaultdict(list)
    for t in fresh:
        groups[t.data_id].append(t.success)
        values["charts/success_rate"].append(t.success)
        values["charts/episodic_return"].append(t.reward)
        values["charts/episodic_length"].append(len(t.turns))
        if t.guided:
            values["exp/retrieval_empty_frac"].append(not t.advice)
        else:
            values["success/unguided"].append(t.success)
        if t.advice:
            values["success/guided"].append(t.success)
    for t in samples:
        values["exp/off_frac"].append(get_extra(t)["off_policy"])
    for group in groups.values():
        values["groups/all_fail"].append(not any(group))
        values["groups/all_success"].append(all(group))
    for t in replayed:
        values["groups/rescued"].append(not any(groups[t.data_id]))
    return {name: fmean(x) for name, x in values.items()}


def replay_metrics(manager: ExperienceManager, replayed: list[Trajectory], iteration: int) -> dict:
    metrics = {
        "replay/pool_tasks": sum(len(tasks) for tasks in manager.valid_tasks().values()),
        "replay/trajectories": sum(len(stored) for stored in manager.memory.values()),
        "replay/skip_set": len(manager.skip_uid_set),
        "replay/experience_tasks": len(replayed),
    }
    if replayed:
        metrics["replay/age_mean"] = fmean([iteration - t.version for t in replayed])
    for num_successes, num_tasks in Counter(manager.num_successes.values()).items():
        metrics[f"replay/bucket_{num_successes}"] = num_tasks
    return metrics


# --- task: environments ---
NAMES = (
    "amber brass cedar delta ember flint grove hazel ivory jade kelp lunar maple north opal "
    "pearl quartz river slate topaz umber violet willow yarrow"
).split()


class LockEnv:
    """Press four buttons in the right order; a wrong button costs a turn.

    Locks of a family share a secret, which is the same for every --seed, and training has locks of
    all families. So a held-out lock is a new room of a known family. Random actions open 7 % of the
    locks. A player who remembers no earlier lock, but repeats no wrong button, opens 14 %.
    """

    actions = ("red", "green", "blue", "gold")

    def __init__(self, num_families: int = 12):
        self.num_families = num_families  # up to 24, the number of names

    def reset(self, seed: int):
        room, family = divmod(seed, self.num_families)
        rules = random.Random(seed if seed >= PRACTICE else f"lock {family}")
        self.secret = rules.choices(self.actions, k=4)
        self.slot = 0
        self.name = NAMES[family]
        # Only the teacher of the warm start reads the solution.
        info = dict(topic=self.name, solution=self.secret)
        return f"lock {self.name} room {room % 100:02d}", info

    def step(self, action: str):
        if action != self.secret[self.slot]:
            return f"jam {self.slot}", 0.0, False, False, {}
        self.slot += 1
        if self.slot < 4:
            return f"click {self.slot}", 0.0, False, False, {}
        experience = f"{self.name} : " + " ".join(self.secret)
        return "open", 1.0, True, False, dict(experience=experience)


class TextEnv:
    """An environment as a text game, with the five values of Gymnasium's step."""

    def __init__(self, args):
        name, brace, options = args.env.partition("{")
        options = json.loads((brace + options) or "{}")
        if name == "lock":
            self.env = LockEnv(**options)
        elif ":" in name:
            self.env = load_object(name)(**options)
        else:
            self.env = gym.make(name, **options).unwrapped  # --max-turns is the time limit
        self.success_reward = args.success_reward
        words = getattr(self.env, "actions", ())
        values = words
        space = getattr(self.env, "action_space", None)
        if isinstance(space, gym.spaces.Discrete):
            values = range(space.start, space.start + space.n)
            words = words or values
        # What is said -> the action of the environment. If this is empty, any text is an action.
        self.actions = {
            str(word).lower(): action for word, action in zip(words, values, strict=True)
        }
        names = sorted(self.actions, key=len, reverse=True)  # prefer "go left" to "go"
        self.pattern = (
            rf"(?<!\w)({'|'.join(map(re.escape, names))})(?!\w)"  # \b would not find "-1"
        )

    def reset(self, task: int) -> tuple[str, dict]:
        observation, info = self.env.reset(seed=task)
        self.earned = 0.0
        self.last_info = {}
        return str(observation), dict(topic=str(observation)) | info

    def step(self, text: str):
        """Take the action that the text names last. Text without an action has a reward of -1.

        The penalty does not count for success. An episode is a success if the last info["success"]
        of the environment is true, or where this entry is missing, if the episode terminated and
        the rewards of the environment reach --success-reward.
        """
        action = text
        if self.actions:
            names = re.findall(self.pattern, text.lower())
            if not names:
                observation = "not an action : " + " ".join(self.actions)
                return observation, -1.0, False, False, self.last_info
            action = self.actions[names[-1]]
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.earned += float(reward)
        has_earned = self.earned > self.success_reward - 1e-6  # sums of floats are not exact
        success = info.get("success", terminated and has_earned)
        self.last_info = info | dict(success=bool(success))  # JSON cannot write a value of NumPy
        return str(observation), float(reward), bool(terminated), bool(truncated), self.last_info


# --- task: functions and classes of the user ---
@functools.cache
def load_file(path: str) -> dict:
    """Run a file once. Its folder is added to the path, so that it can import its neighbors."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    return runpy.run_path(path)


def load_object(place: str):
    """file.py:name or module:name"""
    path, _, name = place.rpartition(":")
    if path.endswith(".py"):
        names = load_file(path)
    else:
        names = vars(importlib.import_module(path))
    if name not in names:
        sys.exit(f"{place}: there is no {name} in {path}")
    return names[name]


def call_within_limit(seconds: float, function, *inputs):
    """What a user's function returns. If it fails, Python prints its error."""
    results = [RuntimeError("an error")]
    # A daemon thread: a call that hangs cannot keep the process alive.
    thread = threading.Thread(target=lambda: results.append(function(*inputs)), daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return TimeoutError(f"no result within {seconds:.0f} seconds")
    return results[-1]


# --- task: practice of the tiny model ---
WORD = r"\d|[^\W\d]+|[^\w\s]"  # one token: a digit, a word, or a mark


def practice_game(env: TextEnv, task: int, rng, args) -> Trajectory:
    """A teacher plays. In 60 % of the games it has advice, and follows it in 80 % of the turns.

    In all other turns it acts at random.
    """
    question, info = env.reset(task)
    t = Trajectory(task, question=question)
    words = list(env.actions) or re.findall(WORD, question) or ["ok"]
    plan = list(info.get("solution") or rng.choices(words, k=args.max_turns))
    if rng.random() < 0.6:
        t.advice = f"{info['topic']} : " + " ".join(plan)
    for _ in range(args.max_turns):
        action = rng.choice(words)
        if t.advice and plan and rng.random() < 0.8:
            action = plan[0]
        if plan and action == plan[0]:
            plan.pop(0)
        observation, _, terminated, truncated, _ = env.step(action)
        t.turns.append(dict(action=action, observation=observation))
        if terminated or truncated:
            break
    return t


def vocabulary(env: TextEnv, tasks, records: list[dict], args) -> list[str]:
    """Words of the tiny model: those of actions, questions, notes, and some random games."""
    texts = [*env.actions, args.experience_template, "not an action : 0 1 2 3 4 5 6 7 8 9"]
    texts += [record["text"] for record in records]
    for task in tasks:
        t = practice_game(env, task, random.Random(task), args)
        texts += [t.question, t.advice]
        for turn in t.turns:
            texts += turn.values()
    return sorted({word for text in texts for word in re.findall(WORD, text)})


def practice(player: Player):
    """Supervised steps on games of a teacher: the tiny model learns to play, and to use advice."""
    args = player.args
    dialogue = player.dialogue
    print(f"warm start: {WARM_START_STEPS} supervised steps on games of a teacher", flush=True)
    optimizer = torch.optim.AdamW(player.policy.parameters(), lr=1e-3, fused=True)
    rng = random.Random(f"{args.seed}/warm start")
    for _ in range(WARM_START_STEPS):
        games = []
        for task in rng.choices(range(PRACTICE, 2 * PRACTICE), k=64):
            t = practice_game(player.envs[0], task, rng, args)
            prompt = inject_experience(t.question, t.advice, args.experience_template)
            t.advised_ids = dialogue.prompt(prompt)
            for turn in t.turns:
                ids = dialogue.encode(turn["action"]) + [min(dialogue.eos_ids)]
                ids = ids[: args.max_turn_tokens]
                t.steps.append(("assistant", ids))
                t.steps.append(("env", dialogue.reply(turn["observation"], ids)))
            games.append(t)
        batch = samples_to_dataproto(games, player.policy.eos_ids.device)
        logprobs, _ = logprobs_and_entropy(player.policy, batch)
        (-masked_mean(logprobs, batch["response_mask"])).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- model: load one, or make the tiny one ---
def pick_device(name: str, built_in: bool) -> torch.device:
    """auto: the CPU if what the run uses is built in, else an accelerator if there is one."""
    if name != "auto":
        return torch.device(name)
    if built_in:
        return torch.device("cpu")
    # Without check_available the CUDA build of torch answers "cuda" on a machine without a GPU.
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


ANSWER = "<<the answer of the agent>>"  # stands for any answer in a chat template


class Dialogue:
    """Turns texts into token ids and back, with the tokenizer's chat template or without."""

    def __init__(self, tokenizer, args, eos_ids):
        self.tokenizer = tokenizer
        self.chat_template = args.chat_template
        self.system_prompt = args.system_prompt
        self.eos_ids = set(eos_ids.tolist())

    @functools.lru_cache(100_000)  # noqa: B019 - texts repeat; nobody may change the cached lists
    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        if self.tokenizer.unk_token_id in ids:
            print(f"warning: the model reads {self.tokenizer.unk_token} in {text!r:.200}")
        return ids

    def render(self, messages: list[tuple[str, str]]) -> str:
        if self.system_prompt:
            messages = [("system", self.system_prompt), *messages]
        return self.tokenizer.apply_chat_template(
            [dict(role=role, content=content) for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
        )

    def prompt(self, text: str) -> list[int]:
        if self.chat_template:
            return self.encode(self.render([("user", text)]))
        return self.encode(text, add_special_tokens=True)

    def reply(self, observation: str, turn_ids: list[int]) -> list[int]:
        """What follows a turn: a line break and the observation, or what the chat template says.

        The template's text starts with the token that ends a turn, which may have been sampled.
        """
        text = f"\n{observation}"
        if self.chat_template:
            # Render a dialogue with a stand-in for the answer, and take what follows it.
            dialogue = [("user", "question"), ("assistant", ANSWER), ("user", observation)]
            _, _, text = self.render(dialogue).partition(ANSWER)
        ids = self.encode(text)
        if ids and ids[0] in self.eos_ids and turn_ids[-1] in self.eos_ids:
            return ids[1:]  # the end was sampled
        return ids

    def read(self, ids: list[int]) -> str:
        text_ids = [token for token in ids if token not in self.eos_ids]
        return self.tokenizer.decode(text_ids, skip_special_tokens=True)


def ask_policy(policy, dialogue: Dialogue, prompts: list[str], max_tokens: int = 64) -> list[str]:
    """Greedy answers of the policy, for summarizers."""
    if isinstance(policy, FSDPModule):
        raise RuntimeError("ask() needs whole weights and does not work with --fsdp")
    contexts = [dialogue.prompt(prompt) for prompt in prompts]
    answers, _ = sample_turn(policy, contexts, max_tokens)
    return [dialogue.read(ids) for ids in answers]


def make_word_tokenizer(words: list[str]):
    """One token per word."""
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    ids = {token: i for i, token in enumerate([*special.values(), *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    pattern = tokenizers.Regex(WORD)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "removed", invert=True)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_tiny_lm(tokenizer):
    """A Llama with 0.1 million parameters."""
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def load_agent(args, words: list[str]):
    """-> causal LM, tokenizer, ids of the tokens that end a turn (E,)"""
    if args.model_name is None:
        tokenizer = make_word_tokenizer(words)
        lm = make_tiny_lm(tokenizer)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_name)
        lm = transformers.AutoModelForCausalLM.from_pretrained(args.model_name, dtype=torch.float32)
    eos_ids = lm.generation_config.eos_token_id  # chat models often have a list of them
    eos_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
    eos_ids = {*eos_ids, tokenizer.eos_token_id} - {None}
    return lm, tokenizer, torch.tensor(sorted(eos_ids))


def transformer_layers(model):
    """The nn.ModuleList with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda layers: sum(x.numel() for x in layers.parameters()))


def use_bf16(policy):
    """Multiply matrices in bfloat16, except in the LM head: rounding logits changes log-probs."""
    device_type = policy.eos_ids.device.type
    policy.forward = torch.autocast(device_type, torch.bfloat16)(policy.forward)
    head = policy.lm.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
    head.forward = torch.autocast(device_type, enabled=False)(head.forward)


def add_adapters(policy, args):
    """LoRA (arXiv:2106.09685): freeze the model; beside each matrix, train a product of low rank."""
    from peft import LoraConfig, get_peft_model

    lm = policy.lm
    if args.weights_dtype == "bfloat16":
        # The LM head stays in float32. It is copied, because it may be tied to the embedding.
        float32_head = copy.deepcopy(lm.get_output_embeddings())
        for parameter in lm.parameters():  # not lm.bfloat16(), which would round buffers as well
            parameter.data = parameter.data.bfloat16()
        lm.set_output_embeddings(float32_head)
        lm.config.tie_word_embeddings = False
    config = LoraConfig(
        r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear"
    )
    policy.lm = get_peft_model(lm, config)  # float32 adapters, which add 0 at first
    policy.eval()


def trained_names(policy) -> list[str]:
    """Names of the weights that are trained. With LoRA, those of the base model are not."""
    weights = policy.state_dict(keep_vars=True)
    return [name for name, weight in weights.items() if weight.requires_grad]


def merge_adapters(lm):
    """Returns an ordinary model without weights, and the weights: frozen ones plus adapters."""
    lm = lm.get_base_model()
    merged_weights = {}
    for name, weight in lm.state_dict().items():
        if "lora_" in name:
            continue
        weight = weight.cpu().float()
        if name.endswith(".base_layer.weight"):
            adapted_layer = lm.get_submodule(name.removesuffix(".base_layer.weight"))
            weight = weight + adapted_layer.get_delta_weight("default").cpu()
        merged_weights[name.replace(".base_layer", "")] = weight
    with torch.device("meta"):
        merged_lm = type(lm)(lm.config)
    merged_lm.generation_config = lm.generation_config
    return merged_lm, merged_weights


# --- run folder ---
def sample_episodes(trajectories: list[Trajectory]) -> list[dict]:
    """The first episodes without advice, then the first ones with advice, in words."""
    without_advice = [t for t in trajectories if not t.advice]
    with_advice = [t for t in trajectories if t.advice]
    return [episode_of(t) for t in without_advice[:4] + with_advice[:4]]


def print_status(progress, iteration: int, metrics: dict, args):
    """Show the success of new episodes. Warn if they should get advice and none got any."""
    status = f"success {metrics['charts/success_rate']:.2f}"
    progress.set_postfix_str(status, refresh=False)
    progress.update()
    if progress.disable:  # the output is not a terminal: print lines instead of a bar
        print(f"[{iteration}/{progress.total}] {status}", flush=True)
    needs_advice = args.train_rollout_expmode != "woexp" and args.rollout_expratio > 0
    if needs_advice and "success/guided" not in metrics and iteration in (1, progress.total):
        tqdm.write(
            f"warning: no training episode got advice, with {metrics['exp/pool_size']} notes"
        )


def print_episodes(samples: list[dict]):
    """Print the first episode without advice and the first one with advice."""
    first_of_kind = {}
    for sample in samples:
        first_of_kind.setdefault(bool(sample["advice"]), sample)
    for sample in first_of_kind.values():
        advice = sample["advice"] or "none"
        print(f"--- task {sample['task']}, reward {sample['reward']:g}, advice: {advice}")
        print(sample["text"])


PANELS = {  # the panels of curves.png: label of the y-axis, metrics
    "held-out success (share)": ["eval/success_unguided", "eval/success_guided"],
    "training success (share)": ["success/unguided", "success/guided"],
    "entropy (nats per token)": ["losses/entropy"],
}


class Run:
    """The folder of a run: options, metrics, samples, and at the end a summary and curves."""

    def __init__(self, args, logged_rows: list[dict]):
        script = Path(__file__).stem
        name = f"{script}__{args.seed}__{int(time.time())}_{os.getpid()}"
        self.dir = Path(args.run_dir or f"runs/{name}")
        self.rows = logged_rows  # those of the run that is resumed
        self.start_time = time.time()
        last_step = -1
        if logged_rows:
            self.start_time -= logged_rows[-1]["time"]
            last_step = logged_rows[-1]["global_step"]
        self.wandb = None
        if rank() > 0:
            return
        self.dir.mkdir(parents=True, exist_ok=args.resume)

        config = asdict(args) | dict(script=script, argv=sys.argv, torch=torch.__version__)
        replace_text(self.dir / "args.json", json.dumps(config, indent=2))
        for name in ("metrics.jsonl", "episodes.jsonl"):
            drop_lines_after(last_step, self.dir / name)
        if args.track:
            import wandb

            id_path = self.dir / "wandb_id.txt"  # a resumed run has the id of its first start
            if not id_path.exists():
                replace_text(id_path, uuid.uuid4().hex)
            wandb.init(
                project=args.wandb_project_name,
                name=self.dir.name,
                dir=self.dir,
                config=config,
                id=id_path.read_text(encoding="utf-8"),
                resume="allow",
            )
            self.wandb = wandb

    def log(self, metrics: dict, samples: list[dict] = ()):
        row = metrics | {"time": round(time.time() - self.start_time, 3)}
        row = {name: x if math.isfinite(x) else None for name, x in row.items()}  # JSON has no NaN
        self.rows.append(row)
        if rank() > 0:
            return
        step = row["global_step"]
        append_lines(self.dir / "metrics.jsonl", [row])
        samples = [{"global_step": step} | sample for sample in samples]
        append_lines(self.dir / "episodes.jsonl", samples)
        if self.wandb:
            self.wandb.log(row, step=step)

    def finish(self):
        """Write summary.json and curves.png, and print the result."""
        if rank() > 0:
            return
        summary = json.dumps(self.rows[-1], indent=2)
        (self.dir / "summary.json").write_text(summary, encoding="utf-8")
        os.environ.pop("MPLBACKEND", None)  # a notebook sets a backend that may not be installed
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4 * len(PANELS), 3.2), layout="constrained")
        axes = figure.subplots(1, len(PANELS))
        for axis, (ylabel, names) in zip(axes, PANELS.items(), strict=True):
            axis.set(xlabel="episodes played", ylabel=ylabel)
            for name in names:
                plot_metric(axis, self.rows, name)
            axis.legend()
        figure.savefig(self.dir / "curves.png")
        if self.wandb:
            self.wandb.finish()

        last_row = self.rows[-1]
        rates = [row["eval/success_rate"] for row in self.rows if "eval/success_rate" in row]
        change = f"{rates[0]:.2f} -> {rates[-1]:.2f}"
        print(f"success {change}, {last_row['global_step']} episodes, {last_row['time']:.0f} s")
        print(f"curves.png and episodes.jsonl are in {self.dir}")
        print(f"load the model: AutoModelForCausalLM.from_pretrained('{self.dir}/final_model')")


def append_lines(path: Path, rows: list[dict]):
    with open(path, "a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def plot_metric(axis, rows: list[dict], name: str):
    rows = [row for row in rows if row.get(name) is not None]
    steps = [row["global_step"] for row in rows]
    axis.plot(steps, [row[name] for row in rows], ".-", label=name)


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


POSITIVE = """num_threads eval_every eval_size save_every num_train_tasks max_turns num_tasks
    group_size max_turn_tokens temperature num_iterations learning_rate update_epochs
    num_minibatches gradient_accumulation_steps off_cliprange_high""".split()
NOT_NEGATIVE = """init_exp_before_training updated_freq imitate_iterations ent_coef lora_rank
    experience_rbound""".split()
SHARES = ["rollout_expratio", "train_sample_keepratio", "exp_ratio"]
NEEDS = {  # an option -> another one, without which it does nothing
    "exp_ratio": "use_experience_replay",
    "replay_old_logp": "use_experience_replay",
    "retire_solved": "use_experience_replay",
    "system_prompt": "chat_template",
    "chat_template": "model_name",  # the tiny model has no template
    "resume": "run_dir",
}
ONLY_WITH_ADVICE = ["experience_pool", "summarizer", "retriever", "val_summarizer_save"]


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_typed(args, name: str) -> str:
    """An option and its value."""
    value = getattr(args, name)
    return as_flag(name) if value is True else f"{as_flag(name)} {value}"


def check_method(args):
    """Raise ValueError if an option contradicts --method. sft accepts all of them."""
    free = {"val_rollout_expmode"}
    if args.method == "het":
        free.add("train_sample_keepratio")
    if args.method != "baseline" and args.train_rollout_expmode == "all":
        free.add("train_rollout_expmode")
    for name, value in METHODS[args.method].items():
        is_typed = getattr(args, name) != value
        if is_typed and name not in free and args.method != "sft":
            raise ValueError(f"--method {args.method} contradicts {as_typed(args, name)}")


def refuse_if(condition, message: str):
    if condition:
        raise ValueError(message)


def check_options(args):
    """Raise ValueError if a value makes no sense. tyro prints it as a command-line error."""
    for name in POSITIVE:
        if not getattr(args, name) > 0:  # this refuses NaN as well
            raise ValueError(f"{as_typed(args, name)}: must be positive")
    for name in NOT_NEGATIVE:
        if not getattr(args, name) >= 0:
            raise ValueError(f"{as_typed(args, name)}: must not be negative")
    for name in SHARES:
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"{as_typed(args, name)}: must be from 0 to 1")
    for name, other in NEEDS.items():
        is_default = getattr(args, name) == getattr(Args, name)
        if not is_default and not getattr(args, other):
            raise ValueError(f"{as_typed(args, name)} needs {as_flag(other)}")
    for name in ONLY_WITH_ADVICE:
        if getattr(args, name) and not args.uses_advice:
            raise ValueError(f"{as_typed(args, name)} does nothing: no episode gets advice")
    for name in ("env", "summarizer", "retriever"):
        path, suffix, _ = (getattr(args, name) or "").partition(".py:")
        if suffix and not Path(path + ".py").is_file():
            raise ValueError(f"{as_typed(args, name)}: there is no file {path}.py")
    imitates = args.method == "sft" or args.imitate_iterations > 0
    is_bfloat16 = args.weights_dtype == "bfloat16"
    num_keeping = num_chosen(args.num_tasks, args.train_sample_keepratio)
    num_replayed = num_chosen(args.num_tasks, args.exp_ratio)
    refuse_if(
        args.imitate_iterations
        and (not args.enable or args.method == "sft" or args.train_rollout_expmode == "all"),
        "--imitate-iterations contradicts --no-enable, --method sft and --train-rollout-expmode "
        "all",
    )
    refuse_if(
        args.method == "het" and not 0 < num_keeping < args.num_tasks,
        f"--train-sample-keepratio {args.train_sample_keepratio}: {num_keeping} of "
        f"{args.num_tasks} tasks keep the advice, and --method het needs both kinds",
    )
    refuse_if(
        args.use_experience_replay and args.exp_ratio > 0 and num_replayed == 0,
        f"--exp-ratio {args.exp_ratio} of {args.num_tasks} tasks is no task",
    )
    refuse_if(
        args.exp_select_mode != "argmin" and not (imitates or args.use_experience_replay),
        f"--exp-select-mode {args.exp_select_mode} needs replay or imitation",
    )
    refuse_if(
        args.experience_pool and not Path(args.experience_pool).is_file(),
        f"--experience-pool: there is no file {args.experience_pool}",
    )
    refuse_if(
        args.experience_template.count("{}") != 1, "--experience-template needs exactly one {}"
    )
    refuse_if(
        args.group_size == 1 and args.method != "sft",
        "--group-size must be at least 2: rewards are compared within a group",
    )
    refuse_if(
        imitates and args.use_experience_replay,
        "imitation cannot be combined with --use-experience-replay",
    )
    refuse_if(
        args.num_tasks > args.num_train_tasks, "--num-train-tasks must be at least --num-tasks"
    )
    refuse_if(
        args.chat_template and args.max_turn_tokens == 1,
        "--chat-template needs --max-turn-tokens 2 or more: one is for the end",
    )
    refuse_if(
        args.batch_size % args.num_parts,
        f"--num-tasks x --group-size must be a multiple of {args.num_parts}: --num-minibatches "
        "x --gradient-accumulation-steps x processes of torchrun",
    )
    refuse_if(args.fsdp and world_size() == 1, "--fsdp needs torchrun with two processes or more")
    refuse_if(args.fsdp and args.lora_rank, "--fsdp with --lora-rank is not supported")
    refuse_if(
        is_bfloat16 and not (args.lora_rank and args.bf16),
        "--weights-dtype bfloat16 needs --lora-rank and --bf16: it is for frozen weights",
    )


@dataclass
class ResumeArgs:
    """These options are read first, because the defaults of the others depend on them."""

    run_dir: str | None = None
    resume: bool = False


# What a run is built on. It is made again when a run resumes, so --resume cannot change it.
FIXED_OPTIONS = """seed env num_train_tasks eval_size max_turns max_turn_tokens model_name
    chat_template system_prompt lora_rank weights_dtype num_tasks group_size method enable
    temperature success_reward experience_template experience_pool init_exp_before_training
    use_experience_replay retire_solved""".split()


def parse_args() -> Args:
    """Read the options. With --resume, the options of the saved run are the defaults."""
    typed, _ = tyro.cli(ResumeArgs, return_unknown_args=True, add_help=False)
    options = {}
    if typed.resume and typed.run_dir:
        options = options_of_run(Path(typed.run_dir))
    if not options:
        return tyro.cli(Args, description=__doc__)
    saved = object.__new__(Args)  # not checked yet: a typed option may correct a saved one
    vars(saved).update(options, resume=True)
    args = tyro.cli(Args, description=__doc__, default=saved)
    for name, value in asdict(args).items():
        old_value = getattr(saved, name)
        if value == old_value:
            continue
        option = "--" + name.replace("_", "-")
        if name in FIXED_OPTIONS:
            sys.exit(f"--resume cannot change {option} from {old_value}")
        print(f"changed: {option} {old_value} -> {value}")
    return args


# --- checkpoints ---
# A checkpoint holds whole tensors, whether the model is sharded or not. It has no frozen weights:
# with LoRA those of the loaded model stay.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_checkpoint(run, policy, optimizer, state: dict):
    """Write a temporary file and rename it. If the run is killed, the old checkpoint is intact."""
    policy_state, optimizer_state = get_state_dict(policy, optimizer, options=WHOLE)
    if rank() == 0:  # on the others both are empty
        weights = {name: policy_state[name] for name in trained_names(policy)}
        saved = dict(policy=weights, optimizer=optimizer_state, rows=run.rows, state=state)
        torch.save(saved, run.dir / "checkpoint.pt.tmp")
        os.replace(run.dir / "checkpoint.pt.tmp", run.dir / "checkpoint.pt")


def load_checkpoint(policy, optimizer, state: dict, args) -> list[dict]:
    """Restore weights, optimizer and state. Returns the logged rows; [] if there is no checkpoint.

    If only some ranks find the checkpoint, the others end with an error.
    """
    path = Path(args.run_dir or "", "checkpoint.pt")
    if not any_rank(args.resume and path.exists(), policy.eos_ids.device):
        return []
    saved = torch.load(path, map_location="cpu", weights_only=True)
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=saved["policy"],
        optim_state_dict=saved["optimizer"],
        options=WHOLE,
    )
    state.update(saved["state"])
    print(f"resuming after iteration {state['iteration']}")
    return saved["rows"]


def is_resumable(args) -> bool:
    """With --resume, the folder may hold a run of this script, or nothing yet."""
    folder = Path(args.run_dir)
    if not (args.resume and folder.is_dir()):
        return False
    is_empty = {path.name for path in folder.iterdir()} <= {"args.json.tmp"}  # killed at its start
    return is_empty or bool(options_of_run(folder))


def options_of_run(folder: Path) -> dict:
    """The options with which the run in this folder was started; {} if there is no run."""
    path = folder / "args.json"
    if not path.exists():
        return {}
    options = json.loads(path.read_text(encoding="utf-8"))
    if options.get("script") != Path(__file__).stem:
        sys.exit(f"--resume: the run in {folder} was made by another script")
    return options


def drop_lines_after(global_step: int, path: Path):
    """Drop what a killed run wrote after its checkpoint: it will be written again."""
    if not path.exists():
        return
    kept = []
    for line in open(path, encoding="utf-8"):
        is_whole = line.endswith("\n")  # a kill may have left half a line
        if is_whole and json.loads(line)["global_step"] <= global_step:
            kept.append(line)
    replace_text(path, "".join(kept))


def replace_text(path: Path, text: str):
    """Write a temporary file, then rename it: a killed run has either the old or the new file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def save_model(policy, tokenizer, folder: Path):
    """Save an ordinary Hugging Face folder, first under a temporary name.

    A run that is killed here saves the folder again when it is resumed.
    """
    lm = policy.lm
    if hasattr(lm, "peft_config"):  # a model with adapters
        lm, weights = merge_adapters(lm)
    else:
        weights = get_model_state_dict(lm, options=WHOLE)
    if rank() > 0:
        return
    for name in lm.all_tied_weights_keys:  # their values are in the file under another name
        weights.pop(name, None)
    new_folder = folder.with_name(folder.name + ".tmp")
    lm.save_pretrained(new_folder, state_dict=weights)
    tokenizer.save_pretrained(new_folder)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(new_folder, folder)


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


# --- distributed ---
# torchrun gives each process its rank and the number of processes.
def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def my_share(rows):
    """Of n ranks, rank r takes the rows r, r + n, r + 2n, ..."""
    return rows[rank() :: world_size()]


def init_distributed(device):
    """Join the other processes of torchrun, if there are any. Returns the device of this one."""
    if world_size() == 1:
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # an error if there are more processes than GPUs
    else:
        device = torch.device("cpu")  # the only other one that torch.distributed supports
    dist.init_process_group()  # gloo for CPU tensors, nccl for CUDA tensors
    if rank() > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # one process prints
    return device


def broadcast_weights(policy):
    """Start all ranks from the weights of rank 0: a warm start rounds differently on other CPUs."""
    if world_size() > 1:
        for parameter in policy.parameters():
            dist.broadcast(parameter.data, 0)


def shard(policy):
    """Shard with FSDP2. The first forward pass gathers the weights, the backward pass frees them.

    With reshard_after_forward=True all ranks would gather them in every forward pass. But ranks
    make different numbers of passes, because they sample different numbers of tokens.
    """
    mesh = init_device_mesh(policy.eos_ids.device.type, (world_size(),))
    for layer in transformer_layers(policy.lm):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(policy, mesh=mesh, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):  # sum gradients over ranks: FSDP's default is the mean
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def gather_weights(policy):
    """FSDP2: every rank takes part, also one that has no episode to play and no forward pass."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def sum_gradients(policy):
    """Losses are divided by the tokens of all ranks, so gradients add up. FSDP sums by itself."""
    if world_size() > 1 and not isinstance(policy, FSDPModule):
        for parameter in policy.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


def sum_over_ranks(tensors):
    if world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def any_rank(flag: bool, device) -> bool:
    """Whether the flag is set on some rank."""
    count = torch.tensor(float(flag), device=device)
    sum_over_ranks([count])
    return count.item() > 0


def gather_objects(mine) -> list:
    """What each rank has, in a list by rank, on every rank."""
    shares = [mine] * world_size()
    if world_size() > 1:
        dist.all_gather_object(shares, mine)
    return shares


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have every character
    with titled_help():
        args = parse_args()
    main(args)
    if dist.is_initialized():
        dist.destroy_process_group()
