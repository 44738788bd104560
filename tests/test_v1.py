"""ppo_v1.py: schedules and controllers by hand, resume after kills, faults, signals, ranks. All through main()."""

import json
import math
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, TINY_LM, metrics_without_times
from test_equivalence import assert_same_run, weights
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM

import ppo
import ppo_v1

fork = multiprocessing.get_context("fork")  # children start with torch imported


def run(folder, script=ppo_v1, **options):
    return script.main(script.Args(**TINY_LM | options, run_dir=str(folder)))


# --- math ---
@pytest.mark.parametrize(
    "kind, warmup, rates",
    [
        ("linear", 0, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1.0, 1.0, 0.5]),
        ("cosine", 0, [1.0, 0.8535534, 0.5, 0.1464466]),
        ("constant", 2, [0.5, 1.0, 1.0, 1.0]),
        ("plateau", 0, [0.25] * 4),
    ],
)
def test_learning_rate(kind, warmup, rates):
    actual = [ppo_v1.learning_rate_at(i, 4, 1.0, kind, warmup, plateau_scale=0.25) for i in (1, 2, 3, 4)]
    assert actual == pytest.approx(rates, abs=1e-7)


def test_adaptive_kl_by_hand():
    assert ppo_v1.adapt_kl_coef(0.2, 9.0, 6.0, 10_000, 256) == pytest.approx(0.201024, abs=1e-9)
    assert ppo_v1.adapt_kl_coef(0.2, 0.0, 6.0, 10_000, 256) == pytest.approx(0.198976, abs=1e-9)
    assert ppo_v1.adapt_kl_coef(0.2, 6.6, 6.0, 10_000, 1000) == pytest.approx(0.202, abs=1e-9)  # error .1, not clipped


# --- equal to the parent ---
def test_extras_off_is_ppo(tmp_path):
    run(tmp_path / "parent", ppo, exp_name="same", num_iterations=4)
    run(tmp_path / "child", exp_name="same", num_iterations=4, early_stopping_patience=0, save_every=0)
    parent, child = (metrics_without_times(tmp_path / name) for name in ("parent", "child"))
    assert [{key: row[key] for key in old} for old, row in zip(parent, child, strict=True)] == parent
    assert parent[-1]["losses/grad_norm"] > 0
    first, second = weights(tmp_path / "parent"), weights(tmp_path / "child")
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    "options", [dict(save_every=1), dict(save_every=1, keep_checkpoints=1), dict(early_stopping_patience=9)]
)
def test_bookkeeping_changes_no_training_number(options, tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "b", **options)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_gradient_accumulation_is_exact(tmp_path):
    """Different lengths in the micro-batches, so a mean of means would show; only the order of sums may differ."""
    for steps in (1, 2, 4):
        run(tmp_path / str(steps), gradient_accumulation_steps=steps, num_iterations=1, learning_rate=1e-3)
    expected = weights(tmp_path / "1")
    for steps in ("2", "4"):
        for key, value in weights(tmp_path / steps).items():
            torch.testing.assert_close(value, expected[key], atol=2e-6, rtol=1e-5)
    rows = [metrics_without_times(tmp_path / steps)[1] for steps in ("1", "4")]
    for key in (
        "losses/policy_loss",
        "losses/value_loss",
        "losses/grad_norm",
        "losses/entropy",
        "losses/clipfrac",
        "total_loss",
    ):
        assert rows[0][key] == pytest.approx(rows[1][key], rel=1e-4, abs=1e-6)


def test_gradient_checkpointing_changes_no_number(tmp_path):
    run(tmp_path / "a", num_iterations=2)
    run(tmp_path / "b", num_iterations=2, gradient_checkpointing=True)
    for a, b in zip(metrics_without_times(tmp_path / "a"), metrics_without_times(tmp_path / "b"), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


def test_gradient_checkpointing_has_no_dropout(tmp_path):
    """OPT calls F.dropout with a number of its own, and checkpointing needs train() mode."""
    tokenizer = ppo_v1.make_tiny_tokenizer()
    sizes = dict(hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16)
    config = OPTConfig(vocab_size=len(tokenizer), max_position_embeddings=64, dropout=0.5, eos_token_id=1, **sizes)
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    tokenizer.save_pretrained(tmp_path / "opt")
    options = dict(model_name=str(tmp_path / "opt"), max_prompt_length=16, num_iterations=1, update_epochs=1)
    metrics = run(tmp_path / "run", gradient_checkpointing=True, num_minibatches=1, **options)
    assert metrics["losses/first_ratio_error"] < 1e-5


def test_bf16_stays_near(tmp_path):
    a, b = run(tmp_path / "a", num_iterations=2), run(tmp_path / "b", num_iterations=2, bf16=True)
    for key in ("losses/value_loss", "losses/grad_norm"):
        assert a[key] == pytest.approx(b[key], rel=0.02) and a[key] != b[key]


# --- checkpoint ---
LONG = dict(num_iterations=8, save_every=1, eval_every=2, keep_checkpoints=2, learning_rate=3e-3)  # fast: best/ appears


def child(folder, before=None, **options):
    """A training process, forked; `before` runs in it first."""

    def target():
        sys.stdout = sys.stderr = open(os.devnull, "w")
        if before:
            before()
        run(folder, **LONG | options)

    process = fork.Process(target=target)
    process.start()
    return process


def die_while_saving(nth, where):
    """Patch this process: SIGKILL in the middle of the nth checkpoint."""
    calls = {"n": 0}
    real_save, real_replace = torch.save, os.replace

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def save(state, file):
        calls["n"] += 1
        if calls["n"] == nth and where == "half":
            import io

            buffer = io.BytesIO()
            real_save(state, buffer)
            file.write(buffer.getvalue()[: buffer.tell() // 2])
            file.flush()
            kill()
        real_save(state, file)

    def replace(*paths):
        if calls["n"] == nth and where == "before rename":
            kill()
        real_replace(*paths)
        if calls["n"] == nth and where == "after rename":
            kill()

    torch.save, os.replace = save, replace


def test_killed_runs_end_like_one_never_stopped(tmp_path):
    run(tmp_path / "whole", **LONG)
    killed = tmp_path / "killed"
    rng = random.Random(0)
    deaths = 0
    for where in ("half", "before rename", "after rename"):
        process = child(killed, lambda w=where: die_while_saving(1 if w == "before rename" else 2, w), resume="auto")
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        deaths += 1
    for _ in range(3):
        process = child(killed, resume="auto")
        process.join(0.2 + 0.6 * rng.random())
        deaths += process.is_alive()
        process.kill()
        process.join()
    run(killed, **LONG, resume="auto")
    assert deaths >= 4
    assert_same_run(tmp_path / "whole", killed)
    assert len(list((killed / "checkpoints").glob("*.pt"))) == 2 and not list(killed.rglob("*.old"))
    best = [AutoModelForCausalLM.from_pretrained(tmp_path / r / "best").state_dict() for r in ("whole", "killed")]
    assert all(torch.equal(best[0][key], best[1][key]) for key in best[0])


def test_resume_carries_controllers(tmp_path):
    """Plateau scale, KL coefficient and early-stop counters survive; a restart of any would show in the metrics."""
    options = LONG | dict(
        lr_scheduler_type="plateau", plateau_patience=1, adaptive_kl=True, kl_target=0.1, kl_horizon=100
    )
    options |= dict(early_stopping_threshold=10.0, early_stopping_patience=0, eval_every=1)
    run(tmp_path / "whole", **options)
    run(tmp_path / "parts", **options | dict(num_iterations=5))
    run(tmp_path / "parts", **options, resume="auto")
    rows = metrics_without_times(tmp_path / "whole")
    assert rows == metrics_without_times(tmp_path / "parts")
    assert len({row["learning_rate"] for row in rows[1:]}) > 1 and len({row["losses/kl_coef"] for row in rows[1:]}) == 8


def checkpoints(folder):
    return [int(path.stem[11:]) for path in sorted((folder / "checkpoints").iterdir())]


def test_a_branch_given_up_is_gone(tmp_path):
    """Resume an older checkpoint: what was trained after it may neither stay nor push out what comes now."""
    run(tmp_path / "whole", num_iterations=4, save_every=1)
    for i in (4, 3, 2):  # as after a copy: the later checkpoint has the earlier time
        os.utime(tmp_path / "whole" / "checkpoints" / f"checkpoint_{i:08d}.pt", (1e9 - i, 1e9 - i))
    args = ppo_v1.Args(run_dir=str(tmp_path / "whole"), resume="auto")
    assert ppo_v1.find_checkpoint(args).name == "checkpoint_00000004.pt"
    older = str(tmp_path / "whole" / "checkpoints" / "checkpoint_00000002.pt")
    run(tmp_path / "whole", num_iterations=3, keep_checkpoints=1, resume=older)
    assert checkpoints(tmp_path / "whole") == [3]
    assert [row["global_step"] for row in metrics_without_times(tmp_path / "whole")] == [0, 8, 16, 24]


def test_resume_into_another_folder(tmp_path, capsys):
    run(tmp_path / "old", save_every=1)
    path = str(tmp_path / "old" / "checkpoints" / "checkpoint_00000002.pt")
    before = {p: p.read_bytes() for p in (tmp_path / "old").rglob("*") if p.is_file()}
    run(tmp_path / "new", resume=path)
    assert {p: p.read_bytes() for p in (tmp_path / "old").rglob("*") if p.is_file()} == before
    assert metrics_without_times(tmp_path / "new") == metrics_without_times(tmp_path / "old")[3:]
    capsys.readouterr()
    fails(capsys, lambda: run(tmp_path / "new", resume=path), "--run-dir", "holds a run already")


def test_nothing_left_to_do(tmp_path):
    """The checkpoint is of an iteration without an evaluation, and the run is not to go on."""
    run(tmp_path / "run", save_every=1, eval_every=0)
    path = tmp_path / "run" / "checkpoints" / "checkpoint_00000002.pt"
    assert math.isfinite(run(tmp_path / "run", num_iterations=2, eval_every=0, resume=str(path))["eval/score"])


def test_resume_with_nothing_there(tmp_path, capsys):
    run(tmp_path / "new", resume="auto")
    assert "starting fresh" in capsys.readouterr().out
    (tmp_path / "new" / "checkpoints" / "checkpoint_00000003.pt").unlink()
    run(tmp_path / "new", resume="auto")  # killed before its first checkpoint: the old rows must not stay
    assert len(metrics_without_times(tmp_path / "new")) == 4


def fails(capsys, call, *words, code=2):
    with pytest.raises(SystemExit) as stop:
        call()
    error = capsys.readouterr().err.strip()
    assert stop.value.code == code and len(error.splitlines()) == 1 and all(str(w) in error for w in words), error


def test_bad_checkpoints(tmp_path, capsys):
    run(tmp_path / "run", save_every=1)
    path = sorted((tmp_path / "run" / "checkpoints").glob("*.pt"))[-1]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    fails(capsys, lambda: run(tmp_path / "run", resume="auto"), path, "damaged")
    path.write_bytes(b"not a checkpoint")
    fails(capsys, lambda: run(tmp_path / "run", resume=str(path)), path, "damaged")
    torch.save({"weights": torch.zeros(3)}, path)
    fails(capsys, lambda: run(tmp_path / "run", resume=str(path)), path, "not one of")
    fails(capsys, lambda: run(tmp_path / "run", resume=str(tmp_path / "none.pt")), "none.pt", "does not exist")
    (tmp_path / "empty").mkdir()  # only auto may start anew
    fails(capsys, lambda: run(tmp_path / "new", resume=str(tmp_path / "empty")), "--resume", "empty: no checkpoints")
    assert not (tmp_path / "new").exists()
    path.write_bytes(data)
    fails(capsys, lambda: run(tmp_path / "run", resume="auto", hidden_size=32), "--hidden-size 32", "16")
    run(tmp_path / "run", resume="auto", num_iterations=4, learning_rate=1e-3)
    out = capsys.readouterr().out
    assert "--learning-rate: 0.0001 before, 0.001 now" in out and "resumed" in out


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/stale_experience_evil",)


def test_a_checkpoint_cannot_run_code(tmp_path, capsys):
    import pickle

    path = tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps(Evil()))
    fails(capsys, lambda: run(tmp_path / "run", resume=str(path)), path, "damaged or not one of ours")
    torch.save({"args": Evil()}, path)
    fails(capsys, lambda: run(tmp_path / "run", resume=str(path)), path)
    assert not os.path.exists("/tmp/stale_experience_evil")


def test_full_disk_keeps_what_was_saved(tmp_path, capsys, monkeypatch):
    run(tmp_path / "run", save_every=1, num_iterations=2)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run" / "checkpoints").iterdir()}

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    fails(
        capsys,
        lambda: run(tmp_path / "run", resume="auto", save_every=1),
        "cannot write checkpoint",
        "No space left",
        code=1,
    )
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "checkpoints").iterdir()} == before


# --- signals ---
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_saves_and_ends(number, tmp_path):
    run(tmp_path / "whole", **LONG)
    process = child(tmp_path / "cut", save_every=0, before=lambda: slow(0.15))
    wait_for(tmp_path / "cut" / "metrics.jsonl", rows=3)
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode == 0
    done = len(metrics_without_times(tmp_path / "cut")) - 1
    assert 2 <= done < 8 and (tmp_path / "cut" / "checkpoints" / f"checkpoint_{done:08d}.pt").exists()
    run(tmp_path / "cut", **LONG, resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_second_signal_ends_at_once(tmp_path):
    process = child(tmp_path / "cut", save_every=0, before=lambda: slow(5.0, after=2))
    wait_for(tmp_path / "cut" / "metrics.jsonl", rows=2)
    for _ in range(2):
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.2)
    process.join(2)
    assert process.exitcode == 128 + signal.SIGTERM


def slow(seconds, after=0):
    """Stretch the iterations of this process."""
    real, calls = ppo_v1.compute_gae, {"n": 0}

    def stretched(*args):
        calls["n"] += 1
        end = time.time() + (seconds if calls["n"] >= after else 0)
        while time.time() < end:
            time.sleep(0.02)
        return real(*args)

    ppo_v1.compute_gae = stretched


def wait_for(path, rows):
    end = time.time() + 30
    while time.time() < end and (not path.exists() or len(path.read_text().splitlines()) < rows):
        time.sleep(0.02)


# --- faults ---
def poison(monkeypatch, name, bad):
    """Let the nth call of a loss function return NaN where bad(n)."""
    real, calls = getattr(ppo_v1, name), {"n": 0}

    def wrapped(*args, **kwargs):
        calls["n"] += 1
        result = real(*args, **kwargs)
        factor = math.nan if bad(calls["n"]) else 1.0
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    monkeypatch.setattr(ppo_v1, name, wrapped)


@pytest.mark.parametrize("name", ["policy_loss", "value_loss"])
def test_nan_loss_never_reaches_the_weights(name, tmp_path, monkeypatch):
    poison(monkeypatch, name, lambda n: n in (1, 3))
    metrics = run(tmp_path / "run")
    assert metrics["losses/skipped_steps"] == 2
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run").values())


def test_ten_bad_steps_in_a_row_end_the_run(tmp_path, monkeypatch, capsys):
    start = ppo_v1.load_policy(ppo_v1.Args(**TINY_LM))[0]
    poison(monkeypatch, "policy_loss", lambda n: n > 4)
    fails(capsys, lambda: run(tmp_path / "run", save_every=1, num_iterations=9), "10 updates in a row", code=1)
    saved = ppo_v1.load_checkpoint(sorted((tmp_path / "run" / "checkpoints").glob("*.pt"))[-1])["policy"]
    assert all(torch.isfinite(value).all() for value in saved.values())
    assert saved.keys() == start.state_dict().keys()


def test_nan_reward_skips_the_update(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(
        "calls = {'n': 0}\n"
        "def mine(prompts, responses, answers):\n"
        "    calls['n'] += 1\n"  # call 1 is the evaluation of the start policy
        "    return [float('nan') if calls['n'] == 3 and i == 1 else len(r) for i, r in enumerate(responses)]\n"
    )
    run(tmp_path / "run", reward_fn=f"{path}:mine", eval_every=0, max_skipped_steps=2)  # an iteration counts once
    rows = metrics_without_times(tmp_path / "run")
    assert [row.get("losses/skipped_steps") for row in rows] == [None, 0, 4, 4]
    assert rows[2]["charts/score"] is None and "losses/policy_loss" not in rows[2] and rows[3]["losses/grad_norm"] > 0


def test_a_save_killed_while_it_cleaned_up(tmp_path):
    policy, tokenizer, _, _ = ppo_v1.load_policy(ppo_v1.Args(**TINY_LM))
    (tmp_path / "best.old").mkdir()
    (tmp_path / "best.old" / "half.safetensors").write_text("")
    for _ in range(2):
        ppo_v1.save_model(policy, tokenizer, tmp_path / "best", rank=0)
    assert (tmp_path / "best" / "config.json").exists() and not (tmp_path / "best.old").exists()


# --- controllers, seen working in a run ---
def test_target_kl_stops_the_epochs(tmp_path, monkeypatch):
    calls = {"n": 0}
    real = ppo_v1.policy_loss

    def counted(*args, **kwargs):
        calls["n"] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(ppo_v1, "policy_loss", counted)
    options = dict(num_iterations=1, update_epochs=8, learning_rate=3e-3)
    run(tmp_path / "free", **options)
    free, calls["n"] = calls["n"], 0
    run(tmp_path / "held", **options, target_kl=1e-4)
    assert free == 16 and calls["n"] < 16 and calls["n"] % 2 == 0


def test_early_stop_and_best(tmp_path, capsys):
    options = dict(num_iterations=40, eval_every=1, early_stopping_patience=2, early_stopping_threshold=100.0)
    run(tmp_path / "run", **options)
    assert "early stop" in capsys.readouterr().out
    rows = metrics_without_times(tmp_path / "run")
    assert len(rows) == 1 + 2 and (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "checkpoint_00000002.pt").exists()


def test_an_early_stop_survives_a_kill(tmp_path, capsys):
    """Killed after the last checkpoint and before the final model: the resumed run ends there, it does not train on."""
    options = dict(num_iterations=9, eval_every=1, early_stopping_patience=2, early_stopping_threshold=100.0)
    run(tmp_path / "run", **options)
    rows = metrics_without_times(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    run(tmp_path / "run", **options, resume="auto")
    assert metrics_without_times(tmp_path / "run") == rows and len(rows) == 3
    assert (tmp_path / "run" / "summary.json").exists()


def test_best_is_the_best(tmp_path):
    run(tmp_path / "run", num_iterations=12, eval_every=1, learning_rate=3e-3, save_every=1, keep_checkpoints=99)
    scores = [row["eval/score"] for row in metrics_without_times(tmp_path / "run")]
    best = max(range(1, 13), key=lambda i: (scores[i], -i))
    assert scores[best] > scores[0]
    saved = ppo_v1.load_checkpoint(tmp_path / "run" / "checkpoints" / f"checkpoint_{best:08d}.pt")["policy"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "best").state_dict()
    assert all(torch.equal(model[key], saved[f"lm.{key}"]) for key in model)


def test_final_folder_gives_the_same_answers(tmp_path):
    args = ppo_v1.Args(**TINY_LM, run_dir=str(tmp_path / "run"))
    ppo_v1.main(args)
    policy, _, eos_ids, pad_id = ppo_v1.load_policy(args)
    checkpoint = ppo_v1.load_checkpoint(tmp_path / "run" / "checkpoints" / "checkpoint_00000003.pt")
    policy.load_state_dict(checkpoint["policy"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final_model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final_model").eval()
    for prompt in ("312=", "4410="):
        ids, mask = ppo_v1.pad([tokenizer(prompt).input_ids], pad_id, "left")
        ours, _, _ = ppo_v1.generate(policy, ids, mask, eos_ids, pad_id, 8, 1.0)
        theirs = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert ours[0].tolist() == theirs.tolist()


def test_training_config(tmp_path):
    run(tmp_path / "run")
    config = json.loads((tmp_path / "run" / "training_config.json").read_text())
    assert config["versions"]["torch"] == torch.__version__ and config["args"]["batch_size"] == 8 and config["argv"]
    assert "iteration 3" in (tmp_path / "run" / "train.log").read_text().splitlines()[-1]


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(warmup_steps=200), ["--warmup-steps 200", "150"]),
        (dict(gradient_accumulation_steps=5), ["--gradient-accumulation-steps 5", "32"]),
        (dict(dual_clip=0.5), ["--dual-clip 0.5", "above 1"]),
        (dict(target_kl=-1.0), ["--target-kl -1.0"]),
        (dict(adaptive_kl=True, kl_coef=0.0), ["--kl-coef 0.0", "--adaptive-kl"]),
        (dict(keep_checkpoints=0), ["--keep-checkpoints 0"]),
    ],
)
def test_bad_options(options, words, capsys):
    fails(capsys, lambda: ppo_v1.Args(**options), *words)


# --- ranks ---
def launch(folder, world_size, before=None, **options):
    """world_size forked ranks, as torchrun would start them. -> exit codes"""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def target(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.stdout = sys.stderr = open(os.devnull, "w")
        if before:
            before(rank)
        run(folder, **options)

    ranks = [fork.Process(target=target, args=(rank,)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fsdp"])
def test_two_ranks_make_the_update_of_one(fsdp, tmp_path):
    options = dict(num_iterations=1, gradient_accumulation_steps=2, learning_rate=1e-3)
    run(tmp_path / "one", **options)
    assert launch(tmp_path / "two", 2, fsdp=fsdp, **options) == [0, 0]
    one, two = metrics_without_times(tmp_path / "one"), metrics_without_times(tmp_path / "two")
    assert len(one) == len(two) == 2, "one log"
    for key, value in one[1].items():
        assert two[1][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    expected = weights(tmp_path / "one")
    for key, value in weights(tmp_path / "two").items():
        torch.testing.assert_close(value, expected[key], atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fsdp"])
def test_two_ranks_resume_exactly(fsdp, tmp_path):
    options = dict(fsdp=fsdp, save_every=1)
    assert launch(tmp_path / "whole", 2, **options) == [0, 0]
    assert launch(tmp_path / "parts", 2, **options | dict(num_iterations=2, learning_rate=2e-4)) == [0, 0]
    (tmp_path / "parts" / "checkpoints" / "checkpoint_00000002.pt").unlink()
    (tmp_path / "parts" / "checkpoints" / "checkpoint_00000001.pt").write_bytes(
        (tmp_path / "whole" / "checkpoints" / "checkpoint_00000001.pt").read_bytes()
    )
    assert launch(tmp_path / "parts", 2, **options, resume="auto") == [0, 0]
    rows = [metrics_without_times(tmp_path / name)[2:] for name in ("whole", "parts")]
    assert rows[0] == rows[1]
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_ends_all(rank, tmp_path):
    def signal_once(mine):
        real, calls = ppo_v1.compute_gae, {"n": 0}

        def signalled(*args):
            calls["n"] += 1
            if mine == rank and calls["n"] == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*args)

        ppo_v1.compute_gae = signalled

    assert launch(tmp_path / "run", 2, before=signal_once, num_iterations=4) == [0, 0]
    assert checkpoints(tmp_path / "run") == [2] and not (tmp_path / "run" / "summary.json").exists()


def test_ranks_decide_alike_when_their_scores_differ(tmp_path):
    """Early stopping by a reward that rises on one rank and stands still on the other: they must leave together."""
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\ncalls = [0]\n"
        "def mine(prompts, responses, answers):\n"
        "    calls[0] += os.environ['RANK'] == '0'\n    return [float(calls[0])] * len(responses)\n"
    )
    options = dict(reward_fn=f"{path}:mine", eval_every=1, early_stopping_patience=1)
    assert launch(tmp_path / "run", 2, **options) == [0, 0]
    assert len(metrics_without_times(tmp_path / "run")) == 4 and (tmp_path / "run" / "summary.json").exists()


def test_a_replicated_checkpoint_does_not_shard(tmp_path, capsys):
    run(tmp_path / "run")
    fails(capsys, lambda: run(tmp_path / "run", resume="auto", fsdp=True), "--fsdp", "the other way round works")


def test_ranks_end_with_equal_weights(tmp_path):
    def dump(rank):
        real = ppo_v1.save_model

        def save(policy, tokenizer, folder, rank):
            torch.save(policy.state_dict(), tmp_path / f"rank{rank}.pt")
            real(policy, tokenizer, folder, rank)

        ppo_v1.save_model = save

    assert launch(tmp_path / "run", 2, before=dump) == [0, 0]
    states = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_torchrun_ends_when_a_rank_fails(tmp_path):
    """The real launcher: a rank whose reward breaks takes the run down in seconds, with a message."""
    path = tmp_path / "reward.py"
    path.write_text(
        "import os\n"
        "def mine(prompts, responses, answers):\n"
        "    broken = os.environ['RANK'] == '1' and len(prompts) == 4\n"
        "    return [float(len(r)) for r in responses][: 1 if broken else None]\n"
    )
    flags = "--num-iterations 3 --batch-size 8 --hidden-size 16 --num-layers 1 --sft-steps 1 --eval-size 2".split()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", ROOT / "ppo_v1.py", *flags]
    command += ["--run-dir", tmp_path / "run", "--reward-fn", f"{path}:mine"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "1 scores for 4 responses" in done.stderr
