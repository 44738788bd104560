"""ppo_v1.py: schedules, resume after kills and signals, faults, early stop, memory, ranks. All through main()."""

import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

import pytest
import torch
import transformers
import wandb
from conftest import (
    REPLAY,
    ROOT,
    TINY_LM,
    assert_checkpoints_have_the_same_weights,
    assert_nearly_the_same,
    assert_same_run,
    at_call,
    die_while_saving,
    forked,
    metrics_without_times,
    posix,
    run,
    same,
    spy,
    two_ranks,
    weights,
)
from torch import tensor

import het_grpo
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
        ("linear", 2, [1 / 3, 2 / 3, 1.0, 0.5]),
        ("cosine", 0, [1.0, 0.8535534, 0.5, 0.1464466]),
        ("constant", 2, [1 / 3, 2 / 3, 1.0, 1.0]),
    ],
)
def test_learning_rate_schedule(kind, warmup, rates, tmp_path):
    options = dict(
        num_iterations=4, sft_steps=0, update_epochs=1, eval_size=1, lr_scheduler_type=kind
    )
    run(ppo_v1, tmp_path / "run", **options, warmup_steps=warmup, learning_rate=1e-3)
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["charts/learning_rate"] for row in rows] == pytest.approx(
        [1e-3 * rate for rate in rates], abs=1e-9
    )


def test_adaptive_kl_moves_the_coefficient_by_the_kl_seen(tmp_path):
    run(ppo_v1, tmp_path / "run", **LONG, ref_kl_target=0.1)
    rows = metrics_without_times(tmp_path / "run")[1:]
    for before, after in zip(rows, rows[1:], strict=False):
        kl = before["rollout/kl_per_response"]
        expected = ppo_v1.adapt_kl_coef(before["losses/kl_coef"], kl, 0.1, 8)
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


def test_a_kl_limit_never_ends_an_update_before_its_first_step(tmp_path, monkeypatch):
    """In bfloat16 the log-probs of training and sampling differ, so approx_kl is not 0 before it."""
    monkeypatch.setattr(ppo_v1, "k3_kl", lambda logp, logq: torch.ones_like(logp))
    run(ppo_v1, tmp_path / "run", num_iterations=1, target_kl=1e-4, learning_rate=1e-2)
    run(ppo_v1, tmp_path / "still", num_iterations=1, learning_rate=1e-30)
    assert not same(weights(tmp_path / "run"), weights(tmp_path / "still"))


def test_a_reward_function_that_draws_random_numbers_does_not_shift_those_of_training(tmp_path):
    """If it drew more on one rank than on another, the ranks would train on different minibatches."""
    lines = "import torch\ndef mine(prompts, responses, answers):\n    torch.rand({})\n"
    lines += "    return [float(len(response)) for response in responses]\n"
    for size in (0, 5):
        (tmp_path / "reward.py").write_text(lines.format(size))
        run(ppo_v1, tmp_path / str(size), reward_fn=f"{tmp_path / 'reward.py'}:mine")
    assert_same_run(tmp_path / "0", tmp_path / "5")


# --- early stop, best ---
PATIENT = dict(num_iterations=9, eval_every=1, early_stopping_patience=2, learning_rate=1e-30)


def test_an_early_stop_says_why_and_a_resumed_run_ends_there_too(tmp_path, capsys, monkeypatch):
    run(ppo_v1, tmp_path / "run", **PATIENT)
    output = capsys.readouterr().out
    assert "early stop: 2 evaluations in a row were not better" in output
    assert output.endswith(f"the model of the best evaluation is in {tmp_path / 'run'}/best\n")
    rows = metrics_without_times(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()  # as if killed after the checkpoint
    monkeypatch.setattr(ppo_v1, "update", None)  # must not be called
    run(ppo_v1, tmp_path / "run", **PATIENT, resume=True)
    assert metrics_without_times(tmp_path / "run") == rows and len(rows) == 1 + 2
    assert (tmp_path / "run" / "summary.json").exists()
    assert "after training" not in capsys.readouterr().out, "it had nothing left to do"
    assert same(weights(tmp_path / "run"), weights(tmp_path / "run", "best")), "nothing was better"


def test_best_and_final_folders_score_what_was_logged(tmp_path):
    """Ordinary Hugging Face folders: --model-name takes them, and the evaluation at its start shows which they are."""
    run(ppo_v1, tmp_path / "run", **LONG, eval_every=1)
    scores = [row["eval/score"] for row in metrics_without_times(tmp_path / "run")]
    assert scores[0] < max(scores) != scores[-1], "for this test to mean something"
    for name, score in (("best", max(scores)), ("final_model", scores[-1])):
        run(ppo_v1, tmp_path / name, model_name=str(tmp_path / "run" / name), num_iterations=1)
        assert metrics_without_times(tmp_path / name)[0]["eval/score"] == score


@pytest.mark.parametrize("script", [ppo_v1, ppo_v2, het_grpo], ids=["v1", "v2", "het"])
def test_a_kill_while_a_model_is_saved_leaves_the_old_one(script, tmp_path):
    """Weights are written before the tokenizer: the process dies between the two."""
    tokenizer = ppo_v1.make_tiny_tokenizer()
    lm = ppo_v1.make_tiny_lm(tokenizer)
    policy = ppo_v1.PolicyWithValue(lm, tensor([1]), 1.0)
    folder = tmp_path / "best"
    script.save_model(policy, tokenizer, folder)
    before = weights(tmp_path, "best")

    class Dying:
        def save_pretrained(self, folder):
            raise KeyboardInterrupt

    with torch.no_grad():
        policy.lm.lm_head.weight += 1
    with pytest.raises(KeyboardInterrupt):
        script.save_model(policy, Dying(), folder)
    assert same(weights(tmp_path, "best"), before)
    script.save_model(policy, tokenizer, folder)
    assert not same(weights(tmp_path, "best"), before)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == tokenizer.eos_token


# --- checkpoint ---
@either
def test_killed_at_any_moment_and_resumed_is_never_stopped(script, extra, tmp_path):
    options = LONG | extra
    options |= (
        dict(rollout_lag=2, correction="decoupled", log_rollouts=True)
        if script is ppo_v2
        else dict(ref_kl_target=0.1)
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
    assert same(a["policy"], b["policy"])
    files = ["samples.jsonl"]
    if script is ppo_v2:
        files.append("rollouts.jsonl")
        buffers = [x["state"].pop("buffer") for x in (a, b)]
        rows = [buffer.pop("rows") for buffer in buffers]
        assert buffers[0] == buffers[1] and same(*rows) and len(rows[0]["birth"]) >= 8
        past_weights = [x["state"].pop("past_weights") for x in (a, b)]
        assert len(past_weights[0]) == 3 and all(map(same, *past_weights))
    assert a["state"] == b["state"]
    for name in files:
        lines = [
            (folder / name).read_text(encoding="utf-8") for folder in (tmp_path / "whole", killed)
        ]
        assert lines[0] == lines[1] and lines[0].count("\n") >= 40, "every line once"


@posix
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
    whole, cut = (
        torch.load(tmp_path / x / "checkpoint.pt", weights_only=True)["state"]
        for x in ("whole", "cut")
    )
    for name in ("buffer", "past_weights"):  # compared above
        whole.pop(name, None), cut.pop(name, None)
    assert whole == cut


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
    run(script, tmp_path / "run")
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["losses/skipped_steps"] for row in rows] == [2, 0, 0]
    assert all(row["losses/policy_loss"] is not None for row in rows), "of the other steps"
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run").values())
    poisoned_calls = range(100)
    with pytest.raises(SystemExit, match="no step of this update had a finite loss and gradient"):
        run(script, tmp_path / "all")


def faulty_reward(folder, bad="nan", calls=(3,)):
    """The second answer of the given calls gets this reward; call 1 is the evaluation of the start policy."""
    lines = ["n = []", "def mine(prompts, responses, answers):", "    n.append(1)"]
    lines += [f"    bad = [float('{bad}')] if len(n) in {calls} else [1.0]"]
    lines += ["    return [x + len(r) for x, r in zip(([0.0] + bad + [0.0] * 9), responses)]"]
    (folder / "reward.py").write_text("\n".join(lines))
    return dict(reward_fn=f"{folder / 'reward.py'}:mine", eval_every=9)


def test_a_nan_reward_ends_ppo_with_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match="returned a score that is NaN or infinite"):
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
    assert math.isfinite(start["eval/score"]) and start["eval/nan_scores"] == (bad == "nan")
    assert [row["rollout/nan_scores"] for row in rows] == [0, 1, 0]
    assert [row["losses/skipped_steps"] for row in rows] == [0, 0, 0]
    assert all(
        math.isfinite(value)
        for row in rows
        for name, value in row.items()
        if name != "losses/explained_variance"  # of equal returns there is none
    )
    # two epochs of two minibatches in each iteration
    left_out = [(mb["response_mask"].sum(1) == 0).sum().item() for (_, mb, *_), _ in calls]
    assert [sum(left_out[i : i + 2]) for i in range(0, 12, 2)] == [0, 0, 1, 1, 0, 0]


BAD_SCORES = "[2.0 + len(r) if len(n) != 3 else float('nan') for r in responses]"


@either
def test_a_batch_without_a_finite_score_is_no_update_and_the_run_goes_on(
    script, extra, tmp_path, capsys
):
    """Iteration 2: every score is NaN. No weight moves, momentum included, and nothing counts as zero."""
    lines = ["n = []", "def mine(prompts, responses, answers):", "    n.append(1)"]
    (tmp_path / "reward.py").write_text("\n".join([*lines, f"    return {BAD_SCORES}"]))
    options = extra | dict(ref_kl_target=0.1, save_every=1, eval_every=9, num_iterations=4)
    saved = []

    def save_checkpoint(run, policy, optimizer, state):
        saved.append({name: x.clone() for name, x in policy.state_dict().items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "save_checkpoint", save_checkpoint)
        run(script, tmp_path / "run", **options, reward_fn=f"{tmp_path / 'reward.py'}:mine")
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert [row["rollout/nan_scores"] for row in rows] == [0, 8, 0, 0]
    assert [row["losses/skipped_steps"] for row in rows] == [0, 4, 0, 0]
    assert rows[1]["charts/score"] is None and rows[1]["losses/policy_loss"] is None
    assert rows[1]["losses/kl_coef"] == rows[2]["losses/kl_coef"] != rows[3]["losses/kl_coef"]
    assert same(saved[0], saved[1]) and not same(saved[1], saved[2])
    assert capsys.readouterr().out.count("no response has a finite score") == 1


@either
def test_a_reward_function_that_returns_only_nan_ends_the_run(script, extra, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def mine(prompts, *rest):\n    return [float('nan')] * len(prompts)"
    )
    with pytest.raises(SystemExit, match="no response of the evaluation has a finite score"):
        run(script, tmp_path / "run", **extra, reward_fn=f"{tmp_path / 'reward.py'}:mine")


def test_metrics_leave_responses_without_a_score_out():
    """Two responses of 1 and 3 tokens, and one of 2 whose score was NaN; KL .1 and .3 nats."""
    mask = tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    mask[1] = 0
    batch = dict(response_mask=mask, scores=tensor([1.0, 0.0, 0.5]), ended=tensor([1.0, 1.0, 0.0]))
    batch |= dict(logprobs=torch.full((3, 3), -1.0), ref_logprobs=torch.full((3, 3), -1.1))
    batch |= dict(values=torch.zeros(3, 3), returns=torch.rand(3, 3))
    found = ppo_v1.batch_metrics(batch, ppo_v1.Args())
    assert found["charts/score"] == pytest.approx(0.75)
    assert found["charts/response_length"] == 2 and found["charts/truncated_frac"] == 0.5
    assert found["rollout/kl_per_response"] == pytest.approx(0.2, abs=1e-6)
    assert found["rollout/nan_scores"] == 1


def test_without_a_penalty_no_kl_is_logged(tmp_path):
    for script in (ppo, ppo_v1):
        run(script, tmp_path / script.__name__, kl_coef=0.0, num_iterations=1)
        row = metrics_without_times(tmp_path / script.__name__)[1]
        assert not [name for name in row if name in ("losses/ref_kl", "rollout/kl_per_response")]


# --- the command line ---
def test_a_resumed_run_takes_its_own_options_and_prints_what_was_changed(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    run(ppo_v1, folder, num_iterations=2, clip_coef=0.3, lr_scheduler_type="cosine")
    words = "ppo_v1.py --run-dir mine --resume --num_iterations 4 --seed 1".split()
    monkeypatch.setattr(sys, "argv", words)
    args = ppo_v1.parse_args()
    assert (args.clip_coef, args.lr_scheduler_type, args.num_iterations) == (0.3, "cosine", 4)
    assert capsys.readouterr().out.splitlines()[-1] == "changed: --num-iterations 2 -> 4"
    monkeypatch.setattr(sys, "argv", "ppo_v1.py --run-dir absent --resume".split())
    assert ppo_v1.parse_args() == ppo_v1.Args(run_dir="absent", resume=True), "it starts"


@pytest.mark.parametrize("script", [ppo, ppo_v1, ppo_v2])
def test_options_can_be_copied_and_a_fork_may_add_its_own(script):
    args = script.Args(**(dict(use_replay_buffer=True) if script is ppo_v2 else {}))
    assert replace(args, seed=2).seed == 2 and script.Args(**asdict(args)) == args

    @dataclass
    class Fork(script.Args):
        my_coef: float = 0.0

    assert replace(Fork(), my_coef=-1.0).my_coef == -1.0


# --- signals ---
@posix
def test_handlers_are_the_old_ones_after_main(tmp_path, capfd):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signals = ppo_v1.Signals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received and "a second one ends it at once" in capfd.readouterr().err
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    run(ppo_v1, tmp_path / "a", num_iterations=1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


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
    options = dict(model_name=str(tmp_path / "model"), num_iterations=1, update_epochs=1)
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
    assert 0 < b["rollout/logprob_mismatch"] < 1e-3
    assert a["losses/grad_norm"] != b["losses/grad_norm"]
    assert a["losses/entropy"] == pytest.approx(b["losses/entropy"], rel=0.02)


def test_bf16_samples_in_one_autocast_and_keeps_heads_in_float32(tmp_path, monkeypatch):
    """Layers are rounded to bfloat16, logits and values are not; a cast weight serves all tokens."""
    real = ppo_v1.sample_token
    sampled_in_autocast = []

    def sample_token(*inputs):
        sampled_in_autocast.append(torch.is_autocast_enabled("cpu"))
        return real(*inputs)

    monkeypatch.setattr(ppo_v1, "sample_token", sample_token)
    calls = spy(monkeypatch, ppo_v1.PolicyWithValue, "forward")
    layers = spy(monkeypatch, transformers.models.llama.modeling_llama.LlamaMLP, "forward")
    run(ppo_v1, tmp_path / "run", bf16=True, learning_rate=1e-2)
    assert len(sampled_in_autocast) > 6 and all(sampled_in_autocast)
    logits, values, _ = calls[-1][1]
    for x in (logits, values):
        assert x.dtype == torch.float32 and not torch.equal(x, x.bfloat16().float())
    assert layers[-1][1].dtype == torch.bfloat16


# --- ranks ---
@pytest.mark.parametrize(
    "script, extra, fsdp",
    [(ppo_v1, {}, False), (ppo_v1, {}, True), (ppo_v2, EXTRA, False), (ppo_v2, EXTRA, True)],
    ids=["v1", "v1 fsdp", "v2", "v2 fsdp"],
)
def test_two_ranks_make_the_update_of_one(script, extra, fsdp, tmp_path):
    options = extra | dict(num_iterations=2, gradient_accumulation_steps=2, learning_rate=1e-4)
    run(script, tmp_path / "one", **options)
    assert two_ranks(lambda rank: run(script, tmp_path / "two", fsdp=fsdp, **options)) == [0, 0]
    assert_nearly_the_same(tmp_path / "one", tmp_path / "two")
    assert_checkpoints_have_the_same_weights(tmp_path / "one", tmp_path / "two")


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


def test_tied_weights_of_a_sharded_model_are_saved_once(tmp_path):
    """The LM head of GPT-2 is its embedding. The whole weights of shards do not share memory."""
    tokenizer = ppo_v1.make_tiny_tokenizer()
    config = tiny_gpt2(vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, bos_token_id=None)
    for part in (transformers.AutoModelForCausalLM.from_config(config), tokenizer):
        part.save_pretrained(tmp_path / "model")
    options = dict(model_name=str(tmp_path / "model"), num_iterations=1, learning_rate=1e-2)
    run(ppo_v1, tmp_path / "one", **options)
    assert two_ranks(lambda rank: run(ppo_v1, tmp_path / "two", fsdp=True, **options)) == [0, 0]
    assert_nearly_the_same(tmp_path / "one", tmp_path / "two")
    assert weights(tmp_path / "two").keys() == weights(tmp_path / "model", "").keys()


def test_two_nodes_make_the_update_of_one_process(tmp_path):
    """Two torchrun commands, as on two machines. Each has a folder of its own, and only node 0 writes."""
    options = dict(num_iterations=2, learning_rate=1e-4)
    run(ppo_v1, tmp_path / "one", **options)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = [f"--{name}={value}" for name, value in (TINY_LM | options).items()]
    nodes = []
    for node in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += [f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
        command += [f"--master-port={port}", str(ROOT / "ppo_v1.py"), "--run-dir=mine", *flags]
        folder = tmp_path / f"node {node}"
        folder.mkdir()
        nodes.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL))
    try:
        assert [node.wait(300) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    assert_nearly_the_same(tmp_path / "one", tmp_path / "node 0" / "mine")
    assert not (tmp_path / "node 1" / "mine").exists()


def test_a_folder_of_another_script_is_never_overwritten(tmp_path):
    run(ppo, tmp_path / "run", num_iterations=1)
    before = metrics_without_times(tmp_path / "run")
    with pytest.raises(SystemExit, match="run was made by another script"):
        run(ppo_v1, tmp_path / "run", resume=True)
    assert metrics_without_times(tmp_path / "run") == before


def test_a_folder_of_other_work_is_not_taken(tmp_path):
    """It may hold a folder best/, which a run would replace. An empty folder is taken."""
    (tmp_path / "run" / "best").mkdir(parents=True)
    (tmp_path / "run" / "best" / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="already exists; runs are never overwritten"):
        run(ppo_v1, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "best" / "notes.txt").read_text() == "mine"
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="already exists"):
        run(ppo_v1, tmp_path / "file", resume=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "args.json.tmp").touch()  # of a run that was killed while it started
    run(ppo_v1, tmp_path / "empty", resume=True, num_iterations=1)
    assert len(metrics_without_times(tmp_path / "empty")) == 2


def test_the_options_of_another_script_are_no_defaults(tmp_path, monkeypatch):
    run(ppo, tmp_path / "run", num_iterations=1)
    words = ["ppo_v1.py", "--run-dir", str(tmp_path / "run"), "--resume"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="run was made by another script"):
        ppo_v1.parse_args()


def test_a_resume_that_fails_leaves_the_options_of_the_run(tmp_path):
    run(ppo_v1, tmp_path / "run", num_iterations=1)
    options = (tmp_path / "run" / "args.json").read_text()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(EOFError):
        run(ppo_v1, tmp_path / "run", num_iterations=5, resume=True)
    assert (tmp_path / "run" / "args.json").read_text() == options


@pytest.mark.parametrize("script", [ppo, ppo_v1], ids=["ppo", "v1"])
def test_a_tracked_run_in_the_folder_of_a_removed_one_is_a_new_run(script, tmp_path, monkeypatch):
    calls = spy(monkeypatch, wandb, "init")
    for _ in range(2):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run(script, tmp_path / "run", num_iterations=1, track=True)
    if script is ppo_v1:
        run(script, tmp_path / "run", num_iterations=1, track=True, resume=True)
    ids = [result.id for _, result in calls]
    assert [result.name for _, result in calls] == ["run"] * len(ids)
    assert ids[0] != ids[1] == ids[-1]


def test_a_kl_limit_that_would_never_act_is_refused():
    with pytest.raises(ValueError, match="--target-kl does nothing with one step per update"):
        ppo_v1.Args(target_kl=0.1, update_epochs=1, num_minibatches=1)


def test_a_resumed_run_cannot_change_its_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(ppo_v1, tmp_path / "mine", num_iterations=1)
    monkeypatch.setattr(sys, "argv", "ppo_v1.py --run-dir mine --resume --batch-size 16".split())
    with pytest.raises(SystemExit, match="--resume cannot change --batch-size from 8"):
        ppo_v1.parse_args()
