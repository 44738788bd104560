# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium==1.4.0", "transformers==5.22.2", "tyro==1.0.16",
#   "wandb==0.31.0", "tqdm==4.70.1", "matplotlib==3.11.2", "tokenizers==0.23.3"]
# ///
"""het_grpo.py - GRPO agents (arXiv:2402.03300) with hybrid experience training and replay.

An agent plays a text game over several turns and learns from groups of rollouts of one task.
Two kinds of experience help it; with both off this is plain GRPO, bit for bit:
    text experience    - what worked before stands in front of the question in part of a group's
                         rollouts; in training samples it is kept, stripped, or mixed by task
                         (AgentEvolver, arXiv:2511.10395): --method, `prompt_of`
    trajectory replay  - recorded successes come back into their task's group, which may have none
                         (ExGRPO, arXiv:2510.02245; LUFFY, arXiv:2504.14945): `ExperienceManager`
Rivals on the same views: --method sft imitates the run's own successes; --method sd lets advice
teach the policy that has none (SDPO, arXiv:2601.20802).
Simplified on purpose: no vLLM, no LoRA; an experience is what a success did, nobody rewrites it.
Shapes: B rollouts in groups of n, P prompt tokens, R tokens of all turns, V vocabulary.

    python het_grpo.py                                          # locks, CPU, about a minute
    python het_grpo.py --method baseline --use-experience-replay
    torchrun --nproc-per-node 2 het_grpo.py                     # two processes
"""

import copy
import functools
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
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import gymnasium as gym
import torch
import torch.distributed as dist
import transformers
import tyro
from matplotlib.figure import Figure
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

PLAY = ("mixed", "all", "woexp")
PRESETS = {  # what PRESET_OPTIONS may be, the default first; None: any share, 0.5 if none is given
    "baseline": (("woexp", "mixed", "all"), ("woexp",), ("keep",), (1.0,)),
    "ec": (PLAY, ("mixed", "all"), ("keep",), (1.0,)),
    "ei": (PLAY, ("mixed", "all"), ("discard",), (0.0,)),
    "het": (PLAY, ("mixed", "all"), ("hybrid",), None),
    "sft": (PLAY, PLAY, ("hybrid", "keep", "discard"), None),
    "sd": (PLAY, ("woexp",), ("keep",), (1.0,)),
}
PRESET_OPTIONS = "val_rollout_expmode train_rollout_expmode train_sample_expmode".split()
PRESET_OPTIONS.append("train_sample_keepratio")
TEMPLATE = "\n\nSome Related Experience to help you to complete the task:<EXP>{}</EXP>\n\n"


# --- args ---
@dataclass
class Args:
    # run
    seed: int = 1  # decides initial weights, data, sampling and shuffling; not the evaluation
    device: str = "auto"  # cpu, cuda, mps, ... (auto: cpu for built-in tasks, else an accelerator)
    num_threads: int = 1  # of torch on a CPU; tiny models are fastest with 1
    run_dir: str | None = None  # a new folder (None: runs/{script}__{seed}__{time})
    resume: bool = False  # go on with run_dir, or start it if there is nothing yet
    save_every: int = 50  # iterations between checkpoints; the last is saved anyway
    fsdp: bool = False  # shard gradients and optimizer over the ranks of torchrun
    eval_every: int = 50  # iterations between greedy evaluations on held-out tasks
    eval_size: int = 480  # held-out tasks; val_rollout_expmode says how many are guided
    track: bool = False  # also log to wandb (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "stale-experience"  # where the runs of wandb are gathered
    # task
    env: str = "lock"  # lock, a Gymnasium id (CliffWalking-v1, ..), file.py:Class or module:Class
    num_families: int = 12  # secrets of the locks; at most 24
    num_rooms: int = 20  # rooms of a family; families x rooms are the training tasks of any env
    max_turns: int = 7  # actions per episode
    success_reward: float = 1.0  # solved: the episode ended by itself and its rewards sum to this
    # model
    model_name: str | None = None  # hub name or folder of a causal LM (None: a tiny Llama)
    chat_template: bool = False  # wrap each prompt as a user turn with the tokenizer's own template
    warm_start_steps: int = 400  # tiny model: supervised steps on games with rules made at random
    # rollout
    num_tasks: int = 8  # B tasks per iteration
    group_size: int = 8  # n rollouts per task, replayed ones included
    max_turn_tokens: int = 1  # tokens of one action, EOS included
    temperature: float = 1.0  # of sampling and of every log-prob; evaluation is greedy
    # optimization
    num_iterations: int = 150  # rollout + update rounds
    learning_rate: float = 1e-3  # the highest; by default it falls linearly to 0
    gradient_accumulation_steps: int = 1  # micro-batches of a minibatch
    update_epochs: int = 2  # passes over the rollouts of an iteration
    num_minibatches: int = 2  # optimizer steps per epoch
    max_grad_norm: float = 1.0  # clip the gradient's global norm here
    # GRPO
    clip_low: float = 0.2  # the ratio of on-policy tokens is clipped from 1 - this
    clip_high: float = 0.28  # to 1 + this
    clip_c: float = 3.0  # bound on the ratio where the advantage is negative (dual clip)
    # experience: text in front of the question
    enable: bool = True  # --no-enable is --method baseline
    method: Literal["baseline", "ec", "ei", "het", "sft", "sd"] | None = None  # preset (None: het)
    val_rollout_expmode: Literal["mixed", "all", "woexp"] | None = None  # guided: some, all, none
    train_rollout_expmode: Literal["mixed", "all", "woexp"] | None = None  # same for training
    rollout_expratio: float = 0.5  # mixed: floor(n x this) rollouts of a group are guided
    train_sample_expmode: Literal["keep", "discard", "hybrid"] | None = None  # decided per task
    train_sample_keepratio: float | None = None  # hybrid: floor(B x this) tasks keep (0.5)
    experience_template: str = TEMPLATE  # stands before the question; {} is the experience
    updated_freq: int = 0  # iterations between additions to the pool (0: never)
    val_summarizer_save: bool = False  # validation successes enter the pool, too: a leak
    retrieve_top_k: int = 3  # experiences per question
    experience_pool: str | None = None  # JSONL of topic and text to start from; never written
    init_exp_before_training: bool = True  # add what rollouts of training tasks find before step 1
    init_exp_tasks: int = 96  # tasks of these rollouts, n each
    off_cliprange_high: float = 0.6  # upper clip of off-policy tokens (stripped or replayed)
    off_old_logp: Literal["stripped", "behavior"] = "stripped"  # pi_old without or with advice
    sd_coef: float = 1.0  # sd: advantage per nat by which advice makes a failure's token likelier
    # replay: recorded successes
    use_experience_replay: bool = False  # they come back into their task's group
    exp_ratio: float = 0.5  # share of an iteration's tasks taken from the replay pool
    exp_select_mode: Literal["argmin", "argmax", "random"] = "argmin"  # by entropy when stored
    experience_lbound: int = -1  # replayed tasks had more successes than this (-1: 0 is enough)
    experience_rbound: int | None = None  # and at most this many (None: n - 1)
    offpolicy_trajectories_per_task: int = 1  # replayed per replay task, below n
    max_trajectories_per_task: int = 8  # memory of a task; exp_select_mode says what goes
    replay_loss: Literal["shape", "clip"] = "clip"  # surrogate of replayed tokens
    shaping_beta: float = 0.1  # shape: w / (w + this)
    replay_old_logp: Literal["recorded", "current"] = "current"  # current: their ratios start at 1
    retire_solved: bool = False  # a solved task is not drawn while others are left, and forgotten

    def __post_init__(self):  # tyro shows a ValueError from here in its error box
        signed = ("success_reward", "experience_lbound", "experience_rbound")
        zero = ("seed", "warm_start_steps", "updated_freq", "sd_coef")
        for name, value in vars(self).items():
            share = name.endswith("ratio")
            least, most = 0 if share or name in zero else 1e-9, 1 if share else sys.maxsize
            if type(value) in (int, float) and name not in signed and not least <= value <= most:
                raise ValueError(f"--{name} {value} is not allowed: from {least:g} to {most:g}")
        self.method = self.method or ("het" if self.enable else "baseline")
        for name, allowed in zip(PRESET_OPTIONS, PRESETS[self.method], strict=True):
            given = getattr(self, name)
            if given is None:
                setattr(self, name, allowed[0] if allowed else 0.5)
            elif allowed and given not in allowed:
                raise ValueError(f"--{name} {given}: --method {self.method} allows {allowed}")
        modes = {self.val_rollout_expmode, self.train_rollout_expmode}
        self.uses_pool = modes != {"woexp"} or self.method == "sd"
        self.batch_size = self.num_tasks * self.group_size
        if self.experience_rbound is None:
            self.experience_rbound = self.group_size - 1
        n, low, high = self.group_size, self.experience_lbound, self.experience_rbound
        for fine, message in (
            (self.enable or self.method == "baseline", "--no-enable contradicts --method"),
            (self.method != "sft" or not self.use_experience_replay, "sft replays anyhow"),
            (self.uses_pool or not self.experience_pool, "--experience-pool would not be read"),
            (self.experience_template.count("{}") == 1, "--experience-template needs one {}"),
            (-1 <= low < high <= n, "--experience-lbound must be below --experience-rbound"),
            (self.offpolicy_trajectories_per_task < n, "--offpolicy-trajectories-per-task >= n"),
            (self.batch_size % self.num_minibatches == 0, "--num-minibatches must divide B x n"),
            (self.num_families <= len(NAMES), f"--num-families: at most {len(NAMES)}"),
            (self.num_tasks <= self.num_families * self.num_rooms, "--num-tasks: there are fewer"),
            (self.run_dir or not self.resume, "--resume needs --run-dir"),
        ):
            if not fine:
                raise ValueError(message)


# --- task ---
NAMES = "amber brass cedar delta ember flint grove hazel ivory jade kelp lunar maple north opal"
NAMES = f"{NAMES} pearl quartz river slate topaz umber violet willow yarrow".split()
PRACTICE = 1_000_000  # seeds from here on have rules of their own: the warm start learns no secret
WORD = r"\d|[^\W\d]+|[^\w\s]"  # of the tiny model: digits and marks one by one, letters together


class LockEnv:
    """Press four buttons in order; a wrong one costs a turn. Locks of a family share a secret."""

    actions = ("red", "green", "blue", "gold")

    def __init__(self, args):
        self.num_families = args.num_families

    def reset(self, seed: int):
        room, family = divmod(seed, self.num_families)
        rules = random.Random(seed if seed >= PRACTICE else f"lock {family}")  # of no run's seed
        self.secret, self.slot, self.name = rules.choices(self.actions, k=4), 0, NAMES[family]
        # the solution is for the warm start's teacher, and where validation tells it
        return f"lock {self.name} room {room % 100:02d}", dict(topic=self.name, solution=self.secret)

    def step(self, action: str):
        if action != self.secret[self.slot]:
            return f"jam {self.slot}", 0.0, False, False, {}
        self.slot += 1
        if self.slot < 4:
            return f"click {self.slot}", 0.0, False, False, {}
        return "open", 1.0, True, False, dict(experience=f"{self.name} : " + " ".join(self.secret))


class TextEnv:
    """Any environment as a text game: reset(seed) -> text, info; step(text) -> Gymnasium's five."""

    def __init__(self, args):
        path, _, name = args.env.rpartition(":")
        if path:
            self.env = (runpy.run_path if path.endswith(".py") else runpy.run_module)(path)[name]()
        else:
            self.env = LockEnv(args) if args.env == "lock" else gym.make(args.env)
        space = getattr(self.env, "action_space", None)
        self.numbers = range(space.start, space.start + space.n) if hasattr(space, "n") else []
        self.actions = list(getattr(self.env, "actions", map(str, self.numbers)))

    def reset(self, seed: int) -> tuple[str, dict]:
        obs, info = self.env.reset(seed=seed)
        return str(obs), dict(topic=str(obs)) | info

    def step(self, text: str):
        """The action named last counts. Nonsense costs a turn and a point, lest it be a way out."""
        found = [(match.end(), len(action), i) for i, action in enumerate(self.actions)
                 for match in re.finditer(rf"\b{re.escape(action)}\b", text, re.I)]
        if self.actions and not found:
            return "not an action : " + " ".join(self.actions), -1.0, False, False, {}
        if found:
            text = (self.numbers or self.actions)[max(found)[2]]
        obs, reward, terminated, truncated, info = self.env.step(text)
        return str(obs), float(reward), bool(terminated), bool(truncated), info


def practice_game(env: TextEnv, seed: int, rng, args) -> tuple[str, str, list[tuple[str, str]]]:
    """A teacher that mostly follows advice and else acts at random.  -> question, advice, turns"""
    question, info = env.reset(seed)
    words = env.actions or re.findall(WORD, question) or ["ok"]
    plan = list(info.get("solution") or rng.choices(words, k=args.max_turns))
    advice = f"{info['topic']} : " + " ".join(plan) if rng.random() < 0.6 else ""
    turns, ended = [], False
    while not ended and len(turns) < args.max_turns:
        action = rng.choice(words)
        if advice and plan and rng.random() < 0.8:
            action = plan[0]
        if plan and action == plan[0]:
            plan.pop(0)
        text, _, terminated, truncated, _ = env.step(action)
        turns.append((action, text))
        ended = terminated or truncated
    return question, advice, turns


def spoken_words(env: TextEnv, seeds: list[int], records: list[dict], args) -> list[str]:
    """The tiny model's vocabulary: every action, the pool's words, and what practice brings up."""
    texts = [*env.actions, args.experience_template, "not an action : 0 1 2 3 4 5 6 7 8 9"]
    texts += [record["text"] for record in records]
    for seed in seeds:
        question, advice, turns = practice_game(env, seed, random.Random(seed), args)
        texts += [question, advice, *sum(turns, ())]
    return sorted({word for text in texts for word in re.findall(WORD, text)})


# --- networks ---
class LanguagePolicy(nn.Module):
    """A causal LM that tells log-probs and entropy, and takes steps."""

    def __init__(self, lm, eos_ids, temperature: float):
        super().__init__()
        self.lm, self.temperature = lm, temperature
        self.critic = None  # the group is the baseline
        self.register_buffer("eos_ids", eos_ids)  # (E,) what ends a turn
        self.eval()  # for good: dropout is noise in ratios

    def predict(self, ids, mask, num_last: int, cache=None):
        """Logits at the last positions; `mask` covers what the cache holds, too.  -> (B,n,V)"""
        inputs = dict(input_ids=ids, attention_mask=mask, past_key_values=cache)
        # only real tokens count, so that left padding does not shift a prompt
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.lm(**inputs, use_cache=cache is not None, logits_to_keep=num_last)
        return output.logits[:, -num_last:]

    def forward(self, rows: dict):
        """Log-prob and entropy of each token the agent chose, 0 on others.  -> 2 x (B,R)"""
        # The last token is not fed: of the last R outputs, number t predicts response token t.
        ids, mask, length = rows["ids"], rows["mask"], rows["response_mask"].shape[1]
        logits = self.predict(ids[:, :-1], mask[:, :-1], length)
        logprobs, entropy = token_logprobs(logits, ids[:, -length:], self.temperature)
        others = rows["response_mask"] == 0
        return logprobs.masked_fill(others, 0.0), entropy.detach().masked_fill(others, 0.0)

    def step(self, ids, mask, cache):
        """Logits of the next token, given the ids that are not in the cache yet.  (B,t) -> (B,V)"""
        return self.predict(ids, mask, 1, cache)[:, 0].float() / self.temperature


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


def load_agent(args, words: list[str]):
    """-> causal LM, tokenizer, the ids that end a turn (E,)"""
    if args.model_name is None:  # one token per word
        ids = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *words])}
        by_word = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
        by_word.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
        marks = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=by_word, **marks)
        sizes = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2)
        special = dict(pad_token_id=0, eos_token_id=1, bos_token_id=None, vocab_size=len(tokenizer))
        config = transformers.LlamaConfig(**sizes, **special, num_attention_heads=4)
        lm = transformers.LlamaForCausalLM(config)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_name)
        lm = transformers.AutoModelForCausalLM.from_pretrained(args.model_name, dtype=torch.float32)
    eos = lm.generation_config.eos_token_id  # nothing else of it (top_k, ..): we sample ourselves
    eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    return lm, tokenizer, torch.tensor(sorted(eos_ids))


# --- buffer ---
@dataclass
class Trajectory:
    """One episode in token ids: what was sampled is never tokenised again."""

    task: int  # seed of the environment
    data_id: int = 0  # its group in the batch
    rollout_id: int = 0  # its place in the group
    guided: bool = False  # to be played with experience
    keep: bool = True  # as a training sample it keeps the experience
    trajectory_id: str = ""
    prompt_ids: list[int] = field(default_factory=list)  # the question alone
    advised_ids: list[int] = field(default_factory=list)  # experience, then the question
    injected: bool = False  # guided, and retrieval found something
    steps: list = field(default_factory=list)  # ("assistant", sampled ids), ("env", other ids), ..
    sampler_logprobs: list[float] = field(default_factory=list)  # one per sampled id
    reward: float = 0.0
    success: bool = False
    topic: str = ""  # what its experience is about
    experience: str = ""  # what a success did, for the pool
    is_experience_replay: bool = False
    old_log_probs: list[float] = field(default_factory=list)  # of the response, when it was saved
    entropy: float = 0.0  # mean over the agent's tokens, then
    version: int = -1  # iteration that sampled it


def prompt_of(t: Trajectory, view: str) -> list[int]:
    """The idea of hybrid experience training: which prompt the completion stands behind.

    keep     the advice stays: the sample is on-policy, and the policy learns to use advice (EC)
    discard  the same ids stand behind the bare question: it learns to do without advice (EI)
    hybrid   drawn per task: all stripped unlearns to follow advice, all kept leans on it (HET)
    """
    # what the policy read when it sampled; what it is trained on; what the teacher of sd reads
    advised = dict(behavior=t.injected, training=t.injected and t.keep, teacher=True)[view]
    return t.advised_ids if advised else t.prompt_ids


@functools.lru_cache(100_000)
def words_of(text: str) -> frozenset:
    return frozenset(re.findall(r"\w+", text.lower()))


class ExperiencePool:
    """What successes on training tasks did, found by the words of a question."""

    def __init__(self, args, held_out: list[int], size=1_000):
        self.records: list[dict] = []  # task, topic, text, step that wrote it
        self.size, self.held_out = size, set(held_out)  # a full pool loses the oldest
        self.marker = max(args.experience_template.split("{}"), key=len).strip()

    def add(self, task, topic: str, text: str, step: int) -> bool:
        """-> False if it is empty, of a validation task, or has the experience template in it"""
        if not (topic and text) or task in self.held_out or (self.marker and self.marker in text):
            return False
        if (topic, text) not in {(record["topic"], record["text"]) for record in self.records}:
            self.records.append(dict(task=task, topic=topic, text=text, step=step))
            del self.records[: -self.size]
        return True

    def add_successes(self, trajectories, step: int):
        for t in trajectories:  # a failure has left no experience
            self.add(t.task, t.topic, t.experience, step)

    def load(self, path: str):
        for number, line in enumerate(open(path, "rb"), 1):
            try:
                r = json.loads(line) if line.strip() else None
                assert r is None or self.add(r.get("task"), r["topic"] + "", r["text"] + "", -1)
            except Exception:  # whatever is wrong with it
                rule = "JSON with a topic and a text without the template, not of a validation task"
                sys.exit(f"--experience-pool {path}: line {number} must be {rule}")

    def retrieve(self, question: str, top_k: int, step: int) -> str:
        """The texts whose topics share most words with the question, rare words first, case aside;
        the newest wins a tie; "" if none shares any. Written at t, readable from t + 1."""
        readable = [record for record in reversed(self.records) if record["step"] < step]
        counts = Counter(word for record in readable for word in words_of(record["topic"]))
        asked = words_of(question) & counts.keys()
        worth = {word: math.log(1 + len(readable) / counts[word]) for word in asked}
        scores = [sum(worth[word] for word in words_of(r["topic"]) & asked) for r in readable]
        best = sorted(zip(scores, readable, strict=True), key=lambda pair: -pair[0])[:top_k]
        return "\n".join(record["text"] for score, record in best if score > 0)


class ExperienceManager:
    """Trajectory replay: which tasks are half-known, and their recorded successes."""

    def __init__(self, args):
        self.args = args
        self.difficulty2task_dict: dict[int, set[int]] = {}  # successes of the last group -> tasks
        self.skip_uid_set: set[int] = set()  # retired: all fresh rollouts succeeded
        self.memory: dict[int, list[Trajectory]] = {}

    def update_difficulty2task_dict(self, fresh):
        """A task goes to the bucket of its successes and leaves its old one."""
        for task in dict.fromkeys(t.task for t in fresh):
            results = [t.success for t in fresh if t.task == task]
            # Replay leaves a group n - k fresh ones: all solved is solved, not n - k of n.
            count = self.args.group_size if all(results) else sum(results)
            for tasks in self.difficulty2task_dict.values():
                tasks.discard(task)
            if not (all(results) and self.args.retire_solved):
                self.difficulty2task_dict.setdefault(count, set()).add(task)

    def update_skip_uid_set_and_filter_trajectories(self, fresh):
        """Solved tasks retire, an imperfect result brings one back.  -> what may be stored"""
        failed = {t.task for t in fresh if not t.success}
        self.skip_uid_set -= failed
        for task in {t.task for t in fresh} - failed if self.args.retire_solved else ():
            self.skip_uid_set.add(task)
            self.memory.pop(task, None)
        return [t for t in fresh if t.success and t.task not in self.skip_uid_set]

    def preference(self, t: Trajectory) -> float:
        if self.args.method == "sft" and self.args.exp_select_mode != "random":
            return len(t.steps)  # the shortest success is the one with the fewest detours
        return {"argmin": 1, "argmax": -1, "random": 0}[self.args.exp_select_mode] * t.entropy

    def save_trajectories_to_memory(self, trajectories):
        """A full memory drops what would be chosen last; among equals (random) the oldest."""
        for t in trajectories:
            stored = self.memory.setdefault(t.task, [])
            stored.append(t)
            if len(stored) > self.args.max_trajectories_per_task:
                stored.remove(max(stored, key=self.preference))

    def sample_successes(self, count: int, rng) -> list[Trajectory]:
        """sft: any successes so far, with replacement; keep or strip is drawn for each."""
        stored = [t for task in sorted(self.memory) for t in self.memory[task]]
        kept = draw(count, self.args.train_sample_expmode, self.args.train_sample_keepratio, rng)
        chosen = rng.choices(stored, k=count) if stored else []
        return [replace(t, keep=kept[i], data_id=i) for i, t in enumerate(chosen)]

    def valid_tasks(self) -> list[list[int]]:
        """What may be replayed, by bucket."""
        low, high = self.args.experience_lbound, self.args.experience_rbound
        buckets = sorted(self.difficulty2task_dict.items())
        return [sorted(tasks & self.memory.keys()) for s, tasks in buckets if low < s <= high]

    def sample_tasks_from_replaypool(self, count: int, rng) -> list[int]:
        """Without replacement: any bucket, then one of its tasks."""
        buckets, chosen = self.valid_tasks(), []
        while any(buckets) and len(chosen) < count:
            tasks = rng.choice([tasks for tasks in buckets if tasks])
            chosen.append(tasks.pop(rng.randrange(len(tasks))))
        return chosen

    def get_offpolicy_trajectories_from_memory(self, task: int, rng) -> list[Trajectory]:
        """At most k, and one place of the group is left for a fresh one."""
        most = min(self.args.offpolicy_trajectories_per_task, self.args.group_size - 1)
        shuffled = rng.sample(self.memory[task], len(self.memory[task]))
        return sorted(shuffled, key=self.preference)[:most]

    def get_offpolicy_batch(self, tasks: list[int], rng) -> list[Trajectory]:
        """These tasks are the first groups of a batch; what is replayed stands behind the fresh."""
        batch = []
        for data_id, task in enumerate(tasks):
            found = self.get_offpolicy_trajectories_from_memory(task, rng)
            first = self.args.group_size - len(found)
            batch += [convert_offpolicy_to_cmt(t, data_id, first + i) for i, t in enumerate(found)]
        return batch


class ExperienceMixCollateFn:
    """-> (experience_tasks, on_policy_tasks): B in all, none twice. The second come in passes;
    retired tasks are passed over as long as enough others are left."""

    def __init__(self, args, manager, tasks: list[int]):
        self.args, self.manager, self.tasks = args, manager, tasks

    def __call__(self, iteration: int, rng) -> tuple[list[int], list[int]]:
        most = int(self.args.num_tasks * self.args.exp_ratio + 1e-9)
        chosen = self.manager.sample_tasks_from_replaypool(most, rng)
        count, others = self.args.num_tasks - len(chosen), set(self.tasks) - set(chosen)
        active = others - self.manager.skip_uid_set
        allowed = active if len(active) >= count else others
        turn, place = divmod((iteration - 1) * self.args.num_tasks, len(self.tasks))
        orders = (random.Random(f"{self.args.seed}/pass {i}") for i in (turn, turn + 1))
        queue = sum((order.sample(self.tasks, len(self.tasks)) for order in orders), [])[place:]
        return chosen, [task for task in dict.fromkeys(queue) if task in allowed][:count]


def convert_offpolicy_to_cmt(stored: Trajectory, data_id: int, rollout_id: int) -> Trajectory:
    """A stored trajectory as a member of a group of this batch."""
    return replace(stored, data_id=data_id, rollout_id=rollout_id, is_experience_replay=True)


def tokenize_steps(steps, is_experience_replay=False):
    """-> response, from the agent's first token on; its mask; prefix mask: what is from memory"""
    response = [token for _, ids in steps for token in ids]
    mask = [int(role == "assistant") for role, ids in steps for _ in ids]
    return response, mask, [bit * int(is_experience_replay) for bit in mask]


def get_extra(t: Trajectory) -> dict:
    """What a sample has to say besides its tokens."""
    replay = t.is_experience_replay
    stripped = t.injected and not t.keep and not replay
    return dict(is_experience_replay=replay, stripped=stripped, off_policy=stripped or replay)


def samples_to_dataproto(trajectories, device, view="training") -> dict:
    """Tensors of the batch: prompts padded on the left, responses on the right. Two masks: exp_mask
    picks the surrogate (stripped or replayed), replay_mask who gets recorded log-probs."""
    rows = [tokenize_steps(t.steps, t.is_experience_replay) for t in trajectories]
    responses, masks, prefixes = zip(*rows, strict=True)
    prompts = pad([prompt_of(t, view) for t in trajectories], "left")
    ids = torch.cat([prompts, pad(responses)], 1)  # (B,P+R)
    response_mask = pad(masks).clamp(min=0)  # (B,R)
    off_policy = torch.tensor([[get_extra(t)["off_policy"]] for t in trajectories])
    recorded = [t.old_log_probs or [0.0] * len(x) for t, x in zip(trajectories, masks, strict=True)]
    data = dict(ids=ids.clamp(min=0), mask=(ids >= 0).long(), response_mask=response_mask)
    data |= dict(exp_mask=response_mask * off_policy, replay_mask=pad(prefixes).clamp(min=0))
    data["recorded_old_log_probs"] = pad(recorded)
    data["rewards"] = torch.tensor([t.reward for t in trajectories], dtype=torch.float32)  # (B,)
    data["group_ids"] = torch.tensor([t.data_id for t in trajectories])
    return {name: x.to(device) for name, x in data.items()}


def pad(rows, side="right"):
    """Lists -> (B,T), -1 where there is nothing: no mask may come from an id that is a token."""
    rows = [torch.as_tensor(row) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_value=-1, padding_side=side)


def _replace_recorded_old_log_probs(data: dict, old_log_probs):
    """Replayed tokens get the log-probs they were recorded with.  (B,R) -> (B,R)"""
    return torch.where(data["replay_mask"].bool(), data["recorded_old_log_probs"], old_log_probs)


# --- math ---
LOSSES = "policy_loss entropy on_policy_loss approx_kl clipfrac_on off_policy_loss clipfrac_off"


def total(x):
    """Sum over the ranks of torchrun."""
    x = x.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def draw(count: int, mode: str, ratio: float, rng) -> list[bool]:
    """Which of `count` rollouts are guided, or which tasks keep: at random places."""
    share = {"woexp": 0, "discard": 0, "all": 1, "keep": 1}.get(mode, ratio)
    # 100 x 0.29 is 28.999999999999996 and means 29
    chosen = rng.sample(range(count), math.floor(count * share + 1e-9))
    return [i in chosen for i in range(count)]


def group_advantages(rewards, group_ids):
    """(R - mean) / (std + 1e-6) in each group, ddof 1; 0 for equal rewards.  2 x (B,) -> (B,)"""
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        r = rewards[group_ids == group]
        if not (r == r[0]).all():  # the mean of equal floats need not be that float
            advantages[group_ids == group] = (r - r.mean()) / (r.std() + 1e-6)
    return advantages


def k3_kl(logprobs, ref_logprobs):
    """KL(pi | pi_ref) per token, never negative (Schulman's k3).  2 x (B,R) -> (B,R)"""
    logratio = (ref_logprobs - logprobs).clamp(-20, 20)
    return logratio.exp() - 1 - logratio


def policy_loss(new_logprobs, logprobs, advantages, clip_low, clip_high, dual_clip=None):
    """Clipped surrogate, eq. 7 of arXiv:1707.06347v2, as a loss; where it binds.  -> 2 x (B,R)"""
    assert new_logprobs.shape == logprobs.shape == advantages.shape
    ratio = (new_logprobs - logprobs).clamp(-20, 20).exp()  # exp of more is inf, and inf * 0 is NaN
    plain = -advantages * ratio
    loss = torch.max(plain, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:  # v1: clip: a ratio that explodes where A < 0 is bounded, too
        loss = torch.where(advantages < 0, torch.min(loss, -advantages * dual_clip), loss)
    return loss, (loss != plain).float()


def shaped_loss(new_logprobs, logprobs, advantages, beta):
    """-A w / (w + beta), LUFFY's shaping: unlikely tokens keep a gradient.  3 x (B,R) -> (B,R)"""
    ratio = (new_logprobs - logprobs).clamp(-20, 20).exp()
    return -advantages * ratio / (ratio + beta)


def grpo_loss(policy, mb, num_tokens, args):
    """-> loss of rows of a minibatch of so many tokens; sums, counts of LOSSES; log-ratios (B,R)"""
    mask, off, replayed = (mb[name].bool() for name in ("response_mask", "exp_mask", "replay_mask"))
    logprobs, entropy = policy(mb)
    known = (logprobs, mb["logprobs"], mb["advantages"])
    on_loss, on_clipped = policy_loss(*known, args.clip_low, args.clip_high, args.clip_c)
    off_loss, off_clipped = policy_loss(*known, args.clip_low, args.off_cliprange_high, args.clip_c)
    if args.replay_loss == "shape":
        off_loss = torch.where(replayed, shaped_loss(*known, args.shaping_beta), off_loss)
        off_clipped = off_clipped * ~replayed
    pg_loss = torch.where(off, off_loss, on_loss)
    if args.method == "sft":  # cross-entropy; the advantage of a success is 1 here
        pg_loss = -mb["advantages"] * logprobs
    kl = k3_kl(mb["logprobs"], logprobs.detach())
    on = mask & ~off
    terms = [(pg_loss, mask), (entropy, mask), (pg_loss, on), (kl, on), (on_clipped, on)]
    terms += [(pg_loss, off), (off_clipped, off)]  # as in LOSSES
    sums = torch.stack([x.masked_fill(~tokens, 0.0).sum() for x, tokens in terms])
    counts = torch.stack([tokens.sum() for _, tokens in terms])
    # one mean over all tokens of the minibatch: the shares of micro-batches and ranks add up
    stats = torch.stack([sums.detach(), counts])
    return sums[0] / num_tokens, stats, logprobs.detach() - mb["logprobs"]


# --- rollout ---
def inject_experience(question: str, experience: str, template: str) -> str:
    """By partition: str.format would read the braces of either text."""
    before, _, after = template.partition("{}")
    return before + experience + after + question if experience else question


class Dialogue:
    """Turns <-> token ids, with the tokenizer's chat template or as plain text."""

    def __init__(self, tokenizer, chat_template: bool, eos_ids):
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.eos_ids = set(eos_ids.tolist())
        self.prompt = functools.cache(self.make_prompt)  # they repeat in a group
        self.reply = functools.cache(self.make_reply)

    def render(self, *turns: str) -> str:
        roles = ("user", "assistant", "user")
        turns = [dict(role=role, content=text) for role, text in zip(roles, turns, strict=False)]
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def make_prompt(self, text: str) -> list[int]:
        text = self.render(text) if self.chat_template else text
        return self.tokenizer(text, add_special_tokens=not self.chat_template).input_ids

    def make_reply(self, observation: str, ended: bool) -> list[int]:
        """Behind the agent's turn: its end if it has none, what it sees, the next one's start."""
        text = f"\n{observation}"  # and nothing behind it, as behind the question
        if self.chat_template:  # what the template puts behind an answer, and nothing before it
            text = self.render("a", "@@", observation).partition("@@")[2]
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids[1:] if ended and ids[0] in self.eos_ids else ids

    def read(self, ids: list[int]) -> str:
        ids = [i for i in ids if i not in self.eos_ids]
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def sample_token(logits, uniforms):
    """Inverse-CDF draw: an answer does not depend on the rows beside it.  (B,V), (B,) -> (B,)"""
    cdf = logits.softmax(-1).cumsum(-1)
    token = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    return token.clamp(max=logits.shape[-1] - 1)


@torch.no_grad()
def play_games(policy, trajectories, envs, pool, dialogue, args, step, uniforms=None):
    """Retrieve, inject, play to the end, score; greedily without uniforms (B, turns x tokens). One
    cache over all turns: the environment's words are fed with the next step, padded on the left."""
    device = policy.eos_ids.device
    retrieve = functools.cache(lambda text: pool.retrieve(text, args.retrieve_top_k, step))
    waiting, turn_ids, actions = [], [[] for _ in trajectories], [[] for _ in trajectories]
    for t, env in zip(trajectories, envs, strict=True):
        question, info = env.reset(t.task)
        advice = retrieve(question) if t.guided or args.method == "sd" else ""
        if t.guided and t.task >= PRACTICE:  # rules nobody has seen: the environment's own advice
            advice = f"{info['topic']} : " + " ".join(info["solution"])
        t.topic, t.injected = info["topic"], t.guided and bool(advice)
        told = inject_experience(question, advice, args.experience_template)
        t.prompt_ids, t.advised_ids = dialogue.prompt(question), dialogue.prompt(told)
        waiting.append(prompt_of(t, "behavior"))
    alive, cache = list(range(len(trajectories))), transformers.DynamicCache()
    mask = torch.zeros(len(trajectories), 0, dtype=int, device=device)
    while alive:
        block = pad([waiting[i] for i in alive], "left").to(device)
        mask = torch.cat([mask, (block >= 0).long()], 1)
        logits = policy.step(block.clamp(min=0), mask, cache)  # (A,V)
        token = logits.argmax(-1)
        if uniforms is not None:
            counts = [len(trajectories[i].sampler_logprobs) for i in alive]
            token = sample_token(logits, uniforms[alive, counts].to(device))
        logprobs = logits.log_softmax(-1).gather(-1, token[:, None]).squeeze(-1).tolist()
        going = []
        for row, (i, new, logprob) in enumerate(zip(alive, token.tolist(), logprobs, strict=True)):
            t, ended = trajectories[i], new in dialogue.eos_ids
            t.sampler_logprobs.append(logprob)
            turn_ids[i].append(new)
            waiting[i] = [new]
            if ended or len(turn_ids[i]) == args.max_turn_tokens:
                actions[i].append(dialogue.read(turn_ids[i]))
                observation, reward, terminated, truncated, info = envs[i].step(actions[i][-1])
                t.reward += reward
                t.steps.append(("assistant", turn_ids[i]))
                waiting[i], turn_ids[i] = [new, *dialogue.reply(observation, ended)], []
                if terminated or truncated or len(actions[i]) == args.max_turns:
                    t.success = terminated and t.reward >= args.success_reward
                    did = f"{t.topic} : " + " ".join(actions[i])
                    t.experience = info.get("experience", did) if t.success else ""
                    continue
                t.steps.append(("env", waiting[i][1:]))
            going.append(row)
        if 0 < len(going) < len(alive):
            cache.batch_select_indices(torch.tensor(going, device=device))
            mask = mask[going]
        alive = [alive[row] for row in going]


def collect(policy, envs, pool, dialogue, args, trajectories, step, uniforms=None):
    """play_games() for all, each rank playing its own.  -> everybody's, by (data_id, rollout_id)"""
    mine = trajectories[args.rank :: args.world_size]
    for start in range(0, len(mine), len(envs)):
        part = mine[start : start + len(envs)]
        places = [t.data_id for t in part], [t.rollout_id for t in part]
        drawn = None if uniforms is None else uniforms[places]  # (b, turns x tokens)
        play_games(policy, part, envs[: len(part)], pool, dialogue, args, step, drawn)
    parts = [mine] * args.world_size
    if args.world_size > 1:
        dist.all_gather_object(parts, mine)
    return sorted(sum(parts, []), key=lambda t: (t.data_id, t.rollout_id))


@torch.no_grad()
def compute_log_prob(policy, data: dict, args):
    """By the training forward, not the sampler: the first ratio is 1.  -> 2 x (B,R)"""
    logprobs, entropys = torch.zeros(2, *data["response_mask"].shape, device=data["ids"].device)
    rows = torch.arange(len(logprobs), device=logprobs.device)[args.rank :: args.world_size]
    for inds in rows.split(args.batch_size // args.num_minibatches):
        logprobs[inds], entropys[inds] = policy({name: x[inds] for name, x in data.items()})
    return total(logprobs), total(entropys)


# --- evaluate ---
def validate(play, env, held_out: list[int], args, step: int):
    """Greedy episodes, guided and unguided apart; changes nothing.  -> metrics, trajectories"""
    guided = draw(len(held_out), args.val_rollout_expmode, args.rollout_expratio, random.Random(0))
    done = play([Trajectory(task, i, guided=guided[i]) for i, task in enumerate(held_out)], step)
    kinds = dict(guided=[t for t in done if t.guided], unguided=[t for t in done if not t.guided])
    if "solution" in env.reset(PRACTICE)[1]:  # does the policy still do what it is told?
        unseen = range(2 * PRACTICE, 2 * PRACTICE + math.ceil(len(held_out) / 2))
        kinds["unseen"] = play([Trajectory(x, i, guided=True) for i, x in enumerate(unseen)], step)
    kinds["rate"] = kinds["unguided"] or kinds["guided"]  # the headline
    metrics = {f"eval/success_{name}": sum(t.success for t in found) / len(found)
               for name, found in kinds.items() if found}
    metrics["eval/episodic_return"] = sum(t.reward for t in kinds["rate"]) / len(kinds["rate"])
    return metrics, done


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


torch.serialization.add_safe_globals([Trajectory])  # what a checkpoint may hold besides tensors
FULL = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # sharded or not: one format


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


def save_model(policy, tokenizer, folder: Path):
    """An ordinary Hugging Face folder that takes the place of the one before."""
    state = dcp.get_model_state_dict(policy, options=FULL)
    if not dist.is_initialized() or dist.get_rank() == 0:
        state = {name[3:]: x for name, x in state.items() if name.startswith("lm.")}
        policy.lm.save_pretrained(f"{folder}.tmp", state_dict=state)
        tokenizer.save_pretrained(f"{folder}.tmp")
        shutil.rmtree(folder, ignore_errors=True)  # killed here: the resumed run saves it again
        os.replace(f"{folder}.tmp", folder)


def sum_gradients(policy, world_size: int):
    """Each loss was divided by the tokens of all ranks, so gradients add up. FSDP has averaged."""
    for parameter in policy.parameters() if world_size > 1 else ():
        if isinstance(policy, FSDPModule):
            parameter.grad.mul_(world_size)
        else:
            dist.all_reduce(parameter.grad)


# --- main ---
def practise(policy, env, dialogue, args):
    """Supervised steps on rules made at random: how to play and follow advice, and no secret."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)
    rng = random.Random(f"{args.seed}/warm start")
    for _ in tqdm(range(args.warm_start_steps), desc="warm start", disable=not sys.stderr.isatty()):
        games = []
        for seed in rng.choices(range(PRACTICE, 2 * PRACTICE), k=64):
            question, advice, turns = practice_game(env, seed, rng, args)
            told = inject_experience(question, advice, args.experience_template)
            t = Trajectory(seed, prompt_ids=dialogue.prompt(told))
            for action, text in turns:
                ids = dialogue.tokenizer(action, add_special_tokens=False).input_ids
                ids = [*ids, min(dialogue.eos_ids)][: args.max_turn_tokens]
                reply = dialogue.reply(text, ids[-1] in dialogue.eos_ids)
                t.steps += [("assistant", ids), ("env", reply)]
            games.append(t)
        data = samples_to_dataproto(games, policy.eos_ids.device)
        (-masked_mean(policy(data)[0], data["response_mask"])).backward()
        optimizer.step()
        optimizer.zero_grad()


def batch_metrics(fresh, replayed, manager, iteration, args):
    """What the batch was made of; a kind that it has none of has no number."""
    groups = [[t.success for t in fresh if t.data_id == i] for i in range(args.num_tasks)]
    failed = {i for i, group in enumerate(groups) if not any(group)}
    stripped = {t.data_id for t in fresh if get_extra(t)["stripped"]}
    values = {
        "charts/success_rate": [t.success for t in fresh],
        "charts/episodic_return": [t.reward for t in fresh],
        "charts/episodic_length": [len(t.steps) // 2 + 1 for t in fresh],
        "success/guided": [t.success for t in fresh if t.injected],
        "success/unguided": [t.success for t in fresh if not t.injected],
        "success/replayed": [t.success for t in replayed],
        "exp/off_frac": [get_extra(t)["off_policy"] for t in fresh + replayed],
        "exp/kept_tasks": [len({t.data_id for t in fresh if t.injected} - stripped)],
        "exp/stripped_tasks": [len(stripped)],
        "exp/retrieval_empty_frac": [not t.injected for t in fresh if t.guided],
        "groups/all_fail": [not any(group) for group in groups],
        "groups/all_success": [all(group) for group in groups],
        "groups/rescued": [len(failed & {t.data_id for t in replayed}) / args.num_tasks],
    }
    if args.use_experience_replay:
        ages, buckets = [iteration - t.version for t in replayed], manager.difficulty2task_dict
        values |= {f"replay/bucket_{s}": [len(tasks)] for s, tasks in buckets.items()} | {
            "replay/pool_tasks": [sum(map(len, manager.valid_tasks()))],
            "replay/trajectories": [sum(map(len, manager.memory.values()))],
            "replay/skip_set": [len(manager.skip_uid_set)],
            "replay/experience_tasks": [len({t.data_id for t in replayed})],
            "replay/age_mean": ages,
            "replay/age_max": ages and [max(ages)],
        }
    return {name: sum(x) / len(x) for name, x in values.items() if x}


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
    rank, world_size, device = init_distributed(device)
    args.rank, args.world_size = rank, world_size  # no options: torchrun's
    tasks = list(range(args.num_families * args.num_rooms))
    held_out = list(range(len(tasks), len(tasks) + args.eval_size))
    envs = [TextEnv(args) for _ in range(args.batch_size)]
    pool = ExperiencePool(args, [] if args.val_summarizer_save else held_out)
    if args.experience_pool:
        pool.load(args.experience_pool)
    words = spoken_words(envs[0], tasks[:200] + held_out[:200], pool.records, args)
    lm, tokenizer, eos_ids = load_agent(args, words)
    policy = LanguagePolicy(lm, eos_ids, args.temperature).to(device)
    dialogue = Dialogue(tokenizer, args.chat_template, eos_ids)
    if args.model_name is None:
        practise(policy, envs[0], dialogue, args)
    for parameter in policy.parameters() if world_size > 1 else ():
        dist.broadcast(parameter.data, 0)
    reference = copy.deepcopy(policy).requires_grad_(False) if args.method == "sd" else None
    if args.fsdp:
        shard(policy)
    parameters, lr = list(policy.parameters()), args.learning_rate
    optimizer = torch.optim.AdamW(parameters, lr, eps=1e-5, weight_decay=0.0, fused=True)
    manager = ExperienceManager(args)
    mix = ExperienceMixCollateFn(args, manager, tasks)
    play = functools.partial(collect, policy, envs, pool, dialogue, args)

    done, global_step, skipped_steps, rows = 0, 0, 0, []
    path = Path(args.run_dir or "") / "checkpoint.pt"
    if args.resume and path.exists():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        changed = {k: v for k, v in asdict(args).items() if saved["args"].get(k) != v}
        print(f"resuming {path}, with changed options: {changed}")
        states = dict(model_state_dict=saved["policy"], optim_state_dict=saved["optimizer"])
        dcp.set_state_dict(policy, optimizer, **states, options=FULL)
        done, global_step, skipped_steps = saved["counters"]
        vars(manager).update(saved["manager"])
        pool.records, rows, metrics = saved["pool"], saved["rows"], saved["rows"][-1]
    received = catch_signals()
    run = Run(args, args.num_iterations, rows, args.resume, rank == 0)
    shape = (args.group_size, args.max_turns * args.max_turn_tokens)
    if not done:
        if args.uses_pool and args.init_exp_before_training:
            first = random.Random(args.seed).sample(tasks, min(args.init_exp_tasks, len(tasks)))
            games = [Trajectory(task, i, j) for i, task in enumerate(first) for j in range(shape[0])]
            pool.add_successes(play(games, 0, torch.rand(len(first), *shape)), step=-1)
            global_step += len(games)
        metrics, _ = validate(play, envs[0], held_out, args, 0)
        run.log({"global_step": global_step, "exp/pool_size": len(pool.records), **metrics})
        if run.enabled and args.uses_pool:
            found = sum(bool(pool.retrieve(envs[0].reset(task)[0], 1, 1)) for task in tasks)
            print(f"{len(pool.records)} experiences, for {found} of {len(tasks)} training tasks")
    for iteration in range(done + 1, args.num_iterations + 1):
        iteration_start = time.time()
        torch.manual_seed(args.seed * 1_000_003 + iteration)  # so that no generator has a history
        exp_rng, replay_rng = (random.Random(f"{args.seed}/{iteration}/{use}") for use in "er")
        lr = args.learning_rate * ((args.num_iterations - iteration + 1) / args.num_iterations)
        optimizer.param_groups[0]["lr"] = lr

        # 1, 2 take B tasks, retired ones skipped, some of them from the replay pool
        experience_tasks, on_policy_tasks = mix(iteration, replay_rng)

        # 3 fetch replayed trajectories; the rest of a group is played
        replayed = manager.get_offpolicy_batch(experience_tasks, replay_rng)

        # 4 draw keep or discard per task, guided or not per rollout
        kept = draw(args.num_tasks, args.train_sample_expmode, args.train_sample_keepratio, exp_rng)
        fresh = []
        for data_id, task in enumerate(experience_tasks + on_policy_tasks):
            rollout_n = args.group_size - sum(t.data_id == data_id for t in replayed)
            guided = draw(rollout_n, args.train_rollout_expmode, args.rollout_expratio, exp_rng)
            for i in range(rollout_n):
                name = f"{iteration}/{task}/{i}"
                fresh.append(Trajectory(task, data_id, i, guided[i], kept[data_id], name))

        # 5 retrieve, inject, roll out, score
        fresh = play(fresh, iteration, torch.rand(args.num_tasks, *shape))
        global_step += len(fresh)

        # 6 difficulty, from fresh rollouts only
        if args.use_experience_replay:
            manager.update_difficulty2task_dict(fresh)

        # 7 training samples: experience kept or stripped (prompt_of), replayed ones in their group
        trajectories = sorted(fresh + replayed, key=lambda t: (t.data_id, t.rollout_id))
        if args.method == "sft":  # the rival trains on successes only, those of all iterations
            manager.save_trajectories_to_memory([t for t in fresh if t.success])
            trajectories = manager.sample_successes(args.batch_size, exp_rng) or trajectories
        data = samples_to_dataproto(trajectories, device)
        mask, off = data["response_mask"].float(), data["exp_mask"].bool()
        stripped = off & ~data["replay_mask"].bool()

        # 8 log-probs and entropy of the current policy on the training view
        old_log_probs, entropys = compute_log_prob(policy, data, args)  # (B,R)

        # 9 save, before anything is replaced
        if args.use_experience_replay:
            for i, t in enumerate(trajectories):
                if not t.is_experience_replay:
                    length = sum(len(ids) for _, ids in t.steps)
                    t.old_log_probs, t.version = old_log_probs[i, :length].tolist(), iteration
                    t.entropy = masked_mean(entropys[i], mask[i]).item()
            storable = manager.update_skip_uid_set_and_filter_trajectories(fresh)
            manager.save_trajectories_to_memory(storable)

        # 10 then recorded log-probs for what is replayed
        logprobs = old_log_probs
        if args.replay_old_logp == "recorded":
            logprobs = _replace_recorded_old_log_probs(data, logprobs)
        sampled = torch.zeros_like(mask)  # log-probs of the sampler, which saw the advice
        sampler_logprobs = [x for t in trajectories for x in t.sampler_logprobs]
        sampled[mask.bool()] = torch.tensor(sampler_logprobs).to(device)
        if args.off_old_logp == "behavior":
            logprobs = torch.where(stripped, sampled, logprobs)

        # 11 group advantages, over guided, unguided and replayed members alike
        advantages = group_advantages(data["rewards"], data["group_ids"])[:, None] * mask  # (B,R)
        # A stripped failure weighs pi(y|x) / pi(y|x,advice), at most 1: else nothing ends the push
        # against what only advice made likely.
        weights = (old_log_probs - sampled).exp().clamp(max=1.0)
        advantages = torch.where(stripped & (advantages < 0), advantages * weights, advantages)
        if args.method == "sft":
            advantages = torch.tensor([[float(t.success)] for t in trajectories]).to(device) * mask
        if args.method == "sd":  # failures: gradient of KL(pi(.|x) | pi_start(.|x,advice)), sampled
            told = samples_to_dataproto(trajectories, device, "teacher")
            gap = compute_log_prob(reference, told, args)[0] - old_log_probs
            taught = [[not t.success and t.advised_ids != t.prompt_ids] for t in trajectories]
            advantages = advantages + args.sd_coef * torch.tensor(taught).to(device) * gap
        batch = data | dict(logprobs=logprobs, advantages=advantages)
        rollout_time = time.time() - iteration_start

        # 12 minibatch updates
        updates, logratios = [], torch.zeros_like(mask)  # (LOSSES,) each; (B,R)
        for _ in range(args.update_epochs):
            for mb_inds in torch.randperm(args.batch_size).to(device).chunk(args.num_minibatches):
                optimizer.zero_grad()
                stats, logratios[mb_inds] = 0, 0.0
                mine, num_tokens = mb_inds[rank::world_size], mask[mb_inds].sum()
                for inds in mine.tensor_split(args.gradient_accumulation_steps):
                    micro = {name: x[inds] for name, x in batch.items()}
                    loss, micro_stats, logratio = grpo_loss(policy, micro, num_tokens, args)
                    loss.backward()
                    stats, logratios[inds] = stats + micro_stats, logratio
                sum_gradients(policy, world_size)
                grad_norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                grad_norm = grad_norm.full_tensor() if args.fsdp else grad_norm
                sums, counts = total(stats)
                stats = torch.cat([sums / counts.clamp(min=1), grad_norm[None]])
                if not stats.isfinite().all():  # a NaN must not reach the weights
                    skipped_steps += 1
                    continue
                updates.append(stats)
                optimizer.step()
        if not updates:
            sys.exit(f"iteration {iteration}: the loss or the gradient is never finite")

        names = [f"losses/{name}" for name in f"{LOSSES} grad_norm".split()]
        metrics = dict(zip(names, torch.stack(updates).mean(0).tolist(), strict=True))
        if off.any():  # watch p99: all-stripped training (EI) is known to explode
            ratio = total(logratios)[off].exp()
            metrics |= {"ratio/off_mean": ratio.mean().item(), "ratio/off_max": ratio.max().item()}
            metrics["ratio/off_p99"] = ratio.quantile(0.99).item()
        metrics |= batch_metrics(fresh, replayed, manager, iteration, args) | {
            "global_step": global_step,
            "exp/pool_size": len(pool.records),
            "losses/skipped_steps": skipped_steps,
            "rollout/logprob_mismatch": masked_mean((old_log_probs - sampled).abs(), mask * ~off).item(),
            "charts/learning_rate": lr,
            "charts/SPS": len(fresh) / (time.time() - iteration_start),
            "time/rollout": rollout_time,
            "time/update": time.time() - iteration_start - rollout_time,
        }

        # 13 pool, validation, checkpoint
        if args.updated_freq and iteration % args.updated_freq == 0:
            pool.add_successes(fresh, iteration)
        last = iteration == args.num_iterations
        if last or iteration % args.eval_every == 0:
            scores, seen = validate(play, envs[0], held_out, args, iteration)
            metrics |= scores
            if args.val_summarizer_save:
                pool.add_successes(seen, iteration)
        run.log(metrics)
        run.status(f"success {metrics['charts/success_rate']:.2f}", iteration)
        stopping = total(torch.tensor(len(received), device=device)) > 0
        if last or stopping or iteration % args.save_every == 0:
            model_state, optimizer_state = dcp.get_state_dict(policy, optimizer, options=FULL)
            counters = (iteration, global_step, skipped_steps)
            state = dict(policy=model_state, optimizer=optimizer_state, counters=counters)
            state |= dict(rows=run.rows, args=asdict(args), pool=pool.records)
            state["manager"] = {name: x for name, x in vars(manager).items() if name != "args"}
            if run.enabled:
                save_checkpoint(run.dir / "checkpoint.pt", state)
        if stopping and not last:
            print(f"stopped and saved; --resume --run-dir {run.dir} goes on")
            return metrics

    save_model(policy, tokenizer, run.dir / "final_model")
    if run.enabled:
        lines = [json.dumps(record) + "\n" for record in pool.records]
        (run.dir / "experience_pool.jsonl").write_text("".join(lines))
        print(f"eval/success_rate {metrics.get('eval/success_rate', math.nan):.3f}: {run.dir}")
    names = [f"eval/success_{kind}" for kind in ("unguided", "guided", "unseen")]
    panels = {"held-out tasks": names, "training": ["success/unguided", "success/guided"]}
    run.close("rollouts", panels | {"off-policy ratio": ["ratio/off_p99", "ratio/off_mean"]})
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
    if dist.is_initialized():  # threads of gloo may abort an interpreter as it ends
        sys.stdout.flush()
        os._exit(0)
