"""The equations, imported from the scripts: cases worked out by hand, slow oracles, micro-batch invariance."""

import math

import pytest
import torch
from torch import tensor

import ppo
import ppo_v1


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), atol=atol, rtol=1e-6
    )


@pytest.mark.parametrize("gamma, gae_lambda", [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (1.0, 0.0)])
def test_gae_against_a_double_sum(gamma, gae_lambda):
    """A_t = sum_k (gamma lambda)^k delta_{t+k}, written out in O(T^2)."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = (
        torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2)
    )
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


def test_every_token_pays_for_its_kl_and_the_last_valid_one_gets_the_score():
    logprobs, ref = tensor([[-1.0, -0.5, -0.2]]), tensor([[-1.2, -0.4, -0.2]])
    close(
        ppo.token_rewards(tensor([1.0]), logprobs, ref, torch.ones(1, 3), kl_coef=0.1),
        [[-0.02, 0.01, 1.0]],
    )
    close(ppo.k3_kl(logprobs, ref), [[0.0187308, 0.0051709, 0.0]])
    zero, mask = torch.zeros(3, 3), tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1]])
    close(
        ppo.token_rewards(tensor([1.0, 2.0, 3.0]), zero, zero, mask, kl_coef=0.1),
        [[0, 1, 0], [2, 0, 0], [0, 0, 3]],
    )


def test_whiten():
    close(
        ppo.whiten(tensor([[1.0, 2, 3, 50]]), tensor([[1.0, 1, 1, 0]])),
        [[-1.2247449, 0, 1.2247449, 0]],
    )
    close(ppo.whiten(tensor([[7.0, 3]]), tensor([[1.0, 0]])), [[0.0, 0.0]])  # one valid token


def surrogate(advantage, ratio, *clip, script=ppo):
    """-> loss, its gradient, whether the clip binds, of one token"""
    new = tensor([[math.log(ratio)]], requires_grad=True)
    loss, clipped = script.policy_loss(
        new, torch.zeros(1, 1), tensor([[float(advantage)]]), *(clip or (0.2,))
    )
    loss.sum().backward()
    return loss.item(), new.grad.item(), bool(clipped)


@pytest.mark.parametrize("script", [ppo, ppo_v1])
@pytest.mark.parametrize(
    "advantage, ratio, loss, clipped",
    [(1, 1.5, -1.2, True), (1, 0.5, -0.5, False), (-1, 1.5, 1.5, False), (-1, 0.5, 0.8, True)],
)
def test_clip_and_where_it_ends_the_gradient(script, advantage, ratio, loss, clipped):
    value, gradient, was_clipped = surrogate(advantage, ratio, script=script)
    assert value == pytest.approx(loss, abs=1e-6) and was_clipped == clipped == (gradient == 0)


def test_dual_clip_and_clip_higher():
    assert surrogate(-1, 5, script=ppo_v1)[0] == pytest.approx(5, abs=1e-5)
    loss, gradient, clipped = surrogate(-1, 5, 0.2, 0.2, 3.0, script=ppo_v1)
    assert loss == pytest.approx(3, abs=1e-6) and gradient == 0 and clipped
    assert surrogate(1, 1.25, 0.2, 0.28, script=ppo_v1)[0] == pytest.approx(-1.25, abs=1e-6)


def test_value_clip():
    close(
        ppo.value_loss(tensor([[1.0]]), tensor([[0.5]]), tensor([[1.2]]), clip_coef=0.2), [[0.125]]
    )


def rows(logprobs, advantages, mask):
    """A minibatch for ppo_loss."""
    mb = dict(logprobs=logprobs, advantages=advantages, response_mask=mask)
    return mb | dict.fromkeys(("values", "returns"), torch.zeros_like(logprobs))


def loss_of(new, mb, *num_tokens, script=ppo):
    """ppo_loss of a policy that gives these log-probs; entropy 0.5, values 0.1."""
    outputs = new, torch.full_like(new, 0.5), torch.full_like(new, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "logprobs_and_values", lambda policy, mb: outputs)
        args = script.Args(ent_coef=0.02, vf_coef=0.3)
        return script.ppo_loss(None, mb, *num_tokens, args)


def test_nan_trap():
    """exp(200) = inf at a masked position: multiplied by 0 afterwards, the loss would be finite, the gradient NaN."""
    new, mask = tensor([[-1.0, 0.0]], requires_grad=True), tensor([[1.0, 0.0]])
    loss, _ = loss_of(new, rows(tensor([[-1.0, -200.0]]), torch.ones(1, 2), mask))
    loss.backward()
    assert loss.isfinite()
    close(new.grad, [[-1.0, 0.0]])


def test_micro_batches_add_up():
    """Lengths 1 and 3, A +1 and -1: the loss of two micro-batches is that of the one batch, not a mean of means."""
    mask, new = tensor([[1.0, 0, 0], [1, 1, 1]]), tensor([[0.1, 0, 0], [0.05, 0.1, -0.1]])
    mb = rows(torch.zeros(2, 3), tensor([[1.0, 1, 1], [-1, -1, -1]]), mask)
    loss, stats = loss_of(new, mb)
    surrogates = (-math.exp(0.1) + math.exp(0.05) + math.exp(0.1) + math.exp(-0.1)) / 4
    close(loss, surrogates + 0.3 * 0.5 * 0.1**2 - 0.02 * 0.5)
    (loss_a, stats_a), (loss_b, stats_b) = [
        loss_of(new[i : i + 1], {k: x[i : i + 1] for k, x in mb.items()}, mask.sum(), script=ppo_v1)
        for i in range(2)
    ]
    close(loss_a + loss_b, loss)
    for name in stats:
        close(stats_a[name] + stats_b[name], stats[name])


def test_explained_variance():
    returns, mask = tensor([[1.0, 2, 3, 99]]), tensor([[1.0, 1, 1, 0]])

    def explained(values, returns=returns):
        return ppo.explained_variance(dict(values=values, returns=returns, response_mask=mask))

    assert explained(returns) == pytest.approx(1.0)
    assert explained(torch.zeros(1, 4)) == pytest.approx(0.0)
    assert explained(-returns) == pytest.approx(-3.0)  # residual 2R: 4 x the variance
    constant = torch.full((1, 4), 0.1) + tensor([[0, 1e-9, 0, 0]])
    assert math.isnan(explained(returns, constant)), "nothing to explain"


def test_sample_token_follows_the_distribution():
    logits = tensor([[0.0, math.log(2), -math.inf, math.log(5)]])  # 1/8, 2/8, 0, 5/8
    tokens = ppo.sample_token(logits.expand(8000, 4), (torch.arange(8000) + 0.5) / 8000)
    close(torch.bincount(tokens, minlength=4).float() / 8000, [1 / 8, 2 / 8, 0, 5 / 8], atol=2e-4)
    largest = tensor([1 - 2**-24])  # that torch.rand gives: the token stays inside the vocabulary
    assert ppo.sample_token(logits, largest).item() == 3


def test_adaptive_kl_by_hand():
    assert ppo_v1.adapt_kl_coef(0.2, 9.0, 6.0, 256) == pytest.approx(0.201024, abs=1e-9)
    assert ppo_v1.adapt_kl_coef(0.2, 0.0, 6.0, 256) == pytest.approx(0.198976, abs=1e-9)
    error_is_not_clipped = ppo_v1.adapt_kl_coef(0.2, 6.6, 6.0, 1000)  # .1
    assert error_is_not_clipped == pytest.approx(0.202, abs=1e-9)
