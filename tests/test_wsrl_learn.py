"""wsrl_warmup.py learns: half a CPU minute per run, so `pytest -m slow` only. Tuning seeds; the page's are 1 to 5."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from wsrl_warmup import Args, main

pytestmark = pytest.mark.slow


def test_the_default_goes_beyond_its_data(tmp_path):
    """No demos: the data have -700 at best, a clone of them less; the warm-up and 500 online steps reach -200."""
    starts, ends = [], []
    for seed in (101, 102, 103):
        main(Args(seed=seed, online_steps=500, device="cpu", run_dir=str(tmp_path / str(seed))))
        rows = [json.loads(line) for line in (tmp_path / str(seed) / "metrics.jsonl").read_text().splitlines()]
        returns = {
            row["charts/env_steps"]: row["eval/episodic_return"] for row in rows if "eval/episodic_return" in row
        }
        starts, ends = [*starts, returns[0]], [*ends, returns[500]]
    assert np.median(starts) > -400 and np.median(ends) > -200, (starts, ends)
