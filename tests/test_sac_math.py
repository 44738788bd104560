"""sac_hybrid.py: equations and the action layout, with the numbers of the specification."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sac_hybrid
from sac_hybrid import (
    ActionLayout,
    Temperature,
    grasp_target,
    gripper_toggles,
    polyak,
    split_batch,
    tanh_normal,
    td_target,
)

MODES = {  # env dims, gripper indices, discrete head, target entropy
    "single-arm-fixed-gripper": (6, [], 0, -3.0),
    "single-arm-learned-gripper": (7, [6], 3, -3.5),
    "dual-arm-fixed-gripper": (12, [], 0, -6.0),
    "dual-arm-learned-gripper": (14, [6, 13], 9, -7.0),
}


@pytest.mark.parametrize("mode", MODES)
def test_action_layout(mode):
    size, gripper, head, entropy = MODES[mode]
    layout = ActionLayout.of_mode(mode)
    assert (layout.action_dim, layout.gripper, layout.grasp_dim) == (size, gripper, head)
    assert layout.continuous == [i for i in range(size) if i not in gripper]
    agent = sac_hybrid.SACHybridAgent([], len(layout.continuous), head, "cpu", state_dim=4, hidden_size=8)
    assert agent.target_entropy == entropy
    assert (agent.policy.discrete_qf is None) == (head == 0) and len(agent.critic) == (3 if head else 2)
    actions = torch.arange(2 * size).view(2, size).float()
    continuous, grasps = layout.split(actions)
    assert continuous.tolist() == [[row[i] for i in layout.continuous] for row in actions.tolist()]
    assert (grasps is None) == (head == 0)


def test_mode_must_fit_the_environment(capsys):
    assert ActionLayout.of_mode("single-arm-learned-gripper", 4).continuous == [0, 1, 2]  # Fetch
    assert ActionLayout.of_mode("dual-arm-learned-gripper", 8).gripper == [3, 7]
    with pytest.raises(SystemExit):
        ActionLayout.of_mode("dual-arm-learned-gripper", 7)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("command", "index"), [(0.95, 2), (-0.93, 0), (0.3, 1), (-0.2, 1), (1, 2), (-1, 0), (0, 1)])
def test_gripper_rounds(command, index):
    layout = ActionLayout.of_mode("single-arm-learned-gripper")
    assert layout.grasp_index(torch.tensor([[command]])).tolist() == [index]


def test_joint_gripper():
    layout = ActionLayout.of_mode("dual-arm-learned-gripper")
    assert layout.grasp_index(torch.tensor([-1.0, 1.0])) == 2
    assert layout.grasp_commands(5) == [0, 1]
    for index in range(9):
        assert layout.grasp_index(torch.tensor(layout.grasp_commands(index), dtype=torch.float32)) == index


def test_toggles_are_effective_and_add_up():
    closed = np.zeros(2, bool)
    counts = []
    for commands in ([0.2, -0.3], [-1, -0.9], [-1, 0], [1, 1], [1, 0], [-0.6, 0.9]):
        toggles, closed = gripper_toggles(np.array(commands), closed)
        counts.append(toggles)
    assert counts == [0, 2, 0, 2, 0, 1] and closed.tolist() == [True, False]


def test_grasp_target():
    online, target = torch.tensor([[0.1, 0.5, 0.3]]), torch.tensor([[0.9, 0.2, 0.6]])
    numbers = torch.tensor([0.0]), torch.tensor([-0.02])
    assert grasp_target(*numbers, torch.ones(1), online, target, 0.97).item() == pytest.approx(0.174)
    assert grasp_target(*numbers, torch.zeros(1), online, target, 0.97).item() == pytest.approx(-0.02)


def test_td_target():
    q, zero, one = torch.tensor([[0.8], [0.6]]), torch.zeros(1), torch.ones(1)
    assert td_target(zero, one, q, 0.97).item() == pytest.approx(0.582)
    assert td_target(zero, one, q, 0.97, -0.01 * torch.tensor([-1.5])).item() == pytest.approx(0.59655)
    assert td_target(one, zero, q, 0.97, 0.015 * one).item() == 1.0  # the bonus is masked, too
    with pytest.raises(AssertionError):
        td_target(torch.zeros(2), one, q, 0.97)


@pytest.mark.parametrize(
    ("batch_size", "num_online", "num_demo", "expected"),
    [(256, 1000, 1000, (128, 128)), (256, 1000, 10, (128, 128)), (256, 1000, 0, (256, 0)), (255, 9, 9, (128, 127)),
     (256, 0, 10, (0, 256)), (256, 0, 0, (0, 0))],
)  # fmt: skip
def test_mixing(batch_size, num_online, num_demo, expected):
    assert split_batch(batch_size, num_online, num_demo, 0.5) == expected  # (online, demo)


def test_tanh_normal():
    one = torch.ones(1, 1)
    action, logprob = tanh_normal(0 * one, one, 0.5 * one)
    assert action.item() == pytest.approx(0.46212, abs=1e-5) and logprob.item() == pytest.approx(-0.80371, abs=1e-5)
    mean = torch.full((1, 1), 20.0, requires_grad=True)
    _, logprob = tanh_normal(mean, one, 0 * one)
    logprob.sum().backward()
    assert math.isfinite(logprob.item()) and math.isfinite(mean.grad.item())


def test_tanh_normal_against_a_slow_one():
    rng = torch.Generator().manual_seed(0)
    mean, noise = torch.randn(2, 5, 3, generator=rng)
    std = torch.rand(5, 3, generator=rng) + 0.1
    actions, logprobs = tanh_normal(mean, std, noise)
    u = (mean + std * noise).double()
    slow = torch.distributions.Normal(mean.double(), std.double()).log_prob(u) - torch.log(1 - u.tanh() ** 2)
    assert torch.allclose(actions, u.tanh().float()) and torch.allclose(logprobs, slow.sum(-1).float(), atol=1e-4)


def test_std_is_bounded():
    actor = sac_hybrid.Actor(3, 2, 8, layer_norm=False)
    with torch.no_grad():
        actor.net[-1].bias.copy_(torch.tensor([0, 0, 99.0, -99.0]))
    assert torch.allclose(actor(torch.zeros(1, 3))[1], torch.tensor([[5.0, 1e-5]]))


def test_polyak():
    target, source = torch.zeros(4), torch.ones(4)
    for _ in range(5):
        polyak(target, source, 0.005)
    assert target.tolist() == pytest.approx([0.024751] * 4, abs=1e-6)


def test_temperature():
    assert Temperature(0.01)().item() == pytest.approx(0.01, rel=1e-4)
    assert Temperature(5e-4)().item() == pytest.approx(5e-4, rel=1e-3)


def test_ensemble_is_what_separate_critics_give():
    qf = sac_hybrid.QEnsemble(3, 5, 2, 16, layer_norm=True)
    features, actions = torch.randn(7, 5), torch.randn(7, 2)
    together = qf(features, actions)
    assert together.shape == (3, 7)
    for e in range(3):
        x = torch.cat([features, actions], 1)
        for i in range(2):
            x = x @ qf.weights[i][e] + qf.biases[i][e]
            x = (torch.nn.functional.layer_norm(x, (16,)) * qf.scales[i][e] + qf.shifts[i][e]).relu()
        assert torch.allclose(together[e], (x @ qf.weights[2][e] + qf.biases[2][e]).squeeze(1), atol=1e-5)


def test_keypoints_are_a_spatial_softmax():
    encoder = sac_hybrid.ImageEncoder("softmax", (8, 8, 3))
    image = torch.randn(2, 3, 8, 8)
    p, line = encoder.conv(image).flatten(2).softmax(-1).view(2, 16, 4, 4), torch.linspace(-1, 1, 4)
    expected = torch.stack([(p.sum(3) * line).sum(2), (p.sum(2) * line).sum(2)], 1).flatten(1)
    assert torch.allclose(encoder(image)[:, :32], expected, atol=1e-5)


def test_random_shift():
    images = torch.arange(2 * 6 * 6 * 3).remainder(251).to(torch.uint8).view(2, 6, 6, 3)
    shifted = sac_hybrid.random_shift(images, 2, torch.Generator().manual_seed(3))
    assert shifted.dtype == torch.uint8 and shifted.shape == images.shape
    padded = torch.nn.functional.pad(images.permute(0, 3, 1, 2).float(), (2, 2, 2, 2), "replicate").permute(0, 2, 3, 1)
    for i in range(2):
        windows = [padded[i, y : y + 6, x : x + 6] for y in range(5) for x in range(5)]
        assert any(torch.equal(window, shifted[i].float()) for window in windows)
    assert torch.equal(sac_hybrid.random_shift(images, 0, torch.Generator()), images)
