"""Each script runs as a function and as a command, moves its weights, and writes the run folder it promises."""

import importlib
import json
import math
import sys
from dataclasses import fields

import pytest
import torch
from conftest import LM_SCRIPTS, TINY_LM, metrics_without_times
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.parametrize("name", LM_SCRIPTS)
def test_main_trains_and_fills_the_run_folder(name, tmp_path):
    script = importlib.import_module(name)
    start = script.load_policy(script.Args(**TINY_LM))[0].lm.state_dict()
    metrics = script.main(script.Args(**TINY_LM, run_dir=str(tmp_path / "run")))
    assert all(math.isfinite(value) for value in metrics.values())
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["global_step"] for row in rows] == [0, 8, 16, 24] and all("time" in row for row in rows)
    assert [i for i, row in enumerate(rows) if "eval/score" in row] == [0, 2, 3]
    assert rows[1]["losses/first_ratio_error"] < 1e-5 and rows[1]["rollout/logprob_mismatch"] < 1e-5
    assert json.loads((run / "args.json").read_text())["batch_size"] == 8
    assert json.loads((run / "summary.json").read_text())["eval/score"] == rows[-1]["eval/score"]
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"
    final = AutoModelForCausalLM.from_pretrained(run / "final_model").state_dict()
    assert any(not torch.equal(final[key], start[key]) for key in start)
    assert AutoTokenizer.from_pretrained(run / "final_model")("12=").input_ids


@pytest.mark.parametrize("name", LM_SCRIPTS)
def test_command_line(name, run_script):
    """Dashes and underscores both work; the progress line shows what a person watches."""
    flags = (
        "--num_iterations 2 --batch-size 8 --num-minibatches 2 --hidden-size 16 --num-layers 1 --sft-steps 1".split()
    )
    done = run_script(f"{name}.py", *flags, "--eval-size", 4, "--run-dir", "out")
    assert done.returncode == 0, done.stderr
    assert "PL:" in done.stdout and "VL:" in done.stdout and "R:" in done.stdout and "eval/score" in done.stdout


@pytest.mark.parametrize("name", LM_SCRIPTS)
def test_help_explains_every_option(name, capsys, monkeypatch):
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        script.parse_args(script.Args)
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for each in fields(script.Args):
        assert (f"--{each.name.replace('_', '-')}" in out) == each.init


@pytest.mark.parametrize("name", LM_SCRIPTS)
def test_tracking_changes_no_number(name, tmp_path):
    script = importlib.import_module(name)
    for track in (False, True):
        script.main(script.Args(**TINY_LM | dict(num_iterations=1, track=track), run_dir=str(tmp_path / str(track))))
    assert metrics_without_times(tmp_path / "True") == metrics_without_times(tmp_path / "False")
    assert list((tmp_path / "True" / "wandb").glob("offline-run-*"))
