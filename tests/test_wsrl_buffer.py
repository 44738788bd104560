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
    row_dtype,
    sample_mixed,
)

D, A = 3, 2
BOX = types.SimpleNamespace
DTYPE = row_dtype(BOX(observation_space=BOX(shape=(D,)), action_space=BOX(shape=(A,))))


def rows(n, **columns):
    made = np.zeros(n, DTYPE)
    for name, values in (dict(weights=1) | columns).items():
        made[name] = np.reshape(values, (-1, 1)) if name == "obs" else values
    return made


def buffer(n, alpha=0.6, **columns):
    return PrioritizedReplayBuffer(n, DTYPE, alpha, rows(n, **columns))


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
    rb = PrioritizedReplayBuffer(4, DTYPE, 1.0, rows(1))
    assert rb.priorities[0] == 1
    rb.update_priorities(np.array([0]), np.array([-5.0]))
    rb.insert(rows(1))
    rb.update_priorities(
        np.array([0]), np.array([0.5])
    )  # the maximum is that of the run, not of the moment
    rb.insert(rows(1))
    assert rb.priorities[:3] == pytest.approx([0.5, 5, 5], abs=1e-5)
    rb.insert(rows(3, rewards=[1, 2, 3]))
    assert rb.rows["rewards"].tolist() == [2, 3, 0, 1] and len(rb) == 4


def test_a_restored_ring_goes_on_where_it_was():
    rb, other = filled(np.arange(1.0, 10.0)), PrioritizedReplayBuffer(9, DTYPE)
    rb.insert(rows(4, obs=2.0))
    other.load_state_dict(rb.state_dict())
    for each in (rb, other):
        each.insert(rows(1, obs=3.0))
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
    whole = buffer(4)
    assert filter_offline_data(whole, 1.0) is whole


def test_retention_by_td_error_and_its_priorities():
    agent = WarmupAgent(Args(hidden_size=16), [1.0] * A, np.zeros(D), np.ones(D))
    rb = buffer(5, obs=np.arange(5), rewards=[0.0, 9.0, 0.1, -8.0, 0.2])  # masks 0: td = Q - r
    kept = filter_offline_data(rb, 0.4, "td_error", agent)
    assert kept.rows["obs"][:, 0].tolist() == [1, 3]  # the size of the error, not its sign
    kept = filled([5.0, 1.0, 3.0, 2.0, 4.0], 1.0).select_top_k(np.array([0, 9, 1, 8, 2]), 2)
    assert kept.priorities == pytest.approx([1.0, 2.0]) and kept.max_priority == pytest.approx(5)


def test_mixed_batch_is_shuffled_and_errors_find_their_rows():
    offline = buffer(50, 1.0, obs=1.0, rewards=np.arange(50))
    online = buffer(50, 1.0, obs=2.0, rewards=100 + np.arange(50))
    rng = np.random.default_rng(0)
    batch, draws = sample_mixed(Args(), (offline, online), (20, 12), 0.4, rng, "cpu")
    source = batch["obs"][:, 0]
    assert (source == 1).sum() == 20 and (source == 2).sum() == 12 and not (source[:20] == 1).all()
    for rb, inds, place in draws:
        rb.update_priorities(inds, batch["rewards"].numpy()[place])  # an error that tells the row
    for rb, mark, first in ((offline, 1, 0), (online, 2, 100)):
        seen = np.unique(batch["rewards"][source == mark].numpy()).astype(int)
        assert rb.priorities[seen - first] == pytest.approx(seen + 1e-6)
        assert (np.delete(rb.priorities, seen - first) == 1).all()


def test_weights_of_a_mixed_batch():
    """Critic: importance, by one maximum of both buffers, times source; actor: source alone; each of mean 1."""

    def draw(**own):
        offline, online = filled([1.0] * 4, 1.0), filled([1.0, 1.0, 1.0, 97.0], 1.0)
        offline.rows["weights"] = 3.0
        rng = np.random.default_rng(0)
        return sample_mixed(Args(**own), (offline, online), (30, 30), 1.0, rng, "cpu")[0]

    both, critic, none = (draw(weighted_loss=kind) for kind in ("both", "critic", "none"))
    # N P: offline 1; online 0.04 and 3.88, so importance has three values at most
    ratios = (none["weights"] / none["weights"].max()).unique().tolist()
    assert [round(x, 4) for x in ratios] in ([0.2577, 1.0], [0.0103, 0.04, 1.0])
    means = [
        batch[name].mean().item()
        for batch in (both, critic, none)
        for name in ("weights", "actor_weights")
    ]
    assert means == pytest.approx([1] * 6)
    assert torch.equal(both["weights"], critic["weights"]) and not torch.allclose(
        critic["weights"], none["weights"]
    )
    assert sorted(both["actor_weights"].unique().tolist()) == pytest.approx([0.5, 1.5])
    assert (critic["actor_weights"] == 1).all()
