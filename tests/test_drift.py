"""Copies stay equal: a top-level block of one name has one text in all scripts, comments included."""

import ast
from collections import defaultdict

import conftest
from conftest import ROOT

SCRIPTS = [ROOT / f"{name}.py" for name in conftest.SCRIPTS]
# name -> {scripts: reason}: these scripts have a text of their own, which they share; the other copies must agree
OWN_TEXT = {
    "check_args": {"ppo": "no number is None"},
    "evaluate": {"ppo": "one process, and no score is NaN"},
    "as_samples": {"ppo": "no score is NaN"},
    "batch_metrics": {"ppo": "no score is NaN, no KL controller"},
    "policy_loss": {"ppo": "no clip-higher, no dual clip"},
    "generate": {"ppo": "one process"},
    "rollout": {"ppo": "one process, a NaN ends the run"},
    "logprobs_and_values_in_parts": {"ppo": "no micro-batches"},
    "Run": {
        "ppo": "one process, no resume",
        "ppo_v2": "rollouts.jsonl, panels of the lag and the buffer",
        "het_grpo": "episodes, and success as the score",
        "sac_hybrid": "no samples; main names the curves",
        "wsrl_warmup": "as sac_hybrid, --exp-name",
    },
    "parse_args": {"sac_hybrid": "defaults of the built-in task", "wsrl_warmup": "presets"},
    "show_progress": {"ppo_v2": "size and use of the buffer"},
    "Signals": {"sac_hybrid": "a robot finishes its episode"},
    "FirstOptions": {"wsrl_warmup": "a preset"},
    "Progress": {"wsrl_warmup": "two phases, no interventions"},
    "explore": {"wsrl_warmup": "no gripper"},
    "learn": {"wsrl_warmup": "two buffers, priorities"},
    "evaluate_policy": {"wsrl_warmup": "no human, no other ranks"},
    "default_options": {"wsrl_warmup": "presets"},
    "finish_run": {"wsrl_warmup": "two videos"},
    "write_video": {"wsrl_warmup": "no human beside the policy"},
    "start_run": {"wsrl_warmup": "offline data, and the second of two commands"},
    "save_run": {"wsrl_warmup": "other buffers"},
    "load_run": {"wsrl_warmup": "other buffers"},
    "State": {"wsrl_warmup": "other buffers"},
    "use_bf16": {"het_grpo": "no value head"},
    "ppo_loss": {"ppo": "no micro-batches", "ppo_v2": "corrections, weights of a draw"},
    "compute_gradient": {"ppo": "no micro-batches, one process"},
    "update": {"ppo": "no micro-batches", "ppo_v2": "advantages are normalized before the mix"},
    "set_up_training": {"ppo": "no LoRA, no bfloat16, one process"},
    "minibatch_indices": {"ppo_v2": "fresh and drawn rollouts in every minibatch"},
}
DIFFERS = ("Args", "main")  # the algorithm


def blocks(own_text):
    """{name: {text: [scripts]}} of all functions and classes; a text of its own has a name of its own"""
    found = defaultdict(lambda: defaultdict(list))
    for path in SCRIPTS:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                start = (
                    min(n.lineno for n in [node, *node.decorator_list]) - 1
                )  # decorators count, too
                groups = [g for g in own_text.get(node.name, {}) if path.stem in g.split()]
                name = " of ".join([node.name, *groups])
                found[name]["\n".join(lines[start : node.end_lineno])].append(path.name)
    return found


def test_same_name_same_body():
    texts = {name: found for name, found in blocks(OWN_TEXT).items() if name not in DIFFERS}
    drifted = {name: list(found.values()) for name, found in texts.items() if len(found) > 1}
    assert not drifted, f"align the copies or rename one: {drifted}"


def test_no_stale_exception():
    texts = blocks({})
    for name, scripts in OWN_TEXT.items():
        for script in scripts:
            alone = [f"{each}.py" for each in script.split()] in texts[name].values()
            assert alone and len(texts[name]) > 1, f"{name} of {script} agrees: drop the exception"


def fields_of(path):
    """{field: (type, doc)} of the Args class; the doc is the comment at the end of the line, which --help shows."""
    source = path.read_text(encoding="utf-8")
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
    "capture_video": "the human and the policy, before and after",
    "device": "a model or an environment is built in",
    "env_id": "one is built in, Gymnasium only",
    "eval_episodes": "they choose the policy, they judge it",
    "eval_every": "iterations, environment steps",
    "eval_size": "prompts, tasks",
    "gamma": "per token, per environment step",
    "hidden_size": "other default rule",
    "init_alpha": "other default rule",
    "learning_rate": "other schedules, linear only",
    "lr": "other default rule",
    "num_critics": "fixed, by preset",
    "num_threads": "the tiny model, small networks",
    "priority_alpha": "advantage and age, TD error",
    "priority_beta": "rises by its increment, to 1 over the run",
    "save_every": "iterations, environment steps",
    "tau": "other default rule",
    "warmup_steps": "of the learning rate, updates on offline data",
}


def test_shared_options_have_one_type_and_one_doc():
    seen = defaultdict(lambda: defaultdict(list))
    for path in SCRIPTS:
        for name, meaning in fields_of(path).items():
            family = path.name[:3] if name in OTHER_UNITS else ""
            seen[name, family][meaning].append(path.name)
    assert not {name: dict(v) for name, v in seen.items() if len(v) > 1}
