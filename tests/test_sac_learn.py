"""sac_hybrid.py learns: minutes per run, so `pytest -m slow` only. Tuning seeds; the README's are 11 to 15."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sac_hybrid import Args, main

pytestmark = pytest.mark.slow


def test_pick_up(tmp_path):
    rates = [main(Args(seed=seed, run_dir=str(tmp_path / str(seed))))["eval/success_rate"] for seed in (1, 2, 3)]
    assert np.median(rates) >= 0.9, rates


def test_without_demos_and_human_there_is_nothing_to_learn_from(tmp_path):
    options = dict(num_demos=0, intervention_steps=0, max_steps=1_500)
    assert main(Args(**options, run_dir=str(tmp_path / "run")))["eval/success_rate"] <= 0.05


@pytest.mark.parametrize(("mode", "bar"), [("single-arm-fixed-gripper", 0.8), ("dual-arm-learned-gripper", 0.8)])
def test_other_modes(mode, bar, tmp_path):
    assert main(Args(setup_mode=mode, seed=2, run_dir=str(tmp_path / "run")))["eval/success_rate"] >= bar
