"""Language-model plumbing on real Hugging Face architectures: padding, positions, EOS, sampling, which models work."""

import json

import pytest
import torch
import transformers
from conftest import run, same, weights
from torch import tensor
from torch.nn.utils.rnn import pad_sequence

import ppo

SIZES = dict(vocab_size=98, bos_token_id=None, eos_token_id=1, pad_token_id=0)
WIDTH = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
GROUPED = WIDTH | dict(num_key_value_heads=2)
WORK = dict(  # name of the configuration class, its sizes
    llama=("Llama", GROUPED),
    gpt2=(
        "GPT2",
        dict(n_embd=32, n_layer=2, n_head=2, n_positions=64),
    ),  # learned positions: wrong ones show at once
    gpt_neox=("GPTNeoX", WIDTH),
    mistral=("Mistral", GROUPED | dict(sliding_window=4)),
    gemma2=(
        "Gemma2",
        GROUPED | dict(head_dim=16, sliding_window=4, final_logit_softcapping=0.5),
    ),  # binds
    cohere=("Cohere", GROUPED | dict(logit_scale=0.3)),
    granite=("Granite", GROUPED | dict(logits_scaling=4.0)),
)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
)
LINEAR |= dict(
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
HYBRID = dict(  # state that is not a cache of keys and values alone
    lfm2=("Lfm2", GROUPED | dict(layer_types=["conv", "full_attention"])),
    qwen3_next=(
        "Qwen3Next",
        GROUPED | dict(head_dim=16, layer_types=["linear_attention", "full_attention"]) | LINEAR,
    ),
)


def make_lm(kind, seed=0):
    torch.manual_seed(seed)
    name, sizes = (WORK | HYBRID)[kind]
    lm = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    )
    for parameter in lm.parameters():
        parameter.data *= (
            5 if parameter.dim() > 1 else 1
        )  # fresh weights give nearly uniform outputs, hiding errors
    return lm


def make_policy(kind, eos_ids=(1,), temperature=1.0):
    policy = ppo.PolicyWithValue(make_lm(kind), tensor(eos_ids), temperature)
    torch.nn.init.normal_(policy.value_head.weight)
    return policy


def pad(rows, side):
    """-> ids padded with 1, an EOS as in many real tokenizers, and mask"""
    rows = [tensor(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_value=1, padding_side=side)
    return ids, pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True, padding_side=side
    )


def make_rows(prompts, responses):
    names = ("prompt_ids", "prompt_mask", "response_ids", "response_mask")
    return dict(zip(names, (*pad(prompts, "left"), *pad(responses, "right")), strict=True))


kinds = pytest.mark.parametrize("kind", WORK)
near = dict(atol=2e-5, rtol=1e-4)


def test_a_model_whose_cached_steps_are_not_its_forward_pass_is_refused(tmp_path, monkeypatch):
    """Simulated: the sampler is one logit off."""
    real = ppo.PolicyWithValue.forward

    def forward(self, ids, mask, num_last, cache=None, use_cache=False):
        logits, values, cache = real(self, ids, mask, num_last, cache, use_cache)
        logits[..., 20] += 3.0 * use_cache
        return logits, values, cache

    monkeypatch.setattr(ppo.PolicyWithValue, "forward", forward)
    with pytest.raises(SystemExit, match=r"sampling and training differ by \d.\d\d nats"):
        run(ppo, tmp_path / "run")


@pytest.mark.parametrize("kind", WORK | HYBRID)
def test_models_train_on_the_log_probs_they_were_sampled_with(kind, tmp_path):
    make_lm(kind).save_pretrained(tmp_path / "model")
    ppo.make_tiny_tokenizer().save_pretrained(tmp_path / "model")
    options = dict(model_name=str(tmp_path / "model"), num_iterations=1, temperature=0.7)
    metrics = run(ppo, tmp_path / "run", **options)
    assert metrics["rollout/logprob_mismatch"] < 2e-5 and metrics["losses/entropy"] > 0.1
    assert not same(weights(tmp_path / "run"), weights(tmp_path, "model"))


@kinds
def test_outputs_are_those_of_the_model_without_padding(kind):
    """Against its own logits and hidden states on the bare sequence: of each token, where it is predicted."""
    policy = make_policy(kind, temperature=0.5)
    prompts, responses = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2]], [[11, 12, 1], [13, 1]]
    found = ppo.logprobs_and_values(policy, make_rows(prompts, responses))
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        bare = policy.lm(tensor([prompt + response]), output_hidden_states=True)
        places = slice(len(prompt) - 1, -1)
        distribution = torch.distributions.Categorical(logits=bare.logits[0, places] / 0.5)
        values = policy.value_head(bare.hidden_states[-1][0, places]).squeeze(-1)
        expected = distribution.log_prob(tensor(response)), distribution.entropy(), values
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x[i, : len(response)], y, **near)
            assert (x[i, len(response) :] == 0).all()


@kinds
def test_sampler_gives_the_log_probs_and_values_of_the_training_pass(kind):
    policy = make_policy(kind, range(1, 30), 0.8)
    ids, mask = pad([[5, 6, 7], [9, 8, 7, 6, 5, 4], [4], [3, 3]], "left")
    uniforms = torch.rand(4, 12, generator=torch.Generator().manual_seed(1))
    sampled = ppo.generate(policy, ids, mask, 12, uniforms)
    batch = dict(prompt_ids=ids, prompt_mask=mask) | sampled
    logprobs, _, values = ppo.logprobs_and_values(policy, batch)
    torch.testing.assert_close(sampled["logprobs"], logprobs, **near)
    torch.testing.assert_close(sampled["values"], values, **near)
    assert sampled["response_mask"].sum(1).unique().numel() > 1, "rows must end at different times"


def test_rows_do_not_depend_on_their_neighbours():
    """A row sampled alone is the row sampled in a batch, although others end earlier or later and padding differs."""
    policy = make_policy("llama", range(1, 20))
    prompts = [[5, 6, 7], [9, 8, 7, 6], [4], [3, 3]]
    uniforms = torch.rand(4, 12, generator=torch.Generator().manual_seed(1))
    batch = ppo.generate(policy, *pad(prompts, "left"), 12, uniforms)
    for i, prompt in enumerate(prompts):
        alone = ppo.generate(policy, *pad([prompt], "left"), 12, uniforms[i : i + 1])
        length = alone["response_mask"].sum()
        assert batch["response_mask"][i].sum() == length
        assert batch["response_ids"][i, :length].tolist() == alone["response_ids"][0].tolist()


def test_mask_ends_with_the_first_eos_whichever_it_is():
    eos = set(range(1, 20))
    uniforms = torch.rand(64, 6, generator=torch.Generator().manual_seed(1))
    prompts = pad([[30 + i % 30] for i in range(64)], "left")
    drawn = ppo.generate(make_policy("llama", sorted(eos)), *prompts, 6, uniforms)
    ended = 0
    for row, mask in zip(
        drawn["response_ids"].tolist(), drawn["response_mask"].tolist(), strict=True
    ):
        length = sum(mask)
        assert mask == [1] * length + [0] * (6 - length) and not eos & set(row[: length - 1])
        assert length == 6 or row[length - 1] in eos
        ended += row[length - 1] in eos
    assert 0 < ended < 64


def test_a_generation_config_that_cannot_be_saved_is_refused_before_training(tmp_path):
    """Saving the trained model would end in this error."""
    lm = make_lm("llama")
    for part in (lm, ppo.make_tiny_tokenizer()):
        part.save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    config = json.loads(path.read_text()) | dict(do_sample=False, temperature=0.6)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        ppo.load_lm(ppo.Args(model_name=str(tmp_path)))


def test_every_eos_id_of_a_model_is_known(tmp_path):
    lm = make_lm("llama")
    lm.generation_config.eos_token_id = [40, 7]
    for part in (lm, ppo.make_tiny_tokenizer()):
        part.save_pretrained(tmp_path)
    assert ppo.load_lm(ppo.Args(model_name=str(tmp_path)))[2].tolist() == [1, 7, 40], (
        "the tokenizer's is 1"
    )


@kinds
def test_lm_head_sees_response_positions_only(kind):
    policy, seen = make_policy(kind), []
    policy.lm.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].shape)
    )
    ppo.logprobs_and_values(policy, make_rows([[5] * 30, [6] * 20], [[7, 8, 1], [1]]))
    assert [tuple(shape) for shape in seen] == [(2, 3, 32)]
