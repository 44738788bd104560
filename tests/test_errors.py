"""A bad input ends with exit code 2 and one line that names it; nothing is written."""

import importlib
import json
import signal
import subprocess
import sys

import pytest
from conftest import LM_SCRIPTS, ROOT

every_script = pytest.mark.parametrize("name", LM_SCRIPTS)


def expect(capsys, tmp_path, call, *words):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        call()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert len(error.strip().splitlines()) == 1, error
    assert all(str(word) in error for word in words), error
    assert sorted(tmp_path.rglob("*")) == before


@every_script
@pytest.mark.parametrize(
    "options, words",
    [
        (dict(batch_size=10, num_minibatches=4), ["--num-minibatches 4", "10"]),
        (dict(learning_rate=0.0), ["--learning-rate 0.0", "positive"]),
        (dict(learning_rate=float("nan")), ["--learning-rate nan"]),
        (dict(temperature=-1.0), ["--temperature -1.0", "positive"]),
        (dict(max_digits=2), ["--max-digits 2", "--min-digits 3"]),
        (dict(gae_lambda=1.5), ["--gae-lambda 1.5", "between 0 and 1"]),
        (dict(kl_coef=-0.1), ["--kl-coef -0.1"]),
        (dict(hidden_size=20), ["--hidden-size 20", "16"]),
        (dict(num_iterations=0), ["--num-iterations 0"]),
        (dict(seed=2**32), ["--seed 4294967296", "less than 2**32"]),
        (dict(reward_fn="a.py:f", reward_model_name="b"), ["--reward-fn", "--reward-model-name"]),
    ],
)
def test_options(name, options, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expect(capsys, tmp_path, lambda: importlib.import_module(name).Args(**options), *words)


def start(name, tmp_path, **options):
    script = importlib.import_module(name)
    tiny = dict(
        hidden_size=16, num_layers=1, sft_steps=1, batch_size=4, num_minibatches=1, num_iterations=1, eval_size=4
    )
    return lambda: script.main(script.Args(**tiny | options, run_dir=str(tmp_path / "run")))


@every_script
@pytest.mark.parametrize(
    "lines, words",
    [
        (['{"prompt": "a", "answer": 1}', '{"prompt": "b"'], ["line 2", "not JSON"]),
        (['{"prompt": "a", "answer": 1}', "", '{"prompt": "b", "reply": 1}'], ["line 3", "prompt/answer"]),
        (['{"prompt": 7, "answer": 1}'], ["line 1", "prompt"]),
        (["[1, 2]"], ["line 1"]),
        (["[" * 100_000], ["line 1", "not JSON"]),
        (['{"prompt": "a", "answer": 1}'], ["two different prompts"]),
        ([""], ["two different prompts"]),
    ],
)
def test_jsonl(name, lines, words, capsys, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    expect(capsys, tmp_path, start(name, tmp_path, task=f"jsonl:{path}"), f"jsonl:{path}", *words)


@every_script
def test_task_names(name, capsys, tmp_path):
    expect(capsys, tmp_path, start(name, tmp_path, task="sotr"), "--task sotr", "sort, add, jsonl:PATH, rg:NAME")
    expect(capsys, tmp_path, start(name, tmp_path, task="jsonl:"), "allowed")
    expect(capsys, tmp_path, start(name, tmp_path, task="jsonl:/no/such/file"), "/no/such/file", "cannot read")


@every_script
@pytest.mark.parametrize(
    "body, words",
    [
        ("[0.0] * (len(responses) - 1)", ["3 scores for 4 responses", "sample 3"]),
        ("[0.0, 1.0] + [float('nan')] * 2", ["sample 2", "nan", "prompt"]),
        ("[float('inf')] * len(responses)", ["sample 0", "inf"]),
    ],
)
def test_reward_function(name, body, words, capsys, tmp_path, monkeypatch):
    path = tmp_path / "reward.py"
    path.write_text(f"def mine(prompts, responses, answers):\n    return {body}\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    call = start(name, tmp_path, reward_fn=f"{path}:mine", nan_rewards="fail")
    expect(capsys, tmp_path, call, *words)


@every_script
def test_reward_function_that_is_not_there(name, capsys, tmp_path):
    expect(capsys, tmp_path, start(name, tmp_path, reward_fn="no.py:mine"), "--reward-fn no.py:mine")


@every_script
def test_model_folders(name, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"')
    expect(capsys, tmp_path, start(name, tmp_path, model_name="./none"), "--model-name ./none", "no such folder")
    for folder in (tmp_path / "empty", tmp_path / "broken"):
        expect(capsys, tmp_path, start(name, tmp_path, model_name=str(folder)), "--model-name", folder)
    expect(capsys, tmp_path, start(name, tmp_path, chat_template=True), "--chat-template")
    call = start(name, tmp_path, max_prompt_length=2000, max_response_length=49)  # the tiny model has 2048 positions
    expect(capsys, tmp_path, call, "--max-prompt-length 2000", "at most 1999")


@every_script
def test_a_folder_that_holds_a_run(name, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"global_step": 0}))
    expect(capsys, tmp_path, start(name, tmp_path), "--run-dir", "holds a run")


@every_script
def test_a_folder_that_cannot_be_made(name, capsys, tmp_path):
    (tmp_path / "run").write_text("a file")
    expect(capsys, tmp_path, start(name, tmp_path), f"--run-dir {tmp_path / 'run'}", "not a folder")


@every_script
@pytest.mark.parametrize(
    "flags, words",
    [
        (["--device", "tpu"], ["--device", "tpu", "auto"]),
        (["--learning-rate", "fast"], ["--learning-rate", "fast"]),
        (["--no-such-flag", "1"], ["--no-such-flag"]),
        (["--temperature", "0"], ["--temperature 0", "positive"]),
    ],
)
def test_command_line(name, flags, words, capsys, tmp_path, monkeypatch):
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    expect(capsys, tmp_path, lambda: script.parse_args(script.Args), *words)


def test_exit_code_of_the_process(run_script, tmp_path):
    done = run_script("ppo.py", "--temperature", 0)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["ppo", "het_grpo"])
def test_an_interrupt_before_the_first_iteration(name, tmp_path):
    """Ctrl-C in the warm start, where there is nothing to save yet: one line, no traceback, no run folder."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, str(ROOT / f"{name}.py")], cwd=tmp_path, **pipes) as process:
        assert process.stdout.readline().startswith("warm start: ")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1].splitlines() == [f"{name}.py: interrupted"]
    assert process.returncode == 130 and not list(tmp_path.iterdir())
