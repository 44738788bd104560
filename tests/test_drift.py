"""Copies stay equal: a top-level block of one name has one text in all scripts, comments included."""

import ast
import re
from collections import defaultdict

from conftest import ROOT

SCRIPTS = sorted(ROOT.glob("*.py"))
DIVERGES = {"Args": "fields differ by design", "main": "the algorithm"}  # name -> reason, reviewed like code


def blocks():
    found = defaultdict(lambda: defaultdict(list))
    for path in SCRIPTS:
        lines = path.read_text().splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                start = min(n.lineno for n in [node, *node.decorator_list]) - 1  # decorators count, too
                found[node.name]["\n".join(lines[start : node.end_lineno])].append(path.name)
    return found


def test_same_name_same_body():
    drifted = {n: list(v.values()) for n, v in blocks().items() if len(v) > 1 and n not in DIVERGES}
    assert not drifted, f"align the copies or rename one: {drifted}"


def test_no_stale_exception():
    assert all(len(blocks()[n]) > 1 for n in DIVERGES), "copies agree again: drop the exception"


def test_a_shared_block_stands_in_one_section():
    sections = defaultdict(lambda: defaultdict(list))
    for path in SCRIPTS:
        section = None
        for line in path.read_text().splitlines():
            if banner := re.fullmatch(r"# --- (.+) ---", line):
                section = banner[1]
            elif block := re.match(r"(?:def|class) (\w+)", line):
                sections[block[1]][section].append(path.name)
    assert not {name: dict(found) for name, found in sections.items() if len(found) > 1}


def fields_of(path):
    """{field: (type, doc)} of the Args class."""
    tree = ast.parse(path.read_text())
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Args").body
    fields = {}
    for node, after in zip(body, body[1:], strict=False):
        if isinstance(node, ast.AnnAssign):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert documented, f"{path.name}: {node.target.id} has no doc"
            fields[node.target.id] = ast.unparse(node.annotation), after.value.value
    return fields


OTHER_UNITS = {  # name -> why the language-model scripts and each of the SAC scripts mean different things by it
    "batch_size": "answers sampled, rows of an update",
    "eval_every": "iterations, environment steps",
    "gamma": "per token, per environment step",
    "hidden_size": "of the language model, of actor and critics",
    "log_interval": "iterations, environment steps",
    # sac_hybrid.py fills what is left out by environment, wsrl_warmup.py by preset and task
    "buffer_size": "frames, transitions",
    "env_id": "one is built in, Gymnasium only",
    "eval_episodes": "they choose the policy, they judge it",
    "init_alpha": "other default rule",
    "lr": "other default rule",
    "num_critics": "fixed, by preset",
    "num_sampled_critics": "fixed, by preset",
    "tau": "other default rule",
}


def test_shared_options_have_one_type_and_one_doc():
    seen = defaultdict(lambda: defaultdict(list))
    for path in SCRIPTS:
        for name, meaning in fields_of(path).items():
            family = path.name[:3] if name in OTHER_UNITS and path.name[:3] in ("sac", "wsr") else ""
            seen[name, family][meaning].append(path.name)
    assert not {name: dict(v) for name, v in seen.items() if len(v) > 1}


def test_the_guard_can_fail(tmp_path, monkeypatch):
    for name, body in (("a.py", "1"), ("b.py", "2")):
        (tmp_path / name).write_text(f"def same():\n    return {body}\n")
    monkeypatch.setattr("test_drift.SCRIPTS", sorted(tmp_path.glob("*.py")))
    assert len(blocks()["same"]) == 2
