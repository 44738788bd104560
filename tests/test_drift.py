"""Copies stay equal: a top-level block of one name has one text in all scripts, comments included."""

import ast
from collections import defaultdict

import conftest
from conftest import ROOT

SCRIPTS = [ROOT / f"{name}.py" for name in conftest.SCRIPTS]
DIVERGES = {  # name -> reason, reviewed like code
    "Args": "fields differ by design",
    "main": "the algorithm",
    "ppo_loss": "ppo_v1.py adds clips, ppo_v2.py weights",
}
PARENT = {  # what ppo.py has in its plain form; all other copies must agree
    "evaluate": "ranks agree on the score",
    "policy_loss": "the dual clip",
    "token_logprobs": "a few rows of logits at a time",
}


def blocks():
    found = defaultdict(lambda: defaultdict(list))
    for path in SCRIPTS:
        lines = path.read_text().splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                start = (
                    min(n.lineno for n in [node, *node.decorator_list]) - 1
                )  # decorators count, too
                if path.name != "ppo.py" or node.name not in PARENT:
                    found[node.name]["\n".join(lines[start : node.end_lineno])].append(path.name)
    return found


def test_same_name_same_body():
    drifted = {n: list(v.values()) for n, v in blocks().items() if len(v) > 1 and n not in DIVERGES}
    assert not drifted, f"align the copies or rename one: {drifted}"


def test_no_stale_exception(monkeypatch):
    assert all(len(blocks()[n]) > 1 for n in DIVERGES), "copies agree again: drop the exception"
    extended = list(PARENT)
    monkeypatch.setattr("test_drift.PARENT", {})
    assert all(len(blocks()[n]) > 1 for n in extended), "copies agree again: drop the exception"


def fields_of(path):
    """{field: (type, doc)} of the Args class; the doc is the comment at the end of the line, which --help shows."""
    source = path.read_text()
    body = next(
        n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Args"
    ).body
    fields = {}
    for node in (node for node in body if isinstance(node, ast.AnnAssign)):
        doc = source.splitlines()[node.end_lineno - 1][node.end_col_offset :].strip()
        assert doc.startswith("# "), f"{path.name}: {node.target.id} has no doc"
        fields[node.target.id] = ast.unparse(node.annotation), doc
    return fields


OTHER_UNITS = {  # name -> why the PPO trio, het_grpo.py and each SAC script say different things of it
    "batch_size": "answers sampled, rows of an update",
    "buffer_size": "frames, transitions",
    "env_id": "one is built in, Gymnasium only",
    "eval_episodes": "they choose the policy, they judge it",
    "eval_every": "iterations, environment steps",
    "eval_size": "prompts, tasks",
    "gamma": "per token, per environment step",
    "hidden_size": "other default rule",
    "init_alpha": "other default rule",
    "lr": "other default rule",
    "num_critics": "fixed, by preset",
    "priority_beta": "rises by its increment, to 1 over the run",
    "save_every": "iterations, environment steps",
    "tau": "other default rule",
}


def test_shared_options_have_one_type_and_one_doc():
    seen = defaultdict(lambda: defaultdict(list))
    for path in SCRIPTS:
        for name, meaning in fields_of(path).items():
            family = path.name[:3] if name in OTHER_UNITS else ""
            seen[name, family][meaning].append(path.name)
    assert not {name: dict(v) for name, v in seen.items() if len(v) > 1}
