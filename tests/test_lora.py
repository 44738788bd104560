"""LoRA in ppo_v1.py and ppo_v2.py: what is trained, reference, merged folders, resume, ranks. All through main()."""

import copy
import random
import signal

import pytest
import torch
import transformers
from conftest import (
    REPLAY,
    assert_checkpoints_have_the_same_weights,
    assert_nearly_the_same,
    assert_same_run,
    die_while_saving,
    forked,
    metrics_without_times,
    run,
    same,
    spy,
    two_ranks,
    weights,
)

import het_grpo
import ppo_v1
import ppo_v2

pytest.importorskip("peft")
LORA = dict(lora_rank=4, learning_rate=1e-2, sft_steps=20)
IN_BF16 = LORA | dict(bf16=True, weights_dtype="bfloat16")
STALE = REPLAY | dict(rollout_lag=2, correction="decoupled")
either = pytest.mark.parametrize("script, extra", [(ppo_v1, {}), (ppo_v2, STALE)], ids=["v1", "v2"])


def test_adapters_and_value_head_are_trained_and_nothing_else(tmp_path, monkeypatch):
    """Two layers with seven matrices each, A and B of rank 4, and the value head."""
    calls = spy(monkeypatch, ppo_v1, "add_adapters")
    frozen = {}
    real = ppo_v1.evaluate

    def evaluate(policy, *rest):
        if not frozen:
            frozen.update({k: x.clone() for k, x in policy.state_dict().items()})
        return real(policy, *rest)

    monkeypatch.setattr(ppo_v1, "evaluate", evaluate)
    run(ppo_v1, tmp_path / "run", **LORA)
    ((policy, _), _) = calls[0]
    names = [name for name, x in policy.state_dict().items() if not torch.equal(x, frozen[name])]
    assert len([name for name in names if "lora_A" in name]) == 14
    assert len([name for name in names if "lora_B" in name]) == 14
    assert sorted(name for name in names if "lora" not in name) == [
        "value_head.bias",
        "value_head.weight",
    ]
    trained = sum(x.numel() for x in policy.parameters() if x.requires_grad)
    attention, mlp = 4 * 4 * (64 + 64), 3 * 4 * (64 + 192)
    assert trained == 2 * (attention + mlp) + 65

    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert len(saved["policy"]) == 28 + 2, "adapters and value head: not the base"
    assert len(saved["optimizer"]["state"]) == 28 + 2


@pytest.mark.parametrize("options", [LORA, IN_BF16], ids=["float32", "bf16"])
def test_the_reference_is_the_model_that_the_adapters_were_added_to(options, tmp_path, monkeypatch):
    """Against a copy of that model, made before; in the last iteration the policy is elsewhere."""
    copies = []
    real = ppo_v1.add_adapters

    def add_adapters(policy, args):
        copies.append(copy.deepcopy(policy))
        real(policy, args)

    monkeypatch.setattr(ppo_v1, "add_adapters", add_adapters)
    calls = spy(monkeypatch, ppo_v1, "logprobs_and_values_in_parts")
    run(ppo_v1, tmp_path / "run", **options)
    assert len(calls) == 3, "one pass of the reference in each iteration"
    for iteration, ((_, batch, _), (ref_logprobs, _, _)) in enumerate(calls, 1):
        with torch.no_grad():
            expected, _, _ = ppo_v1.logprobs_and_values(copies[0], batch)
        tolerance = 0.02 if options is IN_BF16 else 1e-5
        torch.testing.assert_close(ref_logprobs, expected, atol=tolerance, rtol=0)
        moved = (ref_logprobs - batch["logprobs"]).abs().max()
        assert moved < 1e-5 if iteration == 1 else moved > 0.1


@pytest.mark.parametrize("script", [ppo_v1, het_grpo], ids=["v1", "het"])
def test_the_head_keeps_its_float32_weights(script):
    """Everything else of the frozen model is rounded to bfloat16."""
    lm = ppo_v1.make_tiny_lm(ppo_v1.make_tiny_tokenizer())
    expected = lm.lm_head.weight.detach().clone()
    assert not torch.equal(expected, expected.bfloat16().float()), "for this test to mean something"
    policy = ppo_v1.PolicyWithValue(lm, torch.tensor([1]), 1.0)
    script.add_adapters(policy, ppo_v1.Args(**IN_BF16))
    base = policy.lm.get_base_model()
    assert torch.equal(base.lm_head.weight, expected)
    assert base.model.embed_tokens.weight.dtype == torch.bfloat16


def make_gpt2(folder):
    """GPT-2 stores its matrices transposed, and shares the LM head with the embedding."""
    tokenizer = ppo_v1.make_tiny_tokenizer()
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0
    )
    config.bos_token_id = None
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("options", [LORA, IN_BF16], ids=["float32", "bf16"])
def test_saved_models_are_merged_and_load_as_ordinary_folders(kind, options, tmp_path, monkeypatch):
    """Their logits are those of the trained policy, although nothing of LoRA is in the folder."""
    if kind == "gpt2":
        make_gpt2(tmp_path / "model")
        options = options | dict(model_name=str(tmp_path / "model"))
    calls = spy(monkeypatch, ppo_v1, "add_adapters")
    run(ppo_v1, tmp_path / "run", **options)
    policy = calls[0][0][0]
    ids = torch.randint(3, 90, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = policy(ids, torch.ones_like(ids), 12)[0]
        with policy.lm.disable_adapter():
            untrained = policy(ids, torch.ones_like(ids), 12)[0]
    folder = tmp_path / "run" / "final_model"
    assert not list(folder.glob("adapter*")) and not any(
        "lora" in key for key in weights(folder.parent)
    )
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert lm.dtype == torch.float32
    trained_head = policy.lm.get_base_model().get_output_embeddings().weight
    assert torch.equal(lm.get_output_embeddings().weight, trained_head), "also if it was tied"
    frozen_embedding = policy.lm.get_base_model().get_input_embeddings().weight
    assert torch.equal(lm.get_input_embeddings().weight, frozen_embedding.float())
    assert lm.config.tie_word_embeddings == (kind == "gpt2" and options.get("bf16") is None)
    found = lm(ids).logits
    error = (found - expected).abs().max()
    assert error < (1e-4 if options is LORA or not options.get("bf16") else 0.1)
    assert (expected - untrained).abs().max() > 5 * error


# --- resume ---
@either
@pytest.mark.parametrize("options", [LORA, IN_BF16], ids=["float32", "bf16"])
def test_a_killed_run_goes_on_as_if_never_stopped(script, extra, options, tmp_path):
    options = extra | options | dict(num_iterations=6, save_every=1, learning_rate=3e-3)
    run(script, tmp_path / "whole", **options)
    killed, rng = tmp_path / "killed", random.Random(0)

    def go_on():
        run(script, killed, **options, resume=True)

    for where in ("half", "after"):
        (process,) = forked(
            lambda where=where: (die_while_saving("checkpoint.pt", 2, where), go_on())
        )
        process.join(100)
        assert process.exitcode == -signal.SIGKILL
    (process,) = forked(go_on)
    process.join(0.3 + 0.4 * rng.random())
    process.kill()
    process.join()
    go_on()
    assert_same_run(tmp_path / "whole", killed)
    assert same(weights(tmp_path / "whole", "best"), weights(killed, "best"))
    a, b = (
        torch.load(x / "checkpoint.pt", weights_only=True) for x in (tmp_path / "whole", killed)
    )
    assert same(a["policy"], b["policy"])
    if script is ppo_v2:
        past_weights = a["state"]["past_weights"]
        assert len(past_weights) == 3 and past_weights[0].keys() == a["policy"].keys()
        assert all(map(same, past_weights, b["state"]["past_weights"]))


def test_a_checkpoint_of_a_model_with_tied_weights_holds_no_frozen_weight(tmp_path):
    make_gpt2(tmp_path / "model")
    options = dict(model_name=str(tmp_path / "model"), num_iterations=1)
    run(ppo_v1, tmp_path / "all weights", **options)
    names = torch.load(tmp_path / "all weights" / "checkpoint.pt", weights_only=True)["policy"]
    assert "lm.transformer.wte.weight" in names
    run(ppo_v1, tmp_path / "run", **LORA | options)
    names = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["policy"].keys()
    assert {name for name in names if "lora" not in name} == {
        "value_head.weight",
        "value_head.bias",
    }


# --- with other features ---
@pytest.mark.parametrize("script", [ppo_v1, ppo_v2], ids=["v1", "v2"])
def test_two_ranks_make_the_update_of_one(script, tmp_path):
    options = LORA | dict(num_iterations=2, gradient_accumulation_steps=2, learning_rate=1e-4)
    run(script, tmp_path / "one", **options)
    assert two_ranks(lambda rank: run(script, tmp_path / "two", **options)) == [0, 0]
    assert_nearly_the_same(tmp_path / "one", tmp_path / "two")
    assert_checkpoints_have_the_same_weights(tmp_path / "one", tmp_path / "two")


def test_two_ranks_in_bfloat16_hold_the_same_weights(tmp_path):
    options = IN_BF16 | dict(num_iterations=2)
    assert two_ranks(lambda rank: run(ppo_v1, tmp_path / "two", **options)) == [0, 0]
    assert metrics_without_times(tmp_path / "two")[1]["rollout/logprob_mismatch"] < 1e-3


def test_gradient_checkpointing_changes_no_number(tmp_path, monkeypatch):
    calls = spy(monkeypatch, ppo_v1, "checkpoint")
    run(ppo_v1, tmp_path / "a", **LORA)
    assert not calls
    run(ppo_v1, tmp_path / "b", **LORA, gradient_checkpointing=True)
    assert calls
    assert_nearly_the_same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(lora_rank=-1), "--lora-rank must not be negative"),
        (dict(weights_dtype="bfloat16"), "--weights-dtype bfloat16 needs --lora-rank and --bf16"),
        (dict(weights_dtype="bfloat16", lora_rank=4), "needs --lora-rank and --bf16"),
        (dict(lora_rank=4, fsdp=True), "--fsdp with --lora-rank"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        ppo_v1.Args(**options)
