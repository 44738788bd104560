"""het_grpo.py learns: minutes, so `pytest -m slow`. The bars are ones a broken sign could not reach."""

import statistics

import pytest

import het_grpo as het

SHORT = dict(device="cpu", num_iterations=100, eval_every=100, eval_size=240)


@pytest.mark.slow
@pytest.mark.parametrize("options, bar", [({}, 0.4), (dict(method="sft", learning_rate=1e-3), 0.8)], ids=["het", "sft"])
def test_it_learns_to_do_without_advice(options, bar, tmp_path):
    """The start policy opens next to no lock unguided; two thirds of a full run are enough to see it rise."""
    runs = [het.main(het.Args(seed=s, run_dir=str(tmp_path / f"{s}"), **SHORT | options)) for s in (101, 102, 103)]
    scores = [metrics["eval/success_unguided"] for metrics in runs]
    assert statistics.median(scores) > bar, scores
