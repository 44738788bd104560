"""ppo_v2.py: replay, lag and corrections by hand, and through the real training step."""

import json
import math
import sys
from collections import Counter

import pytest
import torch
from conftest import REPLAY, metrics_without_times, run, same, spy, weights
from matplotlib.axes import Axes
from test_v1 import faulty_reward
from torch import tensor

import ppo_v2

LONG = REPLAY | dict(num_iterations=5)
PER = [0.2077657, 0.3149140, 0.4773203]  # (1, 2, 4) ** 0.6, normalised


def filled(births, reuses, priorities=None, size=1, **options):
    """A buffer with these samples, one token each, that draws `size`."""
    options = (
        dict(priority_alpha=0.6, priority_age_tau=None, replay_advantages="all", min_replay_size=1)
        | options
    )
    options = dict(replay_sample_size=size, max_replay_reuse=10**9) | options
    buffer = ppo_v2.ReplayBuffer(ppo_v2.Args(use_replay_buffer=True, **options))
    for i, birth in enumerate(births):
        one = torch.ones(1, 1)
        rows = dict.fromkeys(ppo_v2.STORED, one) | dict(scores=tensor([float(i)]), ended=one[0])
        buffer.add(
            rows | dict(advantages=one * (priorities[i] - 1e-6 if priorities else 1.0)), birth
        )
    buffer.rows["reuse"] = tensor(reuses)
    return buffer


def frequencies(buffer, iteration=2, draws=4000):
    """How much of what is drawn is each sample."""
    torch.manual_seed(0)
    drawn = [i for _ in range(draws) for i in buffer.draw(iteration, 0.0)[0].tolist()]
    return [drawn.count(i) / len(drawn) for i in range(len(buffer))]


# --- which are drawn ---
def test_priorities_are_mean_gains_or_mean_sizes():
    advantages, mask = tensor([[2.0, -4.0, 1.0], [-3.0, -3.0, 9.0]]), tensor([[1, 1, 1], [1, 1, 0]])
    for kind, expected in (("positive", [1 + 1e-6, 1e-6]), ("all", [7 / 3 + 1e-6, 3 + 1e-6])):
        buffer = filled([], [], priority_alpha=1.0, replay_advantages=kind)
        found = buffer.priorities(dict(advantages=advantages, response_mask=mask)).tolist()
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_draws_follow_the_priorities_with_replacement(size):
    assert frequencies(filled([1, 1, 1], [0, 0, 0], [1, 2, 4], size)) == pytest.approx(
        PER, abs=0.025
    )


def test_an_iteration_counts_once_however_often_it_draws_a_rollout():
    buffer = filled([1, 1, 1], [0, 0, 0], [1, 2, 1e9], size=3)
    assert buffer.draw(2, 0.0)[0].tolist() == [2] * 3
    assert buffer.rows["reuse"].tolist() == [0, 0, 1] and buffer.num_reused == 1


def test_the_odds_of_a_rollout_fall_with_its_age():
    young = frequencies(filled([0, 10], [0, 0], priority_age_tau=10.0), iteration=10)[1]
    assert young == pytest.approx(1 / (1 + math.exp(-1)), abs=0.025)


@pytest.mark.parametrize("tau", [None, 50.0])
def test_priorities_that_underflow_can_still_be_drawn(tau):
    """(1e-6) ** 60 is 0 as a double: if no rollout has a gain, all odds were 0 / 0."""
    options = dict(priority_alpha=60.0, replay_advantages="positive", priority_age_tau=tau)
    buffer = filled([1, 1, 1], [0, 0, 0], [0, 0, 0], size=3, **options)
    assert buffer.rows["priority"].tolist() == [0, 0, 0]
    indices, sample_weights = buffer.draw(2, 0.0)
    assert len(indices) == 3 and sample_weights.tolist() == [1, 1, 1]


def test_uniform_draws_weigh_one():
    options = dict(use_priority_sampling=False, priority_alpha=1.0, priority_beta=1.0)
    for size in (1, 4, 6):
        buffer = filled([1] * 6, [0] * 6, [1, 2, 3, 4, 5, 6], size, **options)
        assert buffer.draw(2, 0.0)[1].tolist() == pytest.approx([1] * size)
    assert frequencies(buffer, draws=1000) == pytest.approx([1 / 6] * 6, abs=0.025)


def test_weights_of_prioritized_draws_by_hand():
    torch.manual_seed(0)
    found = {}
    while len(found) < 3:  # until a draw of three holds each: the largest weight drawn is 1
        buffer = filled([1, 1, 1], [0, 0, 0], [1, 2, 4], 3, priority_beta=0.4)
        indices, sample_weights = buffer.draw(2, 0.0)
        found = dict(zip(indices.tolist(), sample_weights.tolist(), strict=True))
    assert [found[i] for i in range(3)] == pytest.approx([1, 0.8467453, 0.7169776], abs=1e-6)


# --- how long they stay ---
def test_the_old_and_the_often_drawn_go_then_the_oldest():
    buffer = filled([1, 2, 3, 4, 5, 6], [0, 4, 3, 0, 0, 0])
    stats = dict(
        buffer_size=6, avg_reuse_count=7 / 6, max_reuse_count=4, avg_age=2.5, oldest_sample=1
    )
    assert buffer.buffer_stats(6) == pytest.approx(stats)
    nothing = {name: x[:0] for name, x in buffer.rows.items()}
    for iteration, size, left in ((4, 9, [1, 3, 4, 5, 6]), (5, 9, [3, 4, 5, 6]), (5, 3, [4, 5, 6])):
        limits = dict(
            staleness_threshold=4, max_replay_reuse=4, replay_buffer_size=size, min_replay_size=1
        )
        buffer.args = ppo_v2.Args(use_replay_buffer=True, **limits)
        buffer.add(nothing, iteration)  # what is left can be drawn in the next
        assert buffer.rows["birth"].tolist() == left and len(buffer) == len(left)


@pytest.mark.parametrize("kl, drawn", [(0.009, {0, 1, 2}), (0.01, {1, 2})])
def test_while_the_policy_moves_fast_rollouts_drawn_often_wait(kl, drawn):
    """Limit 6, a third of it with a KL of .01 or more; what waits is not evicted."""
    buffer = filled([1, 1, 1], [3, 1, 0], size=3, adaptive_reuse=True, max_replay_reuse=6)
    seen = set()
    for seed in range(40):
        torch.manual_seed(seed)
        indices, sample_weights = buffer.draw(2, kl)
        seen |= set(indices.tolist())
        assert len(sample_weights) == len(drawn)
        buffer.rows["reuse"] = tensor([3, 1, 0])
    buffer.add({name: x[:0] for name, x in buffer.rows.items()}, 2)
    assert seen == drawn and len(buffer) == 3


def test_an_empty_buffer_draws_nothing_and_has_statistics():
    buffer = ppo_v2.ReplayBuffer(ppo_v2.Args(use_replay_buffer=True))
    assert len(buffer.draw(2, 0.0)[0]) == 0 and buffer.buffer_stats(1)["buffer_size"] == 0
    full = filled([1, 2], [0, 0], max_replay_reuse=3)
    full.rows["reuse"] += 3
    full.add({name: x[:0] for name, x in full.rows.items()}, 2)  # a batch of NaN scores
    assert len(full) == 0 and full.buffer_stats(2)["avg_reuse_count"] == 0


# --- what they count for ---
def test_staleness_by_hand():
    """Weights of the draw 4, 1, 1, 1 where nothing is stale; a token that is now three times as likely counts 2."""
    same, one = torch.full((4, 1), -1.0), torch.ones(4, 1)
    rows = dict(logprobs=same, mu_logprobs=same, response_mask=one)
    rows |= dict(values=one * tensor([[0.5], [1], [1], [1]]), mu_values=one)
    found = ppo_v2.staleness(rows, tensor([[4.0], [1], [1], [1]]), "x")
    assert found["x/ess"] == pytest.approx(0.6447368, abs=1e-6)
    rows |= dict(logprobs=same + tensor([[math.log(3)], [0], [0], [0]]))
    found = ppo_v2.staleness(rows, 1.0, "x")
    expected = {"x/ess": 25 / 28, "x/value_drift": 0.125}
    expected["x/kl_behaviour"] = (3 - 1 - math.log(3)) / 4
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "correction, advantage, limit, gradient",
    [
        ("none", 1, None, -1.1),
        ("behaviour", 1, None, 0.0),  # its clip is spent
        ("decoupled", 1, None, -2.2),
        ("decoupled", 1, 1.5, -1.65),
        ("cispo", 1, None, -2.2),
        ("cispo", 1, 0.5, -1.5),
        ("dppo", 1, None, 0.0),  # .55 - .25 > .2
        ("dppo", 1, 0.31, -2.2),
        ("dppo", -1, None, 2.2),  # a step back towards mu is free
        ("m2po", 1, None, 0.0),  # (log 2.2)^2 = .62 > .04
        ("m2po", 1, 0.63, -2.2),
        ("m2po", -1, None, 2.2),
    ],
)
def test_corrections_by_hand(correction, advantage, limit, gradient):
    """mu .25, prox .5, pi .55: the weight of the token in the gradient; the loss is that weight, too."""
    mu, prox, pi = (torch.full((1, 1), math.log(p)) for p in (0.25, 0.5, 0.55))
    pi, one = pi.requires_grad_(), torch.ones(1, 1)
    tokens = dict(logprobs=prox, mu_logprobs=mu, advantages=advantage * one, response_mask=one)
    args = ppo_v2.Args(rollout_lag=1, correction=correction, correction_limit=limit)
    loss, dropped = ppo_v2.stale_policy_loss(pi, tokens, one > 0, args)
    loss.sum().backward()
    assert (loss.item(), pi.grad.item()) == pytest.approx((gradient, gradient), abs=1e-6)
    assert dropped.item() == (gradient == 0)


@pytest.mark.parametrize("norm_adv", [False, True])
def test_drawn_gains_are_cut_at_zero_and_keep_their_scale(norm_adv, tmp_path, monkeypatch):
    seen, drawn = spy(monkeypatch, ppo_v2, "ppo_loss"), spy(monkeypatch, ppo_v2, "draw_batch")
    options = LONG | dict(update_epochs=1, num_minibatches=1, norm_adv=norm_adv)
    run(ppo_v2, tmp_path / "run", **options)
    mixed = [mb for (_, mb, *_), _ in seen if mb["is_replayed"].any()]
    assert len(mixed) == 4
    for mb, (_, rows) in zip(mixed, [call for call in drawn if call[1]], strict=True):
        gains = (rows["returns"] - rows["values"]).clamp(min=0) * rows["response_mask"]
        used = mb["advantages"][mb["is_replayed"].flatten() > 0]
        assert used.sum().item() == pytest.approx(gains.sum().item(), rel=1e-4)


def test_fresh_and_drawn_rows_are_whitened_apart(tmp_path, monkeypatch):
    seen = spy(monkeypatch, ppo_v2, "ppo_loss")
    run(
        ppo_v2,
        tmp_path / "run",
        **LONG,
        norm_adv=True,
        replay_advantages="all",
        update_epochs=1,
        num_minibatches=1,
    )
    mixed = [mb for (_, mb, *_), _ in seen if mb["is_replayed"].any()]
    assert mixed
    for mb in mixed:
        for old in (0, 1):
            valid = mb["advantages"][(mb["response_mask"] > 0) & (mb["is_replayed"] == old)]
            assert valid.mean().abs() < 1e-5 and valid.std(unbiased=False).item() == pytest.approx(
                1, abs=1e-3
            )


def test_joined_rows_are_padded_left_of_prompts_and_right_of_responses():
    short = dict(prompt_ids=tensor([[1, 2]]), response_ids=tensor([[3]]), scores=tensor([0.5]))
    long = dict(prompt_ids=tensor([[4, 5, 6]]), response_ids=tensor([[7, 8]]), scores=tensor([1.0]))
    found = {name: x.tolist() for name, x in ppo_v2.join([short, long]).items()}
    assert found == dict(
        prompt_ids=[[0, 1, 2], [4, 5, 6]], response_ids=[[3, 0], [7, 8]], scores=[0.5, 1.0]
    )


# --- through the training step ---
def minibatches(monkeypatch):
    """-> list that main() fills with the rows and the numbers of each optimizer step"""
    seen, real = [], ppo_v2.ppo_loss

    def wrapped(policy, mb, num_tokens, args):
        with torch.no_grad():
            now = ppo_v2.logprobs_and_values(policy, mb)[0]
        loss, stats = real(policy, mb, num_tokens, args)
        seen.append(mb | dict(now=now, stats=stats, num_tokens=num_tokens))
        return loss, stats

    monkeypatch.setattr(ppo_v2, "ppo_loss", wrapped)
    return seen


def token_loss(correction, new, prox, mu, advantage):
    """An independent reading of the table of corrections, one token, plain floats.

    A stale token outside its clip has no gradient, and its loss is 0; a fresh one ("fresh") has PPO's value.
    """

    def surrogate(ratio):
        return max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))

    def clipped(ratio):
        return -advantage * ratio if surrogate(ratio) == -advantage * ratio else 0.0

    ratio, step = math.exp(new - mu), math.exp(new) - math.exp(mu)
    away = step > 0.2 if advantage > 0 else step < -0.2
    return {
        "fresh": surrogate(math.exp(new - prox)),
        "none": clipped(math.exp(new - prox)),
        "behaviour": clipped(ratio),
        "decoupled": min(math.exp(prox - mu), 2.0) * clipped(math.exp(new - prox)),
        "cispo": -advantage * min(ratio, 5.0),
        "dppo": 0.0 if away and advantage else -advantage * ratio,
        "m2po": -advantage * ratio,  # less what `over_budget` names
    }[correction]


def over_budget(tokens, limit=0.04):
    """m2po, one token at a time: [(log ratio, advantage)] -> places of those that are dropped"""
    kept = dict(enumerate(tokens))
    while kept and sum(x**2 for x, _ in kept.values()) / len(kept) > limit:
        away = [i for i, (x, advantage) in kept.items() if x * advantage > 0]
        if not away:
            break
        del kept[max(away, key=lambda i: abs(kept[i][0]))]
    return set(range(len(tokens))) - set(kept)


@pytest.mark.parametrize("correction", ["none", "behaviour", "decoupled", "cispo", "dppo", "m2po"])
@pytest.mark.parametrize("lag", [0, 2])
def test_the_policy_loss_of_every_step_is_that_of_an_oracle(correction, lag, tmp_path, monkeypatch):
    """Fresh or lagged and replayed rows in one minibatch, through main(); weights of the draw included."""
    seen = minibatches(monkeypatch)
    options = dict(
        correction=correction, rollout_lag=lag, replay_advantages="all", learning_rate=5e-3
    )
    run(ppo_v2, tmp_path / "run", **LONG, **options, priority_beta=1.0)
    assert len(seen) == 5 * 4 and sum(mb["is_replayed"].sum() for mb in seen) == 4 * 2 * 8
    for mb in seen:
        valid = [(i, j) for i, j in mb["response_mask"].nonzero().tolist()]
        names = ("now", "logprobs", "mu_logprobs", "advantages")
        tokens = {place: [mb[name][place].item() for name in names] for place in valid}
        stale = [place for place in valid if lag or mb["is_replayed"][place[0]]]
        dropped = (
            over_budget([(tokens[p][0] - tokens[p][2], tokens[p][3]) for p in stale])
            if stale
            else set()
        )
        dropped = {stale[i] for i in dropped} if correction == "m2po" else set()
        total = 0.0
        for place, numbers in tokens.items():
            rule = correction if place in stale else "fresh"
            weight = 0.0 if place in dropped else mb["sample_weights"][place[0]].item()
            total += weight * token_loss(rule, *numbers)
        assert mb["stats"]["policy_loss"].item() == pytest.approx(
            total / mb["num_tokens"].item(), abs=2e-5, rel=1e-3
        )
    drift = max(
        ((mb["logprobs"] - mb["mu_logprobs"]) * mb["response_mask"]).abs().max().item()
        for mb in seen
    )
    assert drift > 0.1, "something must be stale for this test to mean something"


def test_a_lagged_run_samples_with_the_weights_of_so_many_iterations_ago(tmp_path, monkeypatch):
    """And what it trains is the newest: log-probs and values of the update are its own."""
    sampled, learned, real_rollout = [], [], ppo_v2.rollout
    real_outputs = ppo_v2.logprobs_and_values_in_parts

    def rollout(policy, pairs, tokenizer, scorer, args, uniforms=None):
        if uniforms is not None:
            sampled.append([x.clone() for x in policy.parameters()])
        return real_rollout(policy, pairs, tokenizer, scorer, args, uniforms)

    def outputs(model, batch, args):
        if model.lm.lm_head.weight.requires_grad:  # not the reference
            learned.append([x.clone() for x in model.parameters()])
        return real_outputs(model, batch, args)

    monkeypatch.setattr(ppo_v2, "rollout", rollout)
    monkeypatch.setattr(ppo_v2, "logprobs_and_values_in_parts", outputs)
    run(ppo_v2, tmp_path / "run", num_iterations=6, rollout_lag=2)
    rows = metrics_without_times(tmp_path / "run")
    compared = [row["global_step"] for row in rows if "rollout/logprob_mismatch" in row]
    assert compared == [8], "later the sampler is another policy"
    assert len(sampled) == len(learned) == 6
    for i in range(6):
        assert all(map(torch.equal, sampled[i], learned[max(0, i - 2)]))
    assert not torch.equal(learned[0][0], learned[1][0])


def test_drawn_data_is_what_was_sampled(tmp_path, monkeypatch):
    """Tokens, scores and log-probs come back as they went in, through padding and back."""
    stored, ready = (
        spy(monkeypatch, ppo_v2.ReplayBuffer, "add"),
        spy(monkeypatch, ppo_v2, "draw_batch"),
    )
    run(ppo_v2, tmp_path / "run", **LONG, rollout_lag=1)

    def contents(rows):
        """{log-probs: (prompt, response, score)} of rows without their padding"""
        found = {}
        for i, (prompt, response) in enumerate(
            zip(rows["prompt_mask"] > 0, rows["response_mask"] > 0, strict=True)
        ):
            ids = rows["prompt_ids"][i][prompt].tolist(), rows["response_ids"][i][response].tolist()
            found[tuple(rows["mu_logprobs"][i][response].tolist())] = *ids, rows["scores"][i].item()
        return found

    went_in, drawn = {}, [rows for _, rows in ready if rows]
    for (_, rows, _), _ in stored:
        went_in |= contents(rows)
    assert [len(rows["scores"]) for rows in drawn] == [8] * 4
    for rows in drawn:
        assert contents(rows).items() <= went_in.items()


def test_the_weights_of_a_draw_enter_the_update(tmp_path, monkeypatch):
    draws, seen = (
        spy(monkeypatch, ppo_v2.ReplayBuffer, "draw"),
        spy(monkeypatch, ppo_v2, "ppo_loss"),
    )
    options = dict(
        update_epochs=1, num_minibatches=1, use_priority_sampling=True, priority_beta=0.5
    )
    run(ppo_v2, tmp_path / "run", **LONG | options)
    pairs = [
        (given, mb)
        for (_, (_, given)), ((_, mb, *_), _) in zip(draws, seen, strict=True)
        if len(given)
    ]
    assert pairs and all(given.min() < 0.99 for given, _ in pairs)
    for given, mb in pairs:
        drawn = mb["is_replayed"] > 0
        assert mb["sample_weights"][drawn].sort().values.tolist() == given.sort().values.tolist()
        assert (mb["sample_weights"][~drawn] == 1).all()


def test_copies_in_a_draw_are_logged(tmp_path, monkeypatch):
    draws = spy(monkeypatch, ppo_v2.ReplayBuffer, "draw")
    run(ppo_v2, tmp_path / "run", **LONG)
    expected = [len(set(rows.tolist())) / len(rows) for _, (rows, _) in draws if len(rows)]
    rows = metrics_without_times(tmp_path / "run")
    assert [row["replay/distinct_frac"] for row in rows if "replay/ess" in row] == expected
    assert min(expected) < 1


def test_a_draw_refreshes_the_priority(tmp_path, monkeypatch):
    """By today's advantages, which are those of today's critic and policy: returns less values."""
    seen, buffers = spy(monkeypatch, ppo_v2.ReplayBuffer, "priorities"), []
    real = ppo_v2.ReplayBuffer.draw

    def draw(self, iteration, last_kl):
        indices, sample_weights = real(self, iteration, last_kl)
        buffers.append((self, self.rows["priority"][indices].clone() if self.rows else None))
        return indices, sample_weights

    monkeypatch.setattr(ppo_v2.ReplayBuffer, "draw", draw)
    run(ppo_v2, tmp_path / "run", **LONG, replay_advantages="all")
    again = [(rows, new) for (_, rows), new in seen if "returns" in rows]
    assert len(again) == 4
    for rows, new in again:
        size = ((rows["returns"] - rows["values"]).abs() * rows["response_mask"]).sum(1) / rows[
            "response_mask"
        ].sum(1)
        torch.testing.assert_close(new, size.double() + 1e-6, rtol=1e-4, atol=1e-6)
    (buffer, before), new = buffers[-1], again[-1][1]
    born = buffer.rows["birth"][:-8].tolist()  # less what the last iteration has added
    assert len(born) == 32 and (new - before).abs().max() > 1e-2, "they must have moved"
    assert set(new.tolist()) <= set(buffer.rows["priority"].tolist())


def test_every_minibatch_mixes_in_proportion(tmp_path, monkeypatch):
    """Ratio .5, batch 8, 4 minibatches: 2 fresh + 2 replayed each."""
    seen = minibatches(monkeypatch)
    options = dict(num_minibatches=4, update_epochs=1, num_iterations=3, new_samples_ratio=0.5)
    run(
        ppo_v2,
        tmp_path / "run",
        **LONG | options | dict(replay_sample_size=ppo_v2.Args.replay_sample_size),
    )
    counts = [(len(mb["is_replayed"]), mb["is_replayed"].sum().item()) for mb in seen]
    assert counts == [(2, 0)] * 4 + [(4, 2)] * 8


@pytest.mark.parametrize("sample_size, max_reuse", [(8, 4), (64, 2)], ids=["by draws", "by reuse"])
def test_no_rollout_is_drawn_in_its_own_iteration_too_old_or_once_too_often(
    sample_size, max_reuse, tmp_path, monkeypatch
):
    """And EFF counts what entered an update: fresh rollouts, and each drawn one once per update."""
    real, counts = ppo_v2.ReplayBuffer.draw, Counter()

    def draw(self, iteration, last_kl):
        indices, sample_weights = real(self, iteration, last_kl)
        for i in set(indices.tolist()):
            row = {name: self.rows[name][i] for name in ("birth", "prompt_ids", "mu_logprobs")}
            assert 1 <= iteration - row["birth"] <= 20
            counts[str([x[x != 0].tolist() for x in row.values()])] += 1  # less their padding
        return indices, sample_weights

    monkeypatch.setattr(ppo_v2.ReplayBuffer, "draw", draw)
    options = dict(batch_size=4, num_iterations=60, num_minibatches=1, update_epochs=1)
    options |= dict(eval_every=60, eval_size=1, sft_steps=0, max_response_length=2)
    options |= dict(replay_sample_size=sample_size, max_replay_reuse=max_reuse)
    options |= dict(use_priority_sampling=False, priority_age_tau=None, staleness_threshold=20)
    efficiency = run(ppo_v2, tmp_path / "run", **REPLAY | options)["sample_efficiency"]
    assert 2.7 < efficiency <= 3 and max(counts.values()) == max_reuse
    assert efficiency == 1 + counts.total() / (4 * 60)


def test_efficiency_by_hand(tmp_path):
    """Batches of 4; nothing drawn, then 2 rollouts, then 4, all different: (12 + 6) / 12 = 1.5."""
    buffer = filled([1] * 8, [0] * 8)
    buffer.num_reused = 6
    args = ppo_v2.Args(batch_size=4, use_replay_buffer=True)
    assert ppo_v2.stale_metrics({}, {}, buffer, 3, args)["sample_efficiency"] == 1.5


def test_over_a_run_the_buffer_grows_beta_rises_and_the_kl_of_the_last_update_is_known(
    tmp_path, monkeypatch
):
    real, seen, counts = ppo_v2.ReplayBuffer.draw, [], []

    def draw(self, iteration, last_kl):
        seen.append(last_kl)
        counts.append(self.num_draws)
        return real(self, iteration, last_kl)

    monkeypatch.setattr(ppo_v2.ReplayBuffer, "draw", draw)
    sizes = dict(replay_start_size=10, replay_grow_iteration=4, replay_buffer_size=20)
    run(
        ppo_v2, tmp_path / "run", **LONG, **sizes, priority_beta=0.99, priority_beta_increment=0.004
    )
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["buffer_size"] for row in rows] == [8, 10, 10, 18, 20]
    assert counts == [0, 0, 1, 2, 3], "beta rises with every draw that drew something"
    kl = [row["losses/approx_kl"] for row in rows]
    assert seen == [0.0, *kl[:4]] and min(kl) > 0


@pytest.mark.parametrize("kind, moves", [("positive", False), ("all", True)])
def test_the_critic_learns_from_fresh_rollouts_only_with_gains(kind, moves, tmp_path, monkeypatch):
    """Any return of a drawn row leaves the weights alone, unless all advantages are replayed."""
    real, seen, junk = ppo_v2.ppo_loss, [], 0.0

    def wrapped(policy, mb, *rest):
        seen.append(mb)
        return real(policy, mb | {"returns": mb["returns"] + junk * mb["is_replayed"]}, *rest)

    monkeypatch.setattr(ppo_v2, "ppo_loss", wrapped)
    for junk in (0.0, 3.0):
        run(ppo_v2, tmp_path / f"{junk}", **LONG, replay_advantages=kind)
    assert same(weights(tmp_path / "0.0"), weights(tmp_path / "3.0")) != moves
    assert (
        any((mb["advantages"][mb["is_replayed"].flatten() > 0] < 0).any() for mb in seen) == moves
    )


def test_a_nan_reward_never_enters_the_buffer(tmp_path):
    run(ppo_v2, tmp_path / "run", **LONG | faulty_reward(tmp_path))
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["rollout/nan_scores"] for row in rows] == [0, 1, 0, 0, 0]
    assert [row["buffer_size"] for row in rows] == [
        8,
        15,
        23,
        31,
        39,
    ]  # seven of the second iteration's eight
    assert all(value is not None for row in rows for value in row.values())


# --- logged rollouts ---
@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The log of a run of three iterations of eight answers."""
    folder = tmp_path_factory.mktemp("logged") / "run"
    run(ppo_v2, folder, log_rollouts=True)
    return folder / "rollouts.jsonl"


def test_a_run_begins_with_the_log_of_another(logged, tmp_path, monkeypatch):
    """Everything is in the buffer before the first iteration, as it was sampled, and is drawn in it."""
    lines = [json.loads(line) for line in open(logged)]
    draws = spy(monkeypatch, ppo_v2, "draw_batch")
    run(ppo_v2, tmp_path / "run", **LONG, replay_from=str(logged))
    (buffer, _, _, iteration, _), drawn = draws[0]
    assert len(lines) == 24 and iteration == 1 and len(drawn["scores"]) == 8

    def contents(rows):
        masks = [rows[f"{name}_mask"].bool() for name in ("prompt", "response", "response")]
        names = zip(("prompt_ids", "response_ids", "mu_logprobs"), masks, strict=True)
        columns = [
            [tuple(x[keep].tolist()) for x, keep in zip(rows[name], mask, strict=True)]
            for name, mask in names
        ]
        return list(zip(*columns, rows["scores"].tolist(), strict=True))

    logged = [
        (*(tuple(x[k]) for k in ("prompt_ids", "response_ids", "logprobs")), x["score"])
        for x in lines
    ]
    old = {name: x[buffer.rows["birth"] == 0] for name, x in buffer.rows.items()}
    assert sorted(contents(old)) == sorted(logged) and set(contents(drawn)) <= set(logged)


@pytest.mark.parametrize(
    "change",
    ["{", {"score": None}, {"response_ids": [3, 999]}, {"logprobs": [-1.0]},
     {"response_ids": None}, {"prompt_ids": "no ids"}, {"response_ids": [], "logprobs": []},
     {"response_ids": [3, 1], "logprobs": [-1.0, float("nan")]}],
)  # fmt: skip
def test_a_line_of_a_log_that_cannot_be_used_is_named(change, logged, tmp_path):
    lines = open(logged).read().splitlines()
    lines[2] = change if change == "{" else json.dumps(json.loads(lines[2]) | change)
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    with pytest.raises(SystemExit, match=r"log.jsonl, line 3: must have prompt_ids, response_ids"):
        run(ppo_v2, tmp_path / "run", **LONG, replay_from=str(tmp_path / "log.jsonl"))


def test_only_the_lines_that_the_buffer_can_hold_are_read(logged, tmp_path, monkeypatch):
    passes = spy(monkeypatch, ppo_v2, "join")
    options = LONG | dict(num_iterations=1, replay_buffer_size=10, min_replay_size=10)
    run(ppo_v2, tmp_path / "run", **options, replay_from=str(logged))
    (parts,), rows = passes[0]
    lines = [json.loads(line) for line in open(logged)]
    assert len(parts) == 10 and rows["scores"].tolist() == [row["score"] for row in lines[-10:]]


def test_a_log_may_hold_tokens_of_the_model_that_the_tokenizer_does_not_know(logged, tmp_path):
    """Qwen's embedding is larger than its tokenizer, and such a token may be sampled."""
    tokenizer = ppo_v2.make_tiny_tokenizer()
    lm = ppo_v2.make_tiny_lm(tokenizer)
    lm.resize_token_embeddings(len(tokenizer) + 6)
    for part in (lm, tokenizer):
        part.save_pretrained(tmp_path / "model")
    row = json.loads(open(logged).readline())
    row |= dict(response_ids=[len(tokenizer) + 5, 1], logprobs=[-1.0, -1.0])
    (tmp_path / "log.jsonl").write_text((json.dumps(row) + "\n") * 8)
    options = LONG | dict(model_name=str(tmp_path / "model"), num_iterations=1)
    run(ppo_v2, tmp_path / "run", **options, replay_from=str(tmp_path / "log.jsonl"))
    assert metrics_without_times(tmp_path / "run")[1]["buffer_size"] == 16


def test_a_resumed_run_cannot_change_what_its_buffer_began_with(logged, tmp_path, monkeypatch):
    """It needs the file of the start no more."""
    file = tmp_path / "log.jsonl"
    file.write_text(open(logged).read())
    run(ppo_v2, tmp_path / "run", **LONG, replay_from=str(file))
    file.unlink()
    words = ["ppo_v2.py", "--run-dir", str(tmp_path / "run"), "--resume"]
    monkeypatch.setattr(sys, "argv", words)
    assert ppo_v2.parse_args().replay_from == str(file)
    for option, value in (
        ("--replay-from", str(logged)),
        ("--temperature", "0.5"),
        ("--kl-coef", "0"),
        ("--rollout-lag", "2"),
    ):
        monkeypatch.setattr(sys, "argv", [*words, option, value])
        with pytest.raises(SystemExit, match=f"--resume cannot change {option} from"):
            ppo_v2.parse_args()


def test_curves_show_what_was_logged(tmp_path, monkeypatch):
    calls = spy(monkeypatch, Axes, "plot")
    run(ppo_v2, tmp_path / "run", **LONG)
    labels = [line.get_label() for _, (line,) in calls]
    assert "replay/kl_behaviour" in labels and "replay/ess" in labels
    assert not [label for label in labels if label.startswith("lag/")]


def test_a_log_that_is_continued_with_and_without_its_option_keeps_its_lines(tmp_path):
    def responses(iterations, **options):
        more = dict(num_iterations=iterations, save_every=1, resume=True)
        run(ppo_v2, tmp_path / "run", **more, **options)
        lines = open(tmp_path / "run" / "rollouts.jsonl", encoding="utf-8")
        return Counter(json.loads(line)["global_step"] for line in lines)

    assert responses(1, log_rollouts=True) == {8: 8}
    assert responses(2) == {8: 8}
    assert responses(3, log_rollouts=True) == {8: 8, 24: 8}


# --- options ---
@pytest.mark.parametrize(
    "options, message",
    [
        (dict(rollout_lag=1, correction="m2po", gradient_accumulation_steps=2), "whole minibatch"),
        (dict(rollout_lag=1, dual_clip=3.0), "do nothing with a lag"),
        (dict(correction_limit=0.1), "--correction and --correction-limit need a lag"),
        (dict(rollout_lag=1, correction="none", correction_limit=0.1), "has no --correction-limit"),
        (dict(rollout_lag=-1), "--rollout-lag must not be negative"),
        (dict(use_replay_buffer=True, replay_sample_size=3, batch_size=8, num_minibatches=4),
         "3 drawn rollouts are too few"),
        (dict(use_replay_buffer=True, min_replay_size=9000), "--replay-buffer-size is below"),
        (dict(use_replay_buffer=True, batch_size=8, staleness_threshold=10), "is never reached"),
        (dict(use_replay_buffer=True, priority_beta=1.5), "--priority-beta must be from 0 to 1"),
        (dict(use_replay_buffer=True, new_samples_ratio=1.0), "0 drawn rollouts are too few"),
        (dict(priority_alpha=0.5), "--priority-alpha needs --use-replay-buffer"),
        (dict(rollout_lag=1, ref_kl_target=0.1), "which stale tokens do not measure"),
        (dict(use_replay_buffer=True, adaptive_reuse=True, update_epochs=1),
         "--adaptive-reuse does nothing with one step"),
        (dict(use_replay_buffer=True, max_replay_reuse=0), "--max-replay-reuse must be positive"),
    ],
)  # fmt: skip
def test_options_that_would_do_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ppo_v2.Args(**options)


def test_a_log_that_is_absent_or_empty_is_named(tmp_path):
    file = tmp_path / "log.jsonl"
    with pytest.raises(ValueError, match="log.jsonl is not a file"):
        ppo_v2.Args(use_replay_buffer=True, replay_from=str(file))
    file.touch()
    with pytest.raises(SystemExit, match="log.jsonl is empty"):
        run(ppo_v2, tmp_path / "run", **LONG, replay_from=str(file))


def test_a_log_may_fill_a_buffer_that_fresh_rollouts_never_fill(tmp_path):
    (tmp_path / "log.jsonl").write_text("{}")
    options = dict(use_replay_buffer=True, batch_size=8, staleness_threshold=10)
    assert ppo_v2.Args(**options, replay_from=str(tmp_path / "log.jsonl")).min_replay_size > 80


def test_the_default_correction_is_what_the_study_supports():
    assert ppo_v2.Args(rollout_lag=1).stale_correction() == "dppo"
    assert ppo_v2.Args(use_replay_buffer=True).stale_correction() == "decoupled"
    assert ppo_v2.Args(rollout_lag=1, correction="none").stale_correction() == "none"
