"""ppo_v2.py: replay by hand, and through the real training step."""

import math
import re

import pytest
import torch
from conftest import metrics_without_times, run, same, weights
from test_v1 import faulty_reward
from torch import tensor

import ppo_v2

REPLAY = dict(use_replay_buffer=True, min_replay_size=8, replay_sample_size=8, num_iterations=5)
PER = [0.2077657, 0.3149140, 0.4773203]  # (1, 2, 4) ** 0.6, normalised


def filled(births, reuses, priorities=None, **options):
    """A buffer with these samples, one token each."""
    options = dict(priority_alpha=0.6, priority_age_tau=None, replay_advantages="all") | options
    buffer = ppo_v2.ReplayBuffer(ppo_v2.Args(use_replay_buffer=True, **options))
    for i, birth in enumerate(births):
        one = torch.ones(1, 1)
        names = ("logprobs", "ref_logprobs", "values", "prompt_ids", "prompt_mask", "response_ids", "response_mask")
        rows = dict.fromkeys(names, one) | dict(scores=tensor([float(i)]))
        buffer.add(rows | dict(advantages=one * (priorities[i] - 1e-6 if priorities else 1.0)), birth)
        buffer.samples[-1]["reuse"] = reuses[i]
    return buffer


def frequencies(buffer, size, iteration=2, draws=4000):
    """How much of what is drawn is each sample."""
    torch.manual_seed(0)
    ids = [id(sample) for _ in range(draws) for sample in buffer.draw(size, iteration, 10**9, 0.0)[0]]
    return [ids.count(id(sample)) / len(ids) for sample in buffer.samples]


# --- which are drawn ---
def test_priorities_by_hand():
    odds = [sample["priority"] for sample in filled([1, 1, 1], [0, 0, 0], [1, 2, 4]).samples]
    assert [x / sum(odds) for x in odds] == pytest.approx(PER, abs=1e-6)


def test_priorities_are_mean_gains_or_mean_sizes():
    advantages, mask = tensor([[2.0, -4.0, 1.0], [-3.0, -3.0, 9.0]]), tensor([[1.0, 1, 1], [1, 1, 0]])
    for kind, expected in (("positive", [1 + 1e-6, 1e-6]), ("all", [7 / 3 + 1e-6, 3 + 1e-6])):
        buffer = filled([], [], priority_alpha=1.0, replay_advantages=kind)
        assert buffer.priorities(advantages, mask) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_draws_follow_the_priorities_with_replacement(size):
    assert frequencies(filled([1, 1, 1], [0, 0, 0], [1, 2, 4]), size) == pytest.approx(PER, abs=0.025)


def test_an_iteration_counts_once_however_often_it_draws_a_rollout():
    buffer = filled([1, 1, 1], [0, 0, 0], [1, 2, 1e9])
    assert [sample["score"] for sample in buffer.draw(3, 2, 4, 0.0)[0]] == [2.0] * 3
    assert [sample["reuse"] for sample in buffer.samples] == [0, 0, 1]


def test_the_odds_of_a_rollout_fall_with_its_age():
    young = frequencies(filled([0, 10], [0, 0], priority_age_tau=10.0), 1, iteration=10)[1]
    assert young == pytest.approx(1 / (1 + math.exp(-1)), abs=0.025)


def test_uniform_draws_weigh_one():
    buffer = filled([1] * 6, [0] * 6, [1, 2, 3, 4, 5, 6], use_priority_sampling=False)
    for size in (1, 4, 6):
        assert buffer.draw(size, 2, 4, beta=1.0)[1].tolist() == pytest.approx([1] * size)
    assert frequencies(buffer, 1, draws=6000) == pytest.approx([1 / 6] * 6, abs=0.025)


def test_weights_of_prioritized_draws_by_hand():
    torch.manual_seed(0)
    found = {}
    while len(found) < 3:  # until a draw of three holds each: the largest weight drawn is 1
        drawn, drawn_weights = filled([1, 1, 1], [0, 0, 0], [1, 2, 4]).draw(3, 2, 4, beta=0.4)
        found = {sample["score"]: weight.item() for sample, weight in zip(drawn, drawn_weights, strict=True)}
    assert [found[i] for i in range(3)] == pytest.approx([1, 0.8467453, 0.7169776], abs=1e-6)


def test_weights_undo_the_odds_even_where_much_of_the_buffer_is_drawn():
    """32 of 64 at odds 10:1. The four likely ones are 4/64 of the buffer, and are to count for that."""
    torch.manual_seed(0)
    buffer, shares = filled([1] * 64, [0] * 64, [10] * 4 + [1] * 60, priority_alpha=1.0), []
    for _ in range(2000):
        drawn, drawn_weights = buffer.draw(32, 2, 10**9, beta=1.0)
        likely = tensor([sample["score"] < 4 for sample in drawn])
        shares.append(drawn_weights[likely].sum() / drawn_weights.sum())
    assert torch.stack(shares).mean().item() == pytest.approx(4 / 64, rel=0.05)


# --- how long they stay ---
@pytest.mark.parametrize("iteration, there", [(6, True), (7, True), (8, False)])
def test_age_threshold(iteration, there):
    buffer = filled([5], [0], staleness_threshold=2)
    buffer.evict(iteration, 10)
    assert (len(buffer.samples) == 1) == there


def test_what_was_drawn_often_goes_then_the_oldest():
    buffer = filled([1, 2, 3, 4, 5], [4, 3, 0, 0, 0], max_replay_reuse=4)
    buffer.evict(6, capacity=3)
    assert [sample["birth"] for sample in buffer.samples] == [3, 4, 5]


def test_above_a_lower_limit_a_rollout_pauses():
    buffer = filled([1, 1], [3, 1], max_replay_reuse=6)
    drawn, _ = buffer.draw(2, 2, max_reuse=2, beta=0.4)
    buffer.evict(2, 9)
    assert [sample["score"] for sample in drawn] == [1.0] and len(buffer.samples) == 2


def test_buffer_stats_by_hand():
    expected = dict(buffer_size=3, avg_reuse_count=2, max_reuse_count=4, avg_age=3, oldest_sample=5)
    assert filled([5, 7, 9], [4, 2, 0]).buffer_stats(10) == expected


def test_a_thousand_answers_of_256_tokens_take_megabytes():
    ones = torch.ones(1000, 256)
    names = ("prompt_ids", "prompt_mask", "response_ids", "response_mask")
    rows = dict.fromkeys(names, ones.long()) | dict(scores=torch.zeros(1000))
    buffer = filled([], [])
    buffer.add(rows | dict.fromkeys(("logprobs", "ref_logprobs", "values", "advantages"), ones), 1)
    tensors = [x for sample in buffer.samples for x in sample.values() if torch.is_tensor(x)]
    assert sum(x.untyped_storage().nbytes() for x in tensors) < 10e6, "a view would hold the padded batch"


# --- what they count for ---
def test_effective_sample_size_by_hand():
    assert ppo_v2.effective_sample_size(tensor([4.0, 1, 1, 1])).item() == pytest.approx(0.6447368, abs=1e-6)


@pytest.mark.parametrize(
    "correction, loss, gradient",
    [("decoupled", -2.2, -2.2), ("behaviour", -1.2, 0.0), ("none", -1.1, -1.1)],  # behaviour: its clip is spent
)
def test_corrections_by_hand(correction, loss, gradient):
    """mu .25, pi_prox .5, pi_theta .55, A 1, cap 2."""
    new = tensor([[math.log(0.55)]], requires_grad=True)
    prox, mu = tensor([[math.log(0.5)]]), tensor([[math.log(0.25)]])
    anchor, stale_weights = ppo_v2.behaviour_correction(prox, mu, correction, cap=2.0)
    found = (ppo_v2.policy_loss(new, anchor, torch.ones(1, 1), 0.2, 0.2)[0] * stale_weights).sum()
    found.backward()
    assert (found.item(), new.grad.item()) == pytest.approx((loss, gradient), abs=1e-6)


def test_decoupled_weights_are_capped():
    _, found = ppo_v2.behaviour_correction(tensor([[-0.1, -1.0]]), tensor([[-3.0, -0.5]]), "decoupled", cap=2.0)
    assert found.tolist()[0] == pytest.approx([2.0, math.exp(-0.5)])


@pytest.mark.parametrize("batch, sample, reuse, eff", [(16, 32, 4, 3.0), (64, 32, 4, 1.5), (4, 32, 4, 5.0)])
def test_forecast_of_the_efficiency(batch, sample, reuse, eff):
    assert ppo_v2.forecast_efficiency(batch, sample, reuse)[0] == eff


# --- through the training step ---
def spy(monkeypatch, name, owner=ppo_v2):
    """Record arguments and results of a function that main() calls."""
    calls, real = [], getattr(owner, name)

    def wrapped(*args, **kwargs):
        calls.append((args, real(*args, **kwargs)))
        return calls[-1][1]

    monkeypatch.setattr(owner, name, wrapped)
    return calls


def minibatches(monkeypatch):
    """-> list that main() fills with the rows of each optimizer step"""
    seen, real = [], ppo_v2.ppo_loss

    def wrapped(policy, mb, *rest):
        with torch.no_grad():
            seen.append(mb | dict(now=policy(mb)[0]))
        return real(policy, mb, *rest)

    monkeypatch.setattr(ppo_v2, "ppo_loss", wrapped)
    return seen


@pytest.mark.parametrize("correction", ["decoupled", "behaviour", "none"])
def test_unchanged_weights_give_ratio_one_and_weight_one(correction, tmp_path, monkeypatch):
    seen = minibatches(monkeypatch)
    uniform = dict(use_priority_sampling=False, priority_age_tau=None, priority_beta=1.0)
    options = REPLAY | uniform | dict(learning_rate=1e-9, correction=correction, replay_advantages="all")
    metrics = run(ppo_v2, tmp_path / "run", **options)
    assert sum(mb["replayed"].sum() for mb in seen) == 4 * 2 * 8
    for mb in seen:
        valid = mb["response_mask"].bool()
        assert (mb["now"] - mb["logprobs"])[valid].abs().max() < 2e-5
        assert all((mb[name][valid] - 1).abs().max() < 2e-5 for name in ("weights", "value_weights"))
    assert metrics["replay/ess"] == pytest.approx(1, abs=1e-5) and metrics["replay/kl_behaviour"] < 1e-9


@pytest.mark.parametrize("correction", ["decoupled", "behaviour", "none"])
def test_fresh_rows_weigh_exactly_one_and_stale_rows_what_they_should(correction, tmp_path, monkeypatch):
    """In the first step of an update pi_theta is pi_prox; the drawn sample brings its mu."""
    seen, ready = minibatches(monkeypatch), spy(monkeypatch, "bring_up_to_date")
    options = dict(num_minibatches=1, correction=correction, replay_advantages="all", learning_rate=3e-3)
    run(ppo_v2, tmp_path / "run", **REPLAY, **options, priority_beta=1.0)
    for mb in seen:
        fresh = ~mb["replayed"]
        assert (mb["weights"][fresh] == 1).all() and (mb["value_weights"][fresh] == 1).all()
    for (args, (rows, _)), mb in zip(ready, seen[2::2], strict=True):  # two epochs each; none drawn for the first
        samples, sample_weights, stale = args[2], args[3], mb["replayed"].nonzero().flatten()
        assert len(samples) == len(stale) == 8
        for i, sample in enumerate(samples):
            n, weight = len(sample["logprobs"]), sample_weights[i]
            j = next(j for j in stale if torch.equal(mb["response_ids"][j, :n], sample["response_ids"])
                     and torch.equal(mb["prompt_ids"][j, -len(sample["prompt_ids"]):], sample["prompt_ids"])
                     and torch.allclose(rows["weights"][i, :n], mb["weights"][j, :n]))  # fmt: skip
            now, anchor = mb["now"][j, :n], mb["logprobs"][j, :n]
            ratio = (now - sample["logprobs"]).exp()
            expected = ratio.clamp(max=2) if correction == "decoupled" else torch.ones(n)
            torch.testing.assert_close(mb["weights"][j, :n], weight * expected, atol=1e-4, rtol=1e-4)
            behind = sample["logprobs"] if correction == "behaviour" else now
            torch.testing.assert_close(anchor, behind, atol=2e-5, rtol=0)
    assert ready[-1][1][1]["replay/kl_behaviour"] > 1e-3, "mu must be stale for this test to mean something"


def test_drawn_data_is_what_was_sampled(tmp_path, monkeypatch):
    """Tokens, scores and log-probs come back as they went in, through padding and back."""
    stored, ready = spy(monkeypatch, "add", ppo_v2.ReplayBuffer), spy(monkeypatch, "bring_up_to_date")
    run(ppo_v2, tmp_path / "run", **REPLAY, correction="behaviour")
    batches = {args[2]: args[1] for args, _ in stored}  # of each iteration
    found = 0
    for (_, _, samples, *_), (rows, _) in ready:
        for i, sample in enumerate(samples):
            batch = batches[sample["birth"]]
            prompt, response = rows["prompt_mask"][i].bool(), rows["response_mask"][i].bool()
            assert rows["prompt_ids"][i][prompt].tolist() == sample["prompt_ids"].tolist()
            for j, mask in enumerate(batch["response_mask"].bool()):
                if torch.equal(batch["logprobs"][j][mask], rows["logprobs"][i][response]):
                    found += 1
                    assert torch.equal(batch["response_ids"][j][mask], rows["response_ids"][i][response])
                    assert torch.equal(batch["prompt_ids"][j][batch["prompt_mask"][j].bool()], sample["prompt_ids"])
                    assert batch["scores"][j].item() == sample["score"]
    assert found == 4 * 8


def test_a_draw_refreshes_the_priority(tmp_path, monkeypatch):
    """By the advantages of today's critic; a row's returns less its values are these."""
    real, moves = ppo_v2.bring_up_to_date, []

    def wrapped(policy, buffer, samples, *rest):
        before = tensor([sample["priority"] for sample in samples])
        rows, metrics = real(policy, buffer, samples, *rest)
        after = tensor([sample["priority"] for sample in samples])
        expected = buffer.priorities(rows["returns"] - rows["values"], rows["response_mask"])
        torch.testing.assert_close(after, tensor(expected), atol=1e-5, rtol=1e-4)
        moves.append((after - before).abs().max().item())
        return rows, metrics

    monkeypatch.setattr(ppo_v2, "bring_up_to_date", wrapped)
    run(ppo_v2, tmp_path / "run", **REPLAY, replay_advantages="all")
    assert len(moves) == 4 and max(moves) > 1e-2


def test_every_minibatch_mixes_in_proportion(tmp_path, monkeypatch):
    """Ratio .5, batch 8, 4 minibatches: 2 fresh + 2 replayed each."""
    seen = minibatches(monkeypatch)
    options = dict(num_minibatches=4, update_epochs=1, num_iterations=3, new_samples_ratio=0.5)
    run(ppo_v2, tmp_path / "run", **REPLAY | options | dict(replay_sample_size=ppo_v2.Args.replay_sample_size))
    assert [((~mb["replayed"]).sum().item(), mb["replayed"].sum().item()) for mb in seen] == [(2, 0)] * 4 + [(2, 2)] * 8


def test_replay_epochs(tmp_path, monkeypatch):
    seen = minibatches(monkeypatch)
    run(ppo_v2, tmp_path / "run", **REPLAY | dict(update_epochs=3, replay_epochs=1, num_iterations=2))
    assert [len(mb["replayed"]) for mb in seen] == [4] * 6 + [8, 8] + [4] * 4


@pytest.mark.parametrize("copies, efficiency", [(1, [1, 10 / 8, 18 / 12]), (2, [1, 9 / 8, 15 / 12])])
def test_efficiency_by_hand(copies, efficiency, tmp_path, monkeypatch):
    """Batch 4, then 0, 2 and 4 drawn: (4 + 6 + 8) / 12 = 1.5; a copy counts once. Iteration 1 leaves 2 rollouts."""

    def draw(self, size, *rest):
        drawn = self.samples[: min(size, len(self.samples)) // copies] * copies
        return drawn, torch.ones(len(drawn))

    monkeypatch.setattr(ppo_v2.ReplayBuffer, "draw", draw)
    options = dict(batch_size=4, num_iterations=3, min_replay_size=2, replay_sample_size=4)
    run(ppo_v2, tmp_path / "run", **REPLAY | options | dict(replay_start_size=2, replay_grow_iteration=2))
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["sample_efficiency"] for row in rows] == pytest.approx(efficiency)
    assert [row["replay_ratio"] + 1 for row in rows] == pytest.approx(efficiency)


@pytest.mark.parametrize("sample_size, max_reuse", [(8, 4), (64, 2)], ids=["by draws", "by reuse"])
def test_efficiency_comes_near_its_forecast(sample_size, max_reuse, tmp_path, monkeypatch, capsys):
    """And no rollout is drawn in its own iteration, beyond the threshold, or once too often."""
    draws, counts = spy(monkeypatch, "draw", ppo_v2.ReplayBuffer), {}
    options = dict(batch_size=4, num_iterations=60, num_minibatches=1, update_epochs=1, eval_every=60, eval_size=1)
    options |= dict(sft_steps=0, max_response_length=2, replay_sample_size=sample_size, max_replay_reuse=max_reuse)
    options |= dict(use_priority_sampling=False, priority_age_tau=None, staleness_threshold=20)
    metrics = run(ppo_v2, tmp_path / "run", **REPLAY | options)
    assert 2.7 < metrics["sample_efficiency"] <= 3
    assert "EFF will be at most 3.00x" in capsys.readouterr().out
    keep = []  # so that no id is used twice
    for (_, _, iteration, *_), (samples, _) in draws:
        for sample in {id(sample): sample for sample in samples}.values():
            keep.append(sample)
            counts[id(sample)] = counts.get(id(sample), 0) + 1
            assert 1 <= iteration - sample["birth"] <= 20, "older rollouts only, and none beyond the threshold"
    assert max(counts.values()) == max_reuse
    assert metrics["sample_efficiency"] == (4 * 60 + sum(counts.values())) / (4 * 60)


@pytest.mark.parametrize("max_reuse, slow", [(6, 2), (2, 1)])
def test_adaptive_reuse_follows_the_last_kl_within_the_limit(max_reuse, slow, tmp_path, monkeypatch):
    draws = spy(monkeypatch, "draw", ppo_v2.ReplayBuffer)
    options = REPLAY | dict(adaptive_reuse=True, max_replay_reuse=max_reuse, num_iterations=10, learning_rate=2e-3)
    run(ppo_v2, tmp_path / "run", **options, min_digits=3)
    kl = [row.get("losses/approx_kl") for row in metrics_without_times(tmp_path / "run")]
    limits = [(args[2], args[3]) for args, _ in draws]
    assert all(limit == (max_reuse if kl[iteration - 1] < 0.01 else slow) for iteration, limit in limits)
    assert {limit for _, limit in limits} == {max_reuse, slow}, "both must occur for this test to mean something"


def test_the_buffer_grows(tmp_path):
    run(ppo_v2, tmp_path / "run", **REPLAY, replay_start_size=10, replay_grow_iteration=4, replay_buffer_size=20)
    assert [row["buffer_size"] for row in metrics_without_times(tmp_path / "run")[1:]] == [8, 10, 10, 18, 20]


def test_beta_rises_after_each_draw(tmp_path):
    run(ppo_v2, tmp_path / "run", **REPLAY, priority_beta=0.99, priority_beta_increment=0.004)
    betas = [row.get("replay/beta") for row in metrics_without_times(tmp_path / "run")[1:]]
    assert betas == [None, *map(pytest.approx, (0.99, 0.994, 0.998, 1.0))]


def test_replay_max_kl_leaves_far_rollouts_out(tmp_path, monkeypatch):
    seen = minibatches(monkeypatch)
    metrics = run(ppo_v2, tmp_path / "run", **REPLAY, learning_rate=3e-3, replay_max_kl=1e-9)
    assert not any(mb["replayed"].any() for mb in seen) and metrics["sample_efficiency"] == 1
    assert metrics["replay/kl_behaviour"] > 1e-9


def with_junk(monkeypatch, name, junk):
    """Add something to a field of all drawn rows."""
    real = ppo_v2.bring_up_to_date

    def wrapped(*args):
        rows, metrics = real(*args)
        return rows | {name: rows[name] + junk}, metrics

    monkeypatch.setattr(ppo_v2, "bring_up_to_date", wrapped)


@pytest.mark.parametrize("kind, moves", [("positive", False), ("all", True)])
def test_the_critic_learns_from_fresh_rollouts_only_with_gains(kind, moves, tmp_path, monkeypatch):
    """Any return of a drawn row leaves the weights alone, unless all advantages are replayed."""
    seen = minibatches(monkeypatch)
    for junk in (0.0, 3.0):
        with monkeypatch.context() as patch:
            with_junk(patch, "returns", junk)
            run(ppo_v2, tmp_path / f"{junk}", **REPLAY, replay_advantages=kind)
    assert same(weights(tmp_path / "0.0"), weights(tmp_path / "3.0")) != moves
    assert any((mb["advantages"][mb["replayed"]] < 0).any() for mb in seen) == moves


def test_a_nan_reward_never_enters_the_buffer(tmp_path):
    run(ppo_v2, tmp_path / "run", **REPLAY | faulty_reward(tmp_path))
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["rollout/nan_rewards"] for row in rows] == [0, 1, 0, 0, 0]
    assert [row["buffer_size"] for row in rows] == [8, 15, 23, 31, 39]  # seven of the second iteration's eight
    assert all(value is not None and math.isfinite(value) for row in rows for value in row.values())


def test_status_line(tmp_path, capsys):
    run(ppo_v2, tmp_path / "run", **REPLAY)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(lines) == 5
    for line in lines:
        assert re.fullmatch(r"\[\d/5\] PL:-?\d+\.\d\d VL:\d+\.\d\d R:-?\d+\.\d\d BUF:\d+ EFF:\d\.\dx", line), line
    last = metrics_without_times(tmp_path / "run")[-1]
    assert f"R:{last['charts/score']:.2f} BUF:40 EFF:{last['sample_efficiency']:.1f}x" in lines[-1]


def test_a_buffer_that_never_fills_is_told(tmp_path, capsys):
    run(ppo_v2, tmp_path / "run", **REPLAY | dict(min_replay_size=40, num_iterations=3))
    assert "warning: there will never be more than 16 rollouts" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, value", [("replay_buffer_size", 700), ("priority_age_tau", None), ("adaptive_reuse", True)]
)
def test_replay_options_without_replay_are_refused(name, value):
    with pytest.raises(ValueError, match=f"--{name} does nothing without --use-replay-buffer"):
        ppo_v2.Args(**{name: value})
