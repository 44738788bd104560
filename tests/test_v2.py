"""ppo_v2.py: replay, lag and corrections by hand, and through the real training step."""

import json
import math
from collections import Counter

import pytest
import torch
from conftest import REPLAY, metrics_without_times, run, same, spy, weights
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
    ids = [i for _ in range(draws) for i in buffer.draw(iteration)[0]["scores"].tolist()]
    return [ids.count(i) / len(ids) for i in buffer.rows["scores"].tolist()]


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
    assert buffer.draw(2)[0]["scores"].tolist() == [2.0] * 3
    assert buffer.rows["reuse"].tolist() == [0, 0, 1] and buffer.num_drawn == 1


def test_the_odds_of_a_rollout_fall_with_its_age():
    young = frequencies(filled([0, 10], [0, 0], priority_age_tau=10.0), iteration=10)[1]
    assert young == pytest.approx(1 / (1 + math.exp(-1)), abs=0.025)


def test_uniform_draws_weigh_one():
    options = dict(use_priority_sampling=False, priority_beta=1.0)
    for size in (1, 4, 6):
        buffer = filled([1] * 6, [0] * 6, [1, 2, 3, 4, 5, 6], size, **options)
        assert buffer.draw(2)[1].tolist() == pytest.approx([1] * size)
    assert frequencies(buffer, draws=1000) == pytest.approx([1 / 6] * 6, abs=0.025)


def test_weights_of_prioritized_draws_by_hand():
    torch.manual_seed(0)
    found = {}
    while len(found) < 3:  # until a draw of three holds each: the largest weight drawn is 1
        drawn, drawn_weights = filled([1, 1, 1], [0, 0, 0], [1, 2, 4], 3, priority_beta=0.4).draw(2)
        found = dict(zip(drawn["scores"].tolist(), drawn_weights.tolist(), strict=True))
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
        assert buffer.rows["birth"].tolist() == left and buffer.size == len(left)


@pytest.mark.parametrize("kl, drawn", [(0.009, {0, 1, 2}), (0.01, {1, 2})])
def test_while_the_policy_moves_fast_rollouts_drawn_often_wait(kl, drawn):
    """Limit 6, a third of it with a KL of .01 or more; what waits is not evicted."""
    buffer = filled([1, 1, 1], [3, 1, 0], size=3, adaptive_reuse=True, max_replay_reuse=6)
    buffer.last_kl, seen = kl, set()
    for seed in range(40):
        torch.manual_seed(seed)
        rows, drawn_weights = buffer.draw(2)
        seen |= set(rows["scores"].int().tolist())
        assert len(drawn_weights) == len(drawn)
        buffer.rows["reuse"] = tensor([3, 1, 0])
    buffer.add({name: x[:0] for name, x in buffer.rows.items()}, 2)
    assert seen == drawn and buffer.size == 3


# --- what they count for ---
def test_staleness_by_hand():
    """Weights of the draw 4, 1, 1, 1 where nothing is stale; a token that is now three times as likely counts 2."""
    same, one = torch.full((4, 1), -1.0), torch.ones(4, 1)
    rows = dict(
        logprobs=same, mu_logprobs=same, response_mask=one, weights=tensor([[4.0], [1], [1], [1]])
    )
    rows |= dict(values=one * tensor([[0.5], [1], [1], [1]]), mu_values=one)
    assert ppo_v2.staleness("x", rows)["x/ess"] == pytest.approx(0.6447368, abs=1e-6)
    rows |= dict(logprobs=same + tensor([[math.log(3)], [0], [0], [0]]), weights=one)
    found = ppo_v2.staleness("x", rows)
    assert found == pytest.approx({"x/is_mean": 1.25, "x/is_cap_frac": 0.25, "x/ess": 25 / 28, "x/value_drift": 0.125,
                                   "x/kl_behaviour": (3 - 1 - math.log(3)) / 4}, abs=1e-6)  # fmt: skip


@pytest.mark.parametrize(
    "correction, advantage, limit, loss, gradient",
    [
        ("none", 1, None, -1.1, -1.1),
        ("behaviour", 1, None, -1.2, 0.0),  # its clip is spent
        ("decoupled", 1, None, -2.2, -2.2),
        ("decoupled", 1, 1.5, -1.65, -1.65),
        ("cispo", 1, None, -2.2 * math.log(0.55), -2.2),
        ("cispo", 1, 0.5, -1.5 * math.log(0.55), -1.5),
        ("dppo", 1, None, 0.0, 0.0),  # .55 - .25 > .2
        ("dppo", 1, 0.31, -2.2, -2.2),
        ("dppo", -1, None, 2.2, 2.2),  # a step back towards mu is free
        ("m2po", 1, None, 0.0, 0.0),  # (log 2.2)^2 = .62 > .04
        ("m2po", 1, 0.63, -2.2, -2.2),
        ("m2po", -1, None, 2.2, 2.2),
    ],
)
def test_corrections_by_hand(correction, advantage, limit, loss, gradient):
    """mu .25, pi_prox .5, pi_theta .55."""
    mu, prox, new = (torch.full((1, 1), math.log(p)) for p in (0.25, 0.5, 0.55))
    new, one = new.requires_grad_(), torch.ones(1, 1)
    found, bound = ppo_v2.stale_loss(
        new, prox, mu, advantage * one, one, correction, limit, (0.2, 0.2)
    )
    found.sum().backward()
    assert (found.item(), new.grad.item()) == pytest.approx((loss, gradient), abs=1e-6)
    assert bound.item() == (gradient == 0 or limit == 0.5)


@pytest.mark.parametrize("kind, last", [("positive", [0.0, 3.0]), ("all", [-1.0, 1.0])])
def test_replayed_advantages_by_hand(kind, last):
    """Drawn -5, 3 are cut to gains 0, 3, which are not whitened; or whitened, to -1, 1."""
    args = ppo_v2.Args(use_replay_buffer=True, norm_adv=True, replay_advantages=kind)
    found = (
        ppo_v2.replay_advantages(tensor([[-5.0], [3.0]]), torch.ones(2, 1), args).flatten().tolist()
    )
    assert found == pytest.approx(last, abs=1e-6)


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
    mixed = [mb for (_, mb, *_), _ in seen if mb["replayed"].any()]
    assert mixed
    for mb in mixed:
        for old in (0, 1):
            valid = mb["advantages"][(mb["response_mask"] > 0) & (mb["replayed"] == old)]
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
            now = policy(mb)[0]
        loss, stats = real(policy, mb, num_tokens, args)
        seen.append(mb | dict(now=now, stats=stats, num_tokens=num_tokens))
        return loss, stats

    monkeypatch.setattr(ppo_v2, "ppo_loss", wrapped)
    return seen


def token_loss(correction, new, prox, mu, advantage):
    """An independent reading of the table of corrections, one token, plain floats."""

    def clipped(ratio):
        return max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))

    ratio, step = math.exp(new - mu), math.exp(new) - math.exp(mu)
    away = step > 0.2 if advantage > 0 else step < -0.2
    return {
        "none": clipped(math.exp(new - prox)),
        "behaviour": clipped(ratio),
        "decoupled": min(math.exp(prox - mu), 2.0) * clipped(math.exp(new - prox)),
        "cispo": -advantage * min(ratio, 5.0) * new,
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
    assert len(seen) == 5 * 4 and sum(mb["replayed"].sum() for mb in seen) == 4 * 2 * 8
    for mb in seen:
        valid = [(i, j) for i, j in mb["response_mask"].nonzero().tolist()]
        names = ("now", "logprobs", "mu_logprobs", "advantages")
        tokens = {place: [mb[name][place].item() for name in names] for place in valid}
        stale = [place for place in valid if lag or mb["replayed"][place[0]]]
        dropped = (
            over_budget([(tokens[p][0] - tokens[p][2], tokens[p][3]) for p in stale])
            if stale
            else set()
        )
        dropped = {stale[i] for i in dropped} if correction == "m2po" else set()
        total = 0.0
        for place, numbers in tokens.items():
            rule = correction if place in stale else "none"
            weight = 0.0 if place in dropped else mb["weights"][place[0]].item()
            total += weight * token_loss(rule, *numbers)
        assert mb["stats"][0].item() == pytest.approx(
            total / mb["num_tokens"].item(), abs=2e-5, rel=1e-3
        )
    drift = max(
        ((mb["logprobs"] - mb["mu_logprobs"]) * mb["response_mask"]).abs().max().item()
        for mb in seen
    )
    assert drift > 0.1, "something must be stale for this test to mean something"


def test_a_lagged_run_samples_with_the_weights_of_so_many_iterations_ago(tmp_path, monkeypatch):
    """And what it trains is the newest: log-probs and values of the update are its own."""
    sampled, learned, real_rollout, real_score = [], [], ppo_v2.rollout, ppo_v2.score_rows

    def rollout(policy, pairs, tokenizer, scorer, args, uniforms=None):
        if uniforms is not None:
            sampled.append([x.clone() for x in policy.parameters()])
        return real_rollout(policy, pairs, tokenizer, scorer, args, uniforms)

    def score_rows(model, rows, num_rows):
        if model.lm.lm_head.weight.requires_grad:  # not the reference
            learned.append([x.clone() for x in model.parameters()])
        return real_score(model, rows, num_rows)

    monkeypatch.setattr(ppo_v2, "rollout", rollout)
    monkeypatch.setattr(ppo_v2, "score_rows", score_rows)
    run(ppo_v2, tmp_path / "run", num_iterations=6, rollout_lag=2)
    assert len(sampled) == len(learned) == 6
    for i in range(6):
        assert all(map(torch.equal, sampled[i], learned[max(0, i - 2)]))
    assert not torch.equal(learned[0][0], learned[1][0])


def test_drawn_data_is_what_was_sampled(tmp_path, monkeypatch):
    """Tokens, scores and log-probs come back as they went in, through padding and back."""
    stored, ready = (
        spy(monkeypatch, ppo_v2.ReplayBuffer, "add"),
        spy(monkeypatch, ppo_v2, "bring_up_to_date"),
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

    went_in, drawn = {}, [rows for _, rows in ready]
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
        drawn = mb["replayed"] > 0
        assert mb["weights"][drawn].sort().values.tolist() == given.sort().values.tolist()
        assert (mb["weights"][~drawn] == 1).all()


def test_a_draw_refreshes_the_priority(tmp_path, monkeypatch):
    """By today's advantages, which are those of today's critic and policy: returns less values."""
    draws, seen = (
        spy(monkeypatch, ppo_v2.ReplayBuffer, "draw"),
        spy(monkeypatch, ppo_v2.ReplayBuffer, "priorities"),
    )
    run(ppo_v2, tmp_path / "run", **LONG, replay_advantages="all")
    again = [(rows, new) for (_, rows), new in seen if "returns" in rows]
    assert len(again) == 4
    for rows, new in again:
        size = ((rows["returns"] - rows["values"]).abs() * rows["response_mask"]).sum(1) / rows[
            "response_mask"
        ].sum(1)
        torch.testing.assert_close(new, size.double() + 1e-6, rtol=1e-4, atol=1e-6)
    ((buffer, _), (drawn, _)), new = draws[-1], again[-1][1]
    born = buffer.rows["birth"][:-8].tolist()  # less what the last iteration has added
    assert len(born) == 32 and (new - drawn["priority"]).abs().max() > 1e-2, "they must have moved"
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
    counts = [(len(mb["replayed"]), mb["replayed"].sum().item()) for mb in seen]
    assert counts == [(2, 0)] * 4 + [(4, 2)] * 8


@pytest.mark.parametrize("sample_size, max_reuse", [(8, 4), (64, 2)], ids=["by draws", "by reuse"])
def test_efficiency_comes_near_its_forecast(sample_size, max_reuse, tmp_path, monkeypatch, capsys):
    """And no rollout is drawn in its own iteration, beyond the threshold, or once too often."""
    draws, counts = spy(monkeypatch, ppo_v2.ReplayBuffer, "draw"), Counter()
    options = dict(
        batch_size=4,
        num_iterations=60,
        num_minibatches=1,
        update_epochs=1,
        eval_every=60,
        eval_size=1,
    )
    options |= dict(
        sft_steps=0,
        max_response_length=2,
        replay_sample_size=sample_size,
        max_replay_reuse=max_reuse,
    )
    options |= dict(use_priority_sampling=False, priority_age_tau=None, staleness_threshold=20)
    efficiency = run(ppo_v2, tmp_path / "run", **REPLAY | options)["sample_efficiency"]
    assert "EFF will be at most 3.00x" in capsys.readouterr().out and 2.7 < efficiency <= 3
    for (_, iteration), (rows, _) in draws:
        names = ("birth", "prompt_ids", "response_ids", "mu_logprobs") if rows else ()  # who it is
        counts.update(
            {
                tuple(map(str, row))
                for row in zip(*(rows[name].tolist() for name in names), strict=True)
            }
        )
        assert all(
            1 <= iteration - birth <= 20 for birth in rows.get("birth", torch.zeros(0)).tolist()
        )
    assert max(counts.values()) == max_reuse and efficiency == 1 + counts.total() / (4 * 60)


def test_over_a_run_the_buffer_grows_beta_rises_and_the_kl_of_the_last_update_is_known(
    tmp_path, monkeypatch
):
    real, seen, betas = ppo_v2.ReplayBuffer.draw, [], []

    def draw(self, iteration):
        seen.append(self.last_kl)
        betas.append(self.beta)
        return real(self, iteration)

    monkeypatch.setattr(ppo_v2.ReplayBuffer, "draw", draw)
    sizes = dict(replay_start_size=10, replay_grow_iteration=4, replay_buffer_size=20)
    run(
        ppo_v2, tmp_path / "run", **LONG, **sizes, priority_beta=0.99, priority_beta_increment=0.004
    )
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["buffer_size"] for row in rows] == [8, 10, 10, 18, 20]
    assert betas == pytest.approx([0.99, 0.99, 0.994, 0.998, 1.0])
    kl = [row["losses/approx_kl"] for row in rows]
    assert seen == [0.0, *kl[:4]] and min(kl) > 0


@pytest.mark.parametrize("kind, moves", [("positive", False), ("all", True)])
def test_the_critic_learns_from_fresh_rollouts_only_with_gains(kind, moves, tmp_path, monkeypatch):
    """Any return of a drawn row leaves the weights alone, unless all advantages are replayed."""
    real, seen, junk = ppo_v2.ppo_loss, [], 0.0

    def wrapped(policy, mb, *rest):
        seen.append(mb)
        return real(policy, mb | {"returns": mb["returns"] + junk * mb["replayed"]}, *rest)

    monkeypatch.setattr(ppo_v2, "ppo_loss", wrapped)
    for junk in (0.0, 3.0):
        run(ppo_v2, tmp_path / f"{junk}", **LONG, replay_advantages=kind)
    assert same(weights(tmp_path / "0.0"), weights(tmp_path / "3.0")) != moves
    assert any((mb["advantages"][mb["replayed"].flatten() > 0] < 0).any() for mb in seen) == moves


def test_a_nan_reward_never_enters_the_buffer(tmp_path):
    run(ppo_v2, tmp_path / "run", **LONG | faulty_reward(tmp_path))
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["rollout/nan_rewards"] for row in rows] == [0, 1, 0, 0, 0]
    assert [row["buffer_size"] for row in rows] == [
        8,
        15,
        23,
        31,
        39,
    ]  # seven of the second iteration's eight
    assert all(value is not None and math.isfinite(value) for row in rows for value in row.values())


def test_a_buffer_that_never_fills_is_told(tmp_path, capsys):
    run(ppo_v2, tmp_path / "run", **LONG | dict(min_replay_size=40, num_iterations=3))
    assert "warning: nothing will be replayed" in capsys.readouterr().out


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
    draws = spy(monkeypatch, ppo_v2.ReplayBuffer, "draw")
    run(ppo_v2, tmp_path / "run", **LONG, replay_from=str(logged))
    (buffer, iteration), (drawn, _) = draws[0]
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


def test_a_log_without_logprobs_is_told_and_not_corrected(logged, tmp_path, capsys, monkeypatch):
    rows = [json.loads(line) for line in open(logged)]
    lines = [
        json.dumps({k: row[k] for k in ("prompt_ids", "response_ids", "score")}) for row in rows
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    draws, joined = spy(monkeypatch, ppo_v2.ReplayBuffer, "draw"), spy(monkeypatch, ppo_v2, "join")
    options = dict(num_iterations=3, learning_rate=5e-3, replay_from=str(tmp_path / "log.jsonl"))
    run(ppo_v2, tmp_path / "run", **LONG | options)
    assert "24 rollouts; 24 without log-probs: not corrected" in capsys.readouterr().out
    mixed = [parts[1] for (parts,), _ in joined if "logprobs" in parts[0]]  # fresh and drawn rows
    for (_, (drawn, _)), rows in zip(draws, mixed, strict=True):  # also when the policy has moved
        logged = drawn["birth"] == 0
        same_mu = (rows["mu_logprobs"] == rows["logprobs"]).all(1)
        assert logged.any() and same_mu[logged].all()


@pytest.mark.parametrize(
    "change",
    ["{", {"score": None}, {"score": "nan"}, {"response_ids": [3, 999]}, {"response": "of another tokenizer"},
     {"logprobs": [-1.0]}, {"response_ids": None}, {"prompt_ids": "no ids"}],
)  # fmt: skip
def test_a_line_of_a_log_that_cannot_be_used_is_named(change, logged, tmp_path):
    lines = open(logged).read().splitlines()
    lines[2] = change if change == "{" else json.dumps(json.loads(lines[2]) | change)
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    with pytest.raises(SystemExit, match=r"log.jsonl: line 3 must be JSON with prompt"):
        run(ppo_v2, tmp_path / "run", **LONG, replay_from=str(tmp_path / "log.jsonl"))


def test_m2po_needs_the_whole_minibatch(tmp_path):
    with pytest.raises(ValueError, match="m2po looks at a whole minibatch"):
        run(
            ppo_v2,
            tmp_path / "run",
            rollout_lag=1,
            correction="m2po",
            gradient_accumulation_steps=2,
        )


def test_the_default_correction_is_what_the_study_supports():
    assert ppo_v2.Args(rollout_lag=1).correction == "dppo"
    assert ppo_v2.Args(use_replay_buffer=True).correction == "decoupled"
    assert ppo_v2.Args(rollout_lag=1, correction="none").correction == "none"
