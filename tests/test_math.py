"""The equations, imported from the script: cases worked out by hand, slow oracles, micro-batch invariance."""

import math

import pytest
import torch
from torch import tensor

import ppo


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=atol, rtol=1e-6)


def test_gae_by_hand():
    rewards, values = tensor([[0.0, 0, 1], [0, 1, 99]]), tensor([[0.2, 0.5, 0.8], [0.3, 0.6, 77]])
    mask = tensor([[1.0, 1, 1], [1, 1, 0]])
    advantages = ppo.compute_gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    close(advantages, [[0.7655, 0.49, 0.2], [0.68, 0.4, 0.0]])
    close((advantages + values)[0], [0.9655, 0.99, 1.0])


@pytest.mark.parametrize("gamma, gae_lambda", [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (1.0, 0.0)])
def test_gae_against_a_double_sum(gamma, gae_lambda):
    """A_t = sum_k (gamma lambda)^k delta_{t+k}, written out in O(T^2)."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    lengths = [7, 1, 3, 6, 2]
    mask = (torch.arange(7)[None] < tensor(lengths)[:, None]).double()
    advantages = ppo.compute_gae(rewards, values, mask, gamma, gae_lambda)
    for row, length in enumerate(lengths):
        for t in range(7):
            expected = 0.0
            for k in range(t, length):
                after = values[row, k + 1].item() if k + 1 < length else 0.0
                delta = rewards[row, k].item() + gamma * after - values[row, k].item()
                expected += (gamma * gae_lambda) ** (k - t) * delta
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-12)


def test_kl_in_the_reward_and_k3():
    logprobs, ref = tensor([[-1.0, -0.5, -0.2]]), tensor([[-1.2, -0.4, -0.2]])
    rewards = ppo.token_rewards(tensor([1.0]), logprobs, ref, torch.ones(1, 3), kl_coef=0.1)
    close(rewards, [[-0.02, 0.01, 1.0]])
    close(ppo.k3_kl(logprobs, ref), [[0.0187308, 0.0051709, 0.0]])


def test_score_lands_on_the_last_valid_token():
    mask = tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1]])
    rewards = ppo.token_rewards(tensor([1.0, 2.0, 3.0]), torch.zeros(3, 3), torch.zeros(3, 3), mask, kl_coef=0.1)
    close(rewards, [[0.0, 1, 0], [2, 0, 0], [0, 0, 3]])


def test_whiten():
    close(ppo.whiten(tensor([[1.0, 2, 3, 50]]), tensor([[1.0, 1, 1, 0]])), [[-1.2247449, 0, 1.2247449, 0]])
    close(ppo.whiten(tensor([[7.0, 3]]), tensor([[1.0, 0]])), [[0.0, 0.0]])  # one valid token


def surrogate(advantage, ratio, clip_c=math.inf, clip_high=0.2):
    new = tensor([[math.log(ratio)]], requires_grad=True)
    one = torch.ones(1, 1)
    loss, _, clipped = ppo.policy_loss(new, torch.zeros(1, 1), advantage * one, one, one, 1, 0.2, clip_high, clip_c)
    loss.backward()
    return loss.item(), new.grad.item(), bool(clipped)


@pytest.mark.parametrize(
    "advantage, ratio, loss, clipped",
    [(1, 1.5, -1.2, True), (1, 0.5, -0.5, False), (-1, 1.5, 1.5, False), (-1, 0.5, 0.8, True)],
)
def test_clip(advantage, ratio, loss, clipped):
    value, gradient, was_clipped = surrogate(advantage, ratio)
    assert value == pytest.approx(loss, abs=1e-6) and was_clipped == clipped
    assert (gradient == 0) == clipped


def test_dual_clip_and_clip_higher():
    assert surrogate(-1, 5)[0] == pytest.approx(5, abs=1e-5)
    value, gradient, clipped = surrogate(-1, 5, clip_c=3.0)
    assert value == pytest.approx(3, abs=1e-6) and gradient == 0 and clipped
    assert surrogate(1, 1.25, clip_high=0.28)[0] == pytest.approx(-1.25, abs=1e-6)


def test_value_clip():
    new, old, returns, one = tensor([[1.0]]), tensor([[0.5]]), tensor([[1.2]]), torch.ones(1, 1)
    close(ppo.value_loss(new, old, returns, one, one, 1, clip_coef=0.2), 0.125)


def test_nan_trap():
    """exp(200) = inf at a masked position: multiplied by 0 afterwards, the loss is finite and the gradient NaN."""
    new = tensor([[-1.0, 0.0]], requires_grad=True)
    mask, ones = tensor([[1.0, 0.0]]), torch.ones(1, 2)
    loss, _, _ = ppo.policy_loss(new, tensor([[-1.0, -200.0]]), ones, mask, ones, 1, 0.2, 0.2, math.inf)
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all()
    close(new.grad, [[-1.0, 0.0]])


def test_micro_batches_add_up():
    """Lengths 1 and 3, A +1 and -1: the loss of two micro-batches is that of the one batch, not a mean of means."""
    logprobs, mask = torch.zeros(2, 3), tensor([[1.0, 0, 0], [1, 1, 1]])
    new = tensor([[0.1, 0, 0], [0.05, 0.1, -0.1]])
    advantages, ones = tensor([[1.0, 1, 1], [-1, -1, -1]]), torch.ones(2, 3)
    clips = (0.2, 0.2, math.inf)
    whole = ppo.policy_loss(new, logprobs, advantages, mask, ones, mask.sum(), *clips)[0]
    rows = [(x[None] for x in row) for row in zip(new, logprobs, advantages, mask, ones, strict=True)]
    parts = sum(ppo.policy_loss(*row, mask.sum(), *clips)[0] for row in rows)
    close(whole, (-math.exp(0.1) + math.exp(0.05) + math.exp(0.1) + math.exp(-0.1)) / 4)
    close(parts, whole)


def test_weights_scale_both_losses():
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(2, 3, generator=generator) for _ in range(3))
    mask, weights = torch.ones(2, 3), tensor([[2.0] * 3, [0.0] * 3])
    weighted = ppo.policy_loss(a, b, c, mask, weights, 6, 0.2, 0.2, math.inf)[0]
    close(weighted, 2 * ppo.policy_loss(a[:1], b[:1], c[:1], mask[:1], mask[:1], 6, 0.2, 0.2, math.inf)[0])
    half = ppo.value_loss(a[:1], b[:1], c[:1], mask[:1], mask[:1], 6, 0.2)
    close(ppo.value_loss(a, b, c, mask, weights, 6, 0.2), 2 * half)


def test_sample_token_follows_the_distribution():
    logits = tensor([[0.0, math.log(2), -math.inf, math.log(5)]])  # 1/8, 2/8, 0, 5/8
    uniforms = (torch.arange(8000) + 0.5) / 8000
    tokens = ppo.sample_token(logits.expand(8000, 4), uniforms)
    close(torch.bincount(tokens, minlength=4).float() / 8000, [1 / 8, 2 / 8, 0, 5 / 8], atol=2e-4)
    assert ppo.sample_token(logits, tensor([1 - 1e-9])).item() == 3  # the upper end stays inside the vocabulary


def test_token_logprobs_chunked_equals_whole():
    """Chunks, their recomputation in the backward pass and the entropy, against log_softmax."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=False)
    hidden, ids = torch.randn(11, 8, generator=generator), torch.randint(50, (11,), generator=generator)
    logp = (head(hidden) / 0.7).log_softmax(-1)
    expected = logp.gather(-1, ids[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)
    (expected[0].sum() + 0.3 * expected[1].sum()).backward()
    gradient, head.weight.grad = head.weight.grad, None
    for max_logits in (2**25, 150, 1):
        actual = ppo.token_logprobs(head, hidden, ids, 0.7, entropy_grad=True, max_logits=max_logits)
        close(actual[0], expected[0].detach(), atol=1e-5)
        close(actual[1], expected[1].detach(), atol=1e-5)
        head.weight.grad = None
        (actual[0].sum() + 0.3 * actual[1].sum()).backward()
        close(head.weight.grad, gradient, atol=1e-5)


def test_explained_variance():
    returns, mask = tensor([[1.0, 2, 3, 99]]), tensor([[1.0, 1, 1, 0]])
    close(ppo.explained_variance(returns, returns, mask), 1.0)
    close(ppo.explained_variance(torch.zeros(1, 4), returns, mask), 0.0)
    close(ppo.explained_variance(-returns, returns, mask), -3.0)  # residual 2R: four times the variance


@pytest.mark.parametrize(
    "response, answer, score",
    [
        ("72", "72", 1), ("The answer is 72.", "72", 1), ("so 1,072", "1072", 1), ("72 apples, 3 pears", "72", 0),
        (r"\boxed{x+1}", "x+1", 1), ("#### -4", "-4", 1), ("Paris", "Paris", 1), ("paris is it", "Paris", 0),
        ("", "5", 0), ("0.50", ".5", 1),
    ],
)  # fmt: skip
def test_verify(response, answer, score):
    assert ppo.verify([""], [response], [answer]) == [score]


def test_pad_masks_come_from_lengths():
    ids, mask = ppo.pad([[5, 0], [0], [7, 8, 9]], pad_id=0, side="left")  # 0 is also a real token here
    assert ids.tolist() == [[0, 5, 0], [0, 0, 0], [7, 8, 9]] and mask.tolist() == [[0, 1, 1], [0, 0, 1], [1, 1, 1]]
    ids, mask = ppo.pad([[5, 0], [7, 8, 9]], pad_id=0, side="right")
    assert ids.tolist() == [[5, 0, 0], [7, 8, 9]] and mask.tolist() == [[1, 1, 0], [1, 1, 1]]
