"""What must be the same: two runs of one seed, micro-batches, features that are off."""

import importlib

import pytest
import torch
from conftest import LM_SCRIPTS, TINY_LM, metrics_without_times
from transformers import AutoModelForCausalLM


def weights(run_dir):
    return AutoModelForCausalLM.from_pretrained(run_dir / "final_model").state_dict()


def assert_same_run(a, b):
    assert metrics_without_times(a) == metrics_without_times(b)
    first, second = weights(a), weights(b)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", LM_SCRIPTS)
def test_one_seed_one_result(name, tmp_path):
    script = importlib.import_module(name)
    for run in "ab":
        torch.rand(3)  # the global generator must not matter
        script.main(script.Args(**TINY_LM, run_dir=str(tmp_path / run)))
    assert_same_run(tmp_path / "a", tmp_path / "b")
    script.main(script.Args(**TINY_LM | dict(seed=2), run_dir=str(tmp_path / "c")))
    assert metrics_without_times(tmp_path / "c") != metrics_without_times(tmp_path / "a")


@pytest.mark.parametrize("name", LM_SCRIPTS)
def test_evaluation_changes_no_training_number(name, tmp_path):
    script = importlib.import_module(name)
    for every in (0, 1):
        script.main(script.Args(**TINY_LM | dict(eval_every=every), run_dir=str(tmp_path / str(every))))
    rows = [metrics_without_times(tmp_path / str(every)) for every in (0, 1)]
    for row in rows[0] + rows[1]:
        row.pop("eval/score", None)
    assert rows[0] == rows[1]
