"""docs/het_grpo.md says what the script does: commands parse, examples run, keys and tables are those of the code."""

import importlib.util
import json
import re
import runpy
import shlex

import pytest
import tyro
from conftest import ROOT
from test_het_train import TINY, easy_locks, run  # noqa: F401  (a fixture)

import het_grpo as het

PAGE = (ROOT / "docs" / "het_grpo.md").read_text()


def test_commands_parse():
    commands = re.findall(r"^(?:torchrun --nproc-per-node \d+ |python )het_grpo\.py\b([^#\n]*)", PAGE, re.M)
    commands += re.findall(r"^    (?:torchrun --nproc-per-node \d+ |python )het_grpo\.py([^#\n]*)", het.__doc__, re.M)
    assert len(commands) > 10
    for flags in commands:
        tyro.cli(het.Args, args=shlex.split(flags))


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()
    (tmp_path / "game.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.S)[1])
    (tmp_path / "advice.jsonl").write_text(re.search(r"```json\n(.*?)```", PAGE, re.S)[1])
    monkeypatch.chdir(tmp_path)
    options = dict(env="game.py:Game", experience_pool="advice.jsonl", max_turns=1, warm_start_steps=20)
    metrics = run(tmp_path / "run", **options, updated_freq=1)
    assert "for 12 of 12 training tasks" in capsys.readouterr().out
    assert metrics["charts/success_rate"] > 0 and metrics["exp/retrieval_empty_frac"] == 0


def test_logged_keys_are_documented_and_back(tmp_path):
    table = PAGE[PAGE.index("## What it logs") : PAGE.index("## Implementation details")]
    documented = {key for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for key in re.findall(r"`([^`]+)`", cell)}
    run(tmp_path / "run", use_experience_replay=True, num_iterations=4)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = {re.sub(r"bucket_\d", "bucket_{s}", key) for row in rows for key in row}
    assert logged == documented
    assert TINY["num_iterations"] == 3


def test_tables_are_the_raw_data():
    spec = importlib.util.spec_from_file_location("het_study", ROOT / "benchmark" / "het_study.py")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    curves, tuning = study.read(study.STUDY), study.read(study.TUNING)
    tables = [study.table(game, curves) for game in {key[0] for key in curves}]
    lines = "\n".join([*tables, study.guard(curves), study.grid(tuning)]).splitlines()
    assert len(lines) > 12 and not [line for line in lines if line not in PAGE]
    for arm in ("baseline", "HET", "sft"):
        assert {key[3] for key in curves if key[:2] == ("lock", arm)} >= set(study.SEEDS), arm
    ends = [float(curve[-1]["global_step"]) for curve in (curves | tuning).values()]
    assert max(ends) - min(ends) < 130, "equal rollouts, to within two iterations"


def test_misleading_locks():
    """Luck opens training locks only, and what it pressed becomes advice."""
    names = runpy.run_path(str(ROOT / "benchmark" / "locks.py"))
    for name, share in (("Lucky", 0.08), ("Worn", 0.5)):
        env, opened = names[name](), []
        for seed in range(4000):
            secret = env.reset(seed)[1]["solution"]
            slot = 3 if name == "Worn" else 0
            for right in secret[:slot]:
                env.step(right)
            wrong = next(action for action in env.actions if action != secret[slot])
            text, reward, ended, _, info = env.step(wrong)
            opened.append(ended)
            assert (text, reward) == (("open", 1.0) if ended else (f"jam {slot}", 0.0))
            assert not ended or info["experience"].endswith(wrong)
        assert not any(opened[240:]) and sum(opened[:240]) / 240 == pytest.approx(share, abs=0.08)
