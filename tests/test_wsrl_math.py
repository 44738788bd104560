"""wsrl_warmup.py: every number of the design worked out by hand, and the learning rules through real updates."""

import copy
import math

import numpy as np
import pytest
import torch
from conftest import same

import sac_hybrid
from wsrl_warmup import (
    Args,
    WarmupAgent,
    conservative_gap,
    normalize_weights,
    offline_ratio_at,
    priority_beta_schedule,
    return_to_go,
    split_rows,
    td_target,
)

N, D, A = 12, 4, 2


def make_agent(**options):
    args = Args(**dict(hidden_size=16, lr=1e-2, gamma=0.97, init_alpha=0.01) | options)
    return WarmupAgent(np.zeros(D), np.ones(D), A, args=args)


def make_batch(seed=0):
    rng = torch.Generator().manual_seed(seed)
    batch = {name: torch.randn(N, D, generator=rng) for name in ("obs", "next_obs")}
    batch["actions"] = torch.rand(N, A, generator=rng) * 2 - 1
    batch |= dict(rewards=torch.rand(N, generator=rng), masks=torch.ones(N), returns=torch.zeros(N))
    return batch | dict(
        critic_weights=torch.ones(N), actor_weights=torch.ones(N), is_cloned=torch.ones(N)
    )


def test_offline_share_and_split_of_256():
    args = Args()
    expected = {0: 1, 1: 0.999, 100: 0.9048, 500: 0.6064, 692: 0.5004, 693: 0.5, 9999: 0.5}
    for step, ratio in expected.items():
        assert offline_ratio_at(args, step) == pytest.approx(ratio, abs=5e-5)
    splits = {0: (256, 0), 1: (255, 1), 10: (253, 3), 100: (231, 25), 500: (155, 101)}
    for step, split in (splits | {693: (128, 128)}).items():
        assert split_rows(256, offline_ratio_at(args, step), 1000, 1000) == split
    # a short online buffer is filled up from offline, an empty one is not asked
    assert split_rows(256, 0.5, 1000, 40) == (216, 40) and split_rows(256, 0.5, 0, 7) == (0, 256)
    assert split_rows(256, 0.0, 9, 0) == (256, 0) and split_rows(256, 0.0, 9, 1) == (0, 256)


def test_numbers_of_the_design():
    betas = [priority_beta_schedule(t) for t in (0, 0.25, 0.5, 1, 1.5)]
    assert betas == pytest.approx([0.4, 0.55, 0.7, 1, 1])
    assert return_to_go([1, 2, 3], 0.9) == pytest.approx([5.23, 4.7, 3])
    squares, weights = torch.tensor([1.0, -2.0, 3.0]).square(), torch.tensor([2.0, 1.0, 0.5])
    assert (squares * weights).mean().item() == pytest.approx(3.5)
    assert (squares * normalize_weights(weights)).mean().item() == pytest.approx(3.0)
    # r 1, min Q 10, alpha .2, log pi -1.5, gamma .99
    ones = torch.ones(1)
    assert td_target(ones, ones, 10 * ones, 0.99).item() == pytest.approx(10.9)
    assert td_target(ones, ones, (10 + 0.2 * 1.5) * ones, 0.99).item() == pytest.approx(11.197)
    assert td_target(ones, 0 * ones, 10 * ones, 0.99).item() == 1


def test_weighted_td_loss_of_a_real_update():
    """td [1,-2,3] x 4 rows with weights [2,1,.5]: 3.5, over their mean 3.0, without any 4.666667."""
    td, weights = torch.tensor([1.0, -2.0, 3.0] * 4), torch.tensor([2.0, 1.0, 0.5] * 4)
    cases = ((weights, 3.5), (normalize_weights(weights), 3.0), (torch.ones(N), 14 / 3))
    for given, expected in cases:
        agent = make_agent(num_critics=2)
        agent.critic.layers[-1].weight.data.zero_()
        agent.critic.layers[-1].bias.data.zero_()  # Q = 0, so the error is -r
        batch = make_batch() | {"masks": torch.zeros(N), "critic_weights": given, "rewards": -td}
        stats = agent.update(batch)
        assert stats["critic_loss"].item() == pytest.approx(expected)
        assert torch.allclose(stats["td_errors"], td)  # the mean over the critics


def test_cql_and_calql():
    q_values = torch.tensor([[[1.0], [2.0], [0.0]]])  # (E,M,N)
    logs = torch.tensor([[math.log(0.5)], [-1.0], [-2.0]])
    calibrated = torch.tensor([[[1.0], [2.0], [1.5]]])  # the first action is uniform, and stays
    for values, data, gap in (
        (q_values, 0.0, 3.493812),
        (q_values, 1.5, 1.993812),
        (calibrated, 0.0, 4.071375),
        (calibrated, 1.5, 2.571375),
    ):
        found = conservative_gap(values, logs, torch.full((1, 1), data)).item()
        assert found == pytest.approx(gap, abs=1e-5)


def slow_cql(agent, batch, returns=None):
    """The gap row by row and critic by critic, with torch's own distributions"""
    torch.manual_seed(5)
    count = agent.NUM_CQL_ACTIONS
    actions, logs = [torch.rand(count, N, A) * 2 - 1], []
    for obs in (batch["obs"], batch["next_obs"]):
        mean, std = agent.policy(obs)
        sampled = (mean + std * torch.randn(count, N, A)).tanh()
        actions.append(sampled)
        normal = torch.distributions.Normal(mean.double(), std.double())
        bounds = [torch.distributions.TanhTransform()]
        squashed = torch.distributions.TransformedDistribution(normal, bounds)
        logs.append(squashed.log_prob(sampled.double()).sum(-1))
    uniform, total = 2 * -0.693147, 0.0  # of two dims of +-1
    data = agent.critic(batch["obs"], batch["actions"])
    for n in range(N):
        for e in range(len(data)):
            terms = []
            for source in range(3):
                for j in range(count):
                    chosen = actions[source][j, n][None]
                    q = agent.critic(batch["obs"][n : n + 1], chosen)[e, 0].item()
                    q = max(q, returns[n].item()) if returns is not None and source else q
                    terms.append(q - (uniform if source == 0 else logs[source - 1][j, n].item()))
            total += math.log(sum(math.exp(term) for term in terms)) - data[e, n].item()
    return total / data.numel()


@pytest.mark.parametrize("method", ["cql", "calql"])
def test_the_conservative_term_against_a_slow_one(method):
    agent, batch = make_agent(num_critics=3), make_batch()
    batch["returns"] = torch.linspace(-0.5, 0.5, N)
    with torch.no_grad():
        expected = slow_cql(agent, batch, batch["returns"] if method == "calql" else None)
        torch.manual_seed(5)
        q_values = agent.critic(batch["obs"], batch["actions"])
        gap = agent.conservative_term(batch, batch["obs"], batch["next_obs"], q_values, method)
    assert gap.item() == pytest.approx(expected, abs=1e-4)


def test_the_conservative_term_reaches_the_loss():
    """Weight 0 takes the plain path: the same losses, the same weights, no extra random draws."""
    plain = make_agent()
    zero, one = (make_agent(offline_objective="cql", cql_alpha=alpha) for alpha in (0.0, 0.5))
    stats = {"plain": plain.update(make_batch()), "zero": zero.update(make_batch(), method="cql")}
    assert same(plain.state_dict(), zero.state_dict()) and "cql_loss" not in stats["zero"]
    assert all(torch.equal(stats["plain"][name], stats["zero"][name]) for name in stats["plain"])
    stats = one.update(make_batch(), method="cql")
    assert stats["cql_loss"].item() > 0 and not same(plain.state_dict(), one.state_dict())


@pytest.mark.parametrize(
    "options", [{}, dict(num_critics=5), dict(layer_norm=False, bc_weight=2.0)]
)
def test_the_core_is_that_of_sac_hybrid(options):
    """Everything added off: the same losses and weights, bit for bit, after updates of both kinds."""
    shared = dict(hidden_size=16, lr=1e-2, init_alpha=0.1, gamma=0.97, seed=3, tau=0.01) | options
    ours = make_agent(**shared)
    their_args = sac_hybrid.Args(**shared)
    theirs = sac_hybrid.SACHybridAgent([], A, 0, args=their_args, obs_shapes={"state": (D,)})
    names = {  # here the critic is the ensemble, there it has an encoder and a gripper, too
        name: name.replace(".qf.", ".") for name, _ in theirs.named_parameters()
    }
    assert sorted(names.values()) == sorted(name for name, _ in ours.named_parameters())
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights[names[name]])
    for i in range(4):
        is_demo = torch.arange(N) < 5
        batch = make_batch(i) | {"is_cloned": is_demo}
        their_batch = batch | {name: {"state": batch[name]} for name in ("obs", "next_obs")}
        their_batch["is_demo"] = is_demo
        stats = ours.update(batch, train_actor=i % 2 == 1)
        expected = theirs.update(their_batch, train_actor=i % 2 == 1)
        assert all(torch.equal(stats[name], expected[name]) for name in expected)
        assert set(stats) - set(expected) == {"td_errors"}
    assert all(torch.equal(x, weights[names[name]]) for name, x in theirs.named_parameters())


@pytest.mark.parametrize("move", [copy.deepcopy, lambda agent: agent.double().float()])
def test_a_copied_and_a_moved_agent_learn(move):
    """Optimizers hold ordinary parameters: every one of them moves, in the copy and not in the original."""
    original = make_agent(num_critics=3)
    before = copy.deepcopy(original.state_dict())
    agent = move(original)
    for i in range(2):
        agent.update(make_batch(i))
    trained = [name for name, _ in agent.named_parameters() if "target" not in name]
    moved = [name for name in trained if not torch.equal(agent.state_dict()[name], before[name])]
    assert moved == trained
    if move is copy.deepcopy:
        assert same(original.state_dict(), before)


def test_a_gradient_that_is_not_finite_changes_nothing():
    agent = make_agent()
    agent.update(make_batch())
    before = copy.deepcopy(agent.state_dict())
    agent.update(make_batch() | {"rewards": torch.full((N,), math.inf)}, train_actor=False)
    after = agent.state_dict()
    assert after.pop("skipped_steps") == 1 and before.pop("skipped_steps") == 0
    critics = [name for name in after if name.startswith(("critic.", "actor"))]
    assert all(torch.equal(after[name], before[name]) for name in critics)


def test_weights_reach_the_actor_alone():
    """Rows of weight 0 may hold anything; the critic's weights are proved above."""
    mask = (torch.arange(N) < 3).float()
    actors = []
    for seed in (5, 6):
        agent, batch, other = make_agent(), make_batch(0), make_batch(seed)
        batch["obs"] = torch.where(mask[:, None] > 0, batch["obs"], other["obs"])
        batch |= dict(critic_weights=torch.zeros(N), actor_weights=normalize_weights(mask))
        before = torch.cat([x.flatten() for x in agent.actor.parameters()]).clone()
        agent.update(batch)
        actors.append(torch.cat([x.flatten() for x in agent.actor.parameters()]) - before)
    assert torch.allclose(*actors, atol=1e-6) and actors[0].abs().max() > 0


def test_cloning_regresses_the_actions_and_the_critics_learn_beside_it():
    agent, batch = make_agent(), make_batch()
    first = agent.update(batch, method="bc")
    assert "alpha_loss" not in first  # no reinforcement in the actor
    for _ in range(100):
        last = agent.update(batch, method="bc")
    assert last["actor_loss"] < 0.1 * first["actor_loss"]
    assert last["critic_loss"] < 0.5 * first["critic_loss"]


def test_only_marked_rows_are_cloned():
    """By both options, as a weighted mean of these rows. A batch without them has no loss."""
    marked, weights = torch.arange(N) >= 6, torch.linspace(0.5, 1.5, N)
    batch = make_batch() | {"is_cloned": marked, "actor_weights": weights}
    agent = make_agent(bc_weight=2.0)
    mean, _ = agent.policy(batch["obs"])
    distance = (mean.tanh() - batch["actions"]).square().sum(-1)
    error = (weights * distance)[6:].sum().item() / weights[6:].sum().item()
    cloner = make_agent()
    assert cloner.update(batch, method="bc")["actor_loss"].item() == pytest.approx(error, rel=1e-5)
    assert agent.update(batch)["bc_loss"].item() == pytest.approx(2 * error, rel=1e-5)
    assert "bc_loss" not in make_agent().update(batch)
    cloner = make_agent()
    before = copy.deepcopy(cloner.actor.state_dict())
    batch["is_cloned"] = torch.zeros(N)
    assert cloner.update(batch, method="bc")["actor_loss"] == 0
    assert same(cloner.actor.state_dict(), before)


def test_heavier_rows_are_not_cloned_more_where_they_are_rare():
    """All weights have a mean of 1 in a batch: that of a demonstration rises if there are few."""
    losses = []
    for num_demos in (1, 4):
        is_demo = (torch.arange(N) < num_demos).float()
        batch = make_batch() | {"is_cloned": is_demo}
        for name in ("obs", "actions"):
            batch[name] = batch[name][:1].expand(N, -1)  # the same distance in every row
        batch["actor_weights"] = normalize_weights(1 + 4 * is_demo)
        losses.append(make_agent().update(batch, method="bc")["actor_loss"].item())
    assert losses[0] == pytest.approx(losses[1])


def test_the_critics_of_a_clone_evaluate_its_mean_action():
    """No loss of cloning trains the deviation, so the critics must not learn the value of its samples."""
    agent, batch = make_agent(num_critics=1), make_batch()
    next_mean, _ = agent.policy(batch["next_obs"])
    next_value = agent.critic_target(batch["next_obs"], next_mean.tanh())[0]
    target = batch["rewards"] + 0.97 * next_value
    error = agent.critic(batch["obs"], batch["actions"])[0] - target
    found = agent.update(batch, method="bc")["td_errors"]
    assert torch.allclose(found, error.detach(), atol=1e-6)
    sampled = make_agent(num_critics=1).update(batch)["td_errors"]
    assert not torch.allclose(sampled, error.detach(), atol=1e-3)


def test_an_agent_takes_observations_of_any_type():
    agent, obs = make_agent(), np.linspace(-1, 1, D)
    for given in (obs, list(obs), np.float32(obs)[::-1][::-1]):
        assert (agent.act(given) == agent.act(np.float32(obs))).all()


def test_dropout_is_active_in_the_update_of_the_actor_only():
    agent, plain = make_agent(dropout=0.5), make_agent()
    obs = np.ones(D, np.float32)
    assert (agent.act(obs) == agent.act(obs)).all() and (agent.act(obs) == plain.act(obs)).all()
    critic_only = [each.update(make_batch(), train_actor=False) for each in (agent, plain)]
    assert critic_only[0]["critic_loss"] == critic_only[1]["critic_loss"]
    both = [each.update(make_batch(1)) for each in (agent, plain)]
    assert both[0]["actor_loss"] != both[1]["actor_loss"]
    assert not agent.actor.training


def test_an_update_seeds_every_device(monkeypatch):
    """Dropout draws on the device of the network: a resumed run on a GPU needs its generator, too."""
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    agent = make_agent(dropout=0.5, seed=2)
    seeds.clear()
    for i in range(2):
        agent.update(make_batch(i))
    assert seeds == [2_000_006, 2_000_007]


def test_row_errors_are_computed_with_as_many_critics_as_training_draws():
    agent, batch = make_agent(num_critics=4, reward_scale=0.5), make_batch()
    errors = agent.row_errors(batch)
    next_mean, _ = agent.policy(batch["next_obs"])
    next_q = agent.critic_target(batch["next_obs"], next_mean.tanh())
    target = 0.5 * batch["rewards"] + 0.97 * torch.minimum(next_q[0], next_q[1])
    assert torch.allclose(errors["targets"], target)
    assert errors["td_errors"].shape == (4, N)
    distance = (agent.policy(batch["obs"])[0].tanh() - batch["actions"]).square().sum(1)
    assert torch.allclose(errors["clone_errors"], distance)


def test_load_gives_the_same_agent(tmp_path):
    args = Args(hidden_size=16, dropout=0.1)
    agent = WarmupAgent(np.full(D, 0.5), np.ones(D), A, args=args)
    for i in range(3):
        agent.update(make_batch(i))
    torch.save(agent.checkpoint(), tmp_path / "final_model.pth")
    other = WarmupAgent.load(tmp_path / "final_model.pth")  # widths and options come from the file
    assert (other.act(np.ones(D, np.float32)) == agent.act(np.ones(D, np.float32))).all()
    assert agent.update(make_batch(7))["critic_loss"] == other.update(make_batch(7))["critic_loss"]
    assert same(agent.state_dict(), other.state_dict())
