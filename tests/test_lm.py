"""Language-model plumbing on real Hugging Face architectures: padding, positions, EOS, sampling, the LM head's diet."""

import pytest
import torch
from transformers import (
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import ppo

SIZES = dict(vocab_size=40, bos_token_id=None, eos_token_id=1, pad_token_id=None)


def make_policy(kind, seed=0):
    torch.manual_seed(seed)
    if kind == "gpt2":  # learned absolute positions: wrong position_ids show at once
        lm = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **SIZES))
    else:
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
        lm = LlamaForCausalLM(LlamaConfig(**sizes, **SIZES))
    for parameter in lm.parameters():
        parameter.data *= 5  # fresh weights give nearly uniform outputs, in which errors hide
    return ppo.PolicyWithValue(lm, separate_critic=False).eval()


kinds = pytest.mark.parametrize("kind", ["gpt2", "llama"])


@kinds
def test_left_padding_changes_nothing(kind):
    policy = make_policy(kind)
    torch.nn.init.normal_(policy.value_head.weight)
    prompts, responses = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2]], [[11, 12, 1], [13, 1]]
    batch = [*ppo.pad(prompts, 1, "left"), *ppo.pad(responses, 1, "right")]  # pad = eos, as in many real tokenizers
    together = policy(*batch, temperature=0.7)
    for i in range(2):
        row = [*ppo.pad(prompts[i : i + 1], 1, "left"), *ppo.pad(responses[i : i + 1], 1, "right")]
        alone = policy(*row, temperature=0.7)
        for whole, single in zip(together, alone, strict=True):
            torch.testing.assert_close(whole[i : i + 1, : len(responses[i])], single, atol=1e-5, rtol=1e-5)
            assert (whole[i, len(responses[i]) :] == 0).all()


@kinds
def test_own_mask_equals_that_of_transformers(kind):
    policy = make_policy(kind)
    batch = [*ppo.pad([[5, 6, 7], [9, 8, 7, 6, 5]], 1, "left"), *ppo.pad([[11, 12, 1], [13, 1]], 1, "right")]
    assert policy.own_mask
    own = policy(*batch, temperature=1.0)
    policy.own_mask = False
    for a, b in zip(own, policy(*batch, temperature=1.0), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("own_mask", [True, False])
def test_sliding_windows_keep_the_mask_of_transformers(own_mask):
    """Ours knows no window: it is used only where there is none."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=2)
    config = MistralConfig(sliding_window=None if own_mask else 4, **sizes, **SIZES)
    assert ppo.PolicyWithValue(MistralForCausalLM(config), separate_critic=False).own_mask == own_mask


@kinds
def test_logprobs_are_those_of_the_model(kind):
    """Against the model's own logits on the bare sequence, one position at a time."""
    policy = make_policy(kind)
    prompt, response = [5, 6, 7], [11, 12, 1]
    batch = [*ppo.pad([prompt], 0, "left"), *ppo.pad([response], 0, "right")]
    logprobs, entropy, _ = policy(*batch, temperature=0.5)
    logits = policy.lm(torch.tensor([prompt + response])).logits[0] / 0.5
    for t, token in enumerate(response):
        distribution = torch.distributions.Categorical(logits=logits[len(prompt) - 1 + t])
        assert logprobs[0, t].item() == pytest.approx(distribution.log_prob(torch.tensor(token)).item(), abs=1e-5)
        assert entropy[0, t].item() == pytest.approx(distribution.entropy().item(), abs=1e-5)


@kinds
def test_sampler_agrees_with_the_training_forward(kind):
    policy = make_policy(kind)
    prompt_ids, prompt_mask = ppo.pad([[5, 6, 7], [9, 8, 7, 6], [4], [3, 3]], 0, "left")
    uniforms = torch.rand(4, 12, generator=torch.Generator().manual_seed(1))
    ids, mask, sampled = ppo.generate(policy, prompt_ids, prompt_mask, torch.arange(1, 12), 0, 12, 0.8, uniforms)
    logprobs, _, _ = policy(prompt_ids, prompt_mask, ids, mask, temperature=0.8)
    torch.testing.assert_close(sampled, logprobs, atol=1e-5, rtol=1e-5)
    assert mask.sum(1).unique().numel() > 1, "the rows must end at different times for this test to mean something"


def test_rows_do_not_depend_on_their_neighbours():
    """A row sampled alone is the row sampled in a batch, although others end earlier or later and padding differs."""
    policy = make_policy("llama")
    prompts = [[5, 6, 7], [9, 8, 7, 6], [4], [3, 3]]
    uniforms = torch.rand(4, 12, generator=torch.Generator().manual_seed(1))
    eos = torch.tensor([1, 2, 7])
    ids, mask, _ = ppo.generate(policy, *ppo.pad(prompts, 0, "left"), eos, 0, 12, 1.0, uniforms)
    for i, prompt in enumerate(prompts):
        alone, alone_mask, _ = ppo.generate(policy, *ppo.pad([prompt], 0, "left"), eos, 0, 12, 1.0, uniforms[i : i + 1])
        assert ids[i, : mask[i].sum()].tolist() == alone[0, : alone_mask[0].sum()].tolist()


def test_mask_ends_with_the_first_eos():
    policy = make_policy("llama")
    eos = torch.tensor([1, 2, 7])
    uniforms = torch.rand(64, 6, generator=torch.Generator().manual_seed(1))
    prompts = [[3 + i % 30] for i in range(64)]
    ids, mask, _ = ppo.generate(policy, *ppo.pad(prompts, 1, "left"), eos, 1, 6, 1.0, uniforms)
    ended = 0
    for row, valid in zip(ids.tolist(), mask.sum(1).tolist(), strict=True):
        assert not set(row[: valid - 1]) & {1, 2, 7}
        assert valid == 6 or row[valid - 1] in {1, 2, 7}
        ended += row[valid - 1] in {1, 2, 7}
    assert 0 < ended < 64
    tokenizer = ppo.make_tiny_tokenizer()
    assert sum(ppo.decode(tokenizer, ids, mask, eos)[1]) == ended


def test_generation_config_does_not_leak_into_sampling(tmp_path):
    tokenizer = ppo.make_tiny_tokenizer()
    drawn = []
    for leaky in (False, True):
        policy, _, _, _ = ppo.load_policy(ppo.Args(hidden_size=16, num_layers=1))
        if leaky:
            policy.lm.generation_config.update(top_k=1, do_sample=True, repetition_penalty=5.0, temperature=0.1)
        folder = tmp_path / str(leaky)
        policy.lm.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        policy, _, eos_ids, pad_id = ppo.load_policy(ppo.Args(model_name=str(folder)))
        assert (policy.lm.generation_config.top_k == 1) == leaky
        uniforms = torch.rand(16, 8, generator=torch.Generator().manual_seed(0))
        prompt = ppo.pad([[5, 6, 7]] * 16, pad_id, "left")
        drawn.append(ppo.generate(policy, *prompt, eos_ids, pad_id, 8, 1.0, uniforms)[0])
    assert torch.equal(*drawn) and drawn[0][:, 0].unique().numel() > 3


def test_eos_ids_come_from_tokenizer_and_generation_config(tmp_path):
    policy, tokenizer, _, _ = ppo.load_policy(ppo.Args(hidden_size=16, num_layers=1))
    policy.lm.generation_config.eos_token_id = [1, 40]
    policy.lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert ppo.load_policy(ppo.Args(model_name=str(tmp_path)))[2].tolist() == [1, 40]


@kinds
def test_lm_head_sees_valid_response_tokens_only(kind):
    policy = make_policy(kind)
    seen = []
    policy.lm.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape))
    batch = [*ppo.pad([[5] * 30, [6] * 20], 0, "left"), *ppo.pad([[7, 8, 1], [1]], 0, "right")]
    policy(*batch, temperature=1.0)
    assert [tuple(shape) for shape in seen] == [(4, 32)]


def test_value_is_read_where_the_token_is_predicted():
    """Changing a response token must not change the value of the state in which it was chosen, only later ones."""
    policy = make_policy("llama")
    torch.nn.init.normal_(policy.value_head.weight)
    first = [*ppo.pad([[5, 6]], 0, "left"), *ppo.pad([[7, 8, 9]], 0, "right")]
    second = [*ppo.pad([[5, 6]], 0, "left"), *ppo.pad([[7, 30, 9]], 0, "right")]
    a, b = (policy(*batch, temperature=1.0)[2][0] for batch in (first, second))
    assert torch.equal(a[:2], b[:2]) and a[2] != b[2]


def test_separate_critic_leaves_the_policy_alone():
    policy, _, _, _ = ppo.load_policy(ppo.Args(hidden_size=16, num_layers=1, separate_critic=True))
    torch.nn.init.normal_(policy.value_head.weight)
    batch = [*ppo.pad([[5, 6]], 0, "left"), *ppo.pad([[7, 8, 9]], 0, "right")]
    policy(*batch, temperature=1.0)[2].sum().backward()
    assert all(parameter.grad is None for parameter in policy.lm.parameters())
    assert any(parameter.grad.abs().sum() > 0 for parameter in policy.critic.parameters() if parameter.grad is not None)


def test_separate_critic_starts_from_the_warm_trunk():
    args = ppo.Args(hidden_size=16, num_layers=1, separate_critic=True, sft_steps=2)
    policy, tokenizer, eos_ids, pad_id = ppo.load_policy(args)
    ppo.warm_start(policy, ppo.make_task(args, None), tokenizer, eos_ids, pad_id, args)
    trunk, critic = policy.lm.base_model.state_dict(), policy.critic.state_dict()
    assert all(torch.equal(critic[name], trunk[name]) for name in trunk)


def test_alibi_keeps_the_mask_of_transformers():
    """Falcon makes its slopes out of a 2D mask."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, alibi=True)
    policy = ppo.PolicyWithValue(FalconForCausalLM(FalconConfig(**sizes, **SIZES)), separate_critic=False).eval()
    ids = torch.tensor([[5, 6, 7]])
    logits = policy.step(ids, torch.ones_like(ids), DynamicCache())
    torch.testing.assert_close(logits, policy.lm(ids).logits[:, -1])


def test_soft_capped_logits_are_refused(tmp_path, capsys):
    """A model whose logits are not its LM head's output would be sampled and trained as a different model."""
    policy, tokenizer, _, _ = ppo.load_policy(ppo.Args(hidden_size=16, num_layers=1))

    class Capped(type(policy.lm)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = torch.tanh(output.logits * 100)
            return output

    policy.lm.__class__ = Capped
    original = ppo.LlamaForCausalLM
    try:
        ppo.LlamaForCausalLM = lambda config: policy.lm
        with pytest.raises(SystemExit) as stop:
            ppo.load_policy(ppo.Args(hidden_size=16, num_layers=1))
    finally:
        ppo.LlamaForCausalLM = original
    assert stop.value.code == 2 and "LM head" in capsys.readouterr().err


def test_tiny_tokenizer_round_trips(tmp_path):
    from transformers import AutoTokenizer

    text = '3142= {x} "quoted" ~'
    tokenizer = ppo.make_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert each.decode(each(text).input_ids) == text and len(each(text).input_ids) == len(text)


def test_cache_step_equals_full_forward():
    policy = make_policy("gpt2")
    ids, mask = ppo.pad([[5, 6, 7], [4]], 0, "left")
    cache = DynamicCache()
    policy.step(ids, mask, cache)
    token, longer = torch.tensor([[8], [9]]), torch.cat([mask, torch.ones(2, 1, dtype=int)], 1)
    stepped = policy.step(token, longer, cache)
    whole = policy.step(torch.cat([ids, token], 1), longer, DynamicCache())
    torch.testing.assert_close(stepped, whole, atol=1e-5, rtol=1e-5)
