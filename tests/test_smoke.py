"""Each script runs as a function and as a command, moves its weights, and writes the run folder it promises."""

import importlib
import json
import math
import os
import pickle
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import tyro
from conftest import (
    LM_SCRIPTS,
    REPLAY,
    ROOT,
    SCRIPTS,
    TINY_LM,
    assert_nearly_the_same,
    metrics_without_times,
    run,
    same,
    weights,
)
from rewards import digits
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_v2


def flags(**options):
    """As a user would type them."""
    words = []
    for name, value in (TINY_LM | options).items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


@pytest.mark.parametrize("name", LM_SCRIPTS)
def test_main_trains_and_fills_a_folder_that_no_other_run_overwrites(name, tmp_path):
    script, folder = importlib.import_module(name), tmp_path / "run"
    options = TINY_LM | (REPLAY if name == "ppo_v2" else {})
    metrics = script.main(script.Args(**options, run_dir=str(folder)))
    assert all(math.isfinite(value) for value in metrics.values())
    rows = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["global_step"] for row in rows] == [0, 8, 16, 24] and all(
        "time" in row for row in rows
    )
    assert [i for i, row in enumerate(rows) if "eval/score" in row] == [0, 2, 3]
    assert all(
        row["rollout/logprob_mismatch"] < 1e-5 and row["losses/grad_norm"] > 0 for row in rows[1:]
    )
    config = json.loads((folder / "args.json").read_text(encoding="utf-8"))
    assert config["batch_size"] == 8 and config["torch"] == torch.__version__ and config["argv"]
    assert (
        json.loads((folder / "summary.json").read_text(encoding="utf-8"))["eval/score"]
        == rows[-1]["eval/score"]
    )
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG" and (
        folder / "curves.png"
    ).stat().st_size > 20_000
    assert AutoModelForCausalLM.from_pretrained(folder / "final_model").config.hidden_size == 64
    assert AutoTokenizer.from_pretrained(folder / "final_model")("12=").input_ids
    run(script, tmp_path / "other", num_iterations=1)
    assert not same(weights(folder), weights(tmp_path / "other"))
    before = metrics_without_times(folder)
    with pytest.raises(SystemExit, match="run already exists; runs are never overwritten"):
        run(script, folder, num_iterations=1, seed=2)
    assert metrics_without_times(folder) == before


@pytest.mark.parametrize("name", LM_SCRIPTS)
def test_samples_agree_with_the_logged_score(name, tmp_path, capsys):
    """Eight held-out prompts at each evaluation, scored again; a response without EOS was cut off."""
    script, folder = importlib.import_module(name), tmp_path / "run"
    run(script, folder, eval_size=8)
    samples = [json.loads(line) for line in open(folder / "samples.jsonl", encoding="utf-8")]
    scores = {
        row["global_step"]: row["eval/score"]
        for row in metrics_without_times(folder)
        if "eval/score" in row
    }
    assert list(scores) == [0, 16, 24] and len(samples) == 3 * 8
    for step, score in scores.items():
        rows = [sample for sample in samples if sample["global_step"] == step]
        responses = [row["response"].removesuffix("<eos>") for row in rows]
        again = digits([row["prompt"] for row in rows], responses, [row["answer"] for row in rows])
        assert [row["score"] for row in rows] == again
        assert sum(again) / 8 == pytest.approx(score)
        assert all(len(row["response"].removesuffix("<eos>")) <= 8 for row in rows)
        assert all(sorted(row["prompt"][:-1]) == sorted(row["answer"]) for row in rows)
    printed = capsys.readouterr().out
    assert printed.count(", score ") == 6 and f"eval/score {scores[0]:.2f} -> " in printed
    assert str(folder) in printed.splitlines()[-1]


def test_a_run_without_an_evaluation_in_between_still_shows_both_ends(tmp_path):
    run(ppo_v2, tmp_path / "run", num_iterations=1, eval_every=9)
    lines = open(tmp_path / "run" / "samples.jsonl", encoding="utf-8")
    assert [json.loads(line)["global_step"] for line in lines] == [0] * 8 + [8] * 8


@pytest.mark.parametrize("name, last", [("ppo", ""), ("ppo_v2", r" BUF:\d+ EFF:\d\.\dx")])
def test_command_line_prints_plain_status_lines(name, last, run_script):
    """Dashes and underscores both work."""
    words = flags(**REPLAY if name == "ppo_v2" else {}, run_dir="out")
    words[words.index("--num-iterations")] = "--num_iterations"
    done = run_script(f"{name}.py", *words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 3 and "\neval/score " in done.stdout
    assert re.search(r"^device cpu, \d+,\d+ parameters are trained$", done.stdout, re.M)
    for line in lines:
        assert re.fullmatch(r"\[\d/3\] PL:-?\d+\.\d\d VL:\d+\.\d\d R:-?\d+\.\d\d" + last, line), (
            line
        )


def test_torchrun_with_replay_and_shards_is_one_process(tmp_path):
    """The real launcher; an uneven number of held-out prompts, of which each rank takes its share."""
    options = REPLAY | dict(
        num_iterations=2, eval_size=7, gradient_accumulation_steps=2, learning_rate=1e-4
    )
    run(ppo_v2, tmp_path / "one", **options)
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        ROOT / "ppo_v2.py",
    ]
    words += [*flags(**options, run_dir=tmp_path / "two"), "--fsdp"]
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2/2] PL:") == 1, "one voice"
    assert_nearly_the_same(tmp_path / "one", tmp_path / "two")
    one, two = (
        [json.loads(line) for line in open(tmp_path / name / "samples.jsonl", encoding="utf-8")]
        for name in ("one", "two")
    )
    assert [row["prompt"] for row in one] == [row["prompt"] for row in two] and len(one) == 14


@pytest.mark.parametrize("name", LM_SCRIPTS)
def test_text_that_the_terminal_cannot_show_ends_no_run(name, run_script, tmp_path):
    lines = [json.dumps({"prompt": f"{i}→é=", "answer": "1"}) for i in range(20)]
    (tmp_path / "task.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = "--task jsonl:task.jsonl --sft-steps 1 --num-iterations 1 --batch-size 4".split()
    environment = os.environ | dict(PYTHONIOENCODING="ascii")
    finished = run_script(f"{name}.py", *options, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert "after training" in finished.stdout and "??=' ->" in finished.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_explains_every_option(name, capsys, monkeypatch):
    script = importlib.import_module(name)
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as stop, script.titled_help():
        tyro.cli(script.Args, args=["--help"], description=script.__doc__)
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    shown = " ".join(printed.split())
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    groups = ["run", "task", "model", "rollout", "optimization"]
    titles = re.findall(r"^ (\w+)$", printed, re.M)  # a line of its own, indented by one space
    assert [title for title in titles if title in groups] == groups
    comments = re.findall(r"\n    # (.+)\n    \w+:", source)
    expected_titles = [comment for comment in comments if not re.match(r"v\d:", comment)]
    assert re.findall(r"\n\n (\w.*)\n\n  --", printed) == expected_titles
    for field in fields(script.Args):
        text = re.search(rf"^    {field.name}: .*?  # (.{{9,}})$", source, re.M).group(1)
        assert f"--{field.name.replace('_', '-')}" in shown and text in shown, field.name


LM_BAD = """--temperature 0 | --learning-rate nan | --gae-lambda 1.5 | --kl-coef -0.1 | --num-minibatches 3
    --max-digits 2 | --max-digits 8 | --chat-template | --reward-fn absent.py:f | --ent-coef nan
    --task sotr | --task jsonl:/no/such/file | --learning-rate fast | --batch-size 0"""
BAD = {  # flags that make no sense, options that would be ignored among them; the last is named, by its last word
    "ppo": LM_BAD,
    "ppo_v1": LM_BAD
    + " | --warmup-steps 40 | --resume | --fsdp | --dual-clip 0.5 | --early-stopping-patience 0",
    "ppo_v2": LM_BAD + " | --replay-buffer-size 700 | --priority-age-tau None | --correction dppo",
    "het_grpo": """--rollout-expratio 1.5 | --train-sample-keepratio -0.1 | --exp-ratio nan | --temperature 0
        --experience-template none | --num-minibatches 5 | --resume | --method ec --train-sample-expmode discard
        --method baseline --train-rollout-expmode all | --method ei --train-sample-keepratio 0.5
        --method ec --no-enable | --method baseline --experience-pool x | --method sft --use-experience-replay
        --num-train-tasks 7 | --chat-template | --fsdp | --env absent.py:Game | --summarizer absent.py:name
        --experience-pool absent.jsonl""",
    "sac_hybrid": """--lr 0 | --max-steps 0 | --tau 1.5 | --seed -1 | --gamma nan | --resume
        --num-critics 1 --num-sampled-critics 2 | --num-demos 0 --algorithm bc | --env-id Pendulum-v1 --human expert""",
    "wsrl_warmup": """--offline-decay-rate 1.5 | --batch-size 0 | --preset nonsense | --lr nan | --resume
        --retention-ratio 0 --min-offline-ratio 0.5 | --initial-offline-ratio 0.5 --min-offline-ratio 0.9
        --learner | --checkpoint-path absent --learner --online-steps 0 | --warmup-steps -1""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_bad_value_exits_with_2_names_the_option_and_writes_nothing(
    name, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for case in re.split(r"[|\n]", BAD[name] + "| --no-such-flag 1"):
        with pytest.raises(SystemExit) as stop:
            tyro.cli(importlib.import_module(name).Args, args=case.split())
        assert stop.value.code == 2 and not list(tmp_path.iterdir()), case
        assert re.findall(r"--[\w-]*?(\w+)(?= |$)", case)[-1] in capsys.readouterr().err.replace(
            "_", "-"
        ), case


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("name", SCRIPTS[1:])
def test_a_checkpoint_cannot_run_code(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/args.json").write_text(json.dumps(dict(script=name)), encoding="utf-8")
    for file in ("checkpoint.pt", "latest.pth"):
        torch.save({"args": Evil()}, f"run/{file}")
    script, options = (
        importlib.import_module(name),
        TINY_LM if name in LM_SCRIPTS else dict(device="cpu"),
    )
    with pytest.raises((pickle.UnpicklingError, SystemExit), match="mkdir|does not hold"):
        script.main(script.Args(**options, run_dir="run", resume=True))
    assert not Path("evil").exists()
