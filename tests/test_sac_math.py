"""sac_hybrid.py: equations, the action layout and the learning rules, with the numbers of the specification."""

import copy
import math

import numpy as np
import pytest
import torch

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


SHAPES = {"image": (8, 8, 3), "state": (4,)}


def make_agent(grasp=3, continuous=6, **options):
    args = Args(**dict(hidden_size=16, lr=1e-2, bc_weight=0.5) | options)
    return SACHybridAgent(["image"], continuous, grasp, "cpu", args, SHAPES)


def make_batch(continuous=6, seed=0, **changes):
    rng = torch.Generator().manual_seed(seed)

    def obs():
        image = torch.randint(0, 256, (N, 8, 8, 3), generator=rng, dtype=torch.uint8)
        return dict(image=image, state=torch.randn(N, 4, generator=rng))

    batch = dict(
        obs=obs(),
        next_obs=obs(),
        actions=torch.rand(N, continuous, generator=rng) * 2 - 1,
        rewards=torch.rand(N, generator=rng),
        masks=torch.ones(N),
        grasp_penalty=torch.zeros(N),
        grasps=torch.arange(N) % 3,
        is_demo=torch.arange(N) >= N // 2,
    )
    return batch | changes


def weights(agent):
    """Copies of the parameters"""
    return {name: value.clone() for name, value in agent.named_parameters()}


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
    robot = sac_hybrid.Robot(Args(setup_mode=mode))
    layout = robot.layout
    assert (layout.action_dim, layout.gripper, layout.grasp_dim) == (size, gripper, head)
    agent = robot.make_agent("cpu")
    assert agent.target_entropy == -size / 2 and hasattr(agent.critic, "discrete_qf") == (head > 0)
    assert layout.continuous == [i for i in range(size) if i not in gripper]


def test_grippers():
    one, two = ActionLayout(7, 1), ActionLayout(14, 2)
    commands = torch.tensor([[0.95], [-0.93], [0.3], [-0.2]])  # rounded, not truncated
    assert one.grasp_index(commands).tolist() == [2, 0, 1, 1]
    assert two.grasp_index(torch.tensor([-1.0, 1.0])) == 2 and two.grasps[5].tolist() == [0, 1]
    assert two.grasp_index(two.grasps).tolist() == list(range(9))
    held, _ = hold_grippers(np.array([0.51, -0.2]), -np.ones(2))
    assert held.tolist() == [1, -1]  # a weak command is a whole one
    held, counts = np.ones(2), []
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
    q = torch.tensor([[0.8], [0.6]]).min(0).values
    assert td_target(zero, one, q, 0.97).item() == pytest.approx(0.582)
    with_entropy = q - 0.01 * torch.tensor([-1.5])
    assert td_target(zero, one, with_entropy, 0.97).item() == pytest.approx(0.59655)
    assert td_target(one, zero, with_entropy, 0.97).item() == 1.0  # the bonus is masked, too


def test_mixing():
    sizes = [
        (256, 1000, 1000),
        (256, 1000, 10),
        (256, 1000, 0),
        (255, 9, 9),
        (256, 0, 10),
    ]
    expected = [(128, 128), (128, 128), (256, 0), (128, 127), (0, 256)]  # (online, demo)
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


def test_an_ensemble_equals_separate_critics():
    """LayerNorm's scale and shift are shared; the rest is one network per critic."""
    qf = sac_hybrid.QEnsemble(3, 7, 16, layer_norm=True)
    features = torch.randn(7, 5)
    actions = torch.randn(7, 2)
    for layer in qf.layers:
        if isinstance(layer, torch.nn.LayerNorm):
            torch.nn.init.normal_(layer.weight)
            torch.nn.init.normal_(layer.bias)
    for e in range(3):
        x = torch.cat([features, actions], 1)
        for layer in qf.layers:
            if isinstance(layer, sac_hybrid.EnsembleLinear):
                x = x @ layer.weight[e] + layer.bias[e]
            else:
                x = layer(x)
        assert torch.allclose(qf(features, actions)[e], x.squeeze(1), atol=1e-5)


@pytest.mark.parametrize(
    "size, channels, points", [(16, 3, 16), (32, 3, 16), (64, 1, 16), (100, 4, 13)]
)
def test_keypoints_are_a_spatial_softmax(size, channels, points):
    encoder = sac_hybrid.ImageEncoder((size, size, channels))
    image = torch.randn(2, channels, size, size)
    p = encoder.conv(image).flatten(2).softmax(-1).view(2, 16, points, points)
    line = torch.linspace(-1, 1, points)
    rows = (p.sum(3) * line).sum(2)
    columns = (p.sum(2) * line).sum(2)
    assert torch.allclose(encoder(image)[:, :32], torch.cat([rows, columns], 1), atol=1e-5)


def test_shifts_are_crops_of_the_padded_image():
    images = (np.arange(2 * 6 * 6 * 3) % 251).astype(np.uint8).reshape(2, 6, 6, 3)
    seen = set()
    for seed in range(20):
        shifted = sac_hybrid.random_shift(images, 2, np.random.default_rng(seed))
        padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), "edge")
        for source, image in zip(padded, shifted, strict=True):
            places = [(y, x) for y in range(5) for x in range(5)]
            found = [(y, x) for y, x in places if (source[y : y + 6, x : x + 6] == image).all()]
            assert len(found) == 1
            seen.update(found)
    assert len(seen) > 15


def test_a_critic_only_update_leaves_actor_and_temperature_bit_identical():
    agent, critic = make_agent(), {"encoder", "discrete_qf", "qf", "critic_target"}
    before = weights(agent)
    agent.update(make_batch(), train_actor=False)
    assert changed(before, weights(agent)) == critic and not agent.actor_optimizer.state
    agent.update(make_batch(), train_actor=True)
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
        for param in getattr(agent.critic_target, change).parameters() if change else ():
            param.data.add_(0.5)
        stats = agent.update(batch, train_actor=False)
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


def record_targets(agent, monkeypatch):
    """-> list that fills with the targets of the critics"""
    found = []

    def remember(*args):
        found.append(td_target(*args))
        return found[-1]

    monkeypatch.setattr(sac_hybrid, "td_target", remember)
    return found


def test_a_certain_policy_is_worth_less_with_entropy_in_the_backup(monkeypatch):
    found = {}
    for on in (False, True):
        agent = make_agent(grasp=0, backup_entropy=on, init_alpha=0.1)
        agent.critic_target.qf.forward = lambda features, actions: torch.zeros(2, N)
        with torch.no_grad():
            agent.actor[-1].bias[6:] = -8.0  # log std: its density is far above 1
        targets = record_targets(agent, monkeypatch)
        agent.update(make_batch(rewards=torch.full((N,), 10.0)))
        found[on] = targets[0].mean().item()
        monkeypatch.undo()
    assert found[False] == pytest.approx(10) and found[True] < 9


def test_the_actor_climbs_the_mean_of_the_critics():
    agent = make_agent(init_alpha=1e-6, bc_weight=0.0)
    qf = agent.critic.qf.forward

    def constant(features, actions):  # keeps the graph; the critics say 1 and 3
        return 0 * qf(features, actions) + torch.tensor([1.0, 3.0])[:, None]

    agent.critic.qf.forward = constant
    assert agent.update(make_batch())["actor_loss"].item() == pytest.approx(-2, abs=1e-3)


def test_targets_follow_after_every_update_and_the_temperature_is_steered():
    agent = make_agent(tau=0.25)
    for train_actor in (False, True):
        before = [parameter.clone() for parameter in agent.critic_target.parameters()]
        agent.update(make_batch(), train_actor)
        after = agent.critic_target.parameters()
        for slow, old, fast in zip(after, before, agent.critic.parameters(), strict=True):
            assert torch.allclose(slow, old + 0.25 * (fast - old), atol=1e-6)
    for wanted, rises in ((1e3, True), (-1e3, False)):
        agent = make_agent(init_alpha=5e-4)
        agent.target_entropy, before = wanted, agent.alpha().item()
        assert before == pytest.approx(5e-4, rel=1e-3)
        agent.update(make_batch())
        assert (agent.alpha().item() > before) == rises


def test_the_cloning_term_counts_demo_rows_only():
    agent = make_agent()
    with torch.no_grad():
        agent.actor[-1].weight.zero_()
        agent.actor[-1].bias.zero_()  # the mean action is 0
    batch = make_batch()
    expected = 0.5 * batch["actions"][N // 2 :].square().sum(1).mean()
    batch["actions"][: N // 2] = 9.0
    assert torch.isclose(copy.deepcopy(agent).update(batch)["bc_loss"], expected)
    no_demos = batch | {"is_demo": torch.zeros(N, dtype=torch.bool)}
    assert agent.update(no_demos)["bc_loss"] == 0


def test_the_target_is_the_minimum_of_two_of_ten_critics(monkeypatch):
    agent = make_agent(grasp=0, num_critics=10, gamma=1.0)
    numbers = torch.arange(10.0)[:, None].expand(10, N)
    agent.critic_target.qf.forward = lambda features, actions: numbers
    targets = record_targets(agent, monkeypatch)
    for _ in range(40):
        agent.update(make_batch(rewards=torch.zeros(N)))
    seen = {target[0].item() for target in targets}
    assert 9 not in seen and len(seen) > 4


@pytest.mark.parametrize(
    "move", [copy.deepcopy, lambda x: x.double().float(), lambda x: x.to("cpu")]
)
def test_a_copied_and_a_moved_agent_learns(move):
    """Flat vectors behind the parameters once made such an agent log losses and learn nothing."""
    original = make_agent()
    original.update(make_batch())
    agent = move(original)
    before = weights(agent)
    kept = weights(original)
    for _ in range(2):
        agent.update(make_batch())
    after = weights(agent)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    if agent is not original:
        assert not changed(kept, weights(original))


def test_an_update_leaves_the_global_generator_alone():
    """The environment may draw from it in another thread."""
    one, two = make_agent(), make_agent()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one.update(make_batch())
    assert torch.rand(1) == expected
    two.update(make_batch())  # whatever the state of the global generator is
    assert not changed(weights(one), weights(two))


@pytest.mark.parametrize("where", ["rewards", "state", "actions"])
def test_nan_never_reaches_the_weights(where):
    agent = make_agent()
    agent.update(make_batch())
    expected = copy.deepcopy(agent)
    batch = make_batch()
    target = batch["obs"] if where == "state" else batch
    target[where][3] = math.nan
    agent.update(batch)
    moved = changed(weights(expected), weights(agent))
    # a bad reward does not concern the actor; the target networks follow in any case
    allowed = {"critic_target"} | ({"actor", "raw_alpha"} if where == "rewards" else set())
    assert moved <= allowed and agent.skipped_steps == (1 if where == "rewards" else 2)
    if where != "rewards":
        for name in ("critic_optimizer", "actor_optimizer"):
            kept = getattr(expected, name).state_dict()["state"]
            for number, state in getattr(agent, name).state_dict()["state"].items():
                assert all(torch.equal(kept[number][key], value) for key, value in state.items())
    assert all(torch.isfinite(value).all() for value in weights(agent).values())
    agent.update(make_batch())
    assert "qf" in changed(weights(expected), weights(agent))


def test_a_bad_actor_gradient_does_not_stop_the_target_networks():
    agent = make_agent()
    with torch.no_grad():
        agent.raw_alpha.fill_(math.nan)
    before = weights(agent)
    agent.update(make_batch())
    assert changed(before, weights(agent)) >= {"qf", "critic_target"}
    assert agent.skipped_steps == 1 and all(
        torch.equal(before[name], value)
        for name, value in weights(agent).items()
        if name.startswith("actor.")
    )


def test_every_camera_and_vector_matters_and_cloning_clones():
    shapes = {"left": (8, 8, 3), "right": (8, 8, 3), "pose": (2,), "force": (2,)}
    args = Args(hidden_size=16, lr=1e-2)
    agent = SACHybridAgent(["left", "right"], 6, 3, "cpu", args, shapes)
    rng = np.random.default_rng(0)
    obs = {key: rng.integers(0, 256, (8, 8, 3)).astype(np.uint8) for key in ("left", "right")}
    obs |= {key: rng.normal(size=2).astype(np.float32) for key in ("pose", "force")}
    for key in obs:
        assert (agent.act(obs | {key: obs[key][::-1].copy()}) != agent.act(obs)).any(), key
    assert (agent.act(dict(reversed(obs.items()))) == agent.act(obs)).all()  # by name, not by order
    agent, batch = make_agent(), make_batch()
    losses = [agent.update_bc(batch)["actor_loss"].item() for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_cameras_with_other_channels_are_refused():
    def act(shapes):
        agent = SACHybridAgent(["left", "depth"], 6, obs_shapes=shapes)
        return agent.act({key: np.zeros(shape, np.uint8) for key, shape in shapes.items()})

    shapes = {"left": (8, 8, 3), "depth": (8, 8, 1)}
    with pytest.raises(RuntimeError, match="expected input.* 3 channels"):
        act(shapes)
    shapes["depth"] = (16, 16, 3)  # two sizes are no problem
    assert np.isfinite(act(shapes)).all()
    shapes["depth"] = (256, 256, 3)  # its four convolutions leave one pixel of the other image
    with pytest.raises(ValueError, match="one row or one column"):
        act(shapes)


@pytest.mark.parametrize("order", [["small", "large"], ["large", "small"]])
def test_the_image_encoder_fits_the_largest_camera(order):
    """64 rows are halved twice to become 16, whichever camera comes first."""
    shapes = {"small": (16, 16, 3), "large": (64, 64, 3)}
    encoder = sac_hybrid.Encoder({key: shapes[key] for key in order})
    maps = encoder.image.conv(torch.zeros(1, 3, 64, 64))
    assert maps.shape == (1, 16, 16, 16)


def test_load_gives_the_same_agent(tmp_path):
    agent = make_agent()
    obs = {"image": np.full((8, 8, 3), 7, np.uint8), "state": np.ones(4, np.float32)}
    for _ in range(3):
        agent.update(make_batch())
    path = tmp_path / "final_model.pth"
    sac_hybrid.write_checkpoint(path, agent.checkpoint())
    action = agent.act(obs, noise=0.5)
    stats = agent.update(make_batch(seed=4))
    for source in (path, torch.load(path)):  # as in the manual
        loaded = SACHybridAgent(
            image_keys=["image"], continuous_action_dim=6, grasp_action_dim=3, device="cpu"
        )
        loaded.load(source)
        assert (loaded.act(obs, noise=0.5) == action).all()
        # Adam's moments, the temperature and the noise continue, too
        again = loaded.update(make_batch(seed=4))
        assert all(torch.equal(again[name], value) for name, value in stats.items())
        assert not changed(weights(agent), weights(loaded))
    with pytest.raises(RuntimeError):
        SACHybridAgent(["image"], 6, 0).load(path)
    resumed = make_agent()
    resumed.args.lr = 7e-3  # a resumed run may change the learning rate
    resumed.restore(torch.load(path))
    assert resumed.actor_optimizer.param_groups[0]["lr"] == 7e-3
