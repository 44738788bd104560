# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = ["torch==2.13.0", "transformers==5.22.2", "tyro==1.0.16", "tqdm", "matplotlib",
#     "wandb"]
# ///
r"""PPO for language models with production features (arXiv:1707.06347v2).

    for each iteration:
        sample one response to each prompt                                     # rollout
        score each response, for example 1 if it is right, else 0              # scorer
        reward of a token: -kl_coef * (log pi - log pi_ref);
            the score is added to the last token's reward                      # token_rewards
        advantages from rewards and values                                     # compute_gae
        for each epoch, for each minibatch:
            one optimizer step on clipped policy loss + value loss             # ppo_loss

Comments such as `# v1: checkpoint` mark what was added to ppo.py (`all`: lines of all of them).
    v1: checkpoint   - save and resume (on a CPU with identical numbers); Ctrl-C or SIGTERM saves,
                       then ends the run
    v1: schedule     - linear, cosine or constant learning rate, with a warm-up
    v1: accumulate   - micro-batches: the same gradient with less memory
    v1: memory       - bfloat16, gradient checkpointing, a limit on the length of prompts
    v1: lora         - train small adapters beside the frozen model, which is also the reference
    v1: best         - keep the best model; stop when the evaluation score stops improving
    v1: kl           - adapt the KL coefficient to a target; stop an update early when the policy
                       has changed too much
    v1: clip         - clip-higher (arXiv:2503.14476) and dual clip (arXiv:1912.09729)
    v1: nan          - leave out responses whose score is NaN or infinite
    v1: distributed  - several processes, replicated or sharded (FSDP2); they make the updates of
                       one process, up to rounding

The default options give exactly the numbers of ppo.py.

Shapes: B responses, P prompt tokens (left-padded), R response tokens (right-padded), V vocabulary.
A docstring that ends with `-> (B,R)` says which shape is returned.
The algorithm comes first and ends with `main`. Option checks, data, models and logging follow.

    python ppo_v1.py --run-dir runs/mine --resume          # start, or continue where it stopped
    python ppo_v1.py --model-name Qwen/Qwen2.5-1.5B-Instruct --chat-template --task jsonl:FILE \
        --max-response-length 256 --batch-size 64 --gradient-accumulation-steps 16 \
        --lora-rank 16 --bf16 --weights-dtype bfloat16 --gradient-checkpointing \
        --learning-rate 2e-4 --run-dir runs/qwen --resume  # a GPU with 24 GB
    torchrun --nproc-per-node 2 ppo_v1.py --fsdp           # two processes, sharded
"""

import copy
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
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import transformers
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

# --- args ---
Dtype = Literal["float32", "bfloat16"]  # v1: lora


@dataclass
class Args:
    # run
    seed: int = 1  # seed of training; the evaluation is the same for every seed
    device: str = "auto"  # cpu, cuda, mps, ... (auto: cpu for the tiny model, else a GPU if any)
    num_threads: int = 1  # CPU threads of torch; the tiny model is fastest with 1
    run_dir: str | None = None  # folder of this run (None: runs/{script}__{seed}__{time}_{pid})
    eval_every: int = 5  # iterations between evaluations
    eval_size: int = 256  # number of held-out prompts (at most a tenth of the data)
    track: bool = False  # also log to wandb (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "stale-experience"  # project name in wandb
    # v1: checkpoint, distributed
    resume: bool = False  # continue the run in run_dir with its options, or start it
    save_every: int = 10  # iterations between checkpoints
    fsdp: bool = False  # shard gradients and optimizer over the processes of torchrun (FSDP2)
    # task
    task: str = "sort"  # sort, or jsonl:PATH with a prompt and an answer per line
    min_digits: int = 3  # sort: length of the shortest list
    max_digits: int = 4  # sort: length of the longest list
    reward_fn: str | None = None  # file.py:function(prompts, responses, answers) -> list of floats
    # model
    model_name: str | None = None  # name or folder of a causal LM (None: a tiny Llama from scratch)
    chat_template: bool = False  # format each prompt as a user message
    sft_steps: int = 300  # tiny model only: supervised steps on scrambled answers before PPO
    # rollout
    batch_size: int = 128  # responses per iteration
    max_response_length: int = 8  # tokens, including EOS; without EOS the built-in score is 0
    # v1: memory
    max_prompt_length: int | None = None  # drop longer prompts (None: keep all)
    temperature: float = 1.0  # temperature of sampling and of log-probs; evaluation is greedy
    # optimization
    num_iterations: int = 40  # rounds of sampling and updating
    learning_rate: float = 5e-4  # highest learning rate; by default it falls linearly to 0
    update_epochs: int = 2  # passes over the batch
    num_minibatches: int = 1  # optimizer steps per epoch
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    # v1: all
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"  # shape after the warm-up
    warmup_steps: int = 0  # number of first iterations in which the learning rate rises
    gradient_accumulation_steps: int = 1  # micro-batches per minibatch
    bf16: bool = False  # multiply matrices in bfloat16; with LoRA, add --weights-dtype bfloat16
    gradient_checkpointing: bool = False  # less memory: recompute activations in the backward pass
    lora_rank: int = 0  # train adapters of this rank beside the frozen model (0: train the model)
    weights_dtype: Dtype = "float32"  # format of frozen weights (LoRA); with --bf16 use bfloat16
    early_stopping_patience: int | None = None  # stop after N evaluations without a better score
    # PPO
    gamma: float = 1.0  # discount per token
    gae_lambda: float = 1.0  # 0: one-step TD advantage, 1: Monte Carlo advantage
    norm_adv: bool = False  # normalize advantages to mean 0 and variance 1 within the batch
    clip_coef: float = 0.2  # the policy ratio is clipped to [1 - clip_coef, 1 + clip_coef]
    vf_clip_coef: float = 0.2  # clip range of the values in the value loss
    vf_coef: float = 0.1  # weight of the value loss
    ent_coef: float = 0.0  # weight of the entropy bonus
    kl_coef: float = 0.01  # weight of the KL penalty per token (0: no reference model)
    # v1: kl, clip
    ref_kl_target: float | None = None  # adapt kl_coef slowly to reach this KL (nats per response)
    target_kl: float | None = None  # stop an update if approx_kl > 1.5 times this (nats per token)
    clip_coef_high: float | None = None  # upper clip range (None: clip_coef)
    dual_clip: float | None = None  # highest ratio for tokens with a negative advantage (None: off)

    def __post_init__(self):
        check_args(self)
        check_v1_args(self)

    # v1: accumulate, distributed
    def num_parts(self) -> int:
        """Micro-batches of an epoch: minibatches x accumulation steps x processes."""
        return self.num_minibatches * self.gradient_accumulation_steps * world_size()


# --- networks ---
# A batch is a dict of tensors:
#     prompt_ids, prompt_mask       (B,P)
#     response_ids, response_mask   (B,R)  the mask is 1 up to and including EOS
#     logprobs, values              (B,R)  of the policy before the update
#     ref_logprobs                  (B,R)  of the reference
#     advantages, returns           (B,R)  added by add_advantages
#     scores, ended                 (B,)   ended: 1 if there is an EOS
# v1: nan
# If the score of a response is NaN or infinite, its mask is 0.


class PolicyWithValue(nn.Module):
    """A causal language model with a value head on its last hidden states."""

    def __init__(self, lm, eos_ids, temperature: float):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.value_head = nn.Linear(lm.get_output_embeddings().in_features, 1)
        nn.init.zeros_(self.value_head.weight)  # values are 0 at first
        nn.init.zeros_(self.value_head.bias)
        self.register_buffer("eos_ids", eos_ids)  # (E,) any of these tokens ends a response
        self.eval()  # during training, too: dropout would add noise to the policy ratio

    def forward(self, ids, mask, num_last: int, cache=None, use_cache: bool = False):
        """Logits of the next token and values at the last n = num_last positions.

        `ids` are the tokens that are not in the cache yet. `mask` covers all tokens.
        Returns logits (B,n,V), values (B,n) and the cache.
        """
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # padding on the left must not count
        # The value head has the same inputs as the LM head. A hook on the LM head keeps them. With
        # output_hidden_states=True the model would keep the hidden states of every layer.
        lm_head_inputs = []
        lm_head = self.lm.get_output_embeddings()
        hook = lm_head.register_forward_pre_hook(lambda _, inputs: lm_head_inputs.append(inputs[0]))
        output = self.lm(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions[:, -ids.shape[1] :],
            past_key_values=cache,
            use_cache=use_cache,
            logits_to_keep=num_last,
        )
        hook.remove()
        (hidden,) = lm_head_inputs
        # Some models ignore logits_to_keep and return all positions.
        logits = output.logits[:, -num_last:].float() / self.temperature
        values = self.value_head(hidden[:, -num_last:]).squeeze(-1)
        return logits, values.float(), output.past_key_values


def logprobs_and_values(policy, batch: dict):
    """Log-prob and entropy of each response token, and the value before it.  -> 3 x (B,R)"""
    ids = torch.cat([batch["prompt_ids"], batch["response_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["response_mask"]], 1)
    num_response_tokens = batch["response_ids"].shape[1]
    # Position t predicts token t + 1, so the last token is not an input.
    logits, values, _ = policy(ids[:, :-1], mask[:, :-1], num_response_tokens)
    all_logprobs = logits.log_softmax(-1)  # (B,R,V)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    logprobs = all_logprobs.gather(-1, batch["response_ids"][..., None]).squeeze(-1)
    is_token = batch["response_mask"] == 1
    return logprobs.where(is_token, 0.0), entropy.where(is_token, 0.0), values.where(is_token, 0.0)


@torch.no_grad()
def logprobs_and_values_in_parts(policy, batch: dict, args):
    """Call `logprobs_and_values` without gradients on a few rows at a time.  -> 3 x (B,R)"""
    size = args.batch_size // args.num_parts()  # v1: accumulate, distributed
    parts = []
    for start in range(0, len(batch["response_ids"]), size):
        minibatch = {name: tensor[start : start + size] for name, tensor in batch.items()}
        parts.append(logprobs_and_values(policy, minibatch))
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


# --- rollout ---
def encode(tokenizer, prompts: list[str], chat_template: bool, **padding):
    if chat_template:
        messages = [[dict(role="user", content=prompt)] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    return tokenizer(prompts, add_special_tokens=not chat_template, **padding)


def sample_token(logits, uniforms):
    """The first token whose cumulative probability is above the uniform number.  -> (B,)

    A response depends on its own row of uniform numbers only. With torch.multinomial it would also
    depend on which other rows are still in the batch.
    """
    cdf = logits.softmax(-1).cumsum(-1)  # (B,V)
    # Because of rounding the last entry may be below 1, so we scale the uniform number to it.
    return (cdf <= uniforms[:, None] * cdf[:, -1:]).sum(-1)


@torch.no_grad()
def generate(policy, prompt_ids, prompt_mask, max_response_length, uniforms=None) -> dict:
    """Sample a response to each prompt with uniform numbers (B,R). Without them, respond greedily.

    We do not use `lm.generate`: a model's generation config (top_k, repetition penalty, ...) would
    change the distribution that we sample from, and the log-probs stored here would be wrong.
    Returns response_ids, response_mask, logprobs and values (B,R).
    """
    device = prompt_ids.device
    logprobs = torch.zeros(len(prompt_ids), max_response_length, device=device)
    values = torch.zeros_like(logprobs)
    response_ids = torch.zeros_like(logprobs, dtype=torch.long)
    response_mask = torch.zeros_like(response_ids)
    active = torch.arange(len(prompt_ids), device=device)  # responses that have not ended
    ids = (
        prompt_ids  # what the model reads next: the prompts, then one token of each active response
    )
    mask = prompt_mask
    cache = None  # the model creates it
    for t in range(max_response_length):
        logits, new_values, cache = policy(ids, mask, 1, cache, use_cache=True)
        logits = logits[:, 0]  # (active,V)
        if uniforms is None:
            tokens = logits.argmax(-1)
        else:
            tokens = sample_token(logits, uniforms[active, t])
        token_logits = logits.gather(-1, tokens[:, None]).squeeze(-1)
        response_ids[active, t] = tokens
        response_mask[active, t] = 1  # EOS included
        logprobs[active, t] = token_logits - logits.logsumexp(-1)
        values[active, t] = new_values[:, 0]

        unfinished = (~torch.isin(tokens, policy.eos_ids)).nonzero().squeeze(-1)  # of the active
        if len(unfinished) == 0:
            break
        if len(unfinished) < len(active):
            active = active[unfinished]
            tokens = tokens[unfinished]
            mask = mask[unfinished]
            cache.reorder_cache(unfinished)
        ids = tokens[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], 1)

    longest = response_mask.sum(1).max()
    if world_size() > 1:  # v1: distributed
        dist.all_reduce(longest, dist.ReduceOp.MAX)
    batch = dict(
        response_ids=response_ids, response_mask=response_mask, logprobs=logprobs, values=values
    )
    return {name: tensor[:, :longest] for name, tensor in batch.items()}


def rollout(policy, pairs, tokenizer, scorer, args, uniforms=None) -> dict:
    """Sample and score a response to each prompt. Without uniform numbers, respond greedily.

    Returns prompt_ids, prompt_mask (B,P), what `generate` returns (B,R), and scores, ended (B,).
    """
    prompts = [prompt for prompt, _ in pairs]
    answers = [answer for _, answer in pairs]
    padding = dict(padding=True, padding_side="left", return_tensors="pt")
    inputs = encode(tokenizer, prompts, args.chat_template, **padding).to(policy.eos_ids.device)
    # v1: distributed
    # The prompts of all ranks have been padded to one length. Each rank takes its share.
    prompts = my_share(prompts)
    answers = my_share(answers)
    prompt_ids = my_share(inputs.input_ids)
    prompt_mask = my_share(inputs.attention_mask)
    if uniforms is not None:
        uniforms = my_share(uniforms)
    batch = dict(prompt_ids=prompt_ids, prompt_mask=prompt_mask)
    # v1: memory
    # Autocast copies a trained weight to bfloat16 once, and keeps the copy until its block ends. So
    # the block surrounds the whole loop over tokens.
    with torch.autocast(prompt_ids.device.type, torch.bfloat16, enabled=args.bf16):
        batch |= generate(policy, prompt_ids, prompt_mask, args.max_response_length, uniforms)

    is_token = batch["response_mask"] == 1
    is_eos = torch.isin(batch["response_ids"], policy.eos_ids) & is_token
    is_text = is_token & ~is_eos
    text_ids = [ids[keep] for ids, keep in zip(batch["response_ids"], is_text, strict=True)]
    responses = tokenizer.batch_decode(text_ids)  # other special tokens stay in the text
    with torch.random.fork_rng(devices=[]):  # what the scorer draws must not change training
        scores = scorer(prompts, responses, answers)
    if len(scores) != len(prompts):
        sys.exit(f"the reward function returned {len(scores)} scores for {len(prompts)} responses")

    batch["ended"] = is_eos.any(1).float()
    batch["scores"] = torch.tensor([float(score) for score in scores], device=is_eos.device)
    if not args.reward_fn:  # built-in scorers: a truncated response is wrong
        batch["scores"] *= batch["ended"]
    return batch


# v1: nan
def mask_unscored(batch: dict):
    """Responses whose score is NaN or infinite get a mask of zeros: the update leaves them out."""
    is_finite = batch["scores"].isfinite()
    batch["scores"] = batch["scores"].where(is_finite, 0.0)
    batch["response_mask"] = batch["response_mask"] * is_finite[:, None]


# --- math ---
def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def masked_variance(x, mask):
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)


def whiten(x, mask):
    """Shift and scale the valid entries to mean 0 and variance 1.  (B,R) -> (B,R)"""
    centered = (x - masked_mean(x, mask)) * mask
    return centered * (masked_variance(x, mask) + 1e-8).rsqrt()


def token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """KL penalty on every token, plus the score on the last one.  (B,), 3 x (B,R) -> (B,R)

    On tokens that the policy sampled, log pi - log pi_ref is an unbiased estimate of the KL
    divergence. As a term of the loss, this estimate would have an expected gradient of zero.
    """
    rewards = -kl_coef * (logprobs - ref_logprobs) * mask
    last_token = (mask.sum(1, keepdim=True).long() - 1).clamp(min=0)  # (B,1)
    return rewards.scatter_add(1, last_token, scores[:, None])


def k3_kl(logp, logq):
    """Estimate of KL(p || q) from samples of p; k3 of joschu.net/blog/kl-approx.html.  -> (B,R)"""
    logratio = (logq - logp).clamp(-20, 20)
    return logratio.exp() - 1 - logratio


def compute_gae(rewards, values, mask, gamma, gae_lambda):
    """Generalized advantage estimation, eq. 11 and 12 of PPO.  3 x (B,R) -> (B,R)"""
    advantages = torch.zeros_like(rewards)
    next_value = 0.0  # the response ends: nothing follows
    next_advantage = 0.0
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * gae_lambda * next_advantage) * mask[:, t]
        next_value = values[:, t] * mask[:, t]
        advantages[:, t] = next_advantage
    return advantages


def policy_loss(new_logprobs, logprobs, advantages, clip_coef, clip_coef_high=None, dual_clip=None):
    """Clipped surrogate loss (eq. 7 of PPO), and 1 where it has no gradient.  -> 2 x (B,R)"""
    ratio = (new_logprobs - logprobs).clamp(-20, 20).exp()  # without the clamp exp can overflow
    unclipped = -advantages * ratio
    high = clip_coef_high or clip_coef  # v1: clip
    clipped = -advantages * ratio.clamp(1 - clip_coef, 1 + high)
    loss = torch.max(unclipped, clipped)
    if dual_clip:  # v1: clip
        # Without it the loss of a negative advantage grows with the ratio.
        loss = torch.where(advantages < 0, torch.min(loss, -advantages * dual_clip), loss)
    return loss, (loss != unclipped).float()


def value_loss(new_values, values, returns, clip_coef):
    """Clipped squared error, as in the PPO of OpenAI's baselines.  3 x (B,R) -> (B,R)"""
    clipped_values = values + (new_values - values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max((new_values - returns) ** 2, (clipped_values - returns) ** 2)


def explained_variance(batch: dict) -> float:
    """1 if the values predict the returns, 0 if they are no better than a constant."""
    mask = batch["response_mask"].float()
    return_variance = masked_variance(batch["returns"], mask)
    if return_variance < 1e-8:
        return math.nan  # constant returns: there is nothing to explain
    residual_variance = masked_variance(batch["returns"] - batch["values"], mask)
    return 1 - (residual_variance / return_variance).item()


# v1: kl
def adapt_kl_coef(kl_coef, kl, ref_kl_target, num_responses):
    """The controller of arXiv:1909.08593, section 2.2, with the constants of its released code.

    The KL is in nats per response. The coefficient changes slowly: by at most 0.26 % per iteration
    of 128 responses.
    """
    error = min(max(kl / ref_kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_responses / 10_000)


# v1: schedule
def lr_factor(iteration, args) -> float:
    """Learning rate of an iteration, divided by the highest learning rate."""
    if iteration <= args.warmup_steps:
        return iteration / (args.warmup_steps + 1)
    num_iterations_left = args.num_iterations - args.warmup_steps
    progress = (iteration - args.warmup_steps - 1) / num_iterations_left  # from 0 to below 1
    if args.lr_scheduler_type == "linear":
        return 1 - progress
    if args.lr_scheduler_type == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1.0


# --- update ---
def add_advantages(batch: dict, kl_coef, args):
    """Add advantages and returns (B,R) to a batch that has scores, log-probs and values."""
    mask = batch["response_mask"].float()
    rewards = token_rewards(
        batch["scores"], batch["logprobs"], batch["ref_logprobs"], mask, kl_coef
    )
    advantages = compute_gae(rewards, batch["values"], mask, args.gamma, args.gae_lambda)
    batch["advantages"] = advantages
    batch["returns"] = advantages + batch["values"]


def minibatch_indices(batch: dict, args):
    """Yield the indices of each minibatch, epoch by epoch."""
    for _ in range(args.update_epochs):
        yield from torch.randperm(len(batch["scores"])).chunk(args.num_minibatches)


def ppo_loss(policy, minibatch: dict, num_tokens, args):
    """Returns the loss and a dict of statistics, which are means over the tokens of the minibatch.

    # v1: accumulate
    `minibatch` may be one of several parts. Its sums are divided by the number of tokens of the
    whole minibatch, so that the results and gradients of all parts add up.
    """
    mask = minibatch["response_mask"].float()
    logprobs = minibatch["logprobs"]
    advantages = minibatch["advantages"]
    new_logprobs, entropy, new_values = logprobs_and_values(policy, minibatch)
    if not args.ent_coef:
        entropy = entropy.detach()  # only logged: skip its backward pass

    pg_loss, clipped = policy_loss(
        new_logprobs, logprobs, advantages, args.clip_coef, args.clip_coef_high, args.dual_clip
    )
    v_loss = value_loss(new_values, minibatch["values"], minibatch["returns"], args.vf_clip_coef)
    per_token = dict(
        policy_loss=pg_loss,
        value_loss=v_loss,
        entropy=entropy,
        approx_kl=k3_kl(logprobs, new_logprobs.detach()),
        clipfrac=clipped,
        abs_logratio=(new_logprobs.detach() - logprobs).abs(),
    )
    means = {name: (x * mask).sum() / num_tokens for name, x in per_token.items()}  # v1: accumulate
    loss = (
        means["policy_loss"] + args.vf_coef * means["value_loss"] - args.ent_coef * means["entropy"]
    )
    return loss, {name: mean.detach() for name, mean in means.items()}


def compute_gradient(policy, minibatch: dict, args) -> dict:
    """Add up the gradient of a minibatch, and clip its norm. Returns statistics."""
    # v1: accumulate, distributed
    num_tokens = minibatch["response_mask"].sum()
    stats = {}
    my_indices = my_share(torch.arange(len(minibatch["scores"])))
    for indices in my_indices.chunk(args.gradient_accumulation_steps):
        micro_batch = {name: tensor[indices] for name, tensor in minibatch.items()}
        loss, micro_stats = ppo_loss(policy, micro_batch, num_tokens, args)
        loss.backward()
        for name, value in micro_stats.items():
            stats[name] = stats.get(name, 0) + value
    sum_over_ranks(stats.values())
    sum_gradients(policy)
    stats["grad_norm"] = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
    if args.fsdp:
        stats["grad_norm"] = stats["grad_norm"].full_tensor()
    return stats


def update(policy, optimizer, batch: dict, args) -> dict[str, float]:
    """Take an optimizer step on each minibatch. Returns metrics: means over the steps.

    Statistics are measured before each step. So approx_kl of the first step is 0, up to rounding.
    With --bf16 it is a little more, because sampling and training round differently. The means
    include the step that --target-kl did not take.
    """
    if args.norm_adv:
        batch["advantages"] = whiten(batch["advantages"], batch["response_mask"].float())
    steps = []
    num_skipped = 0
    for indices in minibatch_indices(batch, args):
        optimizer.zero_grad()
        minibatch = {name: tensor[indices] for name, tensor in batch.items()}
        stats = compute_gradient(policy, minibatch, args)
        if not all(value.isfinite() for value in stats.values()):
            num_skipped += 1  # a NaN must not reach the weights
            continue
        steps.append(stats)
        # v1: kl
        # The first step is always taken, because approx_kl is measured before the step.
        if args.target_kl and len(steps) > 1 and stats["approx_kl"] > 1.5 * args.target_kl:
            break
        optimizer.step()
    if not steps:
        if batch["response_mask"].any():  # v1: nan
            sys.exit("no step of this update had a finite loss and gradient")
        tqdm.write("warning: no response has a finite score, so nothing is trained")
        steps.append(stats)  # they are NaN

    metrics = {"losses/skipped_steps": num_skipped}
    for name in steps[0]:
        per_step = torch.stack([stats[name] for stats in steps])
        metrics[f"losses/{name}"] = per_step.mean().item()
    # Before its first step the policy is the one that sampled, so the log-probs must agree.
    metrics["rollout/logprob_mismatch"] = steps[0]["abs_logratio"].item()
    return metrics


# --- evaluate ---
def evaluate(policy, pairs, tokenizer, scorer, args):
    """Respond greedily to held-out prompts. This draws no random numbers.

    Returns metrics and the first eight responses as text.
    """
    scores = []
    samples = []
    for start in range(0, len(pairs), args.batch_size):
        some_pairs = pairs[start : start + args.batch_size]
        # v1: distributed
        # Repeat the first prompt until every rank gets the same number of prompts.
        copies = some_pairs[:1] * (-len(some_pairs) % world_size())
        batch = rollout(policy, some_pairs + copies, tokenizer, scorer, args)
        batch = gather_rows(batch)
        scores.append(batch["scores"][: len(some_pairs)])
        samples += as_samples(batch, some_pairs[: 8 - len(samples)], tokenizer)
    # v1: nan
    scores = torch.cat(scores)
    is_finite = scores.isfinite()
    if not is_finite.any():
        sys.exit("no response of the evaluation has a finite score")
    metrics = {
        "eval/score": scores[is_finite].mean().item(),
        "eval/nan_scores": (~is_finite).sum().item(),
    }
    return metrics, samples


def as_samples(batch: dict, pairs, tokenizer) -> list[dict]:
    """Responses as text. A response without an EOS at its end was cut off."""
    samples = []
    for i, (prompt, answer) in enumerate(pairs):
        is_token = batch["response_mask"][i] == 1
        response = tokenizer.decode(batch["response_ids"][i][is_token])
        score = batch["scores"][i].item()
        score = score if math.isfinite(score) else None  # v1: nan
        samples.append(dict(prompt=prompt, response=response, answer=answer, score=score))
    return samples


def batch_metrics(batch: dict, args) -> dict[str, float]:
    """Metrics of the sampled responses, before the update."""
    # v1: nan
    is_scored = batch["response_mask"].any(1)
    num_nan_scores = (~is_scored).sum().item()
    batch = {name: tensor[is_scored] for name, tensor in batch.items()}
    mask = batch["response_mask"].float()
    metrics = {
        "charts/score": batch["scores"].mean().item(),
        "charts/response_length": mask.sum(1).mean().item(),
        "charts/truncated_frac": 1 - batch["ended"].mean().item(),
        "losses/explained_variance": explained_variance(batch),
    }
    if args.kl_coef:
        ref_kl = k3_kl(batch["logprobs"], batch["ref_logprobs"])
        metrics["losses/ref_kl"] = masked_mean(ref_kl, mask).item()
        # v1: kl
        logratio = (batch["logprobs"] - batch["ref_logprobs"]) * mask
        metrics["rollout/kl_per_response"] = logratio.sum(1).mean().item()
    metrics["rollout/nan_scores"] = num_nan_scores  # v1: nan
    return metrics


# v1: best
def keep_if_best(state: dict, metrics: dict, policy, tokenizer, run):
    """Save the model to best/ if this is the best evaluation so far."""
    state["evals_without_improvement"] += 1
    if metrics["eval/score"] > state["best_score"]:
        state["best_score"] = metrics["eval/score"]
        state["evals_without_improvement"] = 0
        save_model(policy, tokenizer, run.dir / "best")


def stops_early(state: dict, args) -> bool:
    """Also True when a run that has stopped early is resumed."""
    patience = args.early_stopping_patience
    return patience is not None and state["evals_without_improvement"] >= patience


# --- main ---
def set_up_training(policy, device, args):
    """Returns the frozen reference, which is a copy of the policy, and the optimizer."""
    # v1: lora, memory, distributed
    # The order matters. The reference is copied before anything replaces methods of the policy,
    # because the copy would call the methods of the policy. Only then the optimizer gets the
    # parameters, which `shard` replaces.
    if args.lora_rank:
        add_adapters(policy, args)
    policy.to(device)
    broadcast_weights(policy)
    reference = None
    if args.kl_coef and args.lora_rank:
        reference = partial(without_adapters, policy)  # the frozen model takes no memory
    elif args.kl_coef:
        reference = copy.deepcopy(policy).requires_grad_(False)
        if args.bf16:
            use_bf16(reference)
    if args.gradient_checkpointing:
        recompute_activations(policy)
    if args.bf16:
        use_bf16(policy)
    if args.fsdp:
        shard(policy)
    trained = [x for x in policy.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, args.learning_rate, eps=1e-5, weight_decay=0.0, fused=True
    )
    num_parameters = sum(x.numel() for x in optimizer.param_groups[0]["params"])
    print(f"device {device}, {num_parameters:,} parameters are trained")
    return reference, optimizer


def main(args: Args) -> dict[str, float]:
    if args.run_dir and Path(args.run_dir).exists() and not is_resumable(args):  # v1: checkpoint
        sys.exit(f"--run-dir {args.run_dir} already exists; runs are never overwritten")
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    transformers.utils.logging.disable_progress_bar()
    device = pick_device(args.device, built_in=args.model_name is None)
    device = init_distributed(device)  # v1: distributed

    train_pairs, eval_pairs, scorer = make_task(args)
    lm, tokenizer, eos_ids = load_lm(args)
    # v1: memory
    train_pairs = drop_long_prompts(train_pairs, tokenizer, args)
    eval_pairs = drop_long_prompts(eval_pairs, tokenizer, args)
    policy = PolicyWithValue(lm, eos_ids, args.temperature)
    if args.model_name is None:  # before the reference is copied
        warm_start(lm, train_pairs, tokenizer, args)
    reference, optimizer = set_up_training(policy, device, args)
    prompt_order = shuffled_passes(train_pairs, args.num_iterations * args.batch_size, args.seed)

    # v1: checkpoint
    # A checkpoint holds this, the weights, the optimizer, and the metrics logged so far.
    state = dict(
        iteration=0,
        kl_coef=args.kl_coef,
        best_score=-math.inf,
        evals_without_improvement=0,
    )
    logged_rows = load_checkpoint(policy, optimizer, state, args)
    run = Run(args, logged_rows)
    if logged_rows:
        metrics = logged_rows[-1]
        samples = []
    else:
        metrics, samples = evaluate(policy, eval_pairs, tokenizer, scorer, args)
        run.log({"global_step": 0} | metrics, samples)
        print_samples("before training", samples)
        keep_if_best(state, metrics, policy, tokenizer, run)
    signals = Signals()
    done = state["iteration"]
    progress = tqdm(initial=done, total=args.num_iterations, disable=None, file=sys.stdout)
    for iteration in range(done + 1, args.num_iterations + 1):
        if stops_early(state, args):  # v1: best
            break
        start_time = time.time()
        # The random numbers of an iteration depend on the seed and the iteration only.
        torch.manual_seed(args.seed * 1_000_003 + iteration)
        learning_rate = args.learning_rate * lr_factor(iteration, args)  # v1: schedule
        optimizer.param_groups[0]["lr"] = learning_rate

        # 1. sample and score
        start = (iteration - 1) * args.batch_size
        global_step = start + args.batch_size  # responses sampled so far
        pairs = prompt_order[start:global_step]
        uniforms = torch.rand(args.batch_size, args.max_response_length).to(device)
        batch = rollout(policy, pairs, tokenizer, scorer, args, uniforms)
        if iteration == 1 and batch["ended"].mean() < 0.1:
            tqdm.write("warning: over 90 % of responses are cut off; raise --max-response-length")
        mask_unscored(batch)  # v1: nan
        if reference is None:
            batch["ref_logprobs"] = batch["logprobs"]  # no penalty
        else:
            batch["ref_logprobs"], _, _ = logprobs_and_values_in_parts(reference, batch, args)

        batch = gather_rows(batch)  # v1: distributed

        # 2. advantages
        add_advantages(batch, state["kl_coef"], args)  # v1: kl
        rollout_time = time.time() - start_time

        # 3. update
        losses = update(policy, optimizer, batch, args)
        mismatch = losses["rollout/logprob_mismatch"]
        if iteration == 1 and mismatch > 0.1:
            sys.exit(
                f"sampling and training differ by {mismatch:.2f} nats per token: use another model"
            )

        # 4. evaluate and log
        metrics = {
            "global_step": global_step,
            "charts/learning_rate": learning_rate,
            "charts/SPS": args.batch_size / (time.time() - start_time),  # responses per second
            "time/rollout": rollout_time,
            "time/update": time.time() - start_time - rollout_time,
        }
        metrics |= batch_metrics(batch, args) | losses
        samples = []
        if iteration % args.eval_every == 0 or iteration == args.num_iterations:
            eval_metrics, samples = evaluate(policy, eval_pairs, tokenizer, scorer, args)
            metrics |= eval_metrics
            keep_if_best(state, metrics, policy, tokenizer, run)  # v1: best
        metrics["losses/kl_coef"] = state["kl_coef"]  # v1: kl
        run.log(metrics, samples)
        # v1: kl
        if args.ref_kl_target and metrics["rollout/nan_scores"] < args.batch_size:
            kl = metrics["rollout/kl_per_response"]
            state["kl_coef"] = adapt_kl_coef(
                state["kl_coef"], kl, args.ref_kl_target, args.batch_size
            )
        show_progress(progress, iteration, metrics)

        # v1: checkpoint
        state["iteration"] = iteration
        is_last = iteration == args.num_iterations or stops_early(state, args)
        is_interrupted = any_rank(signals.received, device)
        if is_last or is_interrupted or iteration % args.save_every == 0:
            save_checkpoint(run, policy, optimizer, state)
        if is_interrupted and not is_last:
            progress.close()
            print(f"stopped and saved; continue with --run-dir {run.dir} --resume")
            return metrics

    progress.close()
    # v1: checkpoint, best
    signals.release()
    if state["iteration"] < args.num_iterations:
        patience = args.early_stopping_patience
        print(f"early stop: {patience} evaluations in a row were not better than {run.dir}/best")
    save_model(policy, tokenizer, run.dir / "final_model")
    if samples:  # a resumed run may have had nothing left to do
        print_samples("after training", samples)
    run.finish()
    return metrics


# --- option checks ---
POSITIVE = """num_threads eval_every eval_size min_digits batch_size max_response_length
    temperature num_iterations learning_rate update_epochs num_minibatches max_grad_norm clip_coef
    vf_clip_coef""".split()
NOT_NEGATIVE = "sft_steps gamma gae_lambda vf_coef ent_coef kl_coef".split()
# v1: all
POSITIVE += """save_every max_prompt_length gradient_accumulation_steps early_stopping_patience
    ref_kl_target target_kl clip_coef_high dual_clip""".split()
NOT_NEGATIVE += ["warmup_steps", "lora_rank"]


def check_args(args: Args):
    """Called whenever an Args is made. tyro prints a ValueError as a command-line error."""
    for name in POSITIVE:
        value = getattr(args, name)  # None turns a feature off
        if value is not None and not value > 0:  # this refuses NaN, too
            raise ValueError(f"--{name.replace('_', '-')} must be positive")
    for name in NOT_NEGATIVE:
        if not getattr(args, name) >= 0:
            raise ValueError(f"--{name.replace('_', '-')} must not be negative")
    if args.gamma > 1 or args.gae_lambda > 1:
        raise ValueError("--gamma and --gae-lambda must be at most 1")
    kind, _, path = args.task.partition(":")
    if args.task != "sort" and not (kind == "jsonl" and Path(path).is_file()):
        raise ValueError(f"--task {args.task}: must be sort, or jsonl:PATH with a file that exists")
    if args.task == "sort" and not args.min_digits <= args.max_digits < args.max_response_length:
        raise ValueError("--max-digits must be from --min-digits to --max-response-length - 1")
    if args.reward_fn and not Path(args.reward_fn.rpartition(":")[0]).is_file():
        raise ValueError(f"--reward-fn {args.reward_fn}: must be file.py:function")
    if args.chat_template and not args.model_name:
        raise ValueError("--chat-template needs --model-name: the tiny model has no template")
    if args.batch_size % args.num_parts():  # v1: accumulate, distributed
        raise ValueError(
            f"--batch-size must be a multiple of {args.num_parts()}: --num-minibatches x "
            "--gradient-accumulation-steps x processes of torchrun"
        )


# v1: all
def refuse_if(condition, message: str):
    if condition:
        raise ValueError(message)


def check_v1_args(args: Args):
    num_steps = args.update_epochs * args.num_minibatches
    is_bfloat16 = args.weights_dtype == "bfloat16"
    refuse_if(args.resume and not args.run_dir, "--resume needs --run-dir")
    refuse_if(
        args.warmup_steps >= args.num_iterations, "--warmup-steps must be below --num-iterations"
    )
    refuse_if(
        args.ref_kl_target and not args.kl_coef, "--ref-kl-target needs a --kl-coef to start from"
    )
    refuse_if(
        args.target_kl and num_steps == 1,
        "--target-kl does nothing with one step per update: it is measured before the step",
    )
    refuse_if(args.dual_clip and args.dual_clip <= 1, "--dual-clip must be above 1")
    refuse_if(args.fsdp and world_size() == 1, "--fsdp needs torchrun with two processes or more")
    refuse_if(args.fsdp and args.lora_rank, "--fsdp with --lora-rank is not supported")
    refuse_if(
        is_bfloat16 and not (args.lora_rank and args.bf16),
        "--weights-dtype bfloat16 needs --lora-rank and --bf16: it is for frozen weights",
    )


# --- task: prompts, answers, scores ---
def final_answer(text: str) -> str:
    """Contents of the last \\boxed{} (MATH), else the text after #### (GSM8K), else all of it."""
    braces = r"\{(?:[^{}]|\{[^{}]*\})*\}"  # a box may contain two levels of braces
    boxed = re.findall(r"\\boxed\{((?:[^{}]|" + braces + r")*)\}", text)
    if boxed:
        return boxed[-1].strip()
    return text.split("####")[-1].strip()


UNIT = r"\\text\{.*?\}"


def as_number(text: str) -> float | None:
    """Read a number, also 10,\\!000, \\$18, 50\\%, **72**, 72\\text{ cm} or x = 3; not 10^{3}."""
    text = re.sub(UNIT, " ", text).split("=")[-1]
    text = re.sub(r"\\!|[$%\\]", "", text).strip(" *()").rstrip(".,:;!?*)")
    is_number = re.fullmatch(r"(?=.*\d)[+-]? ?(\d+|\d{1,3}(,\d{3})+)?(\.\d+)?", text)
    return float(re.sub("[ ,]", "", text)) if is_number else None


def verify(response: str, answer: str) -> bool:
    """Compare final answers: as numbers if the answer is a number, else as text."""
    final = final_answer(response)
    number = as_number(answer)
    if number is None:
        return final == answer
    if final == response.strip():  # neither a box nor ####: take the last word with a digit
        words = re.findall(r"[^\s=:]*\d[^\s=:]*", re.sub(UNIT, " ", final))
        final = words[-1] if words else ""
    return as_number(final) == number


def read_pairs(path: str) -> list[tuple[str, str]]:
    """Read prompts and answers, under the names that GSM8K, MATH and others give them."""
    pairs = []
    for number, line in enumerate(open(path, "rb"), 1):  # as bytes: json decodes UTF-8
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row.get("prompt") or row.get("question") or row["problem"]
            answer = row["answer"] if "answer" in row else row["solution"]
            is_valid = isinstance(prompt, str) and isinstance(answer, str | int | float)
        except (ValueError, KeyError, AttributeError):
            is_valid = False
        if not is_valid:
            sys.exit(
                f"{path}, line {number}: must be a JSON object with prompt (question, problem) and "
                "answer (solution)"
            )
        pairs.append((prompt, final_answer(str(answer))))
    return pairs


def sort_pairs(min_digits: int, max_digits: int) -> list[tuple[str, str]]:
    """20,000 lists of digits, such as ("3142=", "1234")."""
    rng = random.Random(0)
    sizes = rng.choices(range(min_digits, max_digits + 1), k=20_000)
    lists = ["".join(rng.choices("0123456789", k=size)) for size in sizes]
    return [(digits + "=", "".join(sorted(digits))) for digits in lists]


def shuffled_passes(pairs: list, num_pairs: int, seed: int) -> list:
    """Concatenate reshuffled copies of the data until there are num_pairs."""
    order = []
    while len(order) < num_pairs:
        order += random.Random(f"{seed}/{len(order)}").sample(pairs, len(pairs))
    return order[:num_pairs]


def make_task(args):
    """Returns (prompt, answer) pairs for training, pairs for evaluation, and the scorer."""
    kind, _, path = args.task.partition(":")
    if kind == "sort":
        pairs = sort_pairs(args.min_digits, args.max_digits)
        is_right = lambda response, answer: response == answer
    else:
        pairs = read_pairs(path)
        is_right = verify

    def scorer(prompts, responses, answers):
        return [is_right(*both) for both in zip(responses, answers, strict=True)]

    if args.reward_fn:
        path, _, name = args.reward_fn.rpartition(":")
        sys.path.insert(0, str(Path(path).parent))  # it may import files of its folder
        functions = runpy.run_path(path)
        if name not in functions:
            sys.exit(f"--reward-fn {args.reward_fn}: there is no function {name} in {path}")
        scorer = functions[name]

    # The held-out prompts are the same for every seed. None of them is trained on.
    distinct_pairs = list(dict(pairs).items())  # a prompt may occur more than once
    eval_size = min(args.eval_size, math.ceil(len(distinct_pairs) / 10))
    held_out = dict(random.Random(0).sample(distinct_pairs, eval_size))
    train_pairs = [pair for pair in pairs if pair[0] not in held_out]
    if not train_pairs:
        sys.exit(f"--task {args.task}: at least two different prompts are needed")
    return train_pairs, list(held_out.items()), scorer


# v1: memory
def drop_long_prompts(pairs, tokenizer, args):
    if args.max_prompt_length is None:
        return pairs
    limit = args.max_prompt_length
    encoded = encode(tokenizer, [prompt for prompt, _ in pairs], args.chat_template).input_ids
    short_pairs = [pair for pair, ids in zip(pairs, encoded, strict=True) if len(ids) <= limit]
    print(f"left out {len(pairs) - len(short_pairs)} prompts longer than --max-prompt-length")
    if not short_pairs:
        sys.exit("--max-prompt-length: no prompt is left for training, or none for evaluation")
    return short_pairs


# --- model: load one, or make the tiny one ---
def pick_device(name: str, built_in: bool) -> torch.device:
    """auto: the CPU if what the run uses is built in, else an accelerator if there is one."""
    if name != "auto":
        return torch.device(name)
    if built_in:
        return torch.device("cpu")
    # Without check_available the CUDA build of torch answers "cuda" on a machine without a GPU.
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def make_tiny_tokenizer():
    """One token per printable ASCII character."""
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate([*special.values(), *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
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


def warm_start(lm, pairs, tokenizer, args):
    """Teach the tiny model what an answer looks like: the right characters in a random order."""
    print(f"warm start: {args.sft_steps} supervised steps on scrambled answers", flush=True)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, fused=True)
    rng = random.Random(f"{args.seed}/scramble")
    for _ in range(args.sft_steps):
        batch = rng.choices(pairs, k=64)
        texts = []
        for prompt, answer in batch:
            scrambled = "".join(rng.sample(answer, len(answer)))
            texts.append(prompt + scrambled + tokenizer.eos_token)
        tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = tokens.input_ids.masked_fill(tokens.attention_mask == 0, -100)  # -100: no loss
        for i, (prompt, _) in enumerate(batch):
            labels[i, : len(prompt)] = -100  # the tiny tokenizer has one token per character
        lm(**tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def load_lm(args):
    """Returns a causal LM, its tokenizer, and the ids of tokens that end a response (E,)."""
    if args.model_name is None:
        tokenizer = make_tiny_tokenizer()
        lm = make_tiny_lm(tokenizer)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_name)
        lm = transformers.AutoModelForCausalLM.from_pretrained(args.model_name, dtype=torch.float32)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks do not depend on the pad token

    lm.generation_config.validate(strict=True)  # an invalid one could not be saved after training
    eos_ids = lm.generation_config.eos_token_id  # chat models often have a list of them
    eos_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
    eos_ids = {*eos_ids, tokenizer.eos_token_id} - {None}
    return lm, tokenizer, torch.tensor(sorted(eos_ids))


# v1: memory
def transformer_layers(model):
    """The nn.ModuleList with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda layers: sum(x.numel() for x in layers.parameters()))


def recompute_activations(policy):
    """Keep only the inputs of each layer, and recompute the rest in the backward pass.

    The gradient checkpointing of transformers needs train() mode, in which dropout is on.
    """
    for layer in transformer_layers(policy.lm):
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def use_bf16(policy):
    """Multiply matrices in bfloat16. The two heads stay in float32, because log-probs need it.

    The hook below runs before that of PolicyWithValue.forward, so that one keeps float32 inputs.
    """
    device_type = policy.eos_ids.device.type
    policy.forward = torch.autocast(device_type, torch.bfloat16)(policy.forward)
    for head in (policy.lm.get_output_embeddings(), policy.value_head):
        head.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
        head.forward = torch.autocast(device_type, enabled=False)(head.forward)


# v1: lora
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


def without_adapters(policy, *inputs):
    """Call the frozen model, without its adapters: a reference that takes no memory."""
    with policy.lm.disable_adapter():
        return policy(*inputs)


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
PANELS = {  # the panels of curves.png: label of the y-axis, and the metrics that are drawn
    "mean score of a response": ["charts/score", "eval/score"],
    "entropy (nats per token)": ["losses/entropy"],
    "KL divergence (nats per token)": ["losses/approx_kl", "losses/ref_kl"],
    "explained variance of the returns": ["losses/explained_variance"],
}


def show_progress(progress, iteration: int, metrics: dict):
    """Show policy loss (PL), value loss (VL) and mean score (R), beside the bar or as lines."""
    status = f"PL:{metrics['losses/policy_loss']:.2f} VL:{metrics['losses/value_loss']:.2f}"
    status += f" R:{metrics['charts/score']:.2f}"
    progress.set_postfix_str(status, refresh=False)
    progress.update()
    if progress.disable:  # the output is not a terminal: print lines instead of a bar
        print(f"[{iteration}/{progress.total}] {status}", flush=True)


def print_samples(title: str, samples: list[dict]):
    print(title)
    for sample in samples[:3]:
        print(f"  {sample['prompt']!r} -> {sample['response']!r}, score {sample['score']}")


class Run:
    """The folder of a run: options, metrics, samples, and at the end a summary and curves."""

    def __init__(self, args, logged_rows: list[dict]):
        script = Path(__file__).stem
        name = f"{script}__{args.seed}__{int(time.time())}_{os.getpid()}"
        self.dir = Path(args.run_dir or f"runs/{name}")
        # v1: checkpoint
        self.rows = logged_rows  # those of the run that is resumed
        self.start_time = time.time()
        last_step = -1
        if logged_rows:
            self.start_time -= logged_rows[-1]["time"]
            last_step = logged_rows[-1]["global_step"]
        self.wandb = None
        if rank() > 0:  # v1: distributed
            return
        self.dir.mkdir(parents=True, exist_ok=args.resume)

        config = asdict(args) | dict(script=script, argv=sys.argv, torch=torch.__version__)
        # v1: checkpoint
        replace_text(self.dir / "args.json", json.dumps(config, indent=2))
        for name in ("metrics.jsonl", "samples.jsonl"):
            drop_lines_after(last_step, self.dir / name)
        if args.track:
            import wandb

            # v1: checkpoint
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
        if rank() > 0:  # v1: distributed
            return
        step = row["global_step"]
        append_lines(self.dir / "metrics.jsonl", [row])
        samples = [{"global_step": step} | sample for sample in samples]
        append_lines(self.dir / "samples.jsonl", samples)
        if self.wandb:
            self.wandb.log(row, step=step)
        if self.wandb and samples:
            table = self.wandb.Table(list(samples[0]), [list(x.values()) for x in samples])
            self.wandb.log({"samples": table}, step=step)

    def finish(self):
        """Write summary.json and curves.png, and print the result."""
        if rank() > 0:  # v1: distributed
            return
        summary = json.dumps(self.rows[-1], indent=2)
        (self.dir / "summary.json").write_text(summary, encoding="utf-8")
        os.environ.pop("MPLBACKEND", None)  # a notebook sets a backend that may not be installed
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4 * len(PANELS), 3.2), layout="constrained")
        axes = figure.subplots(1, len(PANELS))
        for axis, (ylabel, names) in zip(axes, PANELS.items(), strict=True):
            axis.set(xlabel="responses generated", ylabel=ylabel)
            for name in names:
                plot_metric(axis, self.rows, name)
            axis.legend()
        figure.savefig(self.dir / "curves.png")
        if self.wandb:
            self.wandb.finish()

        last_row = self.rows[-1]
        scores = [row["eval/score"] for row in self.rows if "eval/score" in row]
        change = f"{scores[0]:.2f} -> {scores[-1]:.2f}"
        print(f"eval/score {change}, {last_row['global_step']} responses, {last_row['time']:.0f} s")
        print(f"curves.png and samples.jsonl are in {self.dir}")
        print(f"load the model: AutoModelForCausalLM.from_pretrained('{self.dir}/final_model')")
        print(f"the model of the best evaluation is in {self.dir}/best")  # v1: best


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


# v1: checkpoint
@dataclass
class ResumeArgs:
    """These options are read first, because the defaults of the others depend on them."""

    run_dir: str | None = None
    resume: bool = False


# --resume cannot change these options. What they set is made again when a run resumes, or a change
# would not fit what the checkpoint holds.
FIXED_OPTIONS = """seed batch_size task min_digits max_digits reward_fn eval_size model_name
    sft_steps chat_template max_prompt_length lora_rank weights_dtype kl_coef""".split()


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
# v1: distributed
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


def gather_rows(batch: dict) -> dict:
    """The rows of all ranks on every rank, in the order of a single process."""
    if world_size() == 1:
        return batch
    gathered = {}
    for name, tensor in batch.items():
        parts = [torch.empty_like(tensor) for _ in range(world_size())]
        dist.all_gather(parts, tensor.contiguous())
        gathered[name] = torch.stack(parts, 1).flatten(0, 1)  # the reverse of my_share
    return gathered


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have every character
    with titled_help():
        args = parse_args()
    main(args)
    if dist.is_initialized():
        dist.destroy_process_group()
