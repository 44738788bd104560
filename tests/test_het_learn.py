"""het_grpo.py learns: minutes each, so `pytest -m slow`. The bars are ones a broken sign could not reach."""

import statistics

import pytest

import het_grpo as het

SHORT = dict(device="cpu", num_iterations=120, eval_every=0, save_every=0)


def final(tmp_path, seed, **options):
    return het.main(het.Args(seed=seed, run_dir=str(tmp_path / f"{seed}"), **SHORT | options))


@pytest.mark.slow
def test_het_learns_to_do_without_advice(tmp_path):
    """The start policy opens next to no lock unguided; half the rollouts of a full run are enough to see it rise."""
    scores = [final(tmp_path, seed)["eval/success_unguided"] for seed in (101, 102, 103)]
    assert statistics.median(scores) > 0.4, scores


@pytest.mark.slow
def test_plain_grpo_learns(tmp_path):
    metrics = [final(tmp_path, seed, method="baseline") for seed in (101, 102, 103)]
    assert statistics.median(m["charts/success_rate"] for m in metrics) > 0.2


@pytest.mark.slow
def test_replay_rescues_groups(tmp_path):
    options = dict(method="baseline", use_experience_replay=True)
    metrics = final(tmp_path, 101, debug_replay=True, **options)
    assert metrics["replay/trajectories"] > 20 and metrics["charts/success_rate"] > 0.2
