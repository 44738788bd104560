"""README, pages, docstrings, tables and code say the same."""

import csv
import difflib
import importlib
import importlib.util
import json
import re
import shlex

import pytest
import tyro
from conftest import LM_SCRIPTS, ROOT, TINY_LM

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
PARENTS = {"ppo_v1": "ppo", "ppo_v2": "ppo_v1"}
COMMAND = r"^(?:.*&& )?(?:torchrun --nproc-per-node \d+|python) (\w+)\.py\b([^#\n]*)"


def commands(text):
    """(script, flags) of every command in a fenced block; a backslash goes on with the next line."""
    blocks = "\n".join(re.findall(r"```(?:bash)?\n(.*?)```", text, re.S))
    return re.findall(COMMAND, blocks.replace("\\\n", " "), re.M)


def test_the_readme_is_one_page():
    lines = README.splitlines()
    prose = [line for line in lines if not line.startswith(("|", "![", "[!["))]
    assert len(lines) <= 200 and len(README.split()) <= 1500
    assert not [line for line in prose if len(line) > 160]
    assert "pip install -r requirements.txt && python ppo_v2.py --use-replay-buffer" in README
    assert "pip install -r requirements.txt && pytest" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_of_the_pages_parse(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = commands(page.read_text())
    assert found
    for script, flags in found:
        module = importlib.import_module(script)
        for path in re.findall(r"jsonl:(\S+)", flags):
            (tmp_path / path).touch()
        tyro.cli(module.Args, args=shlex.split(flags))


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("*.py")))
def test_commands_of_the_docstring_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").touch()
    module = importlib.import_module(name)
    found = re.findall(COMMAND.replace("^", "^    "), module.__doc__.replace("\\\n", " "), re.M)
    assert found and {script for script, _ in found} == {name}
    for _, flags in found:
        tyro.cli(module.Args, args=shlex.split(flags))


def documented_keys(page):
    """Keys in the first column of a page's metrics table."""
    table = re.split(r"\n## ", (ROOT / "docs" / page).read_text().split("\n## What it logs\n")[1])[0]
    return {key for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for key in re.findall(r"`([^`]+)`", cell)}


def test_logged_keys_are_documented_and_back(tmp_path):
    logged = {}
    for name in LM_SCRIPTS:
        module = importlib.import_module(name)
        options = TINY_LM | (dict(use_replay_buffer=True, min_replay_size=4) if name == "ppo_v2" else {})
        module.main(module.Args(**options, run_dir=str(tmp_path / name)))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        logged[name] = set().union(*map(json.loads, lines)) - {"global_step"}
    assert logged["ppo_v1"] == documented_keys("ppo.md")
    assert logged["ppo_v2"] - logged["ppo_v1"] == documented_keys("ppo_v2.md")


def test_the_reward_function_of_the_page_trains(tmp_path):
    import ppo

    code = re.search(r"```python\n(# mine\.py\n.*?)```", (ROOT / "docs" / "ppo.md").read_text(), re.S)[1]
    (tmp_path / "mine.py").write_text(code)
    options = TINY_LM | dict(num_iterations=1, reward_fn=f"{tmp_path}/mine.py:score", run_dir=str(tmp_path / "run"))
    assert ppo.main(ppo.Args(**options))["charts/score"] <= 1


@pytest.mark.parametrize("name", PARENTS)
def test_markers_match_the_docstring(name):
    version = name.split("_")[1]
    _, docstring, text = (ROOT / f"{name}.py").read_text().split('"""', 2)
    listed = set(re.findall(rf"^    {version}: (\w+)", docstring, re.M))
    found = re.findall(rf"# (?:[^#\n]*; )?{version}: ([\w, ]+)", text)
    marked = {name.strip() for names in found for name in names.split(",")}
    assert listed == {name for name in marked if name in listed} and not marked - listed - {"all"}


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("*.py")))
def test_lines_and_diffs_in_the_readme(name):
    row = re.search(rf"^\| \[`{name}\.py`\].*$", README, re.M)[0]
    child = (ROOT / f"{name}.py").read_text().splitlines()
    assert f"| {len(child)} |" in row, len(child)
    if name in PARENTS:
        parent = (ROOT / f"{PARENTS[name]}.py").read_text().splitlines()
        matcher = difflib.SequenceMatcher(None, parent, child, autojunk=False)
        same = sum(block.size for block in matcher.get_matching_blocks())
        changes = f"+{len(child) - same} −{len(parent) - same}"
        assert f"| {changes} |" in row, changes
        assert same >= 0.92 * len(parent)


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmark" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_the_ppo_pages_are_the_raw_data():
    plain, replay = ((ROOT / "docs" / name).read_text() for name in ("ppo.md", "ppo_v2.md"))
    assert load("ppo_default").table() in plain
    assert load("peers").tables(list(csv.DictReader(open(ROOT / "benchmark" / "peers.csv")))) in plain
    study = load("replay_study")
    curves, tuning = study.read(study.HERE / "replay_study.csv"), study.read(study.HERE / "replay_tuning.csv")
    tables = [study.table(task, curves) for task in study.TASKS]
    for table in (*tables, study.critic_table(curves), study.grid_table(tuning)):
        assert len(table.splitlines()) > 3 and table in replay, table


def test_links_resolve():
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\(((?!http)[^)]*)\)", text):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), (page.name, target)
            if anchor:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
                anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor in anchors, (page.name, target)
