"""Tiny argument sets, a way to run a script as a user would, and what two runs must have in common."""

import atexit
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["WANDB_MODE"] = "offline"  # a test that tracks must never need an account

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


def small_task():
    """Eighty lists to sort: the built-in task's form, without the second it takes to encode 20 000 prompts."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    digits = [random.Random(i).choices("0123456789", k=3 + i % 2) for i in range(80)]
    rows = [{"prompt": "".join(row) + "=", "answer": "".join(sorted(row))} for row in digits]
    (folder / "sort.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "sort.jsonl"


LM_SCRIPTS = ["ppo", "ppo_v1", "ppo_v2"]
SCRIPTS = [*LM_SCRIPTS, "het_grpo", "sac_hybrid", "wsrl_warmup"]  # a reader's own files may lie beside them
TINY_LM = dict(sft_steps=2, batch_size=8, num_minibatches=2, eval_size=8, num_iterations=3, eval_every=2)
TINY_LM |= dict(update_epochs=2, device="cpu", task=f"jsonl:{small_task()}")
TINY_LM |= dict(reward_fn=f"{ROOT / 'tests' / 'rewards.py'}:digits")


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
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=timeout, **kwargs)

    return start


def metrics_without_times(run_dir):
    """metrics.jsonl as a list of rows, less what no two runs share."""
    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "charts/SPS")
    return [{k: v for k, v in row.items() if k not in timed and not k.startswith("time/")} for row in rows]


def weights(run_dir, name="final_model"):
    return load_file(Path(run_dir) / name / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def assert_same_run(a, b):
    assert metrics_without_times(a) == metrics_without_times(b)
    assert same(weights(a), weights(b))
