"""sac_hybrid.py: equations, the action layout and the learning rules, with the numbers of the specification."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sac_hybrid
from sac_hybrid import (
    ActionLayout,
    Args,
    SACHybridAgent,
    grasp_target,
    hold_grippers,
    split_batch,
    tanh_normal,
    td_target,
)

N = 12


def make_agent(grasp=3, continuous=6, **options):
    args = Args(**dict(hidden_size=16, lr=1e-2, bc_weight=0.5) | options)
    return SACHybridAgent(["image"], continuous, grasp, "cpu", args, (8, 8, 3), 4)


def make_batch(continuous=6, seed=0, **changes):
    rng = torch.Generator().manual_seed(seed)
    image = lambda: torch.randint(0, 256, (N, 8, 8, 3), generator=rng, dtype=torch.uint8)  # noqa: E731
    obs, next_obs = (dict(image=image(), state=torch.randn(N, 4, generator=rng)) for _ in range(2))
    batch = dict(
        obs=obs, next_obs=next_obs, actions=torch.rand(N, continuous, generator=rng) * 2 - 1
    )
    batch |= dict(
        rewards=torch.rand(N, generator=rng), masks=torch.ones(N), grasp_penalty=torch.zeros(N)
    )
    batch |= dict(grasps=torch.arange(N) % 3, is_demo=torch.arange(N) >= N // 2)
    return batch | dict(weights=torch.ones(N), actor_weights=torch.ones(N)) | changes


def weights(agent):
    return {
        name: value.clone()
        for name, value in agent.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def changed(before, after):
    names = (name for name in before if not torch.equal(before[name], after[name]))
    return {
        name.split(".")[1] if name.startswith("critic.") else name.split(".")[0] for name in names
    }


@pytest.mark.parametrize("mode, size, gripper, head", [
    ("single-arm-fixed-gripper", 6, [], 0), ("single-arm-learned-gripper", 7, [6], 3),
    ("dual-arm-fixed-gripper", 12, [], 0), ("dual-arm-learned-gripper", 14, [6, 13], 9),
])  # fmt: skip
def test_action_layout(mode, size, gripper, head):
    robot = sac_hybrid.Robot(Args(setup_mode=mode), human=False)
    layout = robot.layout
    assert (layout.action_dim, layout.gripper, layout.grasp_dim) == (size, gripper, head)
    agent = SACHybridAgent(*robot.dims, "cpu", None, *robot.sizes)
    assert agent.target_entropy == -size / 2 and ("discrete_qf" in agent.critic) == (head > 0)
    assert layout.continuous == [i for i in range(size) if i not in gripper]


def test_grippers():
    one, two = ActionLayout(7, 1), ActionLayout(14, 2)
    commands = torch.tensor([[0.95], [-0.93], [0.3], [-0.2]])  # rounded, not truncated
    assert one.grasp_index(commands).tolist() == [2, 0, 1, 1]
    assert two.grasp_index([-1.0, 1.0]) == 2 and two.grasp_commands(5) == [0, 1]
    assert [int(two.grasp_index(np.float32(two.grasp_commands(i)))) for i in range(9)] == list(
        range(9)
    )
    held, counts = np.zeros(2), []
    for command in (
        [0.2, -0.3],
        [-1, -0.9],
        [-1, 0],
        [1, 1],
        [1, 0],
        [-0.6, 0.9],
    ):  # effective toggles, added up
        held, toggles = hold_grippers(np.array(command), held)
        counts.append(toggles)
    assert counts == [0, 2, 0, 2, 0, 1]


def test_targets():
    online, target = torch.tensor([[0.1, 0.5, 0.3]]), torch.tensor([[0.9, 0.2, 0.6]])
    zero, one, penalty = torch.zeros(1), torch.ones(1), torch.tensor([-0.02])
    assert grasp_target(zero, penalty, one, online, target, 0.97).item() == pytest.approx(0.174)
    assert grasp_target(zero, penalty, zero, online, target, 0.97).item() == pytest.approx(-0.02)
    q = torch.tensor([[0.8], [0.6]])
    assert td_target(zero, one, q, 0.97).item() == pytest.approx(0.582)
    assert td_target(zero, one, q, 0.97, -0.01 * torch.tensor([-1.5])).item() == pytest.approx(
        0.59655
    )
    assert td_target(one, zero, q, 0.97, 0.015 * one).item() == 1.0  # the bonus is masked, too


def test_mixing():
    sizes = [
        (256, 1000, 1000),
        (256, 1000, 10),
        (256, 1000, 0),
        (255, 9, 9),
        (256, 0, 10),
        (256, 0, 0),
    ]
    expected = [(128, 128), (128, 128), (256, 0), (128, 127), (0, 256), (0, 0)]  # (online, demo)
    assert [split_batch(*size, 0.5) for size in sizes] == expected


def test_tanh_normal():
    one = torch.ones(1, 1)
    action, logprob = tanh_normal(0 * one, one, 0.5 * one)
    assert action.item() == pytest.approx(0.46212, abs=1e-5) and logprob.item() == pytest.approx(
        -0.80371, abs=1e-5
    )
    mean = torch.full((1, 1), 20.0, requires_grad=True)
    logprob = tanh_normal(mean, one, 0 * one)[1]
    logprob.sum().backward()
    assert math.isfinite(logprob.item()) and math.isfinite(mean.grad.item())
    mean, noise = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    u = (mean + 0.5 * noise).double()
    slow = torch.distributions.Normal(mean.double(), 0.5).log_prob(u) - torch.log(1 - u.tanh() ** 2)
    assert torch.allclose(
        tanh_normal(mean, 0.5 * torch.ones(5, 3), noise)[1], slow.sum(-1).float(), atol=1e-4
    )


def test_ensemble_is_what_separate_critics_give():
    qf, features, actions = (
        sac_hybrid.QEnsemble(3, 7, 16, layer_norm=True),
        torch.randn(7, 5),
        torch.randn(7, 2),
    )
    w1, b1, s1, t1, w2, b2, s2, t2, w3, b3 = qf.stacked
    for e in range(3):
        x = torch.cat([features, actions], 1)
        for w, b, s, t in ((w1, b1, s1, t1), (w2, b2, s2, t2)):
            x = (F.layer_norm(x @ w[e] + b[e], (16,)) * s[e] + t[e]).relu()
        assert torch.allclose(qf(features, actions)[e], (x @ w3[e] + b3[e]).squeeze(1), atol=1e-5)


def test_keypoints_are_a_spatial_softmax_and_shifts_are_crops_of_the_padded_image():
    encoder, image = sac_hybrid.ImageEncoder("softmax", (8, 8, 3)), torch.randn(2, 3, 8, 8)
    p, line = encoder.conv(image).flatten(2).softmax(-1).view(2, 16, 4, 4), torch.linspace(-1, 1, 4)
    expected = torch.stack([(p.sum(3) * line).sum(2), (p.sum(2) * line).sum(2)], 1).flatten(1)
    assert torch.allclose(encoder(image)[:, :32], expected, atol=1e-5)
    images = torch.arange(2 * 6 * 6 * 3).remainder(251).to(torch.uint8).view(2, 6, 6, 3)
    shifted = sac_hybrid.random_shift(images, 2, np.random.default_rng(3))
    padded = np.pad(images.numpy(), ((0, 0), (2, 2), (2, 2), (0, 0)), "edge")
    for i in range(2):
        crops = [padded[i, y : y + 6, x : x + 6] for y in range(5) for x in range(5)]
        assert any((crop == shifted[i].numpy()).all() for crop in crops)


def test_a_critic_only_update_leaves_actor_and_temperature_bit_identical():
    agent, critic = make_agent(), {"encoder", "discrete_qf", "qf", "critic_target"}
    before = weights(agent)
    agent.update(make_batch(), full=False)
    assert changed(before, weights(agent)) == critic and not agent.optimizers[1].state
    agent.update(make_batch(), full=True)
    assert changed(before, weights(agent)) == critic | {"actor", "raw_alpha"}


def test_the_penalty_moves_the_grasp_critic_only():
    plain, fined = make_agent(), make_agent()
    a, b = (
        plain.update(make_batch()),
        fined.update(make_batch(grasp_penalty=torch.full((N,), -0.02))),
    )
    assert a["critic_loss"] == b["critic_loss"] and a["grasp_critic_loss"] != b["grasp_critic_loss"]
    moved = changed(weights(plain), weights(fined))
    assert "discrete_qf" in moved and "qf" not in moved


def test_what_enters_the_targets():
    """Nothing behind a termination; the slow encoder; the entropy where asked for, and masked."""

    def losses(batch, change=None, **options):
        agent = make_agent(**options)
        for param in agent.critic_target[change].parameters() if change else ():
            param.data.add_(0.5)
        stats = agent.update(batch, full=False)
        return stats["critic_loss"].item(), stats["grasp_critic_loss"].item()

    ended = make_batch(masks=torch.zeros(N))
    for part, moves in dict(
        encoder=(True, True), qf=(True, False), discrete_qf=(False, True)
    ).items():
        moved = zip(losses(make_batch(), part), losses(make_batch()), strict=True)
        assert tuple(a != b for a, b in moved) == moves and losses(ended, part) == losses(ended), (
            part
        )
    on, off = dict(backup_entropy=True, init_alpha=0.5), dict(init_alpha=0.5)
    assert losses(make_batch(), **on)[0] != losses(make_batch(), **off)[0]
    assert losses(ended, **on) == losses(ended, **off)


def test_a_certain_policy_is_worth_less_with_entropy_in_the_backup():
    found = {}
    for on in (False, True):
        agent = make_agent(backup_entropy=on, init_alpha=0.1)
        agent.critic.qf.forward = agent.critic_target.qf.forward = lambda features, actions: (
            torch.zeros(2, N)
        )
        with torch.no_grad():
            agent.actor[-1].bias[6:] = -8.0  # log std: its density is far above 1
        found[on] = agent.bellman(make_batch(rewards=torch.full((N,), 10.0)))[-1].mean().item()
    assert found[False] == pytest.approx(10) and found[True] < 9


def test_the_actor_climbs_the_mean_of_the_critics():
    agent, batch = make_agent(init_alpha=1e-6), make_batch()
    agent.critic.qf.forward = lambda features, actions: torch.tensor([1.0, 3.0])[:, None].expand(
        2, N
    )
    features = agent.critic.encoder(batch["obs"]).detach()
    assert agent.actor_losses(batch, features)["actor_loss"].item() == pytest.approx(-2, abs=1e-3)


def test_targets_follow_after_every_update_and_the_temperature_is_steered():
    agent = make_agent(tau=0.25)
    for full in (False, True):
        before = agent.flat_target.clone()
        agent.update(make_batch(), full)
        assert torch.allclose(
            agent.flat_target, before + 0.25 * (agent.flat_critic - before), atol=1e-6
        )
    for wanted, rises in ((1e3, True), (-1e3, False)):
        agent = make_agent(init_alpha=5e-4)
        agent.target_entropy, before = wanted, agent.alpha().item()
        assert before == pytest.approx(5e-4, rel=1e-3)
        agent.update(make_batch())
        assert (agent.alpha().item() > before) == rises


def test_the_cloning_term_counts_demo_rows_only():
    agent, batch, mean = make_agent(), make_batch(), torch.zeros(N, 6)
    expected = 0.5 * batch["actions"][N // 2 :].square().sum(1).mean()
    batch["actions"][: N // 2] = 9.0
    assert torch.isclose(agent.more_actor_losses(batch, mean)["bc_loss"], expected)
    none = batch | {"is_demo": torch.zeros(N, dtype=torch.bool)}
    assert agent.more_actor_losses(none, mean)["bc_loss"] == 0


def test_subset_of_ten_critics():
    agent, seen = make_agent(num_critics=10, gamma=1.0), set()
    agent.critic_target.qf.forward = lambda features, actions: torch.arange(10.0)[:, None].expand(
        10, N
    )
    for i in range(40):
        torch.manual_seed(i)
        seen.add(agent.bellman(make_batch(rewards=torch.zeros(N)))[-1][0].item())
    assert 9 not in seen and len(seen) > 4  # the minimum of two of 0..9


@pytest.mark.parametrize("where", ["rewards", "state", "actions"])
def test_nan_never_reaches_the_weights(where):
    agent, batch = make_agent(), make_batch()
    agent.update(make_batch())
    before, moments = (
        weights(agent),
        copy.deepcopy([o.state_dict()["state"] for o in agent.optimizers]),
    )
    (batch["obs"] if where == "state" else batch)[where][3] = math.nan
    assert agent.update(batch) == {}
    assert (
        not changed(before, weights(agent)) and agent.skipped_steps == agent.skipped_in_a_row == 1
    )
    for kept, optimizer in zip(moments, agent.optimizers, strict=True):
        assert all(
            torch.equal(kept[0][name], value)
            for name, value in optimizer.state_dict()["state"][0].items()
        )
    agent.update(make_batch())
    assert changed(before, weights(agent)) and (agent.skipped_steps, agent.skipped_in_a_row) == (
        1,
        0,
    )
    with pytest.raises(SystemExit, match="10 gradients in a row"):
        for _ in range(10):
            agent.update(batch)


def test_every_camera_and_vector_matters_and_cloning_clones():
    agent = SACHybridAgent(
        ["left", "right"], 6, 3, "cpu", Args(hidden_size=16, lr=1e-2), (8, 8, 3), 4
    )
    rng = np.random.default_rng(0)
    obs = {key: rng.integers(0, 256, (8, 8, 3)).astype(np.uint8) for key in ("left", "right")}
    obs |= {key: rng.normal(size=2).astype(np.float32) for key in ("pose", "force")}
    for key in obs:
        assert (agent.act(obs | {key: obs[key][::-1].copy()}) != agent.act(obs)).any(), key
    assert (agent.act(dict(reversed(obs.items()))) == agent.act(obs)).all()  # by name, not by order
    agent, batch = make_agent(), make_batch()
    losses = [agent.clone(batch)["actor_loss"].item() for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_load_gives_the_same_agent(tmp_path):
    agent, obs = (
        make_agent(),
        {"image": np.full((8, 8, 3), 7, np.uint8), "state": np.ones(4, np.float32)},
    )
    for _ in range(3):
        agent.update(make_batch())
    path = tmp_path / "final_model.pth"
    sac_hybrid.save_checkpoint(path, agent.checkpoint())
    action, stats = agent.act(obs, noise=0.5), agent.update(make_batch(seed=4))
    for source in (path, torch.load(path)):  # as in the manual
        loaded = SACHybridAgent(
            image_keys=["image"], continuous_action_dim=6, grasp_action_dim=3, device="cpu"
        )
        loaded.load(source)
        assert (loaded.act(obs, noise=0.5) == action).all()
        again = loaded.update(
            make_batch(seed=4)
        )  # Adam's moments, temperature and noise go on, too
        assert all(torch.equal(again[name], value) for name, value in stats.items())
        assert not changed(weights(agent), weights(loaded))
    with pytest.raises(RuntimeError):
        SACHybridAgent(["image"], 6, 0).load(path)
