"""wsrl_warmup.py: every number of the design worked out by hand, and the learning rules through real updates."""

import copy
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import wsrl_warmup
from sac_hybrid import SACHybridAgent
from wsrl_warmup import (
    WarmupAgent,
    batch_weights,
    beta_at,
    calibrate,
    conservative_gap,
    offline_ratio_at,
    polyak,
    return_to_go,
    split_rows,
    td_target,
    uniform_log_density,
    weighted_mean,
)

N, D, A = 12, 4, 2


def make_agent(**options):
    return WarmupAgent(D, A, **dict(hidden_size=16, lr=1e-2, gamma=0.97, init_alpha=0.01) | options)


def make_batch(seed=0, n=N):
    rng = torch.Generator().manual_seed(seed)
    batch = {name: torch.randn(n, D, generator=rng) for name in ("obs", "next_obs")}
    batch["actions"] = torch.rand(n, A, generator=rng) * 2 - 1
    batch |= dict(rewards=torch.rand(n, generator=rng), masks=torch.ones(n), returns=torch.zeros(n))
    return batch


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "step, ratio", [(0, 1), (1, 0.999), (100, 0.9048), (500, 0.6064), (692, 0.5004), (693, 0.5), (9999, 0.5)]
)
def test_offline_share(step, ratio):
    assert offline_ratio_at(step, 1.0, 0.999, 0.5) == pytest.approx(ratio, abs=5e-5)


@pytest.mark.parametrize(
    "step, split",
    [(0, (256, 0)), (1, (255, 1)), (10, (253, 3)), (100, (231, 25)), (500, (155, 101)), (693, (128, 128))],
)
def test_split_of_256(step, split):
    assert split_rows(256, offline_ratio_at(step, 1.0, 0.999, 0.5), 1000, 1000) == split


@pytest.mark.parametrize(
    "ratio, offline, online, split",
    [(0.5, 1000, 40, (216, 40)), (0.5, 0, 7, (0, 256)), (0.0, 9, 0, (256, 0)), (0.5, 0, 0, (0, 0))],
)
def test_a_short_buffer_is_filled_up_and_an_empty_one_not_asked(ratio, offline, online, split):
    assert split_rows(256, ratio, offline, online) == split


def test_beta_rises_to_one():
    assert [beta_at(t) for t in (0, 0.25, 0.5, 1, 1.5)] == pytest.approx([0.4, 0.55, 0.7, 1, 1])


def test_weighted_td_loss():
    squares, weights = torch.tensor([1.0, -2.0, 3.0]).square(), torch.tensor([2.0, 1.0, 0.5])
    assert weighted_mean(squares, weights).item() == pytest.approx(3.5)
    assert weighted_mean(squares, batch_weights(weights)).item() == pytest.approx(3.0)
    assert weighted_mean(squares).item() == pytest.approx(14 / 3)
    assert batch_weights(weights, torch.tensor([1.0, 2.0, 4.0])).tolist() == [1, 1, 1]  # the product, over its mean


def test_return_to_go():
    assert return_to_go([1, 2, 3], 0.9) == pytest.approx([5.23, 4.7, 3])


def test_td_target():
    rewards, q_values, bonus = torch.ones(1), torch.tensor([[10.0], [12.0]]), 0.2 * 1.5
    assert td_target(rewards, torch.ones(1), q_values, 0.99, bonus).item() == pytest.approx(11.197)
    assert td_target(rewards, torch.ones(1), q_values, 0.99).item() == pytest.approx(10.9)
    assert td_target(rewards, torch.zeros(1), q_values, 0.99, bonus).item() == 1


def test_cql_and_calql():
    q_values, logs = torch.tensor([[[1.0, 2.0, 0.0]]]), torch.tensor([[math.log(0.5), -1.0, -2.0]])
    assert conservative_gap(q_values, logs, torch.zeros(1, 1)).item() == pytest.approx(3.493812, abs=1e-5)
    assert conservative_gap(q_values, logs, torch.full((1, 1), 1.5)).item() == pytest.approx(1.993812, abs=1e-5)
    calibrated = calibrate(q_values, torch.tensor([1.5]), num_uniform=1)  # the first is uniform, and stays
    assert calibrated.tolist() == [[[1.0, 2.0, 1.5]]]
    assert conservative_gap(calibrated, logs, torch.zeros(1, 1)).item() == pytest.approx(4.071375, abs=1e-5)
    assert conservative_gap(calibrated, logs, torch.full((1, 1), 1.5)).item() == pytest.approx(2.571375, abs=1e-5)


def test_uniform_density_uses_the_real_bounds():
    assert uniform_log_density([-2.0], [2.0]) == pytest.approx(-1.386294, abs=1e-6)


def test_polyak():
    target = torch.ones(1)
    polyak(target, torch.full((1,), 2.0), 0.005)
    assert target.item() == pytest.approx(1.005)


@pytest.mark.parametrize("critics", [(2, 2), (5, 2)])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_core_is_that_of_sac_hybrid(critics, entropy):
    """Everything extra off: the same weights, bit for bit, after updates of both kinds."""
    shared = dict(hidden_size=16, lr=1e-2, init_alpha=0.1, gamma=0.97, seed=3, backup_entropy=entropy)
    shared |= dict(num_critics=critics[0], num_sampled_critics=critics[1])
    ours, theirs = WarmupAgent(D, A, **shared), SACHybridAgent([], A, 0, "cpu", state_dim=D, **shared)
    for i in range(6):
        batch = make_batch(i)
        theirs_batch = batch | {name: {"state": batch[name]} for name in ("obs", "next_obs")}
        stats = ours.weighted_update(batch, full=i % 2 == 1)
        expected = theirs.update(theirs_batch | {"is_demo": torch.zeros(N, dtype=torch.bool)}, full=i % 2 == 1)
        assert all(torch.equal(stats[name], expected[name]) for name in expected)
    assert torch.equal(ours.flat_critic, theirs.flat_critic) and torch.equal(ours.flat_target, theirs.flat_target)
    assert same(ours.policy.actor.state_dict(), theirs.policy.actor.state_dict())
    assert torch.equal(ours.temperature(), theirs.temperature())


def test_features_off_draw_nothing():
    plain, zero, cql = make_agent(), make_agent(), make_agent()
    for agent, options in ((plain, {}), (zero, dict(cql_alpha=0.0, calibrated=True)), (cql, dict(cql_alpha=1.0))):
        agent.weighted_update(make_batch(), **options)
    assert same(plain.networks(), zero.networks())
    assert torch.equal(plain.noise_rng.get_state(), zero.noise_rng.get_state())
    assert not torch.equal(plain.noise_rng.get_state(), cql.noise_rng.get_state())
    assert torch.equal(plain.dropout_rng.get_state(), make_agent().dropout_rng.get_state())


def test_weights_reach_both_losses_and_only_their_own():
    mask = torch.ones(N)
    mask[3:] = 0
    for critic, actor in ((True, False), (False, True)):
        agents = make_agent(), make_agent()
        for agent, seed in zip(agents, (5, 6), strict=True):  # other rows behind weight 0
            batch, other = make_batch(0), make_batch(seed)
            if critic:  # rewards reach the critic alone
                batch["rewards"] = torch.where(mask > 0, batch["rewards"], other["rewards"])
            else:
                batch["obs"] = torch.where(mask[:, None] > 0, batch["obs"], other["obs"])
            weights = batch_weights(mask)
            if critic:
                agent.weighted_update(batch, (weights, None), full=False)
            else:
                loss = agent.actor_losses(batch, weights)[0]
                agent.result = torch.autograd.grad(loss, list(agent.policy.actor.parameters()))
        if critic:
            assert torch.equal(agents[0].flat_critic, agents[1].flat_critic)
            unweighted = make_agent()
            unweighted.weighted_update(batch, full=False)
            assert not torch.equal(unweighted.flat_critic, agents[1].flat_critic)
        else:
            assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(agents[0].result, agents[1].result, strict=True))


def test_equal_weights_are_the_plain_update():
    plain, weighted = make_agent(), make_agent()
    weights = batch_weights(torch.full((N,), 4.0))  # powers of two: exactly 1
    assert (
        plain.weighted_update(make_batch())["critic_loss"]
        == weighted.weighted_update(make_batch(), (weights,) * 2)["critic_loss"]
    )
    assert same(plain.networks(), weighted.networks())


def slow_cql(agent, batch, returns=None):
    """The gap row by row and critic by critic, with torch's own distributions."""
    draws, k = torch.Generator(), agent.cql_num_actions
    draws.set_state(agent.noise_rng.get_state())
    actions, logs = [torch.rand(N, k, A, generator=draws) * 2 - 1], []
    for obs in (batch["obs"], batch["next_obs"]):
        mean, std = agent.policy.actor(obs)
        sampled = (mean[:, None] + std[:, None] * torch.randn(N, k, A, generator=draws)).tanh()
        actions.append(sampled)
        normal = torch.distributions.Normal(mean[:, None].double(), std[:, None].double())
        squashed = torch.distributions.TransformedDistribution(
            normal, [torch.distributions.TanhTransform(), torch.distributions.AffineTransform(0.0, 2.0)]
        )
        logs.append(squashed.log_prob(2 * sampled.double()).sum(-1))
    total = 0.0
    for n in range(N):
        for e in range(len(agent.qf.weights[0])):
            terms = []
            for source in range(3):
                for j in range(k):
                    q = agent.qf(batch["obs"][n : n + 1], actions[source][n, j][None])[e, 0].item()
                    q = max(q, returns[n].item()) if returns is not None and source else q
                    terms.append(q - (A * math.log(1 / 4) if source == 0 else logs[source - 1][n, j].item()))
            data = agent.qf(batch["obs"][n : n + 1], batch["actions"][n : n + 1])[e, 0].item()
            total += math.log(sum(math.exp(term) for term in terms)) - data
    return total / (N * len(agent.qf.weights[0]))


@pytest.mark.parametrize("calibrated", [False, True])
def test_cql_loss_against_a_slow_one(calibrated):
    bounds = dict(action_low=np.full(A, -2.0), action_high=np.full(A, 2.0))
    agent, batch = make_agent(num_critics=3, **bounds), make_batch()
    batch["returns"] = torch.linspace(-0.5, 0.5, N)
    with torch.no_grad():
        expected = slow_cql(agent, batch, batch["returns"] if calibrated else None)
        loss = agent.cql_loss(batch, agent.qf(batch["obs"], batch["actions"]), calibrated)
    assert loss.item() == pytest.approx(expected, abs=1e-4)


def test_the_conservative_term_leaves_online_rows_alone():
    """Their return is -inf. Each row counts 1/N: half of the rows, half of the term, whatever the others hold."""
    losses = {}
    for name, online in (("none", []), ("odd", range(1, N, 2)), ("even", range(0, N, 2)), ("all", range(N))):
        agent, batch = make_agent(), make_batch()
        batch["returns"][list(online)] = -math.inf
        batch["actions"][list(online)] = 0.7  # must not matter
        losses[name] = agent.cql_loss(batch, agent.qf(batch["obs"], batch["actions"]), calibrated=True).item()
    assert losses["all"] == 0 and losses["odd"] + losses["even"] == pytest.approx(losses["none"], rel=1e-5)
    assert min(losses["odd"], losses["even"]) > 0


def test_cql_lowers_what_the_data_do_not_have():
    gaps = {}
    for alpha in (0.0, 5.0):
        agent, batch = make_agent(), make_batch() | {"masks": torch.zeros(N)}
        for _ in range(30):
            agent.weighted_update(batch, cql_alpha=alpha)
        with torch.no_grad():
            other = torch.rand(N, A, generator=torch.Generator().manual_seed(9)) * 2 - 1
            gaps[alpha] = (agent.qf(batch["obs"], other) - agent.qf(batch["obs"], batch["actions"])).mean().item()
    assert gaps[5.0] < gaps[0.0] - 0.5


def test_calql_stops_at_the_return():
    """Returns far above every Q: the policy's actions carry no gradient any more, the uniform ones do."""
    agent, batch = make_agent(), make_batch() | {"returns": torch.full((N,), 50.0)}
    q_values = torch.tensor([[[1.0, 2.0, 3.0]]], requires_grad=True)
    calibrate(q_values, torch.tensor([50.0]), 1).sum().backward()
    assert q_values.grad.tolist() == [[[1, 0, 0]]]
    stats = agent.weighted_update(batch, cql_alpha=1.0, calibrated=True)
    assert stats["cql_loss"] > 45  # the calibrated value, 50, dominates the log-sum-exp


def test_nan_never_reaches_the_weights():
    agent = make_agent()
    agent.weighted_update(make_batch())
    before, moments = agent.networks(), copy.deepcopy(agent.critic_optimizer.state_dict())
    for name in ("rewards", "obs", "actions"):
        batch = make_batch()
        batch[name][3] = math.nan
        assert agent.weighted_update(batch) == {}
    assert same(before, agent.networks()) and (agent.skipped_steps, agent.skipped_in_a_row) == (3, 3)
    assert torch.equal(moments["state"][0]["exp_avg"], agent.critic_optimizer.state_dict()["state"][0]["exp_avg"])
    agent.weighted_update(make_batch())
    assert agent.skipped_in_a_row == 0


def test_td_errors_are_the_mean_over_the_critics():
    agent, batch = make_agent(num_critics=4), make_batch() | {"masks": torch.zeros(N)}
    with torch.no_grad():
        expected = (agent.qf(batch["obs"], batch["actions"]) - batch["rewards"]).mean(0)
    assert torch.allclose(agent.weighted_update(batch)["td_errors"], expected, atol=1e-6)


def test_dropout_is_for_the_actors_update_only():
    agent = make_agent(dropout=0.5)
    obs = np.ones(D, np.float32)
    assert (agent.policy.act(obs) == agent.policy.act(obs)).all()
    state = agent.dropout_rng.get_state()
    agent.weighted_update(make_batch(), full=False)
    assert torch.equal(state, agent.dropout_rng.get_state())
    agent.weighted_update(make_batch())
    assert not torch.equal(state, agent.dropout_rng.get_state()) and not agent.policy.training
    layer = wsrl_warmup.Dropout(0.25, torch.Generator().manual_seed(0)).train()
    out = layer(torch.ones(40_000))
    assert out.unique().tolist() == pytest.approx([0, 4 / 3]) and out.mean().item() == pytest.approx(1, abs=0.02)


def test_load_gives_the_same_agent(tmp_path):
    agent = make_agent(dropout=0.1)
    agent.policy.obs_mean.fill_(0.5)
    for i in range(3):
        agent.weighted_update(make_batch(i))
    wsrl_warmup.save_checkpoint(tmp_path / "final_model.pth", {"agent": agent.state_dict()})
    other = WarmupAgent(D, A, lr=1e-2, gamma=0.97)  # widths come from the file
    other.load(tmp_path / "final_model.pth")
    obs = np.ones(D, np.float32)
    assert (other.policy.act(obs) == agent.policy.act(obs)).all()
    assert agent.weighted_update(make_batch(7))["critic_loss"] == other.weighted_update(make_batch(7))["critic_loss"]
    assert same(agent.networks(), other.networks())
    other = make_agent(lr=5e-4)
    other.load(tmp_path / "final_model.pth")
    assert other.critic_optimizer.param_groups[0]["lr"] == 5e-4  # the moments come from the file, the rate does not
    with pytest.raises(ValueError, match="obs_dim"):
        WarmupAgent(D + 1, A).load(tmp_path / "final_model.pth")


def test_critic_learns_a_known_value():
    agent, batch = make_agent(num_critics=10), make_batch() | {"masks": torch.zeros(N), "rewards": torch.ones(N)}
    for _ in range(60):
        agent.weighted_update(batch)
    assert agent.weighted_update(batch, full=False)["q_values"].item() == pytest.approx(1.0, abs=0.1)
