"""het_grpo.py learns: minutes each, so `pytest -m slow`. The bars are ones a broken sign could not reach."""

import statistics

import pytest

import het_grpo as het

SHORT = dict(device="cpu", num_rollouts=7_680, eval_every=0, save_every=0, learning_rate=2e-3)
WARM = {}  # seed -> weights; the warm start depends on nothing else and takes as long as the run


def final(tmp_path, monkeypatch, seed, **options):
    real = het.practise

    def practise(policy, world, dialogue, pad_id, args):
        if args.seed not in WARM:
            real(policy, world, dialogue, pad_id, args)
            WARM[args.seed] = {name: x.clone() for name, x in policy.state_dict().items()}
        policy.load_state_dict(WARM[args.seed])

    with monkeypatch.context() as patch:
        patch.setattr(het, "practise", practise)
        return het.main(het.Args(seed=seed, run_dir=str(tmp_path / f"{seed}"), **SHORT | options))


@pytest.mark.slow
def test_het_learns_to_do_without_advice(tmp_path, monkeypatch):
    """The start policy opens next to no lock unguided; half the rollouts of a full run are enough to see it rise."""
    scores = [final(tmp_path, monkeypatch, seed)["eval/success_unguided"] for seed in (101, 102, 103)]
    assert statistics.median(scores) > 0.4, scores


@pytest.mark.slow
def test_plain_grpo_learns(tmp_path, monkeypatch):
    metrics = [final(tmp_path, monkeypatch, seed, method="baseline") for seed in (101, 102, 103)]
    assert statistics.median(m["charts/success_rate"] for m in metrics) > 0.2


@pytest.mark.slow
def test_replay_rescues_groups(tmp_path, monkeypatch):
    metrics = final(tmp_path, monkeypatch, 101, method="baseline", use_experience_replay=True, debug_replay=True)
    assert metrics["replay/trajectories"] > 20 and metrics["charts/success_rate"] > 0.2
