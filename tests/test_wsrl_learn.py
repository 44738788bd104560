"""wsrl_warmup.py learns: minutes per run, so `pytest -m slow` only. Tuning seeds; the README's are 1 to 5."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from wsrl_warmup import Args, main

pytestmark = pytest.mark.slow


def test_warm_start_and_fine_tuning(tmp_path):
    results = []
    for seed in (101, 102, 103):
        results.append(main(Args(seed=seed, device="cpu", run_dir=str(tmp_path / str(seed))))["eval/episodic_return"])
    assert np.median(results) >= 90, results


def test_the_start_policy_is_already_good(tmp_path):
    main(Args(env_id="Pendulum-v1", seed=101, online_steps=500, device="cpu", run_dir=str(tmp_path / "run")))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    returns = {row["charts/env_steps"]: row["eval/episodic_return"] for row in rows if "eval/episodic_return" in row}
    assert returns[0] > -400 and returns[500] > -400, returns
