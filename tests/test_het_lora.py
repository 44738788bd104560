"""LoRA and bfloat16 in het_grpo.py: what is trained, the merged folder, resume, ranks. All through main()."""

import signal

import pytest
import torch
import transformers
from conftest import (
    assert_nearly_the_same,
    assert_same_run,
    die_while_saving,
    forked,
    metrics_without_times,
    same,
    spy,
    two_ranks,
    weights,
)
from test_het_train import advice, easy_locks, run, short_practice  # noqa: F401

import het_grpo as het

pytest.importorskip("peft")
LORA = dict(lora_rank=4, learning_rate=1e-2)
IN_BF16 = LORA | dict(bf16=True, weights_dtype="bfloat16")
BOTH = pytest.mark.parametrize("options", [LORA, IN_BF16], ids=["float32", "bf16"])


def test_adapters_are_trained_and_nothing_else(tmp_path, monkeypatch, advice):  # noqa: F811
    """Two layers with seven matrices each, A and B of rank 4."""
    calls = spy(monkeypatch, het, "add_adapters")
    start = {}
    real = het.validate

    def validate(player, *rest, **kwargs):
        if not start:
            start.update({k: x.clone() for k, x in player.policy.state_dict().items()})
        return real(player, *rest, **kwargs)

    monkeypatch.setattr(het, "validate", validate)
    run(tmp_path / "run", **LORA, **advice)
    ((policy, _), _) = calls[0]
    moved = [name for name, x in policy.state_dict().items() if not torch.equal(x, start[name])]
    assert len(moved) == 28 and all("lora_" in name for name in moved)
    trained = sum(x.numel() for x in policy.parameters() if x.requires_grad)
    attention, mlp = 4 * 4 * (64 + 64), 3 * 4 * (64 + 192)
    assert trained == 2 * (attention + mlp)
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert len(saved["policy"]) == 28, "adapters, not the base"


@BOTH
def test_the_saved_model_is_merged(options, tmp_path, monkeypatch):
    calls = spy(monkeypatch, het, "add_adapters")
    run(tmp_path / "run", **options)
    policy = calls[0][0][0]
    ids = torch.randint(3, 20, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = policy(ids, torch.ones_like(ids), 12)[0]
        with policy.lm.disable_adapter():
            untrained = policy(ids, torch.ones_like(ids), 12)[0]
    assert not any("lora" in key for key in weights(tmp_path / "run"))
    lm = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final_model")
    error = (lm(ids).logits - expected).abs().max()
    assert error < (1e-4 if options is LORA else 0.1)
    assert (expected - untrained).abs().max() > 3 * error


@BOTH
def test_a_killed_run_with_adapters_goes_on_as_if_never_stopped(options, tmp_path):
    options = options | dict(num_iterations=4, save_every=1, learning_rate=3e-3)
    run(tmp_path / "whole", **options)
    killed = tmp_path / "killed"

    def die():
        die_while_saving("checkpoint.pt", 2, "after")
        run(killed, **options)

    (process,) = forked(die)
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    run(killed, **options, resume=True)
    assert_same_run(tmp_path / "whole", killed)
    assert same(weights(tmp_path / "whole"), weights(killed))


def test_two_ranks_make_the_update_of_one_with_adapters(tmp_path):
    options = LORA | dict(num_iterations=2, gradient_accumulation_steps=2, learning_rate=1e-4)
    run(tmp_path / "one", **options)
    assert two_ranks(lambda rank: run(tmp_path / "two", **options)) == [0, 0]
    assert_nearly_the_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("options", [dict(bf16=True), IN_BF16], ids=["bf16", "lora"])
def test_sampling_and_training_agree_in_bfloat16(options, tmp_path):
    run(tmp_path / "run", **options, num_iterations=2, max_turn_tokens=2)
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert max(row["rollout/logprob_mismatch"] for row in rows) < 0.01


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(weights_dtype="bfloat16"), "--weights-dtype bfloat16 needs --lora-rank and --bf16"),
        (dict(lora_rank=4, fsdp=True), "--fsdp with --lora-rank"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        het.Args(**options)
