"""sac_hybrid.py learns: minutes per run, so `pytest -m slow` only. Tuning seeds; the page's are 31 to 35."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sac_hybrid import Args, main

pytestmark = pytest.mark.slow


def test_the_robot_passes_its_teacher(tmp_path):
    ends = [main(Args(seed=seed, run_dir=str(tmp_path / str(seed)))) for seed in (1, 2, 3)]
    assert np.median([end["eval/success_rate"] for end in ends]) >= 0.85, ends
    assert np.median([end["eval/steps_to_success"] for end in ends]) < 8, ends  # the human: 10.7


def test_without_demos_and_human_there_is_nothing_to_learn_from(tmp_path):
    options = dict(num_demos=0, intervention_steps=0, max_steps=1_500)
    assert main(Args(**options, run_dir=str(tmp_path / "run")))["eval/success_rate"] <= 0.05


@pytest.mark.parametrize(("mode", "bar"), [("single-arm-fixed-gripper", 0.8), ("dual-arm-learned-gripper", 0.8)])
def test_other_modes(mode, bar, tmp_path):
    args = Args(setup_mode=mode, human="expert", seed=2, run_dir=str(tmp_path / "run"))
    assert main(args)["eval/success_rate"] >= bar
