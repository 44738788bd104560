"""README, --help, docstrings and code say the same."""

import csv
import importlib
import importlib.util
import json
import re
import shlex

import pytest
import tyro
from conftest import LM_SCRIPTS, ROOT, TINY_LM

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^(?:.*&& )?(?:torchrun --nproc-per-node \d+ |python )(\w+)\.py\b([^#\n]*)", README, re.M)
PARENTS = {"ppo_v1": "ppo", "ppo_v2": "ppo_v1"}


def test_the_two_commands_are_at_the_top():
    head = README[:3000]
    assert "pip install -r requirements.txt && python ppo_v2.py --use-replay-buffer" in head
    assert "pip install -r requirements.txt && pytest" in head


@pytest.mark.parametrize("script, flags", sorted(set(COMMANDS)))
def test_commands_parse(script, flags):
    module = importlib.import_module(script)
    tyro.cli(module.Args, args=shlex.split(flags.replace("FOLDER", "folder")))


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("*.py")))
def test_commands_of_the_docstring_parse(name):
    module = importlib.import_module(name)
    commands = re.findall(rf"^    (?:python|torchrun --nproc-per-node \d+) {name}\.py([^#\n]*)", module.__doc__, re.M)
    assert commands
    for flags in commands:
        tyro.cli(module.Args, args=shlex.split(flags))


def documented_keys(heading="## Metrics of ppo.py, ppo_v1.py, ppo_v2.py"):
    """First column of the README's metrics table, `a/{b,c}` written out."""
    table = re.split(r"\n##+ ", README[README.index(f"\n{heading}\n") + 1 :])[0]
    keys = set()
    for cell in re.findall(r"^\| (`.*?) \|", table, re.M):
        for item in re.findall(r"`([^`]+)`", cell):
            group = re.fullmatch(r"(.*)\{(.*)\}", item)
            keys |= {group[1] + part for part in group[2].split(",")} if group else {item}
    return keys


def test_logged_keys_are_documented_and_back(tmp_path):
    logged = set()
    for name in LM_SCRIPTS:
        module = importlib.import_module(name)
        options = TINY_LM | (dict(use_replay_buffer=True, min_replay_size=4) if name == "ppo_v2" else {})
        module.main(module.Args(**options, run_dir=str(tmp_path / name)))
        for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines():
            logged |= json.loads(line).keys()
    assert logged == documented_keys()


def test_logged_keys_of_het_grpo_are_documented_and_back(tmp_path, monkeypatch):
    """Its table is complete: keys that mean the same in all scripts are listed, too."""
    import het_grpo

    luck = lambda self, action: ("done", float(len(action) % 2 == 0), True)  # noqa: E731
    monkeypatch.setattr(het_grpo.LockEnv, "step", luck)
    sizes = dict(hidden_size=16, num_layers=1, warm_start_steps=2, num_tasks=4, group_size=8, init_exp_tasks=8)
    sizes |= dict(num_iterations=4, eval_size=6, eval_every=2, device="cpu", kl_loss_coef=0.1)
    het_grpo.main(het_grpo.Args(**sizes, use_experience_replay=True, run_dir=str(tmp_path / "run")))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = set().union(*(json.loads(line) for line in lines))
    assert logged == documented_keys("### Metrics of het_grpo.py")


SMALL = {
    "sac_hybrid": dict(max_steps=60, training_starts=20, eval_episodes=1, report_episodes=1, batch_size=8, num_demos=3)
    | dict(hidden_size=16, log_interval=15, intervention_steps=100, device="cpu", eval_every=30),
    "wsrl_warmup": dict(
        env_id="Pendulum-v1",
        offline_objective="calql",
        offline_steps=20,
        online_steps=250,
        batch_size=8,
        hidden_size=16,
    )
    | dict(eval_episodes=1, log_interval=5, buffer_size=100, device="cpu", data_size=200, early_stop_patience=5)
    | dict(early_stop_every=5),
}


@pytest.mark.parametrize("name", SMALL)
def test_logged_keys_of_the_sac_scripts_are_documented_and_back(name, tmp_path):
    module = importlib.import_module(name)
    module.main(module.Args(**SMALL[name], run_dir=str(tmp_path / "run")))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert set().union(*(json.loads(line) for line in lines)) == documented_keys(f"### Metrics of {name}.py")


@pytest.mark.parametrize("name", [name for name in PARENTS if name in LM_SCRIPTS])
def test_markers_match_the_docstring(name):
    version = name.split("_")[1]
    text = (ROOT / f"{name}.py").read_text()
    listed = set(re.findall(rf"^    {version}: (\w+)", text.split('"""')[1], re.M))
    marked = {
        m
        for line in re.findall(rf"# {version}: ([\w, ]+)", text.split('"""', 2)[2])
        for m in re.split(r",\s*", line.strip())
    }
    assert listed == {m.split(" ")[0] for m in marked if m} - {"the"}


def diff_counts(parent, child):
    import difflib

    a, b = ((ROOT / f"{name}.py").read_text().splitlines() for name in (parent, child))
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    hunks = [op for op in matcher.get_opcodes() if op[0] != "equal"]
    return len(b), len(b) - same, len(a) - same, len(hunks), 100 * same / len(a)


@pytest.mark.parametrize("name", [name for name in PARENTS if name in LM_SCRIPTS])
def test_diff_counts_in_the_readme(name):
    lines, added, removed, hunks, kept = diff_counts(PARENTS[name], name)
    row = re.search(rf"^\| \[`{name}\.py`\].*$", README, re.M)[0]
    assert f"| {lines} | +{added} −{removed}, {hunks} hunks |" in row, (lines, added, removed, hunks)
    assert kept >= 95


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("*.py")))
def test_lines_in_the_readme(name):
    row = re.search(rf"^\| \[`{name}\.py`\].*$", README, re.M)[0]
    assert f"| {len((ROOT / f'{name}.py').read_text().splitlines())} |" in row


def test_default_task_table_is_the_raw_data():
    rows = list(csv.DictReader(open(ROOT / "benchmark" / "ppo_default.csv")))
    assert len(rows) == 5 and all(float(row["eval_score"]) >= 0.95 and float(row["seconds"]) <= 180 for row in rows)
    for row in rows:
        start, end, seconds = (float(row[name]) for name in ("start_score", "eval_score", "seconds"))
        assert f"| {row['seed']} | {start:.3f} | {end:.3f} | {seconds:.0f} s |" in README


def load(name):
    """A script of benchmark/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmark" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("task", ["rare", "default", "long"])
def test_replay_tables_are_the_raw_data(task):
    study = load("replay_study")
    lines = study.table(task, study.read(ROOT / "benchmark" / "replay_study.csv")).splitlines()
    assert lines and all(line in README for line in lines)


def test_sac_tables_are_the_raw_data():
    study = load("sac_results")
    results = [row for rows in study.read("sac_results").values() for row in rows]
    lines = study.table(results).splitlines()
    assert lines and all(line in README for line in lines)
    for arm in list(study.ARMS)[:4] + list(study.ARMS)[-3:]:
        assert [row[1] for row in results if row[0] == arm] == [11, 12, 13, 14, 15], arm


def test_het_tables_are_the_raw_data():
    study = load("het_study")
    assert study.read(ROOT / "benchmark" / "het_tuning.csv")
    curves = study.read(ROOT / "benchmark" / "het_study.csv")
    for name in {key[0] for key in curves}:
        missing = [line for line in study.table(name, curves).splitlines() if line not in README]
        assert not missing, missing
    ends = [float(curve[-1]["global_step"]) for key, curve in curves.items()]
    assert max(ends) - min(ends) < 64, "equal rollouts, to within one iteration"


def test_wsrl_tables_are_the_raw_data():
    study = load("wsrl_study")
    curves = study.read()
    for task in study.TASKS:
        lines = study.table(task, curves).splitlines()
        missing = [line for line in lines if line not in README]
        assert lines and not missing, missing
    for task in study.TASKS:
        short = ", 1500 offline updates" if task == "MountainCarContinuous-v0" else ""  # five seeds there, too
        for arm in ("scratch", "rlpd", f"wsrl{short}", "design"):
            assert sorted(key[2] for key in curves if key[:2] == (task, arm)) == [1, 2, 3, 4, 5], (task, arm)


def test_peers_table_is_the_raw_data():
    lines = load("peers").tables(list(csv.DictReader(open(ROOT / "benchmark" / "peers.csv")))).splitlines()
    assert len(lines) > 3 and all(line in README for line in lines), lines


def test_links_within_the_readme_resolve():
    text = (ROOT / "README.md").read_text()
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert len(links) > 5 and not set(links) - anchors
    assert all((ROOT / path).exists() for path in re.findall(r"\]\(((?!http|#)[^)]*)\)", text))
