"""wsrl_warmup.py: prioritized draws, retention, what a mixed batch holds."""

import types

import numpy as np
import pytest
import torch

from wsrl_warmup import (
    Args,
    PrioritizedReplayBuffer,
    WarmupAgent,
    filter_offline_data,
    make_row_dtype,
    sample_mixed,
)

D, A = 3, 2
BOX = types.SimpleNamespace
DTYPE = make_row_dtype(BOX(observation_space=BOX(shape=(D,)), action_space=BOX(shape=(A,))))


def rows(n, **columns):
    made = np.zeros(n, DTYPE)
    for name, values in (dict(weights=1) | columns).items():
        made[name] = np.reshape(values, (-1, 1)) if name == "obs" else values
    return made


def buffer(n, alpha=0.6, **columns):
    rb = PrioritizedReplayBuffer(n, DTYPE, alpha)
    rb.extend(rows(n, **columns))
    return rb


def make_agent(**options):
    args = Args(**dict(hidden_size=16, batch_size=32) | options)
    return WarmupAgent(np.zeros(D), np.ones(D), A, args=args)


def filled(td_errors, alpha=0.6):
    rb = buffer(len(td_errors), alpha)
    rb.update_priorities(np.arange(len(td_errors)), np.array(td_errors) - 1e-6)
    return rb


def test_probabilities_importance_weights_and_draws():
    rb = filled([1.0, 2.0, 3.0, 4.0])
    probabilities = rb.priorities / rb.priorities.sum()
    assert probabilities == pytest.approx([0.148230, 0.224674, 0.286555, 0.340542], abs=1e-6)
    for beta, expected in (
        (0.4, [1, 0.846745, 0.768229, 0.716978]),
        (1.0, [1, 0.659754, 0.517282, 0.435275]),
    ):
        inds, weights = rb.sample(999, beta, np.random.default_rng(0))
        assert weights / weights.max() == pytest.approx(np.array(expected)[inds], abs=1e-6)
    inds, weights = rb.sample(40_000, 1.0, np.random.default_rng(0))
    assert weights == pytest.approx(1 / (4 * probabilities[inds]))
    assert np.bincount(inds, minlength=4) / 40_000 == pytest.approx(probabilities, abs=0.01)
    rb.update_priorities(np.array([0]), np.array([1e9]))  # a cached sum would not see it
    assert (rb.sample(100, 0.4, np.random.default_rng(1))[0] == 0).all()


def test_new_rows_get_the_running_maximum_and_the_oldest_go():
    rb = PrioritizedReplayBuffer(4, DTYPE, 1.0)
    rb.extend(rows(1))
    assert rb.priorities[0] == 1
    rb.update_priorities(np.array([0]), np.array([-5.0]))
    rb.extend(rows(1))
    rb.update_priorities(
        np.array([0]), np.array([0.5])
    )  # the maximum is that of the run, not of the moment
    rb.extend(rows(1))
    assert rb.priorities[:3] == pytest.approx([0.5, 5, 5], abs=1e-5)
    rb.extend(rows(3, rewards=[1, 2, 3]))
    assert rb.rows["rewards"].tolist() == [2, 3, 0, 1] and len(rb) == 4


def test_a_restored_ring_continues_where_it_was():
    rb, other = filled(np.arange(1.0, 10.0)), PrioritizedReplayBuffer(9, DTYPE, 0.6)
    rb.extend(rows(4, obs=2.0))
    other.load_state_dict(rb.state_dict())
    for each in (rb, other):
        each.extend(rows(1, obs=3.0))
    assert (other.rows == rb.rows).all() and (other.priorities == rb.priorities).all()


def test_retention_keeps_the_best():
    values = np.array([0.1, 0.9, 0.5, 0.7, 0.3, 0.2, 0.8, 0.4, 0.6, 1.0])
    for by, name in (("quality", "quality"), ("reward", "rewards")):
        kept = filter_offline_data(buffer(10, obs=np.arange(10), **{name: values}), 0.2, by)
        assert (
            kept.rows["obs"][:, 0].tolist() == [1, 9] and len(kept) == len(kept.rows) == 2
        )  # arrays of its own
    assert [len(filter_offline_data(buffer(n), 0.2)) for n in (7, 4)] == [1, 1]
    assert len(filter_offline_data(buffer(4), 0.0)) == 0  # nothing kept is an empty buffer
    assert len(filter_offline_data(buffer(4), 1.0)) == 4


def test_retention_by_td_error_and_its_priorities():
    agent = make_agent()
    rb = buffer(5, obs=np.arange(5), rewards=[0.0, 9.0, 0.1, -8.0, 0.2])  # masks 0: td = Q - r
    kept = filter_offline_data(rb, 0.4, "td_error", agent)
    assert kept.rows["obs"][:, 0].tolist() == [1, 3]  # the size of the error, not its sign
    # kept rows start over at the priority of new rows, as they do when --learner reads them
    kept = filled([5.0, 1.0, 3.0, 2.0, 4.0], 1.0).select_top_k(np.array([0, 9, 1, 8, 2]), 2)
    assert kept.priorities.tolist() == [1.0, 1.0] and kept.max_priority == 1.0


def test_errors_find_the_rows_of_a_mixed_batch():
    offline = buffer(50, 1.0, obs=1.0, rewards=np.arange(50))
    online = buffer(50, 1.0, obs=2.0, rewards=100 + np.arange(50))
    batch, offline_slots, online_slots = sample_mixed(make_agent(), offline, online, 20 / 32, 0.4)
    assert len(offline_slots) == 20 and len(online_slots) == 12
    assert batch["obs"][:, 0].tolist() == [1.0] * 20 + [2.0] * 12
    errors = batch["rewards"].numpy()  # an error that tells the row
    offline.update_priorities(offline_slots, errors[:20])
    online.update_priorities(online_slots, errors[20:])
    for rb, slots, first in ((offline, offline_slots, 0), (online, online_slots, 100)):
        seen = np.unique(slots)
        assert rb.priorities[seen] == pytest.approx(seen + first + 1e-6)
        assert (np.delete(rb.priorities, seen) == 1).all()


def test_an_error_that_is_not_finite_leaves_a_buffer_that_can_be_drawn_from():
    rb = buffer(4, 1.0)
    rb.update_priorities(np.array([0, 1]), np.array([np.nan, 2.0]))
    slots, weights = rb.sample(100, 0.4, np.random.default_rng(0))
    assert np.isfinite(weights).all() and set(slots) <= {0, 1, 2, 3}


def test_an_infinite_error_does_not_take_all_draws_of_later_rows():
    rb = PrioritizedReplayBuffer(8, DTYPE, 0.6)
    rb.extend(rows(4))
    rb.update_priorities(np.arange(4), np.array([np.inf, 1.0, 1.0, 1.0]))
    rb.extend(rows(4))
    assert rb.max_priority == pytest.approx(1, abs=1e-5)
    assert rb.priorities[:4] == pytest.approx([rb.max_priority] * 4, abs=1e-5)  # it is not known


def test_rewards_and_returns_are_scaled_when_they_are_drawn():
    rb, nothing = buffer(4, rewards=2.0, returns=-3.0), PrioritizedReplayBuffer(9, DTYPE, 0.6)
    batch, _, _ = sample_mixed(make_agent(reward_scale=0.1), rb, nothing, 1.0, 0.4)
    assert batch["rewards"].tolist() == pytest.approx([0.2] * 32)
    assert batch["returns"].tolist() == pytest.approx([-0.3] * 32)
    assert (rb.rows["rewards"] == 2).all()


def test_noise_on_observations_is_in_their_standard_deviations():
    args = Args(hidden_size=16, batch_size=4_000)
    agent = WarmupAgent(np.zeros(D), np.array([1.0, 2.0, 4.0]), A, args=args)
    rb, nothing = buffer(4, obs=5.0), PrioritizedReplayBuffer(9, DTYPE, 0.6)
    batch, _, _ = sample_mixed(agent, rb, nothing, 1.0, 0.4, obs_noise=0.1)
    assert batch["obs"].mean(0).tolist() == pytest.approx([5, 5, 5], abs=0.05)
    assert batch["obs"].std(0).tolist() == pytest.approx([0.1, 0.2, 0.4], rel=0.1)
    assert not torch.allclose(batch["obs"] - 5, batch["next_obs"])
    assert (rb.rows["obs"] == 5).all()
    batch, _, _ = sample_mixed(agent, rb, nothing, 1.0, 0.4)
    assert (batch["obs"] == 5).all()


def test_weights_of_a_mixed_batch():
    """Critic: importance times source; actor: source alone; each by one mean of both buffers."""

    def draw(**own):
        offline, online = filled([1.0] * 4, 1.0), filled([1.0] * 29 + [971.0], 1.0)
        offline.rows["weights"] = 3.0
        return sample_mixed(make_agent(batch_size=60, **own), offline, online, 0.5, 1.0)[0]

    both, critic, none = (draw(weighted_loss=kind) for kind in ("both", "critic", "none"))
    # N P: offline 1; online 0.03 and 29.13, so importance has three values at most
    ratios = (none["critic_weights"] / none["critic_weights"].max()).unique().tolist()
    assert [round(x, 4) for x in ratios] in ([0.0343, 1.0], [0.001, 0.03, 1.0])
    means = [
        batch[name].mean().item()
        for batch in (both, critic, none)
        for name in ("critic_weights", "actor_weights")
    ]
    assert means == pytest.approx([1] * 6)
    assert torch.equal(both["critic_weights"], critic["critic_weights"]) and not torch.allclose(
        critic["critic_weights"], none["critic_weights"]
    )
    assert sorted(both["actor_weights"].unique().tolist()) == pytest.approx([0.5, 1.5])
    assert (critic["actor_weights"] == 1).all()
