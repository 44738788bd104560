"""sac_hybrid.py: the learning rules, seen through real updates of a small agent."""

import copy
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sac_hybrid import SACHybridAgent, load_checkpoint, save_checkpoint

N = 12


def make_agent(grasp=3, continuous=6, **options):
    options = dict(image_shape=(8, 8, 3), state_dim=4, hidden_size=16, lr=1e-2) | options
    return SACHybridAgent(["image"], continuous, grasp, "cpu", **options)


def make_batch(action_dim=7, seed=0):
    rng = torch.Generator().manual_seed(seed)
    obs = [dict(image=torch.randint(0, 256, (N, 8, 8, 3), generator=rng, dtype=torch.uint8),
                state=torch.randn(N, 4, generator=rng)) for _ in range(2)]  # fmt: skip
    actions = torch.rand(N, action_dim, generator=rng) * 2 - 1
    rest = dict(rewards=torch.rand(N, generator=rng), masks=torch.ones(N), grasp_penalty=torch.zeros(N))
    return dict(obs=obs[0], next_obs=obs[1], actions=actions, is_demo=torch.arange(N) >= N // 2, **rest)


def changed(before, after):
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


def parts(agent):
    names = agent.networks()
    return {name.replace("policy.", ""): weight for name, weight in names.items()}


def test_critic_only_leaves_actor_and_temperature_bit_identical():
    agent = make_agent()
    before = parts(agent)
    stats = agent.update(make_batch(), full=False)
    assert changed(before, parts(agent)) == {"encoder", "discrete_qf", "qf", "critic_target"}
    assert set(stats) == {"critic_loss", "grasp_critic_loss", "q_values"}
    assert not agent.actor_optimizer.state and not agent.alpha_optimizer.state
    before = parts(agent)
    stats = agent.update(make_batch(), full=True)
    assert changed(before, parts(agent)) == {"encoder", "discrete_qf", "qf", "critic_target", "actor", "temperature"}
    assert {"actor_loss", "alpha_loss", "alpha"} <= set(stats)


def test_actor_loss_reaches_the_actor_alone():
    agent = make_agent(bc_weight=0.5)
    batch = make_batch()
    features, *_ = agent.critic_losses(batch)
    actor_loss, alpha_loss, _ = agent.actor_losses(batch, features.detach())
    modules = [("encoder", agent.policy.encoder), ("actor", agent.policy.actor), ("temperature", agent.temperature)]
    for loss, reached in ((actor_loss, "actor"), (alpha_loss, "temperature")):
        for name, module in modules:
            grads = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True, allow_unused=True)
            assert any(grad is not None and grad.abs().sum() > 0 for grad in grads) == (name == reached), name
    agent.update(batch)
    assert all(param.grad is None for module in (agent.qf, agent.policy) for param in module.parameters())


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("number", [0, 1])  # in every update, whichever comes first
def test_grasp_penalty_moves_the_grasp_critic_only(full, number):
    plain, fined = make_agent(bc_weight=0.5), make_agent(bc_weight=0.5)
    plain.updates = fined.updates = number
    batch = make_batch()
    plain_stats = plain.update(batch, full)
    fined_stats = fined.update(batch | {"grasp_penalty": torch.full((N,), -0.02)}, full)
    assert plain_stats["critic_loss"] == fined_stats["critic_loss"]
    assert plain_stats["grasp_critic_loss"] != fined_stats["grasp_critic_loss"]
    assert "qf" not in changed(parts(plain), parts(fined)) and "discrete_qf" in changed(parts(plain), parts(fined))


def test_only_continuous_dims_enter_q():
    a, b = make_agent(), make_agent()
    batch, other = make_batch(), make_batch()
    other["actions"][:, 6] = -other["actions"][:, 6].sign()
    assert a.critic_losses(batch)[1] == b.critic_losses(other)[1]
    assert a.critic_losses(batch)[2] != b.critic_losses(other)[2]


def test_terminal_masks_bootstrap_and_truncation_keeps_it():
    batch = make_batch()
    ended = batch | {"masks": torch.zeros(N)}
    agents = make_agent(), make_agent()
    agents[1].flat_target.add_(1.0)  # other weights in the targets must not matter once the episode is over
    assert agents[0].critic_losses(ended)[1:3] == agents[1].critic_losses(ended)[1:3]
    assert agents[0].critic_losses(batch)[1] != agents[1].critic_losses(batch)[1]


def test_next_features_of_the_targets_come_from_the_slow_encoder():
    batch, agents = make_batch(), (make_agent(), make_agent())
    with torch.no_grad():
        for param in agents[1].critic_target[0].parameters():
            param.add_(0.5)
    assert agents[0].critic_losses(batch)[1] != agents[1].critic_losses(batch)[1]
    assert agents[0].critic_losses(batch)[2] != agents[1].critic_losses(batch)[2]


def test_entropy_in_the_backup_is_an_option():
    batch = make_batch()
    losses = {on: make_agent(backup_entropy=on, init_alpha=0.5).critic_losses(batch)[1] for on in (False, True)}
    assert losses[False] != losses[True]
    batch["masks"] = torch.zeros(N)
    losses = {on: make_agent(backup_entropy=on, init_alpha=0.5).critic_losses(batch)[1] for on in (False, True)}
    assert losses[False] == losses[True]


def test_a_certain_policy_is_worth_less_with_entropy_in_the_backup():
    batch, losses = make_batch() | {"rewards": torch.full((N,), 10.0)}, {}
    for on in (False, True):
        agent = make_agent(backup_entropy=on, init_alpha=0.1)
        agent.qf.forward = agent.critic_target[1].forward = lambda features, actions: torch.zeros(2, N)
        with torch.no_grad():
            agent.policy.actor.net[-1].bias[6:] = -8.0  # log std: its density is far above 1
        losses[on] = agent.critic_losses(batch)[1].item()
    assert losses[False] == pytest.approx(100) and losses[True] < 80


def test_the_actor_climbs_the_mean_of_the_critics():
    agent, batch = make_agent(init_alpha=1e-6), make_batch()
    agent.qf.forward = lambda features, actions: torch.tensor([1.0, 3.0])[:, None].expand(2, N)
    features = agent.policy.encoder(batch["obs"]).detach()
    assert agent.actor_losses(batch, features)[0].item() == pytest.approx(-2, abs=1e-3)


def test_targets_follow_after_every_update():
    agent = make_agent(tau=0.25)
    for full in (False, True):
        before = agent.flat_target.clone()
        agent.update(make_batch(), full)
        assert torch.allclose(agent.flat_target, before + 0.25 * (agent.flat_critic - before), atol=1e-6)


def test_temperature_is_steered_to_the_target_entropy():
    for wanted, rises in ((1e3, True), (-1e3, False)):
        agent = make_agent(target_entropy=wanted)
        before = agent.temperature().item()
        for _ in range(3):
            agent.update(make_batch())
        assert (agent.temperature().item() > before) == rises


def test_bc_term_counts_demo_rows_only():
    agent = make_agent(bc_weight=0.5)
    batch = make_batch()
    mean = torch.zeros(N, 6)
    expected = batch["actions"][N // 2 :, :6].square().sum(1).mean()
    assert torch.isclose(agent.bc_loss(batch, mean), expected)
    batch["actions"][: N // 2] = 9.0
    assert torch.isclose(agent.bc_loss(batch, mean), expected)
    assert agent.bc_loss(batch | {"is_demo": torch.zeros(N, dtype=torch.bool)}, mean) == 0


def test_subset_of_ten_critics():
    agent = make_agent(num_critics=10, num_sampled_critics=2)
    agent.gamma, seen = 1.0, set()
    agent.critic_target[1].forward = lambda features, actions: torch.arange(10.0)[:, None].expand(10, N)
    agent.qf.forward = lambda features, actions: torch.zeros(10, N)
    for _ in range(40):
        loss = agent.critic_losses(make_batch() | {"rewards": torch.zeros(N)})[1]
        seen.add(round(math.sqrt(loss.item())))
    assert 9 not in seen and len(seen) > 4  # the minimum of two of 0..9


@pytest.mark.parametrize("where", ["rewards", "state", "actions"])
def test_nan_never_reaches_the_weights(where):
    agent = make_agent(bc_weight=0.5)
    agent.update(make_batch())
    before, batch = parts(agent), make_batch()
    moments = copy.deepcopy(agent.critic_optimizer.state_dict())
    (batch["obs"] if where == "state" else batch)[where][3] = math.nan
    if where == "actions":
        batch["actions"][3, 6] = 0.0
    assert agent.update(batch) == {}
    assert not changed(before, parts(agent)) and (agent.skipped_steps, agent.skipped_in_a_row) == (1, 1)
    after = agent.critic_optimizer.state_dict()["state"][0]
    assert all(torch.equal(moments["state"][0][name], after[name]) for name in after)
    agent.update(make_batch())
    assert changed(before, parts(agent)) and (agent.skipped_steps, agent.skipped_in_a_row) == (1, 0)


def test_every_camera_and_the_state_matter():
    agent = SACHybridAgent(["left", "right"], 6, 3, "cpu", image_shape=(8, 8, 3), state_dim=4, hidden_size=16)
    rng = np.random.default_rng(0)
    obs = {key: rng.integers(0, 256, (8, 8, 3)).astype(np.uint8) for key in ("left", "right")}
    obs["state"] = rng.normal(size=4).astype(np.float32)
    action = agent.policy.act(obs)
    for key in obs:
        other = obs | {key: obs[key][::-1].copy()}
        assert (agent.policy.act(other) != action).any(), key


@pytest.mark.parametrize(("grasp", "continuous"), [(0, 6), (3, 6), (0, 12), (9, 12)])
def test_all_layouts_update(grasp, continuous):
    agent = make_agent(grasp, continuous)
    stats = agent.update(make_batch(continuous + {0: 0, 3: 1, 9: 2}[grasp]))
    assert all(math.isfinite(value) for value in stats.values()) and ("grasp_critic_loss" in stats) == bool(grasp)


def test_conv_encoder_and_bc_baseline_update():
    agent = make_agent(encoder="conv")
    assert all(math.isfinite(value) for value in agent.update(make_batch()).values())
    agent = make_agent(algorithm="bc")
    losses = [agent.update(make_batch())["actor_loss"].item() for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_critic_learns_a_known_value():
    agent = make_agent()
    batch = make_batch() | {"masks": torch.zeros(N), "rewards": torch.ones(N)}
    for _ in range(80):
        agent.update(batch)
    assert agent.update(batch, full=False)["q_values"].item() == pytest.approx(1.0, abs=0.1)


def test_load_gives_the_same_agent(tmp_path):
    agent = make_agent()
    for _ in range(3):
        agent.update(make_batch())
    save_checkpoint(tmp_path / "final_model.pth", {"agent": agent.state_dict()})
    obs = {"image": np.full((8, 8, 3), 7, np.uint8), "state": np.ones(4, np.float32)}
    rng, weights = torch.Generator(), parts(agent)
    actions = [agent.policy.act(obs), agent.policy.act(obs, rng.manual_seed(5))]
    stats = agent.update(make_batch(seed=4))
    manual = dict(image_keys=["image"], continuous_action_dim=6, grasp_action_dim=3, device="cpu")  # as in the manual
    for source in (tmp_path / "final_model.pth", load_checkpoint(tmp_path / "final_model.pth")):
        loaded = SACHybridAgent(**manual, lr=1e-2)
        loaded.load(source)
        assert changed(weights, parts(loaded)) == set()
        assert (loaded.policy.act(obs) == actions[0]).all()
        assert (loaded.policy.act(obs, rng.manual_seed(5)) == actions[1]).all()
        assert loaded.update(make_batch(seed=4)) == stats  # Adam moments, temperature and noise continue, too
        assert changed(parts(agent), parts(loaded)) == set()
    with pytest.raises(ValueError, match="grasp_action_dim"):
        SACHybridAgent(["image"], 6, 0).load(tmp_path / "final_model.pth")
