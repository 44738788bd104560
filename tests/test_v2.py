"""ppo_v2.py: replay by hand, and through the real training step."""

import math
import re
import signal

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_LM, metrics_without_times
from test_equivalence import assert_same_run, weights
from test_v1 import die_while_saving, fails, fork, launch
from torch import tensor

import ppo_v1
import ppo_v2

REPLAY = dict(use_replay_buffer=True, min_replay_size=8, replay_sample_size=8, num_iterations=5)


def run(folder, script=ppo_v2, **options):
    return script.main(script.Args(**TINY_LM | options, run_dir=str(folder)))


def filled(births, reuses, priorities=None, alpha=0.6, **kwargs):
    """A buffer with these samples, one token each."""
    settings = dict(priority_alpha=alpha, priority_age_tau=None, use_priority_sampling=priorities is not None) | kwargs
    buffer = ppo_v2.ReplayBuffer(**settings)
    for i, birth in enumerate(births):
        one = torch.ones(1, 1)
        advantage = one * (1.0 if priorities is None else priorities[i] - 1e-6)
        batch = dict(prompt_ids=one.long(), response_ids=one.long(), logprobs=-one, ref_logprobs=-one, values=one)
        buffer.add(batch | dict(advantages=advantage, scores=tensor([float(i)])), one, one.long(), birth)
    buffer.reuses[:] = reuses
    return buffer


# --- numbers ---
def test_priorities_by_hand():
    buffer = filled([1, 1, 1], [0, 0, 0], priorities=[1, 2, 4])
    assert buffer.priorities / buffer.priorities.sum() == pytest.approx([0.2077657, 0.3149140, 0.4773203], abs=1e-6)
    uids, drawn = buffer.draw(3, 2, 4, beta=0.4, rng=np.random.default_rng(0))
    assert drawn[np.argsort(uids)] == pytest.approx([1, 0.8467453, 0.7169776], abs=1e-6)


def test_draws_follow_the_priorities():
    counts, rng = np.zeros(3), np.random.default_rng(0)
    buffer = filled([1, 1, 1], [0, 0, 0], priorities=[1, 2, 4])
    for _ in range(4000):
        uids, _ = buffer.draw(1, 2, 10**9, beta=0.4, rng=rng)
        counts[uids[0]] += 1
    assert counts / 4000 == pytest.approx([0.2077657, 0.3149140, 0.4773203], abs=0.025)


def test_draws_of_two_are_one_after_the_other_without_replacement():
    p, counts, rng = [0.2077657, 0.3149140, 0.4773203], np.zeros(3), np.random.default_rng(0)
    buffer = filled([1, 1, 1], [0, 0, 0], priorities=[1, 2, 4])
    for _ in range(4000):
        uids, _ = buffer.draw(2, 2, 10**9, beta=0.4, rng=rng)
        counts[uids] += 1
    second = [sum(p[j] * p[i] / (1 - p[j]) for j in range(3) if j != i) for i in range(3)]
    assert counts / 4000 == pytest.approx([a + b for a, b in zip(p, second, strict=True)], abs=0.025)


def test_uniform_draws_are_distinct_and_weigh_one():
    buffer = filled([1] * 6, [0] * 6)
    uids, drawn = buffer.draw(4, 2, 4, beta=0.4, rng=np.random.default_rng(0))
    assert len(set(uids)) == 4 and drawn.tolist() == [1] * 4
    assert buffer.reuses.sum() == 4 and buffer.reuses.max() == 1


def test_age_decay():
    buffer = filled([0, 10], [0, 0], priority_age_tau=10.0)
    rng = np.random.default_rng(0)
    young = sum(buffer.draw(1, 10, 10**9, 0.0, rng)[0][0] for _ in range(4000)) / 4000
    assert young == pytest.approx(1 / (1 + math.exp(-1)), abs=0.025)


def test_age_decay_survives_odds_too_small_for_a_float():
    buffer = filled([0, 0, 100], [0, 0, 0], priorities=[1, 2, 4], priority_age_tau=0.01)
    uids, drawn = buffer.draw(3, 100, 4, beta=0.4, rng=np.random.default_rng(0))
    assert sorted(uids) == [0, 1, 2] and np.isfinite(drawn).all()


@pytest.mark.parametrize("iteration, there", [(6, True), (7, True), (8, False)])
def test_age_threshold(iteration, there):
    buffer = filled([5], [0])
    buffer.evict(iteration, max_age=2, max_reuse=4, capacity=10)
    assert (len(buffer) == 1) == there == (len(buffer.samples) == 1)


def test_eviction_by_reuse_and_overflow():
    buffer = filled([1, 2, 3, 4, 5], [4, 3, 0, 0, 0])
    buffer.evict(6, max_age=100, max_reuse=4, capacity=3)
    assert buffer.uids.tolist() == [2, 3, 4] == list(buffer.samples), "drawn often enough goes, then the oldest"


def test_buffer_stats_by_hand():
    stats = filled([5, 7, 9], [4, 2, 0]).buffer_stats(10)
    expected = dict(buffer_size=3, avg_reuse_count=2, max_reuse_count=4, avg_age=3, oldest_sample=5)
    assert stats == expected


def test_effective_sample_size_by_hand():
    assert ppo_v2.effective_sample_size(tensor([4.0, 1, 1, 1])).item() == pytest.approx(0.6447368, abs=1e-6)


def test_gains_by_hand():
    """Valid: 2, -1 drawn and 1, -2 fresh. Mean 0, variance (4 + 1 + 1 + 4) / 4 = 2.5; 2 / sqrt(2.5) = 1.2649111."""
    drawn, fresh = tensor([[2.0, -1.0, 99.0]]), tensor([[1.0], [-2.0], [55.0]])
    found = ppo_v2.gains(drawn, tensor([[1.0, 1, 0]]), fresh, tensor([[1], [1], [0]]))
    assert found.tolist()[0] == pytest.approx([1.2649111, 0, 0], abs=1e-6)


def test_priorities_by_the_positive_part():
    advantages, mask = tensor([[2.0, -4.0, 1.0], [-3.0, -3.0, 9.0]]), tensor([[1.0, 1, 1], [1, 1, 0]])
    buffers = [ppo_v2.ReplayBuffer(1.0, None, True, positive) for positive in (True, False)]
    both = [buffer.to_priorities(advantages, mask) for buffer in buffers]
    assert both[0] == pytest.approx([1 + 1e-6, 1e-6], rel=1e-9) and both[1] == pytest.approx([7 / 3, 3], abs=1e-5)


def surrogate(correction):
    new = tensor([[math.log(0.55)]], requires_grad=True)
    prox, mu, one = tensor([[math.log(0.5)]]), tensor([[math.log(0.25)]]), torch.ones(1, 1)
    anchor, is_weights = ppo_v2.behaviour_correction(prox, mu, one, correction, cap=2.0)
    loss, _, _ = ppo_v2.policy_loss(new, anchor, one, one, is_weights, 1, 0.2, 0.2, math.inf)
    loss.backward()
    return loss.item(), new.grad.item()


def test_corrections_by_hand():
    assert surrogate("decoupled") == pytest.approx((-2.2, -2.2), abs=1e-6)
    assert surrogate("behaviour") == pytest.approx((-1.2, 0.0), abs=1e-6)  # the clip was spent before the update began
    assert surrogate("none") == pytest.approx((-1.1, -1.1), abs=1e-6)


def test_correction_is_capped_and_masked():
    prox, mu = tensor([[-0.1, -1.0, 0.0]]), tensor([[-3.0, -0.5, -500.0]])
    _, is_weights = ppo_v2.behaviour_correction(prox, mu, tensor([[1.0, 1, 0]]), "decoupled", cap=2.0)
    assert is_weights.tolist()[0] == pytest.approx([2.0, math.exp(-0.5), 1.0])


@pytest.mark.parametrize(
    "batch, sample, reuse, eff", [(16, 32, 4, 3.0), (64, 32, 4, 1.5), (4, 32, 4, 5.0), (32, 64, 8, 3.0)]
)
def test_forecast(batch, sample, reuse, eff):
    assert ppo_v2.forecast_efficiency(batch, sample, reuse)[0] == eff


def test_memory_of_a_thousand_answers():
    buffer = ppo_v2.ReplayBuffer(0.6, None, False)
    mask = torch.ones(1000, 256)
    batch = dict(prompt_ids=torch.ones(1000, 256, dtype=int), response_ids=mask.long(), scores=torch.zeros(1000))
    batch |= dict.fromkeys(("logprobs", "ref_logprobs", "values", "advantages"), mask)
    buffer.add(batch, mask, torch.ones(1000, 256, dtype=int), 1)
    held = sum(t.untyped_storage().nbytes() for sample in buffer.samples.values() for t in sample.values())
    assert 5e6 < held < 10e6, "a view of the padded batch would hold all of it"


# --- off is the parent ---
def test_without_replay_it_is_v1(tmp_path, monkeypatch):
    def poisoned(self, *args, **kwargs):
        raise AssertionError("the buffer must not be touched")

    for name in ("add", "draw", "evict", "refresh"):
        monkeypatch.setattr(ppo_v2.ReplayBuffer, name, poisoned)
    run(tmp_path / "v1", ppo_v1, exp_name="same", save_every=1)
    run(tmp_path / "v2", exp_name="same", save_every=1)
    assert_same_run(tmp_path / "v1", tmp_path / "v2")
    a, b = (ppo_v1.load_checkpoint(tmp_path / v / "checkpoints" / "checkpoint_00000002.pt") for v in ("v1", "v2"))
    assert a.keys() == b.keys() and a["counters"] == b["counters"] and a["controls"] == b["controls"]
    assert all(torch.equal(a["policy"][key], b["policy"][key]) for key in a["policy"])


def test_before_the_first_draw_it_is_v1(tmp_path):
    """Storing alone changes nothing: same numbers until the minimum size is reached."""
    run(tmp_path / "v1", ppo_v1, num_iterations=4)
    run(tmp_path / "v2", **REPLAY | dict(min_replay_size=24, num_iterations=4))
    v1, v2 = metrics_without_times(tmp_path / "v1"), metrics_without_times(tmp_path / "v2")
    same = [all(row[key] == old[key] for key in old) for old, row in zip(v1, v2, strict=True)]
    assert same == [True, True, True, True, False]


# --- through the training step ---
def spy(monkeypatch, name):
    """Record arguments and results of a function that main() calls."""
    calls, real = [], getattr(ppo_v2, name)

    def wrapped(*args, **kwargs):
        calls.append((args, kwargs, real(*args, **kwargs)))
        return calls[-1][2]

    monkeypatch.setattr(ppo_v2, name, wrapped)
    return calls


@pytest.mark.parametrize("prioritized", [False, True])
def test_unchanged_weights_give_ratio_and_weight_one(prioritized, tmp_path, monkeypatch):
    updates = spy(monkeypatch, "policy_loss")
    run(tmp_path / "run", **REPLAY, learning_rate=1e-30, use_priority_sampling=prioritized)
    rows = metrics_without_times(tmp_path / "run")[2:]
    for row in rows:
        assert row["replay/is_mean"] == pytest.approx(1, abs=1e-5) and row["replay/ess"] == pytest.approx(1, abs=1e-5)
        assert row["losses/first_ratio_error"] < 1e-5 and row["replay/kl_behaviour"] < 1e-9
    for _, _, (_, ratio, _) in updates:
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


@pytest.mark.parametrize("correction", ["decoupled", "behaviour", "none"])
def test_fresh_rows_have_weight_one_and_stale_rows_their_own(correction, tmp_path, monkeypatch):
    updates = spy(monkeypatch, "policy_loss")
    run(tmp_path / "run", **REPLAY, learning_rate=1e-3, replay_correction=correction)
    stale = torch.cat([args[4][4:].flatten() for args, _, _ in updates if len(args[4]) > 4])
    fresh = torch.cat([args[4][:4].flatten() for args, _, _ in updates])
    assert (fresh == 1).all() and len(stale) > 100
    assert ((stale - 1).abs().max() > 1e-3) == (correction == "decoupled") and stale.max() <= 2
    first = next(args for args, _, _ in updates if len(args[4]) > 4)
    error = ((first[0] - first[1]) * first[3])[4:].abs().max()
    assert (error > 1e-4) == (correction == "behaviour"), (
        "the ratio of a stale row starts at 1 unless it is taken to mu"
    )


def test_every_minibatch_mixes_in_proportion(tmp_path, monkeypatch):
    updates = spy(monkeypatch, "policy_loss")
    options = REPLAY | dict(num_minibatches=4, update_epochs=1, num_iterations=3)
    run(tmp_path / "run", **options | dict(new_samples_ratio=0.5, replay_sample_size=ppo_v2.Args.replay_sample_size))
    assert [len(args[0]) for args, _, _ in updates] == [2] * 4 + [4] * 8
    for args, _, _ in updates[4:]:
        assert (args[4][:2] == 1).all()


def test_replay_epochs(tmp_path, monkeypatch):
    updates = spy(monkeypatch, "policy_loss")
    run(tmp_path / "run", **REPLAY | dict(update_epochs=3, replay_epochs=1, num_iterations=2))
    assert [len(args[0]) for args, _, _ in updates] == [4] * 6 + [8, 8] + [4] * 4


def test_efficiency_counts_what_entered_an_update(tmp_path):
    """Batch 4, then 0, 2 and 4 drawn: (4 + 6 + 8) / 12 = 1.5. The buffer holds 2 rollouts before iteration 2."""
    options = dict(batch_size=4, num_iterations=3, min_replay_size=2, replay_sample_size=4)
    options |= dict(replay_start_size=2, replay_grow_iteration=2)
    run(tmp_path / "run", **REPLAY | options)
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["sample_efficiency"] for row in rows] == pytest.approx([1, 10 / 8, 1.5])
    assert [row["replay_ratio"] for row in rows] == pytest.approx([0, 2 / 8, 6 / 12])


def test_efficiency_comes_near_its_forecast(tmp_path, capsys):
    """Scenario 1 with a batch of 16: 32 drawn per 16 sampled."""
    options = dict(
        use_replay_buffer=True, batch_size=16, num_iterations=260, num_minibatches=1, update_epochs=1, eval_every=0
    )
    metrics = run(tmp_path / "run", **options, max_response_length=2, sft_steps=0, eval_size=1)
    assert metrics["sample_efficiency"] == pytest.approx(2.99, abs=0.05)
    out = capsys.readouterr().out
    assert "EFF will come near 3.00x (limited by 32 drawn per 16 generated)" in out
    line = [line for line in out.splitlines() if line.startswith("[260/260]")][0]
    assert re.fullmatch(r"\[260/260\] PL:-?\d+\.\d\d VL:\d+\.\d\d R:-?\d+\.\d\d BUF:\d+ EFF:(2\.9|3\.0)x", line), line


def test_a_rollout_is_drawn_at_most_max_reuse_times(tmp_path, monkeypatch):
    drawn = []
    real = ppo_v2.ReplayBuffer.draw

    def draw(self, *args):
        uids, draw_weights = real(self, *args)
        births = dict(zip(self.uids.tolist(), self.births.tolist(), strict=True))
        drawn.append([(uid, births[uid]) for uid in uids.tolist()])
        return uids, draw_weights

    monkeypatch.setattr(ppo_v2.ReplayBuffer, "draw", draw)
    options = dict(max_replay_reuse=2, staleness_threshold=3, replay_sample_size=16, num_iterations=10)
    metrics = run(tmp_path / "run", **REPLAY | options)
    counts = {}
    for iteration, uids in enumerate(drawn, start=2):
        assert len(set(uids)) == len(uids)
        for uid, birth in uids:
            assert 1 <= iteration - birth <= 3, "older rollouts only, and none beyond the threshold"
            counts[uid] = counts.get(uid, 0) + 1
    assert max(counts.values()) == 2
    assert metrics["sample_efficiency"] == pytest.approx((80 + sum(map(len, drawn))) / 80)


def test_a_sample_counts_by_its_weight(tmp_path, monkeypatch):
    """Rows of weight 0 may hold any advantage and return; rows of weight 1 may not."""
    real = ppo_v2.bring_up_to_date

    def edited(weight, junk):
        def wrapped(*args):
            batch, advantages, drift = real(*args)
            batch["weights"] = torch.full_like(batch["logprobs"], weight)
            batch["advantages"] = batch["advantages"] + junk
            batch["returns"] = batch["returns"] + junk
            return batch, advantages, drift

        return wrapped

    for weight in (0.0, 0.5, 1.0):
        for junk in (0.0, 3.0):
            monkeypatch.setattr(ppo_v2, "bring_up_to_date", edited(weight, junk))
            run(tmp_path / f"{weight}.{junk}", **REPLAY | dict(num_iterations=2, eval_every=0))
    same = [weights(tmp_path / f"{weight}.{junk}") for weight in (0.0, 1.0) for junk in (0.0, 3.0)]
    assert all(torch.equal(same[0][key], same[1][key]) for key in same[0])
    assert any(not torch.equal(same[2][key], same[3][key]) for key in same[2])


@pytest.mark.parametrize("kind, moves", [("positive", False), ("all", True)])
def test_the_critic_learns_from_fresh_rollouts_only(kind, moves, tmp_path, monkeypatch):
    """Any return of a drawn row leaves the weights alone, unless all advantages are replayed."""
    real, negative = ppo_v2.bring_up_to_date, []

    def edited(junk):
        def wrapped(*args):
            batch, advantages, drift = real(*args)
            negative.append((batch["advantages"] < 0).any().item())
            return batch | {"returns": batch["returns"] + junk}, advantages, drift

        return wrapped

    for junk in (0.0, 3.0):
        monkeypatch.setattr(ppo_v2, "bring_up_to_date", edited(junk))
        run(tmp_path / f"{junk}", **REPLAY, eval_every=0, replay_advantages=kind)
    a, b = weights(tmp_path / "0.0"), weights(tmp_path / "3.0")
    assert any(not torch.equal(a[key], b[key]) for key in a) == moves == any(negative)


def test_drawn_data_is_what_was_sampled(tmp_path, monkeypatch):
    """Tokens, scores and behaviour log-probs come back as they went in, through padding and the checkpoint format."""
    stored, drawn = {}, []
    real_add, real_update = ppo_v2.ReplayBuffer.add, ppo_v2.bring_up_to_date

    def add(self, batch, mask, prompt_mask, iteration):
        for i in range(len(mask)):
            n, p = int(mask[i].sum()), int(prompt_mask[i].sum())
            key = tuple(batch["prompt_ids"][i, -p:].tolist()), tuple(batch["response_ids"][i, :n].tolist())
            stored.setdefault(key, []).append((batch["logprobs"][i, :n].clone(), batch["scores"][i].item()))
        real_add(self, batch, mask, prompt_mask, iteration)

    def update(policy, samples, *rest):
        result = real_update(policy, samples, *rest)
        drawn.append((samples, result[0]))
        return result

    monkeypatch.setattr(ppo_v2.ReplayBuffer, "add", add)
    monkeypatch.setattr(ppo_v2, "bring_up_to_date", update)
    run(tmp_path / "run", **REPLAY)
    assert len(drawn) == 4
    for samples, batch in drawn:
        for i, sample in enumerate(samples):
            n, p = int(batch["response_mask"][i].sum()), int(batch["prompt_mask"][i].sum())
            key = tuple(batch["prompt_ids"][i, -p:].tolist()), tuple(batch["response_ids"][i, :n].tolist())
            match = [s for s in stored[key] if torch.equal(s[0], sample["logprobs"])]
            assert match and sample["scores"].item() == match[0][1]


def test_replay_max_kl_leaves_far_rollouts_out(tmp_path, monkeypatch):
    updates = spy(monkeypatch, "policy_loss")
    metrics = run(tmp_path / "run", **REPLAY, learning_rate=3e-3, replay_max_kl=1e-12)
    assert all(len(args[0]) == 4 for args, _, _ in updates) and metrics["sample_efficiency"] == 1
    assert metrics["replay/kl_behaviour"] > 1e-12


def test_a_nan_reward_is_never_drawn(tmp_path):
    """It costs the update of its own iteration; the buffer does not bring it back."""
    path = tmp_path / "reward.py"
    path.write_text(
        "calls = {'n': 0}\n"
        "def mine(prompts, responses, answers):\n"
        "    calls['n'] += 1\n"  # call 1 is the evaluation of the start policy
        "    return [float('nan') if calls['n'] == 3 and i == 1 else len(r) for i, r in enumerate(responses)]\n"
    )
    options = REPLAY | dict(reward_fn=f"{path}:mine", eval_every=0, replay_sample_size=32, use_priority_sampling=True)
    run(tmp_path / "run", **options)
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["losses/skipped_steps"] for row in rows] == [0, 4, 4, 4, 4]
    assert [row["buffer_size"] for row in rows] == [8, 15, 23, 31, 39]  # seven of the second iteration's eight


def test_adaptive_reuse_follows_the_last_kl(tmp_path, monkeypatch):
    limits, real = [], ppo_v2.ReplayBuffer.draw

    def draw(self, size, iteration, max_reuse, *rest):
        limits.append((iteration, max_reuse))
        return real(self, size, iteration, max_reuse, *rest)

    monkeypatch.setattr(ppo_v2.ReplayBuffer, "draw", draw)
    options = REPLAY | dict(adaptive_reuse=True, num_iterations=14, replay_sample_size=32, eval_every=0)
    run(tmp_path / "run", **options, learning_rate=1e-2)
    kl = [row.get("losses/approx_kl") for row in metrics_without_times(tmp_path / "run")]
    for iteration, limit in limits:
        assert limit == (6 if kl[iteration - 1] < 0.01 else 2)
    assert {limit for _, limit in limits} == {2, 6}, "both must occur for this test to mean something"


def test_a_rollout_above_the_limit_pauses():
    buffer = filled([1, 1], [3, 1])
    uids, _ = buffer.draw(2, 2, max_reuse=2, beta=0.4, rng=np.random.default_rng(0))
    buffer.evict(2, max_age=9, max_reuse=6, capacity=9)
    assert uids.tolist() == [1] and len(buffer) == 2


def test_buffer_grows(tmp_path):
    run(tmp_path / "run", **REPLAY | dict(replay_start_size=10, replay_grow_iteration=4, replay_buffer_size=20))
    sizes = [row["buffer_size"] for row in metrics_without_times(tmp_path / "run")[1:]]
    assert sizes == [8, 10, 10, 18, 20]


def test_beta_rises_after_each_draw(tmp_path):
    run(tmp_path / "run", **REPLAY, use_priority_sampling=True, priority_beta=0.99, priority_beta_increment=0.004)
    betas = [row["replay/beta"] for row in metrics_without_times(tmp_path / "run")[1:]]
    assert betas == pytest.approx([0.99, 0.994, 0.998, 1.0, 1.0])


# --- resume, ranks, seeds ---
LONG = REPLAY | dict(num_iterations=8, save_every=1, use_priority_sampling=True, adaptive_reuse=True)


def test_killed_with_a_buffer(tmp_path):
    run(tmp_path / "whole", **LONG)
    for nth, where in ((2, "half"), (2, "after rename"), (1, "before rename")):

        def target(nth=nth, where=where):
            import os
            import sys

            sys.stdout = sys.stderr = open(os.devnull, "w")
            die_while_saving(nth, where)
            run(tmp_path / "killed", **LONG, resume="auto")

        process = fork.Process(target=target)
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    run(tmp_path / "killed", **LONG, resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    a, b = (
        ppo_v2.load_checkpoint(tmp_path / r / "checkpoints" / "checkpoint_00000008.pt") for r in ("whole", "killed")
    )
    assert a["replay"]["rng"] == b["replay"]["rng"] and a["replay"]["counters"] == b["replay"]["counters"]
    for key in ("uids", "births", "reuses", "priorities"):
        assert torch.equal(a["replay"]["buffer"][key], b["replay"]["buffer"][key])


def test_two_ranks_replay_like_one(tmp_path, monkeypatch):
    import test_v1

    monkeypatch.setattr(test_v1, "ppo_v1", ppo_v2)
    monkeypatch.setattr(test_v1, "run", run)
    options = REPLAY | dict(num_iterations=2, learning_rate=1e-3)
    run(tmp_path / "one", **options)
    assert launch(tmp_path / "two", 2, **options) == [0, 0]
    one, two = metrics_without_times(tmp_path / "one")[2], metrics_without_times(tmp_path / "two")[2]
    assert one.keys() == two.keys() and one["replay/is_mean"] != 1
    for key, value in one.items():
        assert two[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key


def readme_scenarios():
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^python ppo_v2\.py (--.*?)\s+# scenario (\d)", text, re.M)


def test_the_five_scenarios_of_the_readme_run(tmp_path):
    import tyro

    scenarios = readme_scenarios()
    assert [number for _, number in scenarios] == ["1", "2", "3", "4", "5"]
    for flags, number in scenarios:
        args = tyro.cli(ppo_v2.Args, args=flags.split())
        changed = {k: v for k, v in vars(args).items() if v != getattr(ppo_v2.Args(), k) and k != "minibatch_size"}
        if args.use_replay_buffer:
            changed["min_replay_size"] = 8
        metrics = run(tmp_path / number, **changed)
        assert (metrics.get("sample_efficiency", 1) > 1) == args.use_replay_buffer == (number != "5")


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(replay_sample_size=0), ["--replay-sample-size 0", "1 or more"]),
        (dict(priority_alpha=1.5), ["--priority-alpha 1.5", "between 0 and 1"]),
        (dict(priority_beta=-0.1), ["--priority-beta -0.1", "between 0 and 1"]),
        (dict(staleness_threshold=0), ["--staleness-threshold 0", "1 or more"]),
        (dict(max_replay_reuse=0), ["--max-replay-reuse 0"]),
        (dict(min_replay_size=2000), ["--min-replay-size 2000", "1000"]),
        (
            dict(min_replay_size=100, batch_size=4, num_minibatches=2, staleness_threshold=10),
            ["--min-replay-size 100", "40"],
        ),
        (dict(new_samples_ratio=1.5), ["--new-samples-ratio 1.5"]),
        (dict(new_samples_ratio=0.0), ["--new-samples-ratio 0.0"]),
        (dict(replay_is_cap=0.0), ["--replay-is-cap 0.0", "positive"]),
        (dict(new_samples_ratio=0.5, replay_sample_size=9), ["--replay-sample-size 9", "--new-samples-ratio"]),
    ],
)
def test_bad_options(options, words, capsys):
    fails(capsys, lambda: ppo_v2.Args(use_replay_buffer=True, **options), *words)


@pytest.mark.parametrize(
    "name, value", [("replay_buffer_size", 7), ("priority_age_tau", None), ("adaptive_reuse", True)]
)
def test_replay_options_need_replay(name, value, capsys):
    flag = "--" + name.replace("_", "-")
    fails(capsys, lambda: ppo_v2.Args(**{name: value}), f"{flag} {value}", "left out without --use-replay-buffer")


def test_a_run_too_short_for_its_buffer_is_told(tmp_path, capsys):
    run(tmp_path / "run", use_replay_buffer=True, min_replay_size=17)
    assert "the 16 rollouts before the last update never reach --min-replay-size" in capsys.readouterr().out
