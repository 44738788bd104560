"""Learning runs (pytest -m slow): the built-in task, three seeds, a median that no broken sign could reach."""

import statistics

import pytest

import ppo
import ppo_v1
import ppo_v2


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, options",
    [(ppo, {}), (ppo_v1, {}), (ppo_v2, dict(use_replay_buffer=True))],
    ids=["ppo", "ppo_v1", "ppo_v2"],
)
def test_learns_to_sort(script, options, tmp_path):
    scores = []
    for seed in (21, 22, 23):
        args = script.Args(seed=seed, eval_every=40, device="cpu", **options, run_dir=str(tmp_path / str(seed)))
        scores.append(script.main(args)["eval/score"])
    assert statistics.median(scores) >= 0.95 and min(scores) >= 0.9, scores


@pytest.mark.slow
def test_a_wrong_sign_does_not_learn(tmp_path, monkeypatch):
    """The threshold above means something: with the advantage's sign flipped, accuracy falls."""
    real = ppo.compute_gae
    monkeypatch.setattr(ppo, "compute_gae", lambda *args: -real(*args))
    args = ppo.Args(seed=21, eval_every=40, device="cpu", run_dir=str(tmp_path / "run"))
    assert ppo.main(args)["eval/score"] < 0.2
