"""Learning runs of minutes (pytest -m slow): built-in tasks, three seeds, a median that no broken sign could reach."""

import json

import numpy as np
import pytest

import het_grpo
import ppo
import ppo_v1
import ppo_v2
import sac_hybrid
import wsrl_warmup

pytestmark = pytest.mark.slow


def train(script, folder, seeds, **options):
    """-> last metrics of a run for each seed, which lies in folder/seed"""
    make = lambda seed: script.Args(
        seed=seed, device="cpu", run_dir=str(folder / str(seed)), **options
    )  # noqa: E731
    return [script.main(make(seed)) for seed in seeds]


KEY = "eval/episodic_return"
LM = [(ppo, {}), (ppo_v1, {}), (ppo_v2, dict(use_replay_buffer=True))]


@pytest.mark.parametrize("script, options", LM, ids=["ppo", "ppo_v1", "ppo_v2"])
def test_it_learns_to_sort(script, options, tmp_path):
    scores = [
        end["eval/score"] for end in train(script, tmp_path, (21, 22, 23), eval_every=40, **options)
    ]
    assert np.median(scores) >= 0.95 and min(scores) >= 0.9, scores


def test_a_wrong_sign_does_not_learn(tmp_path, monkeypatch):
    """The threshold above means something: with the advantage's sign flipped, accuracy falls."""
    real = ppo.compute_gae
    monkeypatch.setattr(ppo, "compute_gae", lambda *args: -real(*args))
    assert train(ppo, tmp_path, (21,), eval_every=40)[0]["eval/score"] < 0.2


@pytest.mark.parametrize(
    "options, bar", [({}, 0.4), (dict(method="sft", learning_rate=1e-3), 0.8)], ids=["het", "sft"]
)
def test_it_learns_to_do_without_advice(options, bar, tmp_path):
    """The start policy opens next to no lock unguided; two thirds of a full run are enough to see it rise."""
    short = dict(num_iterations=100, eval_every=100, eval_size=240)
    scores = [
        end["eval/success_unguided"]
        for end in train(het_grpo, tmp_path, (101, 102, 103), **short, **options)
    ]
    assert np.median(scores) > bar, scores


BAR_WORLD = sac_hybrid.BAR_WORLD | dict(capture_video=False)


def test_the_policy_outperforms_the_human(tmp_path):
    ends = train(sac_hybrid, tmp_path, (1, 2, 3), **BAR_WORLD)
    assert np.median([end["report/success_rate"] for end in ends]) >= 0.85, ends
    assert np.median([end["report/steps_to_success"] for end in ends]) < 8, ends  # the human: 11


def test_without_demos_and_human_there_is_nothing_to_learn_from(tmp_path):
    options = BAR_WORLD | dict(num_demos=0, intervention_steps=0, max_steps=1_500)
    assert train(sac_hybrid, tmp_path, (1,), **options)[0]["report/success_rate"] <= 0.05


@pytest.mark.parametrize("mode", ["single-arm-fixed-gripper", "dual-arm-learned-gripper"])
def test_other_arms_learn(mode, tmp_path):
    expert = dict(human="expert", bc_weight=0.5, batch_size=64, num_demos=50)
    expert |= dict(intervention_steps=2_000, max_steps=2_000)
    if mode.startswith("dual"):
        expert |= dict(num_demos=200, intervention_steps=3_000, max_steps=4_000)
    (end,) = train(sac_hybrid, tmp_path, (2,), setup_mode=mode, **BAR_WORLD | expert)
    assert end["report/success_rate"] >= 0.8


def test_the_warm_up_goes_beyond_its_data(tmp_path):
    """No demos: the data have -700 at best, a clone of them less; the warm-up and 600 online steps reach -200."""
    starts, ends = [], []
    options = wsrl_warmup.default_options() | dict(online_steps=600, capture_video=False)
    train(wsrl_warmup, tmp_path, (101, 102, 103), **options)
    for folder in tmp_path.iterdir():
        rows = [
            json.loads(line)
            for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        returns = {row["charts/env_steps"]: row[KEY] for row in rows if KEY in row}
        starts, ends = [*starts, returns[0]], [*ends, returns[600]]
    assert np.median(starts) > -400 and np.median(ends) > -200, (starts, ends)
