"""ppo_v1.py - PPO for language models (arXiv:1707.06347v2) with production features.

Differs from ppo.py (each item is a marker in the code):
    v1: lr_schedule     - linear, cosine, constant or plateau, with warm-up
    v1: grad_accum      - micro-batches inside a minibatch: same gradient, less memory
    v1: checkpoint      - save and resume, bit-exact, killed at any moment
    v1: signals         - SIGINT and SIGTERM finish the iteration, save and end
    v1: text_log        - train.log, every metric of every iteration, with the time
    v1: early_stopping  - end when the evaluation stops improving
    v1: best            - keep the best model by evaluation
    v1: memory          - bf16 autocast, gradient checkpointing
    v1: config          - training_config.json: options, versions, command
    v1: nan_guard       - a NaN reward costs its updates, not the run (ppo.py guards losses and gradients already)
    v1: metrics         - total_loss, kl_divergence, learning_rate
    v1: adaptive_kl     - steer the KL coefficient to a target (arXiv:1909.08593)
    v1: target_kl       - stop the epochs of an update that moved too far
    v1: clip            - clip-higher (arXiv:2503.14476) and dual clip (arXiv:1912.09729)
    v1: distributed     - torchrun, replicated or sharded (FSDP2); same update as one process

Simplified on purpose: no vLLM, no LoRA; sampling holds all weights on every rank.
Shapes: B sequences, P prompt tokens (left-padded), R response tokens (right-padded), V vocabulary, H hidden size.

    python ppo_v1.py                                          # sort digits, CPU, about a minute
    python ppo_v1.py --resume auto --run-dir runs/mine        # start, or go on where it stopped
    torchrun --nproc-per-node 2 ppo_v1.py --fsdp              # two processes, sharded
    python ppo_v1.py --model-name FOLDER --chat-template --task jsonl:questions.jsonl
"""

import atexit
import contextlib
import copy
import ctypes
import functools
import importlib.util
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.distributed as dist
import transformers
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.checkpoint import state_dict as sharded_state
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
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
    # v1: checkpoint
    resume: str | None = None
    """auto: go on from the newest checkpoint of run_dir, or of exp_name and seed; PATH: that one (None: start fresh)"""
    save_every: int = 100
    """steps between checkpoints (iterations in the language-model scripts); 0: only at the end"""
    keep_checkpoints: int = 3
    """newest checkpoints to keep; the best model is kept apart and never deleted"""
    # v1: distributed
    fsdp: bool = False
    """under torchrun, shard weights, gradients and optimizer over the ranks instead of replicating them (FSDP2)"""

    # task
    task: str = "sort"
    """sort, add, jsonl:PATH (columns prompt/answer, question/answer or problem/solution) or rg:NAME (reasoning-gym)"""
    min_digits: int = 3
    """sort: shortest list"""
    max_digits: int = 4
    """sort: longest list"""
    max_operand: int = 19
    """add: largest number in a sum"""
    reward_fn: str | None = None
    """file.py:name of a function (prompts, responses, answers) -> list of floats that replaces the task's verifier"""
    reward_model_name: str | None = None
    """hub name or folder of a sequence-classification model that scores the text instead of the verifier"""
    missing_eos_penalty: float = 0.0
    """subtracted from the score of an answer cut off at max_response_length"""
    nan_rewards: Literal["fail", "skip"] = "skip"  # v1: nan_guard
    """a reward that is not finite ends the run with a message (fail) or costs the updates it would enter (skip)"""

    # model
    model_name: str | None = None
    """hub name or folder of a causal LM (None: a tiny Llama made from a config)"""
    chat_template: bool = False
    """wrap each prompt as a user turn with the tokenizer's own chat template"""
    separate_critic: bool = False
    """give the value head a backbone of its own instead of the policy's"""
    hidden_size: int = 64
    """tiny model: width, a multiple of 16"""
    num_layers: int = 2
    """tiny model: depth"""
    sft_steps: int = 300
    """tiny model: supervised steps on scrambled answers, which teach the format only (0: start from random weights)"""

    # rollout
    batch_size: int = 64
    """answers sampled per iteration"""
    max_prompt_length: int = 512
    """tokens; longer prompts of a data file are left out, with a note"""
    max_response_length: int = 8
    """tokens, EOS included; an answer without EOS by then is cut off"""
    temperature: float = 1.0
    """of sampling and of every log-prob; evaluation is greedy"""

    # optimization
    num_iterations: int = 150
    """rollout + update rounds"""
    learning_rate: float = 1e-4
    """at the start; by default it falls linearly to 0 over the run"""
    update_epochs: int = 4
    """passes over the rollouts of an iteration"""
    num_minibatches: int = 2
    """optimizer steps per epoch"""
    max_grad_norm: float = 1.0
    """clip the gradient's global norm here"""
    max_skipped_steps: int = 10
    """end the run after this many optimizer steps in a row with a non-finite gradient"""
    # v1: lr_schedule
    lr_scheduler_type: Literal["linear", "cosine", "constant", "plateau"] = "linear"
    """shape after the warm-up, over the iterations of this run; plateau: halved whenever evaluation stands still"""
    warmup_steps: int = 0
    """iterations in which the learning rate rises linearly from 0"""
    plateau_patience: int = 2
    """plateau: evaluations without improvement before the rate is halved"""
    # v1: grad_accum
    gradient_accumulation_steps: int = 1
    """micro-batches per minibatch; changes memory, not the gradient"""
    # v1: memory
    bf16: bool = False
    """run the networks under bfloat16 autocast (weights, log-probs and losses stay float32)"""
    gradient_checkpointing: bool = False
    """keep one activation per layer and compute the rest again in the backward pass"""

    # PPO
    gamma: float = 1.0
    """discount per token"""
    gae_lambda: float = 0.95
    """0: one-step TD advantage, 1: Monte Carlo"""
    clip_coef: float = 0.2
    """the policy ratio is clipped to 1 - this .. 1 + this"""
    vf_clip_coef: float = 0.2
    """a value may leave its old prediction by this much"""
    vf_coef: float = 0.1
    """weight of the value loss"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    kl_coef: float = 0.01
    """penalty in the reward per nat of log pi - log pi_ref (0: no reference model at all)"""
    # v1: adaptive_kl
    adaptive_kl: bool = False
    """move kl_coef so that the KL per answer comes near kl_target"""
    kl_target: float = 6.0
    """adaptive_kl: nats per answer"""
    kl_horizon: int = 10_000
    """adaptive_kl: answers over which kl_coef may change by about 20 %"""
    # v1: target_kl
    target_kl: float | None = None
    """stop the epochs of an update once approx_kl passes 1.5 times this (None: never)"""
    # v1: clip
    clip_coef_high: float | None = None
    """upper side of the policy clip, where it shall differ (clip-higher; None: clip_coef)"""
    dual_clip: float | None = None
    """bound on the ratio for negative advantages, above 1 (dual clip; None: no bound)"""

    # logging
    eval_every: int = 50
    """iterations between greedy evaluations on held-out prompts (0: the first and the last policy only)"""
    eval_size: int = 256
    """held-out prompts per evaluation"""
    log_interval: int = 1
    """iterations between lines of metrics.jsonl"""
    track: bool = False
    """also log to wandb (WANDB_MODE=offline works without an account)"""
    wandb_project_name: str = "stale-experience"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb team (None: your default one)"""
    # v1: early_stopping
    early_stopping_patience: int = 5
    """end after this many evaluations in a row without improvement (0: never)"""
    early_stopping_threshold: float = 0.001
    """what counts as an improvement of eval/score"""

    # derived
    minibatch_size: int = field(init=False)
    """batch_size / num_minibatches"""

    def __post_init__(self):
        positive = "batch_size max_prompt_length max_response_length temperature num_iterations learning_rate"
        positive += " update_epochs num_minibatches max_grad_norm max_skipped_steps clip_coef vf_clip_coef"
        positive += " eval_size log_interval min_digits max_operand hidden_size num_layers"
        not_negative = "seed num_threads sft_steps eval_every vf_coef ent_coef kl_coef missing_eos_penalty"
        for name in positive.split():
            check(0 < getattr(self, name) < math.inf, self, name, "a positive number")
        for name in not_negative.split():
            check(0 <= getattr(self, name) < math.inf, self, name, "0 or a positive number")
        for name in ("gamma", "gae_lambda"):
            check(0 <= getattr(self, name) <= 1, self, name, "between 0 and 1")
        check(self.seed < 2**32, self, "seed", "less than 2**32")
        check(self.max_digits >= self.min_digits, self, "max_digits", f"at least --min-digits {self.min_digits}")
        check(self.hidden_size % 16 == 0, self, "hidden_size", "a multiple of 16")
        divisor = f"a divisor of --batch-size {self.batch_size}"
        check(self.batch_size % self.num_minibatches == 0, self, "num_minibatches", divisor)
        check(not (self.reward_fn and self.reward_model_name), self, "reward_fn", "left out with --reward-model-name")
        self.minibatch_size = self.batch_size // self.num_minibatches
        # v1: the options of this file
        for name in ("keep_checkpoints", "plateau_patience", "kl_target", "kl_horizon", "gradient_accumulation_steps"):
            check(0 < getattr(self, name) < math.inf, self, name, "a positive number")
        for name in ("save_every", "warmup_steps", "early_stopping_patience", "early_stopping_threshold"):
            check(0 <= getattr(self, name) < math.inf, self, name, "0 or a positive number")
        for name, least in (("target_kl", 0), ("clip_coef_high", 0), ("dual_clip", 1)):
            value = getattr(self, name)
            check(value is None or least < value < math.inf, self, name, f"a number above {least}, or left out")
        check(self.warmup_steps < self.num_iterations, self, "warmup_steps", f"below {self.num_iterations} iterations")
        divides = self.minibatch_size % self.gradient_accumulation_steps == 0
        check(divides, self, "gradient_accumulation_steps", f"a divisor of {self.minibatch_size}, the minibatch")
        check(self.kl_coef > 0 or not self.adaptive_kl, self, "kl_coef", "positive with --adaptive-kl")


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
@dataclass
class Task:
    train: Callable[[int], tuple[str, str]]  # position in the stream -> (prompt, answer): all that resuming needs
    evaluation: list[tuple[str, str]]  # held-out (prompt, answer) pairs, the same for every seed
    score: Callable  # (prompts, responses, answers) -> list of floats
    scramble: Callable[[random.Random, str], str]  # an answer right in form only, for the warm start


BOXED = r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"  # may hold \frac{1}{2}


def is_held_out(prompt: str) -> bool:
    """A tenth of all prompts, picked by their text, is for evaluation only."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def exact_match(prompts, responses, answers):
    return [float(response == answer) for response, answer in zip(responses, answers, strict=True)]


def verify(prompts, responses, answers):
    """1 for the right final answer, else 0. A number may end a sentence, stand behind #### or in a box."""
    scores = []
    for response, answer in zip(responses, answers, strict=True):
        marked = re.findall(BOXED + r"|####\s*(\S+)", response)
        text = max(marked[-1]).strip() if marked else response.strip()
        numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+", text)
        if numbers and re.fullmatch(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+", answer):
            scores.append(float(float(numbers[-1].replace(",", "")) == float(answer.replace(",", ""))))
        else:
            scores.append(float(text == answer))
    return scores


def read_jsonl(path: str) -> list[tuple[str, str]]:
    """(prompt, answer) pairs of a JSONL file; a line that cannot be used is named by its number."""
    columns = (("prompt", "answer"), ("question", "answer"), ("problem", "solution"))
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # a string may hold U+2028, which splitlines cuts at
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--task jsonl:{path}: cannot read the file: {error}")
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            fail(f"--task jsonl:{path}: line {number} is not JSON: {error}")
        names = next((c for c in columns if isinstance(row, dict) and c[0] in row and c[1] in row), None)
        if names is None:
            fail(f"--task jsonl:{path}: line {number} lacks prompt/answer, question/answer or problem/solution")
        prompt, answer = (row[name] for name in names)
        if not isinstance(prompt, str) or not prompt or not isinstance(answer, str | int | float):
            fail(f"--task jsonl:{path}: line {number}: {names[0]} must be a text, {names[1]} a text or a number")
        answer = str(answer).split("####")[-1].strip()  # GSM8K keeps the answer behind ####, MATH in the last box
        boxed = re.findall(BOXED, answer)
        pairs.append((prompt, boxed[-1].strip() if boxed else answer))
    return pairs


def make_generated_task(args) -> Task:
    def draw(rng):
        if args.task == "add":
            a, b = (rng.randint(0, args.max_operand) for _ in range(2))
            return f"{a}+{b}=", str(a + b)
        digits = rng.choices("0123456789", k=rng.randint(args.min_digits, args.max_digits))
        return "".join(digits) + "=", "".join(sorted(digits))

    def train(position):
        rng = random.Random(f"{args.seed}/{position}")
        while is_held_out((pair := draw(rng))[0]):
            pass
        return pair

    def scramble(rng, answer):
        if args.task == "add":
            return str(rng.randint(0, 2 * args.max_operand))
        return "".join(rng.sample(answer, len(answer)))

    rng, evaluation = random.Random(0), {}
    for _ in range(200 * args.eval_size):  # bounded: a small task may have fewer held-out prompts than asked for
        prompt, answer = draw(rng)
        if is_held_out(prompt):
            evaluation[prompt] = answer
        if len(evaluation) == args.eval_size:
            break
    if not evaluation:
        fail(f"--task {args.task} has no held-out prompt at these sizes: raise --max-digits or --max-operand")
    return Task(train, list(evaluation.items()), exact_match, scramble)


def make_task(args, lengths: Callable[[list[str]], list[int]]) -> Task:
    """`lengths` counts the tokens of prompts."""
    if args.task in ("sort", "add"):
        return make_generated_task(args)
    kind, _, source = args.task.partition(":")
    score = verify
    if kind == "jsonl" and source:
        pairs = read_jsonl(source)
    elif kind == "rg" and source:
        try:
            import reasoning_gym
        except ImportError:
            fail(f"--task {args.task} needs an optional package: pip install reasoning-gym")
        try:
            dataset = reasoning_gym.create_dataset(source, size=5_000, seed=0)
        except ValueError as error:
            fail(f"--task {args.task}: {error}")
        entries = {entry["question"]: entry for entry in dataset}
        pairs = [(question, str(entry["answer"])) for question, entry in entries.items()]

        def score(prompts, responses, answers):
            scored = zip(prompts, responses, strict=True)
            return [float(dataset.score_answer(answer=response.strip(), entry=entries[p])) for p, response in scored]
    else:
        fail(f"--task {args.task} is unknown; allowed: sort, add, jsonl:PATH, rg:NAME")
    counts = lengths([prompt for prompt, _ in pairs]) if pairs else []
    fitting = [pair for pair, count in zip(pairs, counts, strict=True) if count <= args.max_prompt_length]
    if len(fitting) < len(pairs):
        print(f"{len(pairs) - len(fitting)} of {len(pairs)} prompts are longer than --max-prompt-length: left out")
    # As in is_held_out, but a small file must yield one, too.
    by_hash = sorted(fitting, key=lambda pair: zlib.crc32(pair[0].encode()))
    held_out = dict(by_hash[: min(args.eval_size, math.ceil(len(by_hash) / 10))])
    kept = [pair for pair in fitting if pair[0] not in held_out]
    if not kept:
        fail(f"--task {args.task} needs two different prompts of at most {args.max_prompt_length} tokens, one held out")

    @functools.lru_cache(maxsize=2)
    def order(number):  # every prompt once per pass, each pass in an order of its own
        return random.Random(f"{args.seed}/{number}").sample(range(len(kept)), len(kept))

    def train(position):
        return kept[order(position // len(kept))[position % len(kept)]]

    return Task(train, list(held_out.items()), score, lambda rng, answer: rng.choice(kept)[1])


def make_scorer(args, task: Task, device) -> Callable:
    """Where the score of an answer comes from: reward model, reward function or the task's verifier."""
    score = task.score
    if args.reward_model_name:
        name, option = args.reward_model_name, "--reward-model-name"
        reward_model = load_pretrained(AutoModelForSequenceClassification, name, option).to(device)
        reward_tokenizer = load_pretrained(AutoTokenizer, name, option)

        @torch.no_grad()
        def score(prompts, responses, answers):
            # A reward model may have another vocabulary, so it reads text; nothing of this enters the loss. One row at
            # a time: its pooling looks for the first pad token, and that may be an eos which belongs to the text.
            scores = []
            for prompt, response in zip(prompts, responses, strict=True):
                text, special = prompt + response, True
                if args.chat_template and reward_tokenizer.chat_template:
                    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
                    text, special = reward_tokenizer.apply_chat_template(turns, tokenize=False), False
                ids = reward_tokenizer(text, add_special_tokens=special, return_tensors="pt").input_ids
                scores.append(reward_model(ids.to(device)).logits[0, 0].item())
            return scores
    elif args.reward_fn:
        path, _, name = args.reward_fn.rpartition(":")
        if not Path(path).is_file():
            fail(f"--reward-fn {args.reward_fn} must be file.py:name of an existing file")
        spec = importlib.util.spec_from_file_location("reward_fn", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        score = getattr(module, name, None)
        if not callable(score):
            fail(f"--reward-fn {args.reward_fn}: {path} has no function {name!r}")
    return score


def score_responses(scorer, args, prompts, responses, answers, ended):
    """What the scorer says, checked, as the return sees it.  -> (B,)"""
    scores = list(scorer(list(prompts), list(responses), list(answers)))
    if len(scores) != len(responses):
        fail(f"the reward gave {len(scores)} scores for {len(responses)} responses: sample {len(scores)} has none")
    for i, score in enumerate(scores):
        if not math.isfinite(score) and args.nan_rewards == "fail":
            fail(f"the reward of sample {i} is {score}: prompt {prompts[i]!r}, response {responses[i]!r}")
    scores, ended = torch.tensor(scores, dtype=torch.float32), torch.tensor(ended, dtype=torch.float32)
    if not args.reward_fn and not args.reward_model_name:
        scores = scores * ended  # a verifier's point needs an end; whoever brings a reward decides that for himself
    return scores - args.missing_eos_penalty * (1 - ended)


# --- networks ---
class PolicyWithValue(nn.Module):
    """A causal LM and a value head, on the LM's own trunk or on a copy of it."""

    def __init__(self, lm, separate_critic: bool):
        super().__init__()
        self.lm = lm
        self.critic = copy.deepcopy(lm.base_model) if separate_critic else None
        self.value_head = nn.Linear(lm.get_output_embeddings().in_features, 1)
        nn.init.zeros_(self.value_head.weight)  # the first advantages are then plain returns
        nn.init.zeros_(self.value_head.bias)
        config = lm.config.get_text_config()
        full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        full = full and getattr(config, "sliding_window", None) is None
        # transformers makes the same mask out of a 2D one, but that takes a quarter of a tiny model's forward pass
        self.own_mask = full and config._attn_implementation == "sdpa" and not getattr(config, "alibi", False)

    def inputs(self, ids, mask):
        """For a trunk: `mask` (B,T) covers all tokens, `ids` (B,t) the last of them, positions count real ones only."""
        position_ids = positions(mask)[:, -ids.shape[1] :]
        mask = causal_mask(mask, ids.shape[1]) if self.own_mask else mask
        return dict(input_ids=ids, attention_mask=mask, position_ids=position_ids)

    def forward(self, prompt_ids, prompt_mask, response_ids, response_mask, temperature, entropy_grad=False):
        """Log-prob and entropy of each response token, and the value of the state it was chosen in.  -> 3 x (B,R)"""
        length, valid = response_ids.shape[1], response_mask.bool()
        # The last token predicts nothing and is not fed: of the last R outputs, number t predicts response token t.
        mask = torch.cat([prompt_mask, response_mask], 1)[:, :-1]  # (B,P+R-1)
        inputs = self.inputs(torch.cat([prompt_ids, response_ids], 1)[:, :-1], mask)
        hidden = self.lm.base_model(**inputs, use_cache=False).last_hidden_state[:, -length:]  # (B,R,H)
        # The LM head is the largest layer, so it sees the N valid response tokens only: no prompt, no padding.
        lm_head = self.lm.get_output_embeddings()
        logprobs, entropy = token_logprobs(lm_head, hidden[valid], response_ids[valid], temperature, entropy_grad)
        if self.critic is not None:
            hidden = self.critic(**inputs, use_cache=False).last_hidden_state[:, -length:]
        values = self.value_head(hidden).squeeze(-1).float() * response_mask
        zeros = torch.zeros_like(values)
        return zeros.masked_scatter(valid, logprobs), zeros.masked_scatter(valid, entropy), values

    def step(self, ids, mask, cache):
        """Logits of the next token, given the cache and the ids that are not in it yet.  (B,t) -> (B,V)"""
        output = self.lm.base_model(**self.inputs(ids, mask), past_key_values=cache, use_cache=True)
        return self.lm.get_output_embeddings()(output.last_hidden_state[:, -1])


def positions(mask):
    """Count real tokens only, so that left padding does not shift a prompt.  (B,T) -> (B,T)"""
    return (mask.cumsum(1) - 1).clamp(min=0)


def causal_mask(mask, num_new):
    """What the last `num_new` tokens may attend to; always themselves, or padding gives NaN.  -> (B,1,num_new,T)"""
    at = torch.arange(mask.shape[1], device=mask.device)
    row = at[-num_new:, None]
    return ((at <= row) & mask[:, None, None].bool()) | (at == row)


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


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, as a Hugging Face tokenizer, so that one code path serves all models."""
    vocab = ["<pad>", "<eos>", "<unk>", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
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


def load_policy(args):
    """-> policy, tokenizer, the ids that end an answer (E,), the id to pad with"""
    with torch.random.fork_rng(devices=[]):  # weights come from the global generator; leave that as it was
        torch.manual_seed(args.seed)
        if args.model_name is None:
            tokenizer = make_tiny_tokenizer()
            special = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
            sizes = dict(hidden_size=args.hidden_size, intermediate_size=3 * args.hidden_size)
            sizes |= dict(num_hidden_layers=args.num_layers, num_attention_heads=args.hidden_size // 16)
            lm = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **special)).eval()
        else:
            tokenizer = load_pretrained(AutoTokenizer, args.model_name, "--model-name")
            lm = load_pretrained(AutoModelForCausalLM, args.model_name, "--model-name")
        policy = PolicyWithValue(lm, args.separate_critic).eval()
    if args.chat_template and not tokenizer.chat_template:
        fail(f"--chat-template: the tokenizer of {args.model_name or 'the tiny model'} has no chat template")
    most = (getattr(lm.config, "max_position_embeddings", None) or math.inf) - args.max_response_length
    check(args.max_prompt_length <= most, args, "max_prompt_length", f"at most {most}: the model's positions end there")
    ids, mask = torch.tensor([[3, 3, 4, 5]]), torch.tensor([[0, 1, 1, 1]])
    with torch.no_grad():  # not so for scaled or soft-capped logits (Cohere, Gemma 2)
        if not torch.allclose(lm(ids[:, 1:]).logits[:, -1], policy.step(ids, mask, DynamicCache()), atol=1e-3):
            fail(f"--model-name {args.model_name}: its logits are not its LM head applied to its last hidden state")
    # The generation config is read for its EOS ids only: its top_k or repetition penalty must not leak into sampling.
    eos = getattr(lm.generation_config, "eos_token_id", None)
    eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    if not eos_ids:
        fail(f"--model-name {args.model_name}: neither its tokenizer nor its generation config names an EOS token")
    pad_id = min(eos_ids) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return policy, tokenizer, torch.tensor(sorted(eos_ids)), pad_id


# --- math ---
def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def whiten(x, mask):
    """Zero mean and unit (population) variance over valid tokens, 0 elsewhere and for a lone token.  (B,R) -> (B,R)"""
    centred = (x - masked_mean(x, mask)) * mask
    return centred * (masked_mean(centred**2, mask) + 1e-8).rsqrt()


def token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef):
    """KL penalty on every token, score on the last valid one.  (B,), 3 x (B,R) -> (B,R)"""
    # k1 = log pi - log pi_ref goes in the reward: as a loss, its expected gradient is zero (k3 is for logging)
    rewards = -kl_coef * (logprobs - ref_logprobs) * mask
    last = mask.sum(1, keepdim=True).long() - 1  # (B,1)
    return rewards.scatter_add(1, last, scores[:, None])


def k3_kl(logprobs, ref_logprobs):
    """KL(pi | pi_ref) per token, never negative (Schulman, "Approximating KL Divergence").  2 x (B,R) -> (B,R)"""
    logratio = ref_logprobs - logprobs
    return logratio.exp() - 1 - logratio


def compute_gae(rewards, values, mask, gamma, gae_lambda):
    """Generalized advantages, eq. 11 and 12 of arXiv:1707.06347v2, over valid tokens.  3 x (B,R) -> (B,R)"""
    assert rewards.shape == values.shape == mask.shape
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])  # (B,); nothing comes after the last token
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = next_advantage = (delta + gamma * gae_lambda * next_advantage) * mask[:, t]
        next_value = values[:, t] * mask[:, t]
    return advantages


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


def value_loss(new_values, values, returns, mask, weights, num_tokens, clip_coef):
    """Half the squared error of the new value, or of the new value held near the old one if worse.  (B,R) -> ()"""
    assert new_values.shape == values.shape == returns.shape == mask.shape == weights.shape
    held = values + (new_values - values).clamp(-clip_coef, clip_coef)
    error = torch.max((new_values - returns) ** 2, (held - returns) ** 2)
    return 0.5 * (error * weights * mask).sum() / num_tokens


def explained_variance(values, returns, mask):
    """1: the critic predicts the returns; 0: no better than a constant.  2 x (B,R) -> ()"""
    variance, residual = ((x - masked_mean(x, mask)) ** 2 for x in (returns, returns - values))
    return 1 - masked_mean(residual, mask) / masked_mean(variance, mask).clamp(min=1e-8)


# v1: lr_schedule
def learning_rate_at(iteration, num_iterations, learning_rate, kind, warmup_steps, plateau_scale):
    """Rate of one iteration, the first being 1; linear and cosine end at 0."""
    if iteration <= warmup_steps:
        return learning_rate * iteration / warmup_steps
    progress = (iteration - 1 - warmup_steps) / (num_iterations - warmup_steps)
    shape = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "plateau": plateau_scale}
    return learning_rate * shape.get(kind, 1)


# v1: adaptive_kl
def adapt_kl_coef(kl_coef, kl, kl_target, kl_horizon, num_answers):
    """Proportional controller of section 2.2 of arXiv:1909.08593; `kl` in nats per answer."""
    error = min(max(kl / kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_answers / kl_horizon)


# --- rollout ---
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


@torch.no_grad()
def generate(policy, prompt_ids, prompt_mask, eos_ids, pad_id, max_response_length, temperature, uniforms=None):
    """Sample at `temperature`, or greedily where `uniforms` (B,R) is None.  -> response_ids, response_mask, logprobs

    Not transformers' `generate`: that applies what a checkpoint's generation config holds, and the log-probs of the
    policy would not be those of the sampler.
    """
    shape, device = (len(prompt_ids), max_response_length), prompt_ids.device
    response_ids, response_mask = torch.full(shape, pad_id, device=device), torch.zeros(shape, dtype=int, device=device)
    logprobs = torch.zeros(shape, device=device)
    alive = torch.arange(len(prompt_ids), device=device)  # rows that have not ended; the others stop costing
    cache, ids, mask = DynamicCache(), prompt_ids, prompt_mask
    for t in range(max_response_length):
        logits = policy.step(ids, mask, cache).float() / temperature  # (A,V)
        token = logits.argmax(-1) if uniforms is None else sample_token(logits, uniforms[alive, t])
        response_ids[alive, t], response_mask[alive, t] = token, 1  # includes the EOS and nothing after it
        logprobs[alive, t] = logits.gather(-1, token[:, None]).squeeze(-1) - logits.logsumexp(-1)
        going = (~torch.isin(token, eos_ids)).nonzero().squeeze(-1)
        if len(going) == 0:
            break
        if len(going) < len(alive):
            cache.batch_select_indices(going)
            alive, token, mask = alive[going], token[going], mask[going]
        ids = token[:, None]
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return response_ids[:, : t + 1], response_mask[:, : t + 1], logprobs[:, : t + 1]


def decode(tokenizer, response_ids, response_mask, eos_ids) -> tuple[list[str], list[bool]]:
    """-> texts without the EOS, and which rows have one"""
    rows = [ids[:n] for ids, n in zip(response_ids.tolist(), response_mask.sum(1).tolist(), strict=True)]
    ends = set(eos_ids.tolist())
    ended = [row[-1] in ends for row in rows]
    rows = [row[:-1] if end else row for row, end in zip(rows, ended, strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True), ended


# --- evaluate ---
def evaluate(policy, task, tokenizer, scorer, eos_ids, pad_id, args) -> float:
    """Mean score of greedy answers to the held-out prompts. Draws no random number, so it cannot change training."""
    total = 0.0
    for start in range(0, len(task.evaluation), args.batch_size):
        prompts, answers = zip(*task.evaluation[start : start + args.batch_size], strict=True)
        rows = encode_prompts(tokenizer, prompts, args.chat_template)
        prompt_ids, prompt_mask = (x.to(eos_ids.device) for x in pad(rows, pad_id, "left"))
        limits = (args.max_response_length, args.temperature)
        response_ids, response_mask, _ = generate(policy, prompt_ids, prompt_mask, eos_ids, pad_id, *limits)
        responses, ended = decode(tokenizer, response_ids, response_mask, eos_ids)
        total += score_responses(scorer, args, prompts, responses, answers, ended).sum().item()
    return total / len(task.evaluation)


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


# v1: checkpoint
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


# v1: signals
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


# v1: distributed
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


def mean_over_ranks(score: float, world_size: int, device) -> float:
    """A reward may be random, and what is decided by its score all ranks must decide alike."""
    return float(sum_over_ranks({"score": score}, world_size, device)["score"]) / world_size


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
def warm_start(policy, task, tokenizer, eos_ids, pad_id, args):
    """Supervised steps on scrambled answers: what comes out answers in the right form, and is right by chance only."""
    print(f"warm start: {args.sft_steps} supervised steps on answers that are right in form only", flush=True)
    optimizer = torch.optim.AdamW(policy.lm.parameters(), lr=1e-3, fused=True)
    rng = random.Random(f"{args.seed}/scramble")
    for step in range(args.sft_steps):
        pairs = [task.train(10**9 + step * 64 + i) for i in range(64)]  # far behind the positions that the run will use
        answers = tokenizer([task.scramble(rng, answer) for _, answer in pairs], add_special_tokens=False).input_ids
        answers = [(row + eos_ids[:1].tolist())[: args.max_response_length] for row in answers]
        prompts = encode_prompts(tokenizer, [prompt for prompt, _ in pairs], args.chat_template)
        batch = [x.to(eos_ids.device) for x in (*pad(prompts, pad_id, "left"), *pad(answers, pad_id, "right"))]
        logprobs, _, _ = policy(*batch, temperature=1.0)
        optimizer.zero_grad()
        (-masked_mean(logprobs, batch[3])).backward()
        optimizer.step()
    if policy.critic is not None:
        policy.critic.load_state_dict(policy.lm.base_model.state_dict())  # has learned the form, too


# v1: checkpoint
def check_resumed_args(args, saved: dict, path: Path):
    """Other options are listed; ones that would make it another run are refused."""
    if not isinstance(saved, dict) or not {"args", "policy", "optimizer", "counters", "controls"} <= saved.keys():
        fail(f"checkpoint {path} is not one of ppo.py's children")
    fixed = ("seed", "task", "model_name", "hidden_size", "num_layers", "separate_critic", "sft_steps", "batch_size")
    fixed += ("min_digits", "max_digits", "max_operand", "max_response_length")  # the warm start makes pi_ref from them
    if args.fsdp and not saved["args"]["fsdp"]:
        fail(f"--fsdp does not fit {path}, which was saved without it (the other way round works)")
    ignored = ("resume", "run_dir", "exp_name")
    for name, now in asdict(args).items():
        before = saved["args"].get(name)
        if name in fixed and before != now:
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
    # v1: checkpoint
    resume_path = find_checkpoint(args)
    saved = load_checkpoint(resume_path) if resume_path else None
    if saved:
        check_resumed_args(args, saved, resume_path)
        home = resume_path.resolve().parent
        run_dir = home.parent if home.name == "checkpoints" and not args.run_dir else run_dir
    elif args.resume:
        print("nothing to resume: starting fresh")
    check_folder("run-dir", run_dir)
    # v1: checkpoint
    goes_on = args.resume and (saved is None or run_dir.resolve() == home.parent)
    if (run_dir / "metrics.jsonl").exists() and not goes_on:
        fail(f"--run-dir {run_dir} holds a run already: choose another folder")
    device = pick_device(args.device)
    # v1: distributed
    rank, world_size, device = init_distributed(device)
    if args.minibatch_size % (world_size * args.gradient_accumulation_steps):
        fail(f"--batch-size {args.batch_size} does not divide into {world_size} ranks x minibatches x micro-batches")
    if args.fsdp and world_size == 1:
        fail("--fsdp True is not allowed: it needs torchrun with two processes or more")
    policy, tokenizer, eos_ids, pad_id = load_policy(args)
    policy, eos_ids = policy.to(device), eos_ids.to(device)
    task = make_task(args, lambda prompts: [len(row) for row in encode_prompts(tokenizer, prompts, args.chat_template)])
    scorer = make_scorer(args, task, device)

    if args.model_name is None:
        warm_start(policy, task, tokenizer, eos_ids, pad_id, args)
    # v1: distributed
    for parameter in policy.parameters() if world_size > 1 else ():
        dist.broadcast(parameter.data, 0)
    reference = None
    if args.kl_coef:  # frozen pi_ref
        reference = PolicyWithValue(copy.deepcopy(policy.lm), separate_critic=False).to(device).requires_grad_(False)
    # v1: distributed
    if args.fsdp:
        policy, reference = shard(policy, device), reference and shard(reference, device)
    # v1: memory
    if args.gradient_checkpointing:
        for trunk in filter(None, (policy.lm, policy.critic)):
            trunk.gradient_checkpointing_enable()
        for module in policy.modules():  # it works in train() mode only, and dropout would be noise in ratios
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name in [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]:
                setattr(module, name, 0.0)  # some models call F.dropout with a number of theirs
    if args.bf16:
        autocast = torch.autocast(device.type, torch.bfloat16)  # also a decorator, so that no line below moves
        for model in filter(None, (policy, reference)):
            model.forward, model.step = autocast(model.forward), autocast(model.step)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, eps=1e-5, weight_decay=0.0, fused=True)
    sample_rng = torch.Generator().manual_seed(args.seed)  # one per purpose: more draws of one leave the other alone
    shuffle_rng = torch.Generator().manual_seed(args.seed + 1)

    writer = Writer(
        args,
        run_dir,
        total=args.num_iterations,
        enabled=rank == 0,  # v1: distributed
    )
    iteration = global_step = skipped_steps = skipped_in_a_row = 0
    kl_coef = args.kl_coef
    # v1: early_stopping, best, lr_schedule
    best_score, stale_evals, plateau_evals, plateau_scale = -math.inf, 0, 0, 1.0
    # v1: checkpoint
    if saved:
        load_state(policy, optimizer, saved["policy"], saved["optimizer"])
        sample_rng.set_state(saved["sample_rng"])
        shuffle_rng.set_state(saved["shuffle_rng"])
        iteration, global_step, skipped_steps, skipped_in_a_row = saved["counters"]
        best_score, stale_evals, plateau_evals, plateau_scale, adapted = saved["controls"]
        kl_coef = adapted if args.adaptive_kl else kl_coef
        metrics = saved["metrics"]
        print(f"resumed {resume_path} at iteration {iteration}")
    if args.resume and rank == 0:
        for path in sorted((run_dir / "checkpoints").glob("checkpoint_*.pt")):
            if path.name > f"checkpoint_{iteration:08d}.pt":  # of a branch given up; killed here, one of them is whole
                path.unlink()
        cut_back(run_dir / "metrics.jsonl", global_step if saved else -1)
        if (run_dir / "best.old").exists() and not (run_dir / "best").exists():
            (run_dir / "best.old").rename(run_dir / "best")  # killed between the two renames of save_model
    # v1: signals
    stop, stopping = StopSignal(), False
    keep_whole(policy, True)
    if iteration == 0:
        metrics = {"eval/score": evaluate(policy, task, tokenizer, scorer, eos_ids, pad_id, args)}
        metrics["eval/score"] = mean_over_ranks(metrics["eval/score"], world_size, device)  # v1: distributed
        writer.log(metrics, global_step)
        if math.isfinite(metrics["eval/score"]):
            best_score = metrics["eval/score"]  # v1: best
    start_time, start_step = time.time(), global_step
    # v1: config
    versions = {m.__name__: m.__version__ for m in (torch, transformers)} | {"python": sys.version.split()[0]}
    config = {"args": asdict(args), "argv": sys.argv, "versions": versions, "world_size": world_size}
    writer.write("training_config.json", json.dumps(config, indent=2) + "\n")

    while iteration < args.num_iterations:
        # v1: early_stopping
        if 0 < args.early_stopping_patience <= stale_evals:  # at the top, so that a resumed run ends here, too
            print(f"early stop: no better evaluation than {best_score:.3f} in {stale_evals} of them")
            break
        iteration += 1
        iteration_start = time.time()
        # v1: lr_schedule
        schedule = (args.num_iterations, args.learning_rate, args.lr_scheduler_type, args.warmup_steps)
        lr = learning_rate_at(iteration, *schedule, plateau_scale)
        optimizer.param_groups[0]["lr"] = lr

        # 1 collect
        prompts, answers = zip(*(task.train(global_step + i) for i in range(args.batch_size)), strict=True)
        # v1: distributed
        prompts, answers = prompts[rank::world_size], answers[rank::world_size]
        rows = encode_prompts(tokenizer, prompts, args.chat_template)
        prompt_ids, prompt_mask = (x.to(device) for x in pad(rows, pad_id, "left"))  # (B,P)
        uniforms = torch.rand(args.batch_size, args.max_response_length, generator=sample_rng).to(device)
        # v1: distributed
        uniforms = uniforms[rank::world_size]
        limits = (args.max_response_length, args.temperature)
        response_ids, response_mask, sampler_logprobs = generate(
            policy, prompt_ids, prompt_mask, eos_ids, pad_id, *limits, uniforms
        )  # 3 x (B,R)
        global_step += args.batch_size

        # 2 score
        responses, ended = decode(tokenizer, response_ids, response_mask, eos_ids)
        scores = score_responses(scorer, args, prompts, responses, answers, ended).to(device)  # (B,)
        tokens = dict(prompt_ids=prompt_ids, prompt_mask=prompt_mask)
        tokens |= dict(response_ids=response_ids, response_mask=response_mask)
        with torch.no_grad():  # by the training forward, not by the sampler: the first minibatch then has a ratio of 1
            split = torch.arange(len(scores)).split(args.minibatch_size)
            chunks = [{name: x[inds] for name, x in tokens.items()} for inds in split]
            outputs = [policy(**chunk, temperature=args.temperature) for chunk in chunks]
            logprobs, entropy, values = map(torch.cat, zip(*outputs, strict=True))  # 3 x (B,R)
            ref_logprobs = logprobs
            if reference is not None:
                ref_logprobs = torch.cat([reference(**chunk, temperature=args.temperature)[0] for chunk in chunks])

        # v1: distributed
        if world_size > 1:  # every rank gets the whole batch: moments and token counts are then those of one process
            sides = {name: "left" if "prompt" in name else "right" for name in tokens}
            tokens = {name: gather_rows(x, sides[name], world_size) for name, x in tokens.items()}
            per_token = (sampler_logprobs, logprobs, entropy, values, ref_logprobs)
            sampler_logprobs, logprobs, entropy, values, ref_logprobs = (
                gather_rows(x, "right", world_size) for x in per_token
            )
            response_mask = tokens["response_mask"]
            per_answer = torch.stack([scores, torch.tensor(ended, dtype=torch.float32, device=device)], 1)
            scores, ended = gather_rows(per_answer, "right", world_size).unbind(1)
            ended = ended.bool().tolist()

        # 3 advantages
        mask = response_mask.float()
        rewards = token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef)
        advantages = compute_gae(rewards, values, mask, args.gamma, args.gae_lambda)
        batch = tokens | dict(logprobs=logprobs, values=values, returns=advantages + values)  # returns before whitening
        batch["advantages"] = whiten(advantages, mask)
        batch["weights"] = torch.ones_like(mask)  # of a token in both losses
        rollout_time = time.time() - iteration_start

        # 4 update
        # v1: distributed, memory
        keep_whole(policy, False)
        policy.train(args.gradient_checkpointing)
        sums = {}  # metric -> sum over the minibatches of this update
        num_updates = num_applied = 0
        first_ratio_error = torch.zeros((), device=device)
        spoiled = not scores.isfinite().all()  # by whitening one bad reward reaches every row
        for epoch in range(args.update_epochs):
            minibatches = torch.randperm(args.batch_size, generator=shuffle_rng).to(device).chunk(args.num_minibatches)
            for mb_inds in minibatches:
                num_tokens = batch["response_mask"][mb_inds].sum()
                stats = {}
                optimizer.zero_grad()
                # v1: grad_accum, distributed
                for micro_inds in mb_inds[rank::world_size].chunk(args.gradient_accumulation_steps):
                    mb = {name: tensor[micro_inds] for name, tensor in batch.items()}
                    mb_mask = mb["response_mask"].float()
                    mb_tokens = {name: mb[name] for name in tokens}
                    new_logprobs, new_entropy, new_values = policy(
                        **mb_tokens, temperature=args.temperature, entropy_grad=args.ent_coef > 0
                    )
                    pg_loss, ratio, clipped = policy_loss(
                        new_logprobs, mb["logprobs"], mb["advantages"], mb_mask,
                        mb["weights"],
                        num_tokens,
                        clip_low=args.clip_coef,
                        clip_high=args.clip_coef_high or args.clip_coef,  # v1: clip
                        clip_c=args.dual_clip or math.inf,  # v1: clip
                    )  # fmt: skip
                    v_loss = value_loss(
                        new_values, mb["values"], mb["returns"], mb_mask,
                        mb["weights"],
                        num_tokens,
                        clip_coef=args.vf_clip_coef,
                    )  # fmt: skip
                    entropy_loss = (new_entropy * mb_mask).sum() / num_tokens
                    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy_loss
                    loss.backward()
                    micro_stats = {
                        "losses/policy_loss": pg_loss.detach(),
                        "losses/value_loss": v_loss.detach(),
                        "losses/entropy": entropy_loss.detach(),
                        "losses/approx_kl": ((ratio - 1 - ratio.log()) * mb_mask).sum() / num_tokens,
                        "losses/clipfrac": (clipped * mb_mask).sum() / num_tokens,
                        "total_loss": loss.detach(),  # v1: metrics
                    }
                    stats = {name: stats.get(name, 0) + value for name, value in micro_stats.items()}
                    if num_updates == 0:
                        first_ratio_error = torch.maximum(first_ratio_error, ((ratio - 1) * mb_mask).abs().max())
                # v1: distributed
                sync_gradients(policy, world_size)
                stats = sum_over_ranks(stats, world_size, device)
                stats["losses/grad_norm"] = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                # v1: distributed
                if args.fsdp:
                    stats["losses/grad_norm"] = stats["losses/grad_norm"].full_tensor()
                num_updates += 1
                watched = ("losses/policy_loss", "losses/value_loss", "losses/grad_norm")
                if not all(math.isfinite(stats[name]) for name in watched):  # a NaN must not reach the weights
                    skipped_steps += 1
                    skipped_in_a_row += not spoiled or num_updates == 1  # a bad reward costs its updates, not the run
                    if skipped_in_a_row >= args.max_skipped_steps:
                        fail(f"{skipped_in_a_row} updates in a row were not finite (iteration {iteration})", code=1)
                    continue
                optimizer.step()
                num_applied, skipped_in_a_row = num_applied + 1, 0
                sums = {name: sums.get(name, 0) + value for name, value in stats.items()}
            # v1: target_kl
            if args.target_kl is not None and stats["losses/approx_kl"] > 1.5 * args.target_kl:
                break
        # v1: distributed, memory
        policy.eval()
        keep_whole(policy, True)

        # 5 log
        metrics = {name: float(value) / num_applied for name, value in sums.items()}  # none if all were skipped
        metrics |= {
            "losses/explained_variance": explained_variance(values, advantages + values, mask).item(),
            "losses/ref_kl": masked_mean(k3_kl(logprobs, ref_logprobs), mask).item(),
            "losses/first_ratio_error": first_ratio_error.item(),
            "losses/skipped_steps": skipped_steps,
            "rollout/logprob_mismatch": masked_mean((logprobs - sampler_logprobs).abs(), mask).item(),
            "rollout/entropy": masked_mean(entropy, mask).item(),
            "charts/score": scores.mean().item(),
            "charts/response_length": mask.sum(1).mean().item(),
            "charts/truncated_frac": 1 - sum(ended) / len(ended),
            "charts/learning_rate": lr,
            "charts/SPS": (global_step - start_step) / (time.time() - start_time),
            "time/rollout": rollout_time,
            "time/update": time.time() - iteration_start - rollout_time,
        }

        # v1: metrics
        metrics |= {"learning_rate": lr, "kl_divergence": ((logprobs - ref_logprobs) * mask).sum(1).mean().item()}
        # v1: adaptive_kl
        metrics["losses/kl_coef"] = kl_coef
        if args.adaptive_kl:
            kl_coef = adapt_kl_coef(kl_coef, metrics["kl_divergence"], args.kl_target, args.kl_horizon, args.batch_size)

        # 6 evaluate
        last = iteration == args.num_iterations
        if last or (args.eval_every and iteration % args.eval_every == 0):
            metrics["eval/score"] = evaluate(policy, task, tokenizer, scorer, eos_ids, pad_id, args)
            metrics["eval/score"] = mean_over_ranks(metrics["eval/score"], world_size, device)  # v1: distributed
        # v1: early_stopping, best, lr_schedule
        if "eval/score" in metrics:
            improvement = metrics["eval/score"] - best_score
            stale_evals = 0 if improvement > args.early_stopping_threshold else stale_evals + 1
            plateau_evals = 0 if improvement > args.early_stopping_threshold else plateau_evals + 1
            if plateau_evals >= args.plateau_patience:
                plateau_scale, plateau_evals = plateau_scale / 2, 0
            if improvement > 0:
                best_score = metrics["eval/score"]
                save_model(policy, tokenizer, run_dir / "best", rank)
        if "eval/score" in metrics or iteration % args.log_interval == 0:
            writer.log(metrics, global_step)
        pl, vl = (metrics.get(f"losses/{name}_loss", math.nan) for name in ("policy", "value"))
        line = f"PL:{pl:.2f} VL:{vl:.2f} R:{metrics['charts/score']:.2f}"
        writer.status(line, done=iteration)
        # v1: text_log
        text = " ".join(f"{name}={value:.4g}" for name, value in metrics.items())
        writer.write("train.log", f"{time.strftime('%Y-%m-%d %H:%M:%S')} iteration {iteration} {text}\n", "a")
        # v1: checkpoint, signals
        stopping = sum_over_ranks({"stop": stop.received is not None}, world_size, device)["stop"] > 0
        early = 0 < args.early_stopping_patience <= stale_evals
        if last or early or stopping or (args.save_every and iteration % args.save_every == 0):
            model_state, optimizer_state = whole_state(policy, optimizer)
            state = {"args": asdict(args), "policy": model_state, "optimizer": optimizer_state, "metrics": metrics}
            state |= {"sample_rng": sample_rng.get_state(), "shuffle_rng": shuffle_rng.get_state()}
            state["counters"] = (iteration, global_step, skipped_steps, skipped_in_a_row)
            state["controls"] = (best_score, stale_evals, plateau_evals, plateau_scale, kl_coef)
            if rank == 0:
                save_checkpoint(run_dir / "checkpoints" / f"checkpoint_{iteration:08d}.pt", state)
                for path in sorted((run_dir / "checkpoints").glob("checkpoint_*.pt"))[: -args.keep_checkpoints]:
                    path.unlink()
        if stopping:
            print(f"stopped after iteration {iteration} and saved; --resume auto --run-dir {run_dir} goes on")
            break
    # v1: signals
    stop.restore()
    if stopping and iteration < args.num_iterations:
        return metrics
    if "eval/score" not in metrics:  # resumed with nothing left to do, from a checkpoint without an evaluation
        metrics["eval/score"] = evaluate(policy, task, tokenizer, scorer, eos_ids, pad_id, args)

    # v1: distributed
    save_model(policy, tokenizer, run_dir / "final_model", rank)
    curves = ["charts/score", "eval/score"]
    curves += ["losses/approx_kl", "losses/entropy", "losses/ref_kl", "losses/explained_variance"]
    seconds = round(time.time() - start_time, 1)
    writer.close({"global_step": global_step, "iterations": iteration, "seconds": seconds, **metrics}, curves)
    print(f"eval/score {metrics['eval/score']:.3f} after {global_step} responses and {seconds} s: {run_dir}")
    return metrics


if __name__ == "__main__":
    try:
        main(parse_args(Args))
    except KeyboardInterrupt:
        fail("interrupted", code=130)
