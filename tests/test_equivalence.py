"""What must be the same: two runs of one seed, a child with its features off, micro-batches, evaluation, tracking."""

import pytest
import torch
from conftest import REPLAY, assert_same_run, metrics_without_times, run, same, weights

import ppo
import ppo_v1
import ppo_v2

PLAIN = [
    {},
    dict(norm_adv=True, ent_coef=0.01, kl_coef=0.0, temperature=0.8, gae_lambda=0.9, seed=2),
]
EXTRAS = dict(
    gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=1, ref_kl_target=0.1
)
EXTRAS |= dict(clip_coef_high=0.3, dual_clip=3.0, target_kl=0.05, early_stopping_patience=9)


@pytest.mark.parametrize("options", PLAIN)
def test_v1_with_its_extras_off_is_ppo(options, tmp_path):
    run(ppo, tmp_path / "parent", **options)
    run(ppo_v1, tmp_path / "child", **options)
    parent, child = (metrics_without_times(tmp_path / name) for name in ("parent", "child"))
    assert [
        {key: row[key] for key in old} for old, row in zip(parent, child, strict=True)
    ] == parent
    assert (
        same(weights(tmp_path / "parent"), weights(tmp_path / "child"))
        and parent[-1]["losses/grad_norm"] > 0
    )


@pytest.mark.parametrize("options", [*PLAIN, EXTRAS])
def test_v2_without_replay_is_v1(options, tmp_path, monkeypatch):
    for name in ("add", "draw", "priorities"):
        monkeypatch.setattr(ppo_v2.ReplayBuffer, name, None)  # must not be touched
    run(ppo_v1, tmp_path / "v1", **options)
    run(ppo_v2, tmp_path / "v2", **options)
    assert_same_run(tmp_path / "v1", tmp_path / "v2")
    a, b = (torch.load(tmp_path / v / "checkpoint.pt", weights_only=True) for v in ("v1", "v2"))
    for name in ("buffer", "past_weights", "last_kl"):
        del b["state"][name]
    assert same(a["policy"], b["policy"]) and a["state"] == b["state"]


@pytest.mark.parametrize("script, options", [(ppo, {}), (ppo_v2, REPLAY)], ids=["ppo", "ppo_v2"])
def test_one_seed_one_result(script, options, tmp_path):
    for name in "ab":
        torch.rand(3)  # the global generator must not matter
        run(script, tmp_path / name, **options)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    run(script, tmp_path / "c", **options, seed=2)
    assert metrics_without_times(tmp_path / "c")[1] != metrics_without_times(tmp_path / "a")[1]


@pytest.mark.parametrize("script, options", [(ppo, {}), (ppo_v2, REPLAY)], ids=["ppo", "ppo_v2"])
def test_evaluation_changes_no_training_number(script, options, tmp_path):
    rows = []
    for every in (9, 1):
        run(script, tmp_path / str(every), **options, eval_every=every)
        rows.append(metrics_without_times(tmp_path / str(every)))
        assert sum("eval/score" in row for row in rows[-1]) == (2 if every == 9 else 4)
    for row in rows[0] + rows[1]:
        row.pop("eval/score", None), row.pop("eval/nan_scores", None)
    assert rows[0] == rows[1]


def test_checkpoints_and_tracking_change_no_number(tmp_path):
    run(ppo_v1, tmp_path / "a")
    run(ppo_v1, tmp_path / "b", save_every=1, track=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert list((tmp_path / "b" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize(
    "options", [{}, REPLAY | dict(replay_advantages="all", priority_beta=1.0)], ids=["v1", "v2"]
)
def test_micro_batches_give_the_gradient_of_the_minibatch(options, tmp_path, monkeypatch):
    """At the optimizer's door, in every step of two iterations; lengths differ, so a mean of means would show."""
    script, real, found = ppo_v2 if options else ppo_v1, torch.optim.AdamW.step, {}
    options = options | dict(num_iterations=2, learning_rate=1e-6, sft_steps=0)

    def step(self, *args):
        gradients = [x.grad.flatten() for group in self.param_groups for x in group["params"]]
        found[micro].append(torch.cat(gradients))
        return real(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    for micro in (1, 2, 4):
        found[micro] = []
        run(script, tmp_path / str(micro), **options, gradient_accumulation_steps=micro)
    assert len(found[1]) == 8
    for micro in (2, 4):
        for a, b in zip(found[1], found[micro], strict=True):
            assert (a - b).norm() < 1e-5 * a.norm() and not torch.equal(a, b)
    rows = [metrics_without_times(tmp_path / str(micro))[2] for micro in (1, 4)]
    assert rows[0] == pytest.approx(rows[1], rel=1e-4, abs=1e-6)
