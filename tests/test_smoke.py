"""Each script runs as a function and as a command, moves its weights, and writes the run folder it promises."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
import tyro
from conftest import LM_SCRIPTS, ROOT, SCRIPTS, TINY_LM, metrics_without_times, run, same, weights
from test_v1 import assert_nearly_the_same
from transformers import AutoModelForCausalLM, AutoTokenizer

import ppo_v2

every_script = pytest.mark.parametrize("name", LM_SCRIPTS)
REPLAY = dict(use_replay_buffer=True, min_replay_size=8, replay_sample_size=8)


def flags(**options):
    """As a user would type them."""
    words = []
    for name, value in (TINY_LM | options).items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


@every_script
def test_main_trains_and_fills_the_run_folder(name, tmp_path):
    script = importlib.import_module(name)
    options = TINY_LM | (REPLAY if name == "ppo_v2" else {})
    metrics = script.main(script.Args(**options, run_dir=str(tmp_path / "run")))
    folder = tmp_path / "run"
    assert all(math.isfinite(value) for value in metrics.values())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["global_step"] for row in rows] == [0, 8, 16, 24] and all("time" in row for row in rows)
    assert [i for i, row in enumerate(rows) if "eval/score" in row] == [0, 2, 3]
    assert all(row["rollout/logprob_mismatch"] < 1e-5 and row["losses/grad_norm"] > 0 for row in rows[1:])
    config = json.loads((folder / "args.json").read_text())
    assert config["batch_size"] == 8 and config["torch"] == torch.__version__ and config["argv"]
    assert json.loads((folder / "summary.json").read_text())["eval/score"] == rows[-1]["eval/score"]
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG" and (folder / "curves.png").stat().st_size > 20_000
    run(script, tmp_path / "other", num_iterations=1)
    assert not same(weights(folder), weights(tmp_path / "other"))
    assert AutoModelForCausalLM.from_pretrained(folder / "final_model").config.hidden_size == 64
    assert AutoTokenizer.from_pretrained(folder / "final_model")("12=").input_ids


@pytest.mark.parametrize("name, last", [("ppo", ""), ("ppo_v2", r" BUF:\d+ EFF:\d\.\dx")])
def test_command_line_prints_plain_status_lines(name, last, run_script):
    """Dashes and underscores both work."""
    words = flags(**REPLAY if name == "ppo_v2" else {}, run_dir="out")
    words[words.index("--num-iterations")] = "--num_iterations"
    done = run_script(f"{name}.py", *words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 3 and "eval/score" in done.stdout.splitlines()[-1]
    for line in lines:
        assert re.fullmatch(r"\[\d/3\] PL:-?\d+\.\d\d VL:\d+\.\d\d R:-?\d+\.\d\d" + last, line), line


def test_torchrun_with_replay_and_shards_is_one_process(tmp_path):
    """The real launcher; 5 rows drawn, so that ranks and micro-batches have uneven shares."""
    options = REPLAY | dict(num_iterations=2, replay_sample_size=5, gradient_accumulation_steps=2, learning_rate=1e-4)
    run(ppo_v2, tmp_path / "one", **options)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", ROOT / "ppo_v2.py"]
    words += [*flags(**options, run_dir=tmp_path / "two"), "--fsdp"]
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2/2] PL:") == 1, "one voice"
    assert_nearly_the_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_explains_every_option(name, capsys, monkeypatch):
    script = importlib.import_module(name)
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as stop:
        tyro.cli(script.Args, args=["--help"], description=script.__doc__)
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    source = (ROOT / f"{name}.py").read_text()
    for field in fields(script.Args):
        text = re.search(rf"^    {field.name}: .*?  # (.{{9,}})$", source, re.M).group(1)
        assert f"--{field.name.replace('_', '-')}" in shown and text in shown, field.name


@every_script
@pytest.mark.parametrize(
    "flag, value",
    [("--temperature", "0"), ("--learning-rate", "nan"), ("--gae-lambda", "1.5"), ("--kl-coef", "-0.1"),
     ("--num-minibatches", "3"), ("--max-digits", "2"), ("--task", "sotr"), ("--task", "jsonl:/no/such/file"),
     ("--learning-rate", "fast"), ("--no-such-flag", "1"), ("--batch-size", "0")],
)  # fmt: skip
def test_a_bad_value_exits_with_2_and_writes_nothing(name, flag, value, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        tyro.cli(importlib.import_module(name).Args, args=[flag, value])
    assert stop.value.code == 2 and not list(tmp_path.iterdir())
    shown = capsys.readouterr().err.replace("_", "-")
    assert flag in shown


@every_script
def test_a_folder_that_holds_a_run_is_refused(name, tmp_path):
    script = importlib.import_module(name)
    run(script, tmp_path / "run", num_iterations=1)
    rows = metrics_without_times(tmp_path / "run")
    with pytest.raises(FileExistsError, match="run"):
        run(script, tmp_path / "run", num_iterations=1, seed=2)
    assert metrics_without_times(tmp_path / "run") == rows
