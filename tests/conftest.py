"""Shared fixtures: the scripts as modules, tiny argument sets, and a way to run a script as a user would."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["WANDB_MODE"] = "offline"  # a test that tracks must never need an account

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)

LM_SCRIPTS = [name for name in ("ppo", "ppo_v1", "ppo_v2") if (ROOT / f"{name}.py").exists()]
TINY_LM = dict(hidden_size=16, num_layers=1, sft_steps=2, batch_size=8, num_minibatches=2, update_epochs=2, eval_size=8)
TINY_LM |= dict(num_iterations=3, eval_every=2, device="cpu", reward_fn=f"{ROOT / 'tests' / 'rewards.py'}:digits")


@pytest.fixture
def run_script(tmp_path):
    """run_script("ppo.py", "--seed", "3") -> finished process, started in an empty folder."""

    def run(script, *flags, timeout=120, **kwargs):
        command = [sys.executable, str(ROOT / script), *map(str, flags)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=timeout, **kwargs)

    return run


def metrics_without_times(run_dir):
    """metrics.jsonl as a list of rows, less what no two runs share."""
    import json

    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "charts/SPS")
    return [{k: v for k, v in row.items() if k not in timed and not k.startswith("time/")} for row in rows]
