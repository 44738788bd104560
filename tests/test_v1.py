"""ppo_v1.py: schedules, resume after kills and signals, faults, early stop, memory, ranks. All through main()."""

import math
import os
import random
import signal

import pytest
import torch
import transformers
from conftest import (
    REPLAY,
    assert_nearly_the_same,
    assert_same_run,
    at_call,
    die_while_saving,
    forked,
    metrics_without_times,
    run,
    same,
    spy,
    two_ranks,
    weights,
)

import ppo
import ppo_v1
import ppo_v2

LONG = dict(num_iterations=8, save_every=1, learning_rate=3e-3)
EXTRA = REPLAY | dict(adaptive_reuse=True, priority_beta=0.5, priority_beta_increment=0.1)
either = pytest.mark.parametrize("script, extra", [(ppo_v1, {}), (ppo_v2, EXTRA)], ids=["v1", "v2"])


# --- schedule, controllers ---
@pytest.mark.parametrize(
    "kind, warmup, rates",
    [
        ("linear", 0, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.0, 0.5, 1.0, 0.5]),
        ("cosine", 0, [1.0, 0.8535534, 0.5, 0.1464466]),
        ("constant", 2, [0.0, 0.5, 1.0, 1.0]),
    ],
)
def test_learning_rate_schedule(kind, warmup, rates, tmp_path):
    options = dict(
        num_iterations=4, sft_steps=0, update_epochs=1, eval_size=1, lr_scheduler_type=kind
    )
    run(ppo_v1, tmp_path / "run", **options, warmup_steps=warmup, learning_rate=1e-3)
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["learning_rate"] for row in rows] == pytest.approx(
        [1e-3 * rate for rate in rates], abs=1e-9
    )


def test_adaptive_kl_moves_the_coefficient_by_the_kl_seen(tmp_path):
    run(ppo_v1, tmp_path / "run", **LONG, adaptive_kl=True, kl_target=0.1, kl_horizon=100)
    rows = metrics_without_times(tmp_path / "run")[1:]
    for before, after in zip(rows, rows[1:], strict=False):
        expected = ppo_v1.adapt_kl_coef(
            before["losses/kl_coef"], before["kl_divergence"], 0.1, 100, 8
        )
        assert after["losses/kl_coef"] == pytest.approx(expected, rel=1e-9)
    assert rows[0]["losses/kl_coef"] == 0.01 != rows[-1]["losses/kl_coef"]


def test_target_kl_stops_the_epochs(tmp_path, monkeypatch):
    calls, options = (
        spy(monkeypatch, ppo_v1, "ppo_loss"),
        dict(num_iterations=1, update_epochs=8, learning_rate=3e-3),
    )
    run(ppo_v1, tmp_path / "free", **options)
    free = len(calls)
    run(ppo_v1, tmp_path / "held", **options, target_kl=1e-4)
    assert free == 16 and len(calls) - free in (2, 4), "whole epochs, few of them"


# --- early stop, best ---
PATIENT = dict(
    num_iterations=9, eval_every=1, early_stopping_patience=2, early_stopping_threshold=100.0
)


def test_an_early_stop_says_why_and_a_resumed_run_ends_there_too(tmp_path, capsys):
    run(ppo_v1, tmp_path / "run", **PATIENT)
    assert "early stop: 2 evaluations not better than" in capsys.readouterr().out
    rows = metrics_without_times(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()  # as if killed after the checkpoint
    run(ppo_v1, tmp_path / "run", **PATIENT, resume=True)
    assert metrics_without_times(tmp_path / "run") == rows and len(rows) == 1 + 2
    assert (tmp_path / "run" / "summary.json").exists() and "early stop" in capsys.readouterr().out


def test_best_and_final_folders_score_what_was_logged(tmp_path):
    """Ordinary Hugging Face folders: --model-name takes them, and the evaluation at its start shows which they are."""
    run(ppo_v1, tmp_path / "run", **LONG, eval_every=1)
    scores = [row["eval/score"] for row in metrics_without_times(tmp_path / "run")]
    assert scores[0] < max(scores) != scores[-1], "for this test to mean something"
    for name, score in (("best", max(scores)), ("final_model", scores[-1])):
        run(ppo_v1, tmp_path / name, model_name=str(tmp_path / "run" / name), num_iterations=1)
        assert metrics_without_times(tmp_path / name)[0]["eval/score"] == score


# --- checkpoint ---
@either
def test_killed_at_any_moment_and_resumed_is_never_stopped(script, extra, tmp_path):
    options = LONG | extra | dict(adaptive_kl=True, kl_target=0.1, kl_horizon=100)
    options |= (
        dict(rollout_lag=2, correction="decoupled", log_rollouts=True) if script is ppo_v2 else {}
    )
    run(script, tmp_path / "whole", **options)
    killed, rng = tmp_path / "killed", random.Random(0)

    def go_on():
        run(script, killed, **options, resume=True)

    for where in ("half", "before", "after"):
        (process,) = forked(
            lambda where=where: (die_while_saving("checkpoint.pt", 2, where), go_on())
        )
        process.join(100)
        assert process.exitcode == -signal.SIGKILL
    for _ in range(3):
        (process,) = forked(go_on)
        process.join(0.05 + 0.4 * rng.random())
        process.kill()  # wherever it is; a fast machine may be done by then, the three deaths above are sure
        process.join()
    go_on()
    assert_same_run(tmp_path / "whole", killed)
    assert same(weights(tmp_path / "whole", "best"), weights(killed, "best"))
    a, b = (
        torch.load(folder / "checkpoint.pt", weights_only=True)
        for folder in (tmp_path / "whole", killed)
    )
    assert same(a["policy"], b["policy"]) and a["counters"] == b["counters"]
    if script is ppo_v2:
        rows, chosen = ([x["buffer"].pop(name) for x in (a, b)] for name in ("rows", "chosen"))
        assert (
            a["buffer"] == b["buffer"]
            and torch.equal(*chosen)
            and same(*rows)
            and len(rows[0]["birth"]) >= 8
        )
        logs = [(folder / "rollouts.jsonl").read_text() for folder in (tmp_path / "whole", killed)]
        assert logs[0] == logs[1] and logs[0].count("\n") == 64, "every answer once"


@either
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_and_the_run_goes_on_as_if_never_stopped(
    script, extra, number, tmp_path, monkeypatch
):
    options = LONG | extra | dict(save_every=100, eval_every=1, early_stopping_patience=9)
    run(script, tmp_path / "whole", **options)
    monkeypatch.setattr(script, "compute_gae", script.compute_gae)  # undone at the end
    at_call(script, "compute_gae", 5, lambda: os.kill(os.getpid(), number))
    run(script, tmp_path / "cut", **options)
    done = len(metrics_without_times(tmp_path / "cut")) - 1
    assert 2 < done < 8 and not (tmp_path / "cut" / "summary.json").exists()
    run(script, tmp_path / "cut", **options, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert same(weights(tmp_path / "whole", "best"), weights(tmp_path / "cut", "best"))
    counters = [
        torch.load(tmp_path / x / "checkpoint.pt", weights_only=True)["counters"]
        for x in ("whole", "cut")
    ]
    assert counters[0] == counters[1]


# --- faults ---
@pytest.mark.parametrize("script", [ppo, ppo_v1])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_nan_never_reaches_the_weights_and_is_counted(script, what, tmp_path, monkeypatch):
    """The steps without it train on; an update with nothing left ends the run."""
    real, calls, poisoned_calls = script.value_loss, [], (1, 3)

    def poisoned(new_values, *rest):
        calls.append(1)
        bad = len(calls) in poisoned_calls
        if bad and what == "gradient":
            new_values.register_hook(lambda gradient: gradient * math.nan)
        return real(new_values, *rest) * (math.nan if bad and what == "loss" else 1.0)

    monkeypatch.setattr(script, "value_loss", poisoned)
    metrics = run(script, tmp_path / "run")
    assert metrics["losses/skipped_steps"] == 2 and all(map(math.isfinite, metrics.values()))
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run").values())
    poisoned_calls = range(100)
    with pytest.raises(SystemExit, match="iteration 1: neither loss nor gradient was ever finite"):
        run(script, tmp_path / "all")


def faulty_reward(folder, bad="nan", calls=(3,)):
    """The second answer of the given calls gets this reward; call 1 is the evaluation of the start policy."""
    lines = ["n = []", "def mine(prompts, responses, answers):", "    n.append(1)"]
    lines += [f"    bad = [float('{bad}')] if len(n) in {calls} else [1.0]"]
    lines += ["    return [x + len(r) for x, r in zip(([0.0] + bad + [0.0] * 9), responses)]"]
    (folder / "reward.py").write_text("\n".join(lines))
    return dict(reward_fn=f"{folder / 'reward.py'}:mine", eval_every=9)


def test_a_nan_reward_ends_ppo_with_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match=r"^the reward of answer 1, to '\d+=', is not finite$"):
        run(ppo, tmp_path / "run", **faulty_reward(tmp_path))


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_nan_reward_costs_its_own_answer_and_is_counted(bad, tmp_path, monkeypatch):
    calls = spy(monkeypatch, ppo_v1, "ppo_loss")
    run(
        ppo_v1,
        tmp_path / "run",
        **faulty_reward(tmp_path, bad, calls=(1, 3) if bad == "nan" else (3,)),
    )
    start, *rows = metrics_without_times(tmp_path / "run")
    assert math.isfinite(start["eval/score"])
    assert [row["rollout/nan_rewards"] for row in rows] == [0, 1, 0]
    assert [row["losses/skipped_steps"] for row in rows] == [0, 0, 0]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    # two epochs of two minibatches in each iteration
    left_out = [(mb["response_mask"].sum(1) == 0).sum().item() for (_, mb, *_), _ in calls]
    assert [sum(left_out[i : i + 2]) for i in range(0, 12, 2)] == [0, 0, 1, 1, 0, 0]


def tiny_gpt2(**special):
    return transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5, **special
    )


def tiny_opt(**special):  # calls F.dropout with a number of its own
    sizes = dict(
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        word_embed_proj_dim=16,
    )
    return transformers.OPTConfig(max_position_embeddings=64, dropout=0.5, **sizes, **special)


# --- memory ---
@pytest.mark.parametrize("make_config", [tiny_gpt2, tiny_opt])
def test_gradient_checkpointing_has_no_dropout(make_config, tmp_path, monkeypatch):
    """Layers are computed again, the numbers are the same: a model's own dropout would be noise in the ratios."""
    calls = spy(monkeypatch, ppo_v1, "checkpoint")
    tokenizer = ppo_v1.make_tiny_tokenizer()
    config = make_config(
        vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, bos_token_id=None
    )
    for part in (transformers.AutoModelForCausalLM.from_config(config), tokenizer):
        part.save_pretrained(tmp_path / "model")
    options = dict(
        model_name=str(tmp_path / "model"), max_prompt_length=16, num_iterations=1, update_epochs=1
    )
    a = run(ppo_v1, tmp_path / "a", **options)
    assert not calls
    b = run(ppo_v1, tmp_path / "b", **options, gradient_checkpointing=True)
    assert calls
    assert b["rollout/logprob_mismatch"] < 1e-5 and b["losses/grad_norm"] > 0
    for key in ("losses/grad_norm", "losses/value_loss", "losses/policy_loss", "eval/score"):
        assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key


def test_bf16_stays_near(tmp_path):
    options = dict(num_iterations=1, batch_size=64, num_minibatches=1)
    a, b = run(ppo_v1, tmp_path / "a", **options), run(ppo_v1, tmp_path / "b", **options, bf16=True)
    assert 0 < b["rollout/logprob_mismatch"] < 0.05 and a["losses/entropy"] != b["losses/entropy"]
    assert a["losses/entropy"] == pytest.approx(b["losses/entropy"], rel=0.02)


# --- ranks ---
@pytest.mark.parametrize(
    "script, extra, fsdp",
    [(ppo_v1, {}, False), (ppo_v1, {}, True), (ppo_v2, EXTRA, False)],
    ids=["v1", "v1 fsdp", "v2"],
)
def test_two_ranks_make_the_update_of_one(script, extra, fsdp, tmp_path):
    options = extra | dict(num_iterations=2, gradient_accumulation_steps=2, learning_rate=1e-4)
    run(script, tmp_path / "one", **options)
    assert two_ranks(lambda rank: run(script, tmp_path / "two", fsdp=fsdp, **options)) == [0, 0]
    assert_nearly_the_same(tmp_path / "one", tmp_path / "two")


def test_a_signal_to_one_rank_saves_and_ends_all_and_they_resume(tmp_path):
    """Sharded, and with a checkpoint in the format of one process."""
    cut, options = tmp_path / "cut", dict(fsdp=True, num_iterations=4)

    def signalled(rank):
        if rank == 1:
            at_call(ppo_v1, "compute_gae", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        run(ppo_v1, cut, **options)

    assert two_ranks(signalled) == [0, 0]
    assert len(metrics_without_times(cut)) == 3 and not (cut / "summary.json").exists()
    assert two_ranks(lambda rank: run(ppo_v1, cut, **options, resume=True)) == [0, 0]
    run(ppo_v1, tmp_path / "one", num_iterations=4)
    assert_nearly_the_same(tmp_path / "one", cut)
