# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.22.2", "tyro==1.0.16", "tqdm", "matplotlib", "wandb"]
# ///
"""ppo_v1.py - PPO for language models (arXiv:1707.06347v2) with production features.

Differs from ppo.py (each item is a marker in the code):
    v1: checkpoint   - save and resume, bit-exact, killed at any moment; signals save and end
    v1: schedule     - linear, cosine, constant, .. learning rate, with warm-up
    v1: accumulate   - micro-batches inside a minibatch: same gradient, less memory
    v1: memory       - bf16 autocast, gradient checkpointing, logits of a few rows at a time
    v1: best         - keep the best model by evaluation; end when evaluation stops improving
    v1: kl           - adaptive KL coefficient (arXiv:1909.08593), target KL for the epochs
    v1: clip         - clip-higher (arXiv:2503.14476) and dual clip (arXiv:1912.09729)
    v1: nan          - an answer whose reward is NaN is left out; the run goes on
    v1: distributed  - torchrun, replicated or sharded (FSDP2): same update as one process
Simplified on purpose: no vLLM, no LoRA; sampling holds all weights on every rank.
Shapes: B sequences, P prompt tokens (left-padded), R response tokens (right-padded), V vocabulary.

    python ppo_v1.py --run-dir runs/mine --resume              # start, or go on where it stopped
    torchrun --nproc-per-node 2 ppo_v1.py --fsdp               # two processes, sharded
"""

import copy
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import transformers
import tyro
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm


# --- args ---
@dataclass
class Args:
    # run
    seed: int = 1  # decides initial weights, data, sampling and shuffling; not the evaluation
    device: str = "auto"  # cpu, cuda, mps, ... (auto: cpu for what is built in, else an accelerator)
    num_threads: int = 1  # of torch on a CPU; tiny models are fastest with 1
    run_dir: str | None = None  # a new folder (None: runs/{script}__{seed}__{time})
    eval_every: int = 5  # iterations between greedy evaluations on held-out prompts
    eval_size: int = 256  # held-out prompts, at most
    track: bool = False  # also log to wandb (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "stale-experience"  # where the runs of wandb are gathered
    # v1: checkpoint, distributed
    resume: bool = False  # go on with run_dir, or start it if there is nothing yet
    save_every: int = 10  # iterations between checkpoints; the last is saved anyway
    fsdp: bool = False  # shard gradients and optimizer over the ranks of torchrun
    # task
    task: str = "sort"  # sort, rg:NAME (reasoning-gym) or jsonl:PATH (prompt and answer, ..)
    min_digits: int = 3  # sort: shortest list
    max_digits: int = 4  # sort: longest list
    reward_fn: str | None = None  # file.py:name of (prompts, responses, answers) -> list of floats
    reward_model_name: str | None = None  # a sequence-classification model instead of the verifier
    missing_eos_penalty: float = 0.0  # taken from the score of an answer that is cut off
    # model
    model_name: str | None = None  # hub name or folder of a causal LM (None: a tiny Llama)
    chat_template: bool = False  # wrap each prompt as a user turn with the tokenizer's own template
    separate_critic: bool = False  # give the value head a trunk of its own, not the policy's
    sft_steps: int = 300  # tiny model: supervised steps on scrambled answers, for the format only
    # rollout
    batch_size: int = 128  # answers sampled per iteration
    max_prompt_length: int = 512  # tokens; longer prompts are left out, with a note
    max_response_length: int = 8  # tokens, EOS included; an answer without EOS by then is cut off
    temperature: float = 1.0  # of sampling and of every log-prob; evaluation is greedy
    # optimization
    num_iterations: int = 40  # rollout + update rounds
    learning_rate: float = 5e-4  # the highest; by default it falls linearly to 0
    update_epochs: int = 2  # passes over the rollouts of an iteration
    num_minibatches: int = 1  # optimizer steps per epoch
    max_grad_norm: float = 1.0  # clip the gradient's global norm here
    # v1: schedule, accumulate, memory, best
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"  # after the warm-up
    warmup_steps: int = 0  # iterations in which the rate rises linearly from 0
    gradient_accumulation_steps: int = 1  # micro-batches of a minibatch
    bf16: bool = False  # bfloat16 autocast (weights, log-probs and losses stay float32)
    gradient_checkpointing: bool = False  # keep one activation per layer, compute the rest again
    early_stopping_patience: int = 0  # end after so many evaluations with no better one (0: off)
    early_stopping_threshold: float = 0.001  # what counts as better
    # PPO
    gamma: float = 1.0  # discount per token
    gae_lambda: float = 0.95  # 0: one-step TD advantage, 1: Monte Carlo
    norm_adv: bool = False  # whiten advantages: makes a batch without a success as loud as one with
    clip_coef: float = 0.2  # the policy ratio is clipped to 1 - this .. 1 + this
    vf_clip_coef: float = 0.2  # a value may leave its old prediction by this much
    vf_coef: float = 0.1  # weight of the value loss
    ent_coef: float = 0.0  # weight of the entropy bonus
    kl_coef: float = 0.01  # penalty in the reward per nat of log pi - log pi_ref (0: no reference)
    # v1: kl, clip
    adaptive_kl: bool = False  # move kl_coef so that the KL per answer comes near kl_target
    kl_target: float = 6.0  # nats per answer
    kl_horizon: int = 10_000  # answers over which kl_coef may change by about 20 %
    target_kl: float | None = None  # end an update's epochs once approx_kl is over 1.5 times this
    clip_coef_high: float | None = None  # upper side of the policy clip (None: clip_coef)
    dual_clip: float | None = None  # bound on the ratio where the advantage is negative (None: off)

    def __post_init__(self):  # tyro shows a ValueError from here in its error box
        one = ["gamma", "gae_lambda"]  # from 0 to this
        zero = [*one, "seed", "sft_steps", "missing_eos_penalty", "vf_coef", "ent_coef", "kl_coef"]
        zero += "warmup_steps early_stopping_patience early_stopping_threshold".split()  # v1
        for name, value in vars(self).items():
            least, most = 0 if name in zero else 1e-9, 1 if name in one else sys.maxsize
            if type(value) in (int, float) and not least <= value <= most:
                raise ValueError(f"--{name} {value} is not allowed: from {least:g} to {most:g}")
        kind, _, path = self.task.partition(":")
        known = kind in ("sort", "rg") or (kind == "jsonl" and Path(path).is_file())
        for wrong, message in (
            (not known, f"--task {self.task}: must be sort, rg:NAME or jsonl: and a file"),
            (self.reward_fn and self.reward_model_name, "--reward-fn or --reward-model-name, not both"),
            (self.min_digits > self.max_digits, "--max-digits must be at least --min-digits"),
            (self.batch_size % self.num_minibatches, "--num-minibatches must divide --batch-size"),
            # v1: checkpoint, kl
            (self.resume and not self.run_dir, "--resume needs --run-dir"),
            (self.adaptive_kl and not self.kl_coef, "--adaptive-kl needs a --kl-coef to start from"),
        ):
            if wrong:
                raise ValueError(message)


# --- task ---
def final_answer(text: str) -> str:
    """What stands in the last box (MATH), behind #### (GSM8K), or all of it."""
    boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)  # may hold \frac{1}{2}
    return (boxed[-1] if boxed else text.split("####")[-1]).strip()


def verify(prompt, response, answer) -> bool:
    """Is the final answer right as a text, or its last number as a number?"""
    response, number = final_answer(response), r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+"
    numbers = re.findall(number, response)
    if numbers and re.fullmatch(number, answer):
        response, answer = (float(x.replace(",", "")) for x in (numbers[-1], answer))
    return response == answer


def read_jsonl(path: str, convert, expected: str) -> list:
    """What `convert` makes of each line that is not blank. One it cannot use ends the run."""
    rows = []
    for number, line in enumerate(open(path, "rb"), 1):
        try:
            rows += [convert(json.loads(line))] if line.strip() else []
        except Exception:
            sys.exit(f"{path}: line {number} must be JSON with {expected}")
    return rows


def to_pair(row: dict) -> tuple[str, str]:
    prompt = [row[name] for name in ("prompt", "question", "problem") if name in row][0]
    answer = [row[name] for name in ("answer", "solution") if name in row][0]
    assert isinstance(prompt, str) and isinstance(answer, str | int | float)
    return prompt, final_answer(str(answer))


def make_task(args, tokenizer):
    """-> (prompt, answer) pairs to train on, held-out ones (the same for every seed), verifier"""
    kind, _, source = args.task.partition(":")
    if kind == "sort":
        rng = random.Random(0)
        sizes = rng.choices(range(args.min_digits, args.max_digits + 1), k=20_000)
        lists = ["".join(rng.choices("0123456789", k=size)) for size in sizes]
        pairs = [(digits + "=", "".join(sorted(digits))) for digits in lists]
        verifier = lambda prompt, response, answer: response == answer  # a leading 0 counts
    elif kind == "jsonl":
        pairs, verifier = read_jsonl(source, to_pair, "a prompt and an answer"), verify
    else:
        import reasoning_gym

        dataset = reasoning_gym.create_dataset(source, size=5_000, seed=0)
        entries = {entry["question"]: entry for entry in dataset}
        pairs = [(question, str(entry["answer"])) for question, entry in entries.items()]
        verifier = lambda prompt, said, _: dataset.score_answer(said.strip(), entries[prompt])
    rows = encode(tokenizer, [prompt for prompt, _ in pairs], args.chat_template).input_ids
    fits = [p for p, row in zip(pairs, rows, strict=True) if len(row) <= args.max_prompt_length]
    if len(fits) < len(pairs):
        print(f"{len(pairs) - len(fits)} prompts are longer than --max-prompt-length: left out")
    held_out = dict(random.Random(0).sample(fits, min(args.eval_size, math.ceil(len(fits) / 10))))
    train = [pair for pair in fits if pair[0] not in held_out]
    if not train:
        sys.exit(f"--task {args.task}: fewer than two prompts within --max-prompt-length")
    return train, list(held_out.items()), lambda *columns: list(map(verifier, *columns))


def make_scorer(args, verifier, device):
    """Where scores come from: reward function, reward model or verifier."""
    if args.reward_fn:
        path, _, name = args.reward_fn.rpartition(":")
        return runpy.run_path(path)[name]
    if not args.reward_model_name:
        return verifier
    options = dict(function_to_apply="none", add_special_tokens=not args.chat_template)
    name = args.reward_model_name
    judge = transformers.pipeline("text-classification", name, device=device, **options)
    if judge.model.config.num_labels != 1:
        sys.exit(f"--reward-model-name {name}: it has more than one label")

    def judge_texts(prompts, responses, answers):
        pairs = list(zip(prompts, responses, strict=True))
        texts = [prompt + response for prompt, response in pairs]
        if args.chat_template:
            turns = [[dict(role="user", content=p), dict(role="assistant", content=r)] for p, r in pairs]
            texts = judge.tokenizer.apply_chat_template(turns, tokenize=False)
        return [row["score"] for row in judge(texts)]

    return judge_texts


# --- networks ---
class PolicyWithValue(nn.Module):
    """A causal LM and a value head, on the LM's own trunk or on a copy of it."""

    def __init__(self, lm, eos_ids, temperature: float, separate_critic=False):
        super().__init__()
        self.lm, self.temperature = lm, temperature
        self.critic = copy.deepcopy(lm.base_model) if separate_critic else None
        self.value_head = nn.Linear(lm.get_output_embeddings().in_features, 1)
        nn.init.zeros_(self.value_head.weight)  # the first advantages are then plain returns
        nn.init.zeros_(self.value_head.bias)
        self.register_buffer("eos_ids", eos_ids)  # (E,) what ends an answer
        self.eval()  # for good: dropout is noise in ratios

    def predict(self, ids, mask, num_last: int, caches=(None, None)):
        """At the last positions: logits of the next token and values.  -> (B,n,V), (B,n)"""
        # mask (B,T) covers what the caches hold, too; ids (B,t) are the last of these tokens
        inputs = dict(input_ids=ids, attention_mask=mask, use_cache=caches[0] is not None)
        # only real tokens count, so that left padding does not shift a prompt
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        heads = dict(output_hidden_states=True, logits_to_keep=num_last)  # no logits of the prompt
        output = self.lm(**inputs, **heads, past_key_values=caches[0])
        hidden = output.hidden_states[-1]
        if self.critic is not None:
            hidden = self.critic(**inputs, past_key_values=caches[1]).last_hidden_state
        values = self.value_head(hidden[:, -num_last:]).squeeze(-1).float()
        return output.logits[:, -num_last:], values

    def forward(self, rows: dict):
        """Log-prob, entropy of each response token, value of the state before it.  -> 3 x (B,R)"""
        ids, mask = (torch.cat([rows[f"prompt_{x}"], rows[f"response_{x}"]], 1) for x in ("ids", "mask"))
        # The last token is not fed: of the last R outputs, number t predicts response token t.
        logits, values = self.predict(ids[:, :-1], mask[:, :-1], rows["response_ids"].shape[1])
        outputs = (*token_logprobs(logits, rows["response_ids"], self.temperature), values)
        return tuple(x.masked_fill(rows["response_mask"] == 0, 0.0) for x in outputs)

    def step(self, ids, mask, caches):
        """One token on, given the ids that are not in the caches yet.  (B,t) -> (B,V), (B,)"""
        logits, values = self.predict(ids, mask, 1, caches)
        return logits[:, 0].float() / self.temperature, values[:, 0]


def token_logprobs(logits, ids, temperature, max_logits=2**25):
    """Log-prob of each id under softmax(logits / temperature), entropy.  (B,R,V) -> 2 x (B,R)"""
    # v1: memory: float32 copies of a few rows at a time, made again in the backward pass
    size = max(1, max_logits // logits[0].numel())
    if len(ids) > size:
        rest = (temperature, sys.maxsize)
        pieces = zip(logits.split(size), ids.split(size), strict=True)
        outputs = [checkpoint(token_logprobs, *x, *rest, use_reentrant=False) for x in pieces]
        return tuple(map(torch.cat, zip(*outputs, strict=True)))
    logprobs = (logits.float() / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids[..., None]).squeeze(-1), entropy


def make_tiny_tokenizer():
    """One token per printable ASCII character, so that one code path serves all models."""
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    ids = {token: i for i, token in enumerate([*special.values(), *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def load_lm(args):
    """-> causal LM, tokenizer, the ids that end an answer (E,)"""
    if args.model_name is None:
        tokenizer = make_tiny_tokenizer()
        sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
        special = dict(pad_token_id=0, eos_token_id=1, bos_token_id=None, vocab_size=len(tokenizer))
        lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **special))
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_name)
        lm = transformers.AutoModelForCausalLM.from_pretrained(args.model_name, dtype=torch.float32)
    eos = lm.generation_config.eos_token_id  # the rest of it (top_k, ..) is not the policy
    eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # harmless: masks come from lengths, not from ids
    most = getattr(lm.config, "max_position_embeddings", None) or math.inf
    if args.max_prompt_length + args.max_response_length > most:
        sys.exit(f"--max-prompt-length + --max-response-length: the model ends at {most} tokens")
    return lm, tokenizer, torch.tensor(sorted(eos_ids))


@torch.no_grad()
def check_sampler(policy, name: str):
    """Cached steps must give what a forward pass gives, or a run would train on wrong samples."""
    ids, mask = torch.tensor([[3, 4, 5], [5, 3, 4]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    whole, caches = policy.predict(ids, mask, 1)[0][1:, 0], (transformers.DynamicCache(), None)
    try:  # a recurrent state is no cache of keys and values: Mamba, LFM2, Qwen3-Next
        policy.predict(ids[:, :2], mask[:, :2], 1, caches)
        caches[0].batch_select_indices(torch.tensor([1]))  # as rows are dropped that have ended
        steps = policy.predict(ids[1:, 2:], mask[1:], 1, caches)[0][:, 0]
        assert torch.allclose(steps, whole, rtol=1e-3, atol=1e-3 * whole.std().item())
    except Exception:
        sys.exit(f"--model-name {name}: its cached steps differ from its forward pass")


# --- math ---
# v1: distributed
def total(x):
    """Sum over the ranks of torchrun."""
    x = x.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


# v1: kl
def adapt_kl_coef(kl_coef, kl, kl_target, kl_horizon, num_answers):
    """Proportional controller of section 2.2 of arXiv:1909.08593; `kl` in nats per answer."""
    error = min(max(kl / kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_answers / kl_horizon)


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def whiten(x, mask):
    """Zero mean and unit variance over valid tokens, 0 elsewhere.  (B,R) -> (B,R)"""
    centred = (x - masked_mean(x, mask)) * mask
    return centred * (masked_mean(centred**2, mask) + 1e-8).rsqrt()


def token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """KL penalty on every token, score on the last valid one.  (B,), 3 x (B,R) -> (B,R)"""
    # k1 = log pi - log pi_ref is for the reward: as a loss, its expected gradient is zero
    rewards = -kl_coef * (logprobs - ref_logprobs) * mask
    last = (mask.sum(1, keepdim=True).long() - 1).clamp(min=0)  # (B,1)
    return rewards.scatter_add(1, last, scores[:, None])


def k3_kl(logprobs, ref_logprobs):
    """KL(pi | pi_ref) per token, never negative (Schulman's k3).  2 x (B,R) -> (B,R)"""
    logratio = (ref_logprobs - logprobs).clamp(-20, 20)
    return logratio.exp() - 1 - logratio


def compute_gae(rewards, values, mask, gamma, gae_lambda):
    """Generalized advantages, eq. 11 and 12 of arXiv:1707.06347v2.  3 x (B,R) -> (B,R)"""
    assert rewards.shape == values.shape == mask.shape  # broadcasting hides bugs
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])  # after the last token
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * gae_lambda * next_advantage) * mask[:, t]
        advantages[:, t], next_value = next_advantage, values[:, t] * mask[:, t]
    return advantages


def policy_loss(new_logprobs, logprobs, advantages, clip_low, clip_high, dual_clip=None):
    """Clipped surrogate, eq. 7 of arXiv:1707.06347v2, as a loss; where it binds.  -> 2 x (B,R)"""
    assert new_logprobs.shape == logprobs.shape == advantages.shape
    ratio = (new_logprobs - logprobs).clamp(-20, 20).exp()  # exp of more is inf, and inf * 0 is NaN
    plain = -advantages * ratio
    loss = torch.max(plain, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:  # v1: clip: a ratio that explodes where A < 0 is bounded, too
        loss = torch.where(advantages < 0, torch.min(loss, -advantages * dual_clip), loss)
    return loss, (loss != plain).float()


def value_loss(new_values, values, returns, clip_coef):
    """Half the squared error of the new value, or of one held near the old if worse.  -> (B,R)"""
    assert new_values.shape == values.shape == returns.shape
    held = values + (new_values - values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max((new_values - returns) ** 2, (held - returns) ** 2)


def explained_variance(values, returns, mask):
    """1: the critic predicts the returns; 0: no better than a constant.  3 x (B,R) -> float"""
    residual, variance = ((x - masked_mean(x, mask)) ** 2 for x in (returns - values, returns))
    return 1 - (masked_mean(residual, mask) / masked_mean(variance, mask).clamp(min=1e-8)).item()


LOSSES = "policy_loss value_loss entropy approx_kl clipfrac abs_logratio".split()


def ppo_loss(policy, mb, num_tokens, args):
    """What these rows add to loss and LOSSES of a minibatch of `num_tokens`.  -> (), (n,)"""
    mask = mb["response_mask"].float()
    logprobs, entropy, values = policy(mb)
    entropy = entropy if args.ent_coef else entropy.detach()  # its backward pass is not free
    clip = (args.clip_coef, args.clip_coef_high or args.clip_coef, args.dual_clip)  # v1: clip
    pg_loss, clipped = policy_loss(logprobs, mb["logprobs"], mb["advantages"], *clip)
    v_loss = value_loss(values, mb["values"], mb["returns"], args.vf_clip_coef)
    kl, moved = k3_kl(mb["logprobs"], logprobs.detach()), (logprobs.detach() - mb["logprobs"]).abs()
    # a mean over all tokens: one per sequence would under-weight long answers (arXiv:2503.14476)
    terms = (pg_loss, v_loss, entropy, kl, clipped, moved)
    terms = [(x * mask).sum() / num_tokens for x in terms]
    loss = terms[0] + args.vf_coef * terms[1] - args.ent_coef * terms[2]
    return loss, torch.stack(terms).detach()


# --- rollout ---
def encode(tokenizer, prompts: list[str], chat_template: bool, **padding):
    if chat_template:
        turns = [[dict(role="user", content=prompt)] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer(prompts, add_special_tokens=not chat_template, **padding)


def sample_token(logits, uniforms):
    """Inverse-CDF draw: an answer does not depend on the rows beside it.  (B,V), (B,) -> (B,)"""
    cdf = logits.softmax(-1).cumsum(-1)
    token = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    return token.clamp(max=logits.shape[-1] - 1)


@torch.no_grad()
def generate(policy, ids, mask, max_response_length, uniforms=None):
    """Continue prompts (B,P): sample, or without uniforms (B,R) be greedy.  -> dict of (B,R)"""
    # Log-probs and values are the sampler's own: no second pass. transformers' `generate` would apply
    # a checkpoint's generation config: its samples are not the policy's.
    shape, device = (len(ids), max_response_length), ids.device
    kinds = dict(response_ids=int, response_mask=int, logprobs=torch.float32, values=torch.float32)
    rows = {name: torch.zeros(shape, dtype=kind, device=device) for name, kind in kinds.items()}
    alive = torch.arange(len(ids), device=device)  # rows that have not ended; others cost nothing
    caches = transformers.DynamicCache(), transformers.DynamicCache()  # of policy, of its critic
    for t in range(max_response_length):
        logits, values = policy.step(ids, mask, caches)  # (A,V), (A,)
        token = logits.argmax(-1) if uniforms is None else sample_token(logits, uniforms[alive, t])
        logprobs = logits.gather(-1, token[:, None]).squeeze(-1) - logits.logsumexp(-1)
        for name, x in zip(rows, (token, 1, logprobs, values), strict=True):
            rows[name][alive, t] = x  # the mask includes the EOS and nothing after it
        going = (~torch.isin(token, policy.eos_ids)).nonzero().squeeze(-1)
        if len(going) == 0:
            break
        if len(going) < len(alive):
            alive, token, mask = alive[going], token[going], mask[going]
            for cache in caches:
                cache.batch_select_indices(going)
        ids = token[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return {name: x[:, : t + 1] for name, x in rows.items()}


def rollout(policy, pairs, tokenizer, scorer, args, uniforms=None) -> dict:
    """Answer prompts, score the answers.  -> prompt_*: (B,P), scores, ended: (B,), rest: (B,R)"""
    prompts, answers = map(list, zip(*pairs, strict=True))
    padding = dict(padding=True, padding_side="left", return_tensors="pt")
    inputs = encode(tokenizer, prompts, args.chat_template, **padding).to(policy.eos_ids.device)
    rows = dict(prompt_ids=inputs.input_ids, prompt_mask=inputs.attention_mask)
    rows |= generate(policy, *rows.values(), args.max_response_length, uniforms)
    valid = rows["response_mask"].bool()
    is_eos = torch.isin(rows["response_ids"], policy.eos_ids) & valid
    texts = [ids[keep] for ids, keep in zip(rows["response_ids"], valid & ~is_eos, strict=True)]
    said = scorer(prompts, tokenizer.batch_decode(texts, skip_special_tokens=True), answers)
    try:
        scores = torch.tensor([float(score) for _, score in zip(prompts, said, strict=True)])
    except (TypeError, ValueError):
        sys.exit(f"the reward must be {len(prompts)} numbers, one an answer, not {str(said)[:80]}")
    ended = rows["ended"] = is_eos.any(1).float()
    own_reward = args.reward_fn or args.reward_model_name  # decides for itself what an end is worth
    scores = scores.to(ended) * (1 if own_reward else ended)
    rows["scores"] = scores - args.missing_eos_penalty * (1 - ended)
    return rows


@torch.no_grad()
def score_rows(model, rows: dict, num_rows: int):
    """Log-probs, entropy and values as `model` sees them, a few rows at a time.  -> 3 x (B,R)"""
    chunks = torch.arange(len(rows["response_ids"])).split(num_rows)
    parts = [model({name: x[inds] for name, x in rows.items()}) for inds in chunks]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


# --- evaluate ---
def evaluate(policy, pairs, tokenizer, scorer, args) -> float:
    """Mean score of greedy answers. Draws no random number, so it cannot change training."""
    batches = [pairs[i : i + args.batch_size] for i in range(0, len(pairs), args.batch_size)]
    scores = [rollout(policy, batch, tokenizer, scorer, args)["scores"] for batch in batches]
    mean = torch.cat(scores).nanmean()
    return (total(mean) / total(torch.ones_like(mean))).item()  # v1: distributed


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


# v1: checkpoint
def catch_signals() -> list[int]:
    """SIGINT and SIGTERM go into this list: save and end. A second one ends at once."""
    received = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(1) if received else received.append(number))
    return received


# v1: distributed
FULL = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # sharded or not: one format


def save_model(policy, tokenizer, folder: Path):
    """An ordinary Hugging Face folder that takes the place of the one before."""
    state = dcp.get_model_state_dict(policy, options=FULL)
    if not dist.is_initialized() or dist.get_rank() == 0:
        state = {name[3:]: x for name, x in state.items() if name.startswith("lm.")}
        policy.lm.save_pretrained(f"{folder}.tmp", state_dict=state)
        tokenizer.save_pretrained(f"{folder}.tmp")
        shutil.rmtree(folder, ignore_errors=True)  # killed here: the resumed run saves it again
        os.replace(f"{folder}.tmp", folder)


# v1: distributed
def init_distributed(device):
    """-> rank, number of ranks, this rank's device; 0, 1, device without torchrun"""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_rank() > 0:
        sys.stdout = open(os.devnull, "w")  # one voice is enough
    return dist.get_rank(), dist.get_world_size(), device


def shard(policy):
    """FSDP2 that keeps weights whole until the backward pass: sampling needs no communication."""
    for trunk in filter(None, (policy.lm, policy.critic)):
        for layer in max((m for m in trunk.modules() if isinstance(m, nn.ModuleList)), key=len):
            fully_shard(layer, reshard_after_forward=False)
    fully_shard(policy, reshard_after_forward=False)
    register_fsdp_forward_method(policy, "step")


def sum_gradients(policy, world_size: int):
    """Each loss was divided by the tokens of all ranks, so gradients add up. FSDP has averaged."""
    for parameter in policy.parameters() if world_size > 1 else ():
        if isinstance(policy, FSDPModule):
            parameter.grad.mul_(world_size)
        else:
            dist.all_reduce(parameter.grad)


def join(parts: list[dict]) -> dict:
    """Rows of all parts, prompts padded on the left and responses on the right to one width."""
    joined = {}
    for name in parts[0]:
        rows = [part[name] for part in parts]
        if rows[0].dim() == 2:
            gaps = [max(x.shape[1] for x in rows) - x.shape[1] for x in rows]
            sides = [(gap, 0) if "prompt" in name else (0, gap) for gap in gaps]
            rows = [nn.functional.pad(x, side) for x, side in zip(rows, sides, strict=True)]
        joined[name] = torch.cat(rows)
    return joined


def gather_rows(rows: dict, world_size: int) -> dict:
    """All rows on every rank in the order of one process, so that ranks shuffle alike."""
    parts = [None] * world_size
    dist.all_gather_object(parts, {name: x.cpu() for name, x in rows.items()})
    joined = join(parts)
    order = torch.arange(len(joined["scores"])).view(world_size, -1).T.flatten()  # rank 0 had 0, 2, ..
    return {name: x[order].to(rows[name].device) for name, x in joined.items()}


# --- main ---
def warm_start(lm, pairs, tokenizer, args):
    """Supervised steps on scrambled answers: right in form, and right in content by chance only."""
    print(f"warm start: {args.sft_steps} supervised steps on scrambled answers", flush=True)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, fused=True)
    rng = random.Random(f"{args.seed}/scramble")
    for _ in range(args.sft_steps):
        batch = rng.choices(pairs, k=64)
        texts = [p + "".join(rng.sample(a, len(a))) + tokenizer.eos_token for p, a in batch]
        tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        mask, lengths = tokens.attention_mask, torch.tensor([[len(prompt)] for prompt, _ in batch])
        is_answer = (mask == 1) & (mask.cumsum(1) > lengths)  # a token a letter
        lm(**tokens, labels=tokens.input_ids.masked_fill(~is_answer, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


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
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    device = pick_device(args.device, built_in=args.model_name is None)
    # v1: distributed
    rank, world_size, device = init_distributed(device)
    if args.batch_size % (args.num_minibatches * args.gradient_accumulation_steps * world_size):
        sys.exit("--batch-size must divide into minibatches x micro-batches x ranks")
    lm, tokenizer, eos_ids = load_lm(args)
    reference = PolicyWithValue(lm, eos_ids, args.temperature)
    check_sampler(reference, args.model_name)
    train_pairs, eval_pairs, verifier = make_task(args, tokenizer)
    scorer = make_scorer(args, verifier, device)
    if args.model_name is None:
        warm_start(lm, train_pairs, tokenizer, args)
    reference = copy.deepcopy(reference).to(device).requires_grad_(False) if args.kl_coef else None
    policy = PolicyWithValue(lm, eos_ids, args.temperature, args.separate_critic).to(device)
    # v1: memory: transformers' own checkpointing works in train() only, with dropout
    for trunk in filter(None, (policy.lm, policy.critic)) if args.gradient_checkpointing else ():
        for layer in max((m for m in trunk.modules() if isinstance(m, nn.ModuleList)), key=len):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for model in filter(None, (policy, reference)) if args.bf16 else ():
        autocast = torch.autocast(device.type, torch.bfloat16)
        model.forward, model.step = autocast(model.forward), autocast(model.step)
    # v1: distributed
    for parameter in policy.parameters() if world_size > 1 else ():
        dist.broadcast(parameter.data, 0)
    if args.fsdp:
        shard(policy)
    parameters, lr = list(policy.parameters()), args.learning_rate
    optimizer = torch.optim.AdamW(parameters, lr, eps=1e-5, weight_decay=0.0, fused=True)
    # v1: schedule: its function alone, of the iteration; nothing to save
    steps = dict(num_warmup_steps=args.warmup_steps, num_training_steps=args.num_iterations)
    kind = args.lr_scheduler_type.replace("constant", "constant_with_warmup")
    schedule = transformers.get_scheduler(kind, optimizer, **steps).lr_lambdas[0]
    stream = []  # every prompt once per pass, each pass in an order of its own
    while len(stream) < args.num_iterations * args.batch_size:
        stream += random.Random(f"{args.seed}/{len(stream)}").sample(train_pairs, len(train_pairs))

    num_rows = args.batch_size // args.num_minibatches  # in one pass of the model
    num_rows //= args.gradient_accumulation_steps * world_size  # v1: accumulate, distributed
    iteration = global_step = skipped_steps = 0
    # v1: checkpoint
    kl_coef, best_score, stale_evals, rows = args.kl_coef, -math.inf, 0, []
    path = Path(args.run_dir or "") / "checkpoint.pt"
    if args.resume and path.exists():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        changed = {k: v for k, v in asdict(args).items() if k != "resume" and saved["args"].get(k) != v}
        print(f"resuming {path}; options that changed: {changed or 'none'}")
        states = dict(model_state_dict=saved["policy"], optim_state_dict=saved["optimizer"])
        dcp.set_state_dict(policy, optimizer, **states, options=FULL)
        iteration, skipped_steps, best_score, stale_evals, kl_coef = saved["counters"]
        kl_coef = kl_coef if args.adaptive_kl else args.kl_coef
        global_step, rows = iteration * args.batch_size, saved["rows"]
        metrics = {name: x for name, x in rows[-1].items() if x is not None}
    stop = catch_signals()
    run = Run(args, args.num_iterations, rows, exist_ok=args.resume, enabled=rank == 0)
    if iteration == 0:
        metrics = {"eval/score": evaluate(policy, eval_pairs, tokenizer, scorer, args)}
        run.log({"global_step": 0, **metrics})
        best_score = metrics["eval/score"]  # v1: best
    patience = args.early_stopping_patience or math.inf  # v1: best
    while iteration < args.num_iterations and stale_evals < patience:
        iteration += 1
        start_time = time.time()
        torch.manual_seed(args.seed * 1_000_003 + iteration)  # so that no generator has a history
        lr = args.learning_rate * schedule(iteration - 1)  # v1: schedule
        optimizer.param_groups[0]["lr"] = lr

        # 1 collect
        pairs = stream[global_step : global_step + args.batch_size]
        uniforms = torch.rand(args.batch_size, args.max_response_length)  # of all rows and tokens
        pairs, uniforms = pairs[rank::world_size], uniforms[rank::world_size]  # v1: distributed
        batch = rollout(policy, pairs, tokenizer, scorer, args, uniforms.to(device))
        global_step += args.batch_size
        # v1: nan
        good = batch["scores"].isfinite()
        batch["response_mask"] = batch["response_mask"] * good[:, None]
        batch["scores"] = batch["scores"].where(good, 0.0)
        batch["ref_logprobs"] = batch["logprobs"]
        if reference is not None:
            batch["ref_logprobs"], _, _ = score_rows(reference, batch, num_rows)
        batch = gather_rows(batch, world_size) if world_size > 1 else batch  # v1: distributed

        # 2 advantages
        mask, past = batch["response_mask"].float(), (batch["logprobs"], batch["ref_logprobs"])
        rewards = token_rewards(batch["scores"], *past, mask, kl_coef)  # v1: kl
        advantages = compute_gae(rewards, batch["values"], mask, args.gamma, args.gae_lambda)
        batch["returns"] = advantages + batch["values"]
        batch["advantages"] = whiten(advantages, mask) if args.norm_adv else advantages
        rollout_time = time.time() - start_time

        # 3 update
        updates = []  # LOSSES and gradient norm of each
        for epoch in range(args.update_epochs):
            minibatches = torch.randperm(args.batch_size).to(device).chunk(args.num_minibatches)
            for mb_inds in minibatches:
                optimizer.zero_grad()
                num_tokens = batch["response_mask"][mb_inds].sum()
                # v1: accumulate, distributed
                stats = 0
                for inds in mb_inds[rank::world_size].tensor_split(args.gradient_accumulation_steps):
                    mb = {name: x[inds] for name, x in batch.items()}
                    loss, micro_stats = ppo_loss(policy, mb, num_tokens, args)
                    loss.backward()
                    stats = stats + micro_stats
                sum_gradients(policy, world_size)
                grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                grad_norm = grad_norm.full_tensor() if args.fsdp else grad_norm  # v1: distributed
                stats = torch.cat([total(stats), grad_norm[None]])
                if not stats.isfinite().all():  # a NaN must not reach the weights
                    skipped_steps += 1
                    continue
                optimizer.step()
                updates.append(stats)
            # v1: kl
            if args.target_kl and updates and updates[-1][3] > 1.5 * args.target_kl:
                break
        if not updates:
            sys.exit(f"iteration {iteration}: neither loss nor gradient was ever finite")

        # 4 log
        means = torch.stack(updates).mean(0).tolist()
        metrics = {f"losses/{k}": x for k, x in zip([*LOSSES, "grad_norm"], means, strict=True)}
        metrics |= {
            "global_step": global_step,
            "losses/explained_variance": explained_variance(batch["values"], batch["returns"], mask),
            "losses/ref_kl": masked_mean(k3_kl(*past), mask).item(),
            "losses/skipped_steps": skipped_steps,
            "rollout/logprob_mismatch": updates[0][5].item(),  # weights are still the sampler's
            "charts/score": batch["scores"].mean().item(),
            "charts/response_length": mask.sum(1).mean().item(),
            "charts/truncated_frac": 1 - batch["ended"].mean().item(),
            "charts/learning_rate": lr,
            "charts/SPS": args.batch_size / (time.time() - start_time),
            "time/rollout": rollout_time,
            "time/update": time.time() - start_time - rollout_time,
        }

        # v1: kl, nan
        kl = ((past[0] - past[1]) * mask).sum(1).mean().item()  # nats per answer
        metrics |= {"kl_divergence": kl, "losses/kl_coef": kl_coef, "learning_rate": lr}
        metrics["total_loss"] = means[0] + args.vf_coef * means[1] - args.ent_coef * means[2]
        metrics["rollout/nan_rewards"] = (mask.sum(1) == 0).sum().item()
        if args.adaptive_kl:
            kl_coef = adapt_kl_coef(kl_coef, kl, args.kl_target, args.kl_horizon, args.batch_size)

        # 5 evaluate
        if iteration % args.eval_every == 0 or iteration == args.num_iterations:
            metrics["eval/score"] = evaluate(policy, eval_pairs, tokenizer, scorer, args)
            # v1: best
            better = metrics["eval/score"] > best_score + args.early_stopping_threshold
            stale_evals = 0 if better else stale_evals + 1
            if metrics["eval/score"] > best_score:
                best_score = metrics["eval/score"]
                save_model(policy, tokenizer, run.dir / "best")
        run.log(metrics)
        line = f"PL:{means[0]:.2f} VL:{means[1]:.2f} R:{metrics['charts/score']:.2f}"
        run.status(line, iteration)
        # v1: checkpoint
        stopping = total(torch.tensor(float(len(stop)), device=device)) > 0  # any rank
        ended = iteration == args.num_iterations or stale_evals >= patience
        if ended or stopping or iteration % args.save_every == 0:
            model_state, optimizer_state = dcp.get_state_dict(policy, optimizer, options=FULL)
            state = dict(policy=model_state, optimizer=optimizer_state, args=asdict(args), rows=run.rows)
            state["counters"] = iteration, skipped_steps, best_score, stale_evals, kl_coef
            if rank == 0:  # whole or not at all: a kill at any moment leaves the previous one good
                torch.save(state, run.dir / "checkpoint.pt.tmp")
                os.replace(run.dir / "checkpoint.pt.tmp", run.dir / "checkpoint.pt")
        if stopping and not ended:
            print(f"stopped and saved; --resume --run-dir {run.dir} goes on")
            return metrics

    if stale_evals >= patience:  # v1: best
        print(f"early stop: {stale_evals} evaluations not better than {best_score:.3f}")
    save_model(policy, tokenizer, run.dir / "final_model")  # v1: distributed
    panels = {"score of an answer": ["charts/score", "eval/score"], "entropy": ["losses/entropy"]}
    panels["how far the policy moves, nats per token"] = ["losses/approx_kl", "losses/ref_kl"]
    panels["what the critic predicts"] = ["losses/explained_variance"]
    run.close("answers generated", panels)
    print(f"eval/score {metrics['eval/score']:.3f} after {global_step} answers: {run.dir}")
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
    if dist.is_initialized():  # v1: distributed: threads of gloo may abort an interpreter as it ends
        sys.stdout.flush()
        os._exit(0)
