"""wsrl_warmup.py: every number of the design worked out by hand, and the learning rules through real updates."""

import math

import numpy as np
import pytest
import torch
from conftest import same

import sac_hybrid
from wsrl_warmup import (
    Args,
    WarmupAgent,
    batch_weights,
    calibrate,
    conservative_gap,
    offline_ratio_at,
    priority_beta_schedule,
    return_to_go,
    split_rows,
)

N, D, A = 12, 4, 2


def make_agent(scale=1.0, **options):
    args = Args(**dict(hidden_size=16, lr=1e-2, gamma=0.97, init_alpha=0.01) | options)
    return WarmupAgent(args, [scale] * A, np.zeros(D), np.ones(D))


def make_batch(seed=0):
    rng = torch.Generator().manual_seed(seed)
    batch = {name: torch.randn(N, D, generator=rng) for name in ("obs", "next_obs")}
    batch["actions"] = torch.rand(N, A, generator=rng) * 2 - 1
    batch |= dict(rewards=torch.rand(N, generator=rng), masks=torch.ones(N), returns=torch.zeros(N))
    return batch | dict(weights=torch.ones(N), actor_weights=torch.ones(N))


def test_offline_share_and_split_of_256():
    expected = {0: 1, 1: 0.999, 100: 0.9048, 500: 0.6064, 692: 0.5004, 693: 0.5, 9999: 0.5}
    for step, ratio in expected.items():
        assert offline_ratio_at(step, 1.0, 0.999, 0.5) == pytest.approx(ratio, abs=5e-5)
    splits = {
        0: (256, 0),
        1: (255, 1),
        10: (253, 3),
        100: (231, 25),
        500: (155, 101),
        693: (128, 128),
    }
    for step, split in splits.items():
        assert split_rows(256, offline_ratio_at(step, 1.0, 0.999, 0.5), 1000, 1000) == split
    # a short online buffer is filled up from offline, an empty one is not asked
    assert split_rows(256, 0.5, 1000, 40) == (216, 40) and split_rows(256, 0.5, 0, 7) == (0, 256)
    assert split_rows(256, 0.0, 9, 0) == (256, 0) and split_rows(256, 0.5, 0, 0) == (0, 0)


def test_numbers_of_the_design():
    assert [priority_beta_schedule(t) for t in (0, 0.25, 0.5, 1, 1.5)] == pytest.approx(
        [0.4, 0.55, 0.7, 1, 1]
    )
    assert return_to_go([1, 2, 3], 0.9) == pytest.approx([5.23, 4.7, 3])
    squares, weights = torch.tensor([1.0, -2.0, 3.0]).square(), torch.tensor([2.0, 1.0, 0.5])
    assert (squares * weights).mean().item() == pytest.approx(3.5)
    assert (squares * batch_weights(weights)).mean().item() == pytest.approx(3.0)
    assert batch_weights(weights, torch.tensor([1.0, 2.0, 4.0])).tolist() == [
        1,
        1,
        1,
    ]  # the product, over its mean


def test_weighted_td_loss_of_a_real_update():
    """td [1,-2,3] x 4 rows with weights [2,1,.5]: 3.5, over their mean 3.0, without any 4.666667."""
    td, weights = torch.tensor([1.0, -2.0, 3.0] * 4), torch.tensor([2.0, 1.0, 0.5] * 4)
    for given, expected in ((weights, 3.5), (batch_weights(weights), 3.0), (torch.ones(N), 14 / 3)):
        agent, batch = (
            make_agent(num_critics=2),
            make_batch() | {"masks": torch.zeros(N), "weights": given},
        )
        agent.critic.qf.stacked[-2].data.zero_()
        agent.critic.qf.stacked[-1].data.zero_()  # Q = 0, so the error is -r
        stats = agent.update(batch | {"rewards": -td})
        assert stats["critic_loss"].item() == pytest.approx(expected)
        assert torch.allclose(stats["td_errors"], td)  # the mean over the critics


def test_cql_and_calql():
    q_values, logs = torch.tensor([[[1.0, 2.0, 0.0]]]), torch.tensor([[math.log(0.5), -1.0, -2.0]])
    q_values.requires_grad_()
    calibrated = calibrate(
        q_values, torch.tensor([1.5]), num_uniform=1
    )  # the first is uniform, and stays
    assert calibrated.tolist() == [[[1.0, 2.0, 1.5]]]
    for values, data, gap in (
        (q_values, 0.0, 3.493812),
        (q_values, 1.5, 1.993812),
        (calibrated, 1.5, 2.571375),
    ):
        assert conservative_gap(values, logs, torch.full((1, 1), data)).item() == pytest.approx(
            gap, abs=1e-5
        )
    calibrated.sum().backward()
    assert q_values.grad.tolist() == [[[1, 1, 0]]], "nothing is pushed below the return"


def slow_cql(agent, batch, returns=None):
    """The gap row by row and critic by critic, with torch's own distributions; scale 2: actions are within +-2."""
    torch.manual_seed(5)
    actions, logs = [torch.rand(N, agent.K, A) * 2 - 1], []
    for obs in (batch["obs"], batch["next_obs"]):
        mean, std = agent.policy(obs)
        sampled = (mean[:, None] + std[:, None] * torch.randn(N, agent.K, A)).tanh()
        actions.append(sampled)
        normal = torch.distributions.Normal(mean[:, None].double(), std[:, None].double())
        bounds = [
            torch.distributions.TanhTransform(),
            torch.distributions.AffineTransform(0.0, 2.0),
        ]
        squashed = torch.distributions.TransformedDistribution(normal, bounds)
        logs.append(squashed.log_prob(2 * sampled.double()).sum(-1))
    uniform, total = 2 * -1.386294, 0.0  # of two dims of +-2
    data = agent.critic.qf(batch["obs"], batch["actions"])
    for n in range(N):
        for e in range(len(data)):
            terms = []
            for source in range(3):
                for j in range(agent.K):
                    q = agent.critic.qf(batch["obs"][n : n + 1], actions[source][n, j][None])[
                        e, 0
                    ].item()
                    q = max(q, returns[n].item()) if returns is not None and source else q
                    terms.append(q - (uniform if source == 0 else logs[source - 1][n, j].item()))
            total += math.log(sum(math.exp(term) for term in terms)) - data[e, n].item()
    return total / data.numel()


@pytest.mark.parametrize("objective", ["cql", "calql"])
def test_cql_loss_against_a_slow_one(objective):
    agent, batch = make_agent(scale=2.0, num_critics=3, offline_objective=objective), make_batch()
    batch["returns"] = torch.linspace(-0.5, 0.5, N)
    with torch.no_grad():
        expected = slow_cql(agent, batch, batch["returns"] if objective == "calql" else None)
        torch.manual_seed(5)
        q_values = agent.critic.qf(batch["obs"], batch["actions"])
        loss = agent.more_critic_losses(batch, batch["obs"], batch["next_obs"], None, q_values)[
            "cql_loss"
        ]
    assert loss.item() == pytest.approx(expected, abs=1e-4)


def test_the_conservative_term_leaves_online_rows_alone():
    """Their return is -inf. Each row counts 1/N: half of the rows, half of the term, whatever the others hold."""
    losses = {}
    for name, online in (
        ("none", []),
        ("odd", range(1, N, 2)),
        ("even", range(0, N, 2)),
        ("all", range(N)),
    ):
        agent, batch = make_agent(offline_objective="calql", online_cql_alpha=1.0), make_batch()
        agent.enter(3)
        batch["returns"][list(online)] = -math.inf
        batch["actions"][list(online)] = 0.7  # must not matter
        losses[name] = agent.update(batch)["cql_loss"].item()
    assert losses["all"] == 0 and losses["odd"] + losses["even"] == pytest.approx(
        losses["none"], rel=1e-5
    )


@pytest.mark.parametrize("critics", [(2, 2), (5, 2)])
def test_the_core_is_that_of_sac_hybrid(critics):
    """Everything extra off: the same losses and weights, bit for bit, after updates of both kinds."""
    shared = dict(
        hidden_size=16, lr=1e-2, init_alpha=0.1, gamma=0.97, seed=3, tau=0.01, backup_entropy=True
    )
    shared |= dict(num_critics=critics[0], num_sampled_critics=critics[1])
    ours, theirs = make_agent(**shared), make_agent(**shared)
    theirs.__class__ = type(
        "Plain", (sac_hybrid.SAC,), {}
    )  # their update, our encoder and initial weights
    theirs.more_critic_losses = theirs.more_actor_losses = lambda *_: {}
    for i in range(4):
        stats, expected = (agent.update(make_batch(i), full=i % 2 == 1) for agent in (ours, theirs))
        assert all(torch.equal(stats[name], expected[name]) for name in expected)
    assert torch.equal(ours.flat_critic, theirs.flat_critic) and torch.equal(
        ours.flat_target, theirs.flat_target
    )


def test_weights_reach_the_actor_alone():
    """Rows of weight 0 may hold anything; the critic's weights are proved above."""
    mask, grads = (torch.arange(N) < 3).float(), []
    for seed in (5, 6):
        agent, batch, other = make_agent(), make_batch(0), make_batch(seed)
        batch["obs"] = torch.where(mask[:, None] > 0, batch["obs"], other["obs"])
        torch.manual_seed(0)
        loss = agent.actor_losses(batch | dict(actor_weights=batch_weights(mask)), batch["obs"])[
            "actor_loss"
        ]
        grads.append(
            torch.cat(
                [x.flatten() for x in torch.autograd.grad(loss, list(agent.actor.parameters()))]
            )
        )
    assert torch.allclose(*grads, atol=1e-7) and grads[0].abs().max() > 0


def test_cloning_regresses_the_actions_offline_and_fades_online():
    agent, batch = (
        make_agent(offline_objective="bc", online_bc_weight=2.0, offline_decay_rate=0.5),
        make_batch(),
    )
    first = agent.update(batch)
    assert (
        "alpha" in first and "alpha_loss" not in first
    )  # no reinforcement in the actor, the critic learns on
    for _ in range(100):
        last = agent.update(batch)
    assert last["actor_loss"] < 0.1 * first["actor_loss"]
    agent.enter(3)  # 2 * 0.5^3 of |Q|, on rows of the data alone
    batch["returns"][:6] = -math.inf
    agent.q_size = agent.critic.qf(batch["obs"], batch["actions"]).abs().mean()
    mean = agent.policy(batch["obs"])[0]
    error = (mean.tanh() - batch["actions"]).square().sum(-1)[6:].sum() / N
    expected = (0.25 * agent.q_size * error).item()
    assert agent.more_actor_losses(batch, mean)["bc_loss"].item() == pytest.approx(
        expected, rel=1e-3
    )
    assert "bc_loss" in agent.update(batch) and "bc_loss" not in make_agent().update(batch)


def test_load_gives_the_same_agent(tmp_path):
    agent = WarmupAgent(Args(hidden_size=16, dropout=0.1), [1.0] * A, np.full(D, 0.5), np.ones(D))
    for i in range(3):
        agent.update(make_batch(i))
    torch.save(agent.checkpoint(), tmp_path / "final_model.pth")
    other = WarmupAgent.load(tmp_path / "final_model.pth")  # widths and options come from the file
    assert (other.act(np.ones(D, np.float32)) == agent.act(np.ones(D, np.float32))).all()
    assert agent.update(make_batch(7))["critic_loss"] == other.update(make_batch(7))["critic_loss"]
    assert same(agent.state_dict(), other.state_dict())
