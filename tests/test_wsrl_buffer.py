"""wsrl_warmup.py: buffers, prioritized draws in both forms, retention, what a mixed batch holds."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from wsrl_warmup import (
    Args,
    PrioritizedReplayBuffer,
    UniformReplayBuffer,
    WarmupAgent,
    data_weight,
    filter_offline_data,
    importance_weights,
    sample_mixed,
)

D, A = 3, 2


def rows(n, mark=0.0, **others):
    columns = dict(obs=np.full((n, D), mark), next_obs=np.zeros((n, D)), actions=np.zeros((n, A)))
    columns |= {name: np.zeros(n) for name in ("rewards", "masks", "quality", "returns")} | {"weights": np.ones(n)}
    return columns | others


@pytest.fixture(params=["cumsum", "tree"])
def form(request, monkeypatch):
    monkeypatch.setattr(PrioritizedReplayBuffer, "TREE_FROM", 50_000 if request.param == "cumsum" else 1)


def filled(td_errors, **options):
    rb = PrioritizedReplayBuffer(len(td_errors), D, A, **options)
    rb.insert(rows(len(td_errors)))
    rb.update_priorities(np.arange(len(td_errors)), np.array(td_errors) - 1e-6)
    return rb


def test_probabilities_and_importance_weights(form):
    rb = filled([1.0, 2.0, 3.0, 4.0])
    probabilities = rb.priorities / rb.priorities.sum()
    assert probabilities == pytest.approx([0.148230, 0.224674, 0.286555, 0.340542], abs=1e-6)
    for beta, expected in ((0.4, [1, 0.846745, 0.768229, 0.716978]), (1.0, [1, 0.659754, 0.517282, 0.435275])):
        weights = importance_weights(probabilities, 4, beta)
        assert weights / weights.max() == pytest.approx(expected, abs=1e-6)
    inds, weights = rb.sample(1000, 1.0, np.random.default_rng(0))
    assert weights == pytest.approx(1 / (4 * probabilities[inds]))


def test_draws_follow_the_priorities(form):
    rb = filled([1.0, 2.0, 3.0, 4.0])
    inds, _ = rb.sample(40_000, 0.4, np.random.default_rng(1))
    assert np.bincount(inds, minlength=4) / 40_000 == pytest.approx([0.148, 0.225, 0.287, 0.341], abs=0.01)
    rb.update_priorities(np.array([0]), np.array([1e9]))  # a cached sum would not see it
    assert (rb.sample(100, 0.4, np.random.default_rng(1))[0] == 0).all()


def test_rounding_leads_to_no_row_that_is_not_there(form):
    rb = PrioritizedReplayBuffer(7, D, A)
    rb.insert(rows(5))
    rb.sample(1, 0.4, np.random.default_rng(0))
    total = rb.priorities.sum()
    assert rb.find(np.array([0.0, 0.999, 1.0, 4.999, total, np.nextafter(total, 9)])).tolist() == [0, 0, 1, 4, 4, 4]


def test_both_forms_find_the_same_rows(monkeypatch):
    errors = np.random.default_rng(2).exponential(size=1000)
    found = []
    for limit in (50_000, 1):
        monkeypatch.setattr(PrioritizedReplayBuffer, "TREE_FROM", limit)
        rb = filled(errors)
        rb.insert(rows(300))  # a ring: the oldest 300 go
        found.append(rb.sample(2000, 0.7, np.random.default_rng(3)))
    assert (found[0][0] == found[1][0]).all() and found[0][1] == pytest.approx(found[1][1])


def test_new_rows_get_the_running_maximum(form):
    rb = PrioritizedReplayBuffer(4, D, A, alpha=1.0)
    rb.insert(rows(1))
    assert rb.priorities[0] == 1
    rb.update_priorities(np.array([0]), np.array([-5.0]))
    rb.insert(rows(1))
    rb.update_priorities(np.array([0]), np.array([0.5]))  # the maximum is that of the run, not of the moment
    rb.insert(rows(1))
    assert rb.priorities[:3] == pytest.approx([0.5, 5, 5], abs=1e-5)


def test_restored_buffer_draws_the_same(form):
    rb = filled(np.arange(1.0, 10.0))
    rb.insert(rows(4, mark=2.0))
    other = PrioritizedReplayBuffer(9, D, A)
    other.load_state_dict(rb.state_dict())
    draws = [x.sample(50, 0.5, np.random.default_rng(0)) for x in (rb, other)]
    assert (draws[0][0] == draws[1][0]).all() and (draws[0][1] == draws[1][1]).all()
    assert other.at == rb.at == 4 and (other.columns["obs"] == rb.columns["obs"]).all()
    assert other.insert(rows(1)).tolist() == [4] and other.max_priority == rb.max_priority


def test_sampling_by_source_weight_is_not_undone(form):
    rb = PrioritizedReplayBuffer(2, D, A, alpha=0.0, by_weight=True)
    rb.insert(rows(2, weights=np.array([0.5, 1.5])))
    inds, weights = rb.sample(8000, 1.0, np.random.default_rng(0))
    assert inds.mean() == pytest.approx(0.75, abs=0.02) and weights == pytest.approx(np.ones(8000))
    rb.update_priorities(np.array([0, 1]), np.array([3.0, 7.0]))
    assert rb.priorities == pytest.approx([0.5, 1.5])


def test_retention_keeps_the_best():
    values = np.array([0.1, 0.9, 0.5, 0.7, 0.3, 0.2, 0.8, 0.4, 0.6, 1.0])
    for by, columns in (("quality", dict(quality=values)), ("reward", dict(rewards=values))):
        rb = UniformReplayBuffer(10, D, A)
        rb.insert(rows(10, obs=np.arange(10)[:, None].repeat(D, 1), **columns))
        kept = filter_offline_data(rb, 0.2, by)
        assert kept.columns["obs"][:, 0].tolist() == [1, 9]  # in the order of the data
        assert kept.nbytes == rb.nbytes * 0.2 and len(kept) == kept.capacity == 2
    for n in (7, 4):
        rb = UniformReplayBuffer(n, D, A)
        rb.insert(rows(n))
        assert len(filter_offline_data(rb, 0.2)) == 1
    assert filter_offline_data(rb, 1.0) is rb


def test_retention_by_td_error():
    agent = WarmupAgent(D, A, hidden_size=16)
    rewards = np.array([0.0, 9.0, 0.1, -8.0, 0.2])
    rb = UniformReplayBuffer(5, D, A)
    rb.insert(rows(5, obs=np.arange(5)[:, None].repeat(D, 1), rewards=rewards))  # masks 0: td = Q - r
    state = agent.noise_rng.get_state()
    kept = filter_offline_data(rb, 0.4, "td_error", agent)
    assert kept.columns["obs"][:, 0].tolist() == [1, 3]  # the size of the error, not its sign
    assert torch.equal(state, agent.noise_rng.get_state())


def test_priorities_survive_retention(form):
    rb = filled([5.0, 1.0, 3.0, 2.0, 4.0], alpha=1.0)
    kept, best = rb.select_top_k(np.array([0, 9, 1, 8, 2]), 2)
    assert best.tolist() == [1, 3] and kept.priorities == pytest.approx([1.0, 2.0]) and kept.max_priority == 5
    assert (kept.sample(100, 0.4, np.random.default_rng(0))[0] < 2).all()


def test_source_weight_bonus():
    assert data_weight(2.0, 0.5, False, 1.5) == 2 and data_weight(2.0, 0.5, True, 1.5) == 3
    assert data_weight(1.0, 0.9, False, 1.5) > data_weight(1.0, 0.2, False, 1.5) > 0
    assert Args().demo_weight == 2 and Args().success_weight_bonus == 1.5


def test_mixed_batch_is_shuffled_and_errors_find_their_rows():
    agent = WarmupAgent(D, A, hidden_size=16)
    offline, online = (PrioritizedReplayBuffer(50, D, A, alpha=1.0) for _ in range(2))
    offline.insert(rows(50, mark=1.0, rewards=np.arange(50)))
    online.insert(rows(50, mark=2.0, rewards=100 + np.arange(50)))
    batch, is_weights, take_back = sample_mixed((offline, online), (20, 12), 0.4, np.random.default_rng(0), agent)
    source = batch["obs"][:, 0]
    assert (source == 1).sum() == 20 and (source == 2).sum() == 12 and not (source[:20] == 1).all()
    assert is_weights.max() == 1 and len(is_weights) == 32
    take_back(batch["rewards"].numpy())  # an error that tells the row
    for rb, first in ((offline, 0), (online, 100)):
        seen = np.unique(batch["rewards"][source == (1 if first == 0 else 2)].numpy()).astype(int)
        assert rb.priorities[seen - first] == pytest.approx(seen + 1e-6)
        assert (np.delete(rb.priorities, seen - first) == 1).all()


def test_one_maximum_for_both_buffers():
    agent = WarmupAgent(D, A, hidden_size=16)
    offline, online = filled([1.0] * 4, alpha=1.0), filled([1.0, 1.0, 1.0, 97.0], alpha=1.0)
    batch, is_weights, _ = sample_mixed((offline, online), (30, 30), 1.0, np.random.default_rng(0), agent)
    values = sorted(is_weights.unique().tolist())
    # N P: offline 1; online 0.04 and 3.88. Weights 1 (row of 0.04, if drawn), else the offline rows have the maximum
    assert values in ([pytest.approx(0.25 / 3.88 * 4), 1.0], [pytest.approx(0.04 / 3.88), pytest.approx(0.04), 1.0])


def test_one_buffer_alone_draws_no_permutation():
    agent, rng, other = WarmupAgent(D, A, hidden_size=16), np.random.default_rng(4), np.random.default_rng(4)
    rb = UniformReplayBuffer(9, D, A)
    rb.insert(rows(9, rewards=np.arange(9)))
    batch, is_weights, _ = sample_mixed((None, rb), (0, 16), 0.4, rng, agent)
    assert batch["rewards"].tolist() == other.integers(0, 9, 16).tolist() and (is_weights == 1).all()
    assert rng.random() == other.random()


def test_a_million_rows_keep_their_precision():
    rb = PrioritizedReplayBuffer(1_000_000, 1, 1)
    rb.size = 1_000_000
    rb.set_priorities(np.arange(1_000_000), np.full(1_000_000, 0.1))
    assert rb.tree[1] == pytest.approx(1e5, rel=1e-12)
    points = (np.array([0, 7, 499_999, 999_999]) + 0.5) * 0.1
    assert rb.find(points).tolist() == [0, 7, 499_999, 999_999]
