"""Tiny argument sets, a way to run a script as a user would, and what two runs must have in common."""

import atexit
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["WANDB_MODE"] = "offline"  # a test that tracks must never need an account

import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


def small_task():
    """Eighty lists to sort: the built-in task's form, without the second it takes to encode 20 000 prompts."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    digits = [random.Random(i).choices("0123456789", k=3 + i % 2) for i in range(80)]
    rows = [{"prompt": "".join(row) + "=", "answer": "".join(sorted(row))} for row in digits]
    (folder / "sort.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder / "sort.jsonl"


LM_SCRIPTS = ["ppo", "ppo_v1", "ppo_v2"]
SCRIPTS = [
    *LM_SCRIPTS,
    "het_grpo",
    "sac_hybrid",
    "wsrl_warmup",
]  # a reader's own files may lie beside them
TINY_LM = dict(
    sft_steps=2, batch_size=8, num_minibatches=2, eval_size=8, num_iterations=3, eval_every=2
)
TINY_LM |= dict(update_epochs=2, device="cpu", task=f"jsonl:{small_task()}")
TINY_LM |= dict(reward_fn=f"{ROOT / 'tests' / 'rewards.py'}:digits")
REPLAY = dict(use_replay_buffer=True, min_replay_size=8, replay_sample_size=8)


# --- running ---
def run(script, folder, **options):
    """main() of a language-model script on the tiny task -> its last metrics; no picture, which costs half the time"""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with mock.patch("matplotlib.figure.Figure.savefig"):
            return script.main(script.Args(**TINY_LM | options, run_dir=str(folder)))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture
def run_script(tmp_path):
    """run_script("ppo.py", "--seed", "3") -> finished process, started in an empty folder."""

    def start(script, *flags, timeout=120, **kwargs):
        command = [sys.executable, str(ROOT / script), *map(str, flags)]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=timeout, **kwargs
        )

    return start


def spy(monkeypatch, owner, name):
    """-> list that fills with (arguments, result) of every call of a function"""
    calls, real = [], getattr(owner, name)

    def wrapped(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append(((*args, *kwargs.values()), result))
        return result

    monkeypatch.setattr(owner, name, wrapped)
    return calls


def forked(*calls):
    """Run calls in processes that start with torch imported. -> processes, started"""
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")

    def target(call):
        sys.stdout = sys.stderr = open(os.devnull, "w")
        tqdm.set_lock(
            threading.RLock()
        )  # the usual one is shared: a child killed in it would hold it for good
        call()

    processes = [
        multiprocessing.get_context("fork").Process(target=target, args=(call,)) for call in calls
    ]
    for process in processes:
        process.start()
    return processes


def at_call(script, name, nth, action):
    """Patch this process: before the nth call of a function of the script, do something."""
    real, calls = getattr(script, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == nth:
            action()
        return real(*args, **kwargs)

    setattr(script, name, wrapped)


def die_while_saving(name, nth, where):
    """Patch this process: SIGKILL in its nth saving of this file, half written, before or after it gets its name."""
    save, replace, saves = torch.save, os.replace, []

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_save(state, path):
        saves.append(name in str(path))
        save(state, path)
        if saves[-1] and sum(saves) == nth and where == "half":
            os.truncate(path, os.path.getsize(path) // 2)
            die()

    def dying_replace(source, target):
        due = name in str(target) and sum(saves) == nth
        if due and where == "before":
            die()
        replace(source, target)
        if due:
            die()

    torch.save, os.replace = dying_save, dying_replace


def two_ranks(call):
    """call(rank) in two forked processes, as torchrun would start them. -> exit codes"""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))

    def start(rank):
        os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        call(rank)

    ranks = forked(lambda: start(0), lambda: start(1))
    for process in ranks:
        process.join(200)
        process.kill()
    return [process.exitcode for process in ranks]


# --- comparing ---
def metrics_without_times(run_dir):
    """metrics.jsonl as a list of rows, less what no two runs share."""
    rows = [json.loads(line) for line in open(Path(run_dir) / "metrics.jsonl", encoding="utf-8")]
    timed = ("time", "charts/SPS")
    return [
        {k: v for k, v in row.items() if k not in timed and not k.startswith("time/")}
        for row in rows
    ]


def weights(run_dir, name="final_model"):
    return load_file(Path(run_dir) / name / "model.safetensors")


def same(a, b):
    """Two state dicts: every tensor, bit for bit."""
    tensors = [{key: value for key, value in x.items() if torch.is_tensor(value)} for x in (a, b)]
    return a.keys() == b.keys() and all(
        torch.equal(x, tensors[1][key]) for key, x in tensors[0].items()
    )


def assert_same_run(a, b):
    assert metrics_without_times(a) == metrics_without_times(b)
    assert same(weights(a), weights(b))


def assert_checkpoints_have_the_same_weights(one, two):
    """Names and shapes, as a checkpoint of two ranks is to hold all weights."""
    shapes = []
    for folder in (one, two):
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        shapes.append({name: tensor.shape for name, tensor in saved["policy"].items()})
    assert shapes[0] == shapes[1] and shapes[0]


def assert_nearly_the_same(one, two):
    """Metrics and weights of two runs, up to the order of sums."""
    for a, b in zip(metrics_without_times(one), metrics_without_times(two), strict=True):
        assert a == pytest.approx(b, rel=2e-3, abs=1e-4)
    expected = weights(one)
    for key, value in weights(two).items():
        torch.testing.assert_close(value, expected[key], atol=2e-5, rtol=1e-3)
