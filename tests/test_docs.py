"""README, pages, docstrings, tables and code say the same; what a page tells a reader to type runs."""

import csv
import difflib
import importlib.util
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from unittest import mock

import numpy as np
import pytest
import transformers
import tyro
from conftest import ROOT, SCRIPTS

import het_grpo
import ppo

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
SCRIPT_PAGES = [page for page in PAGES[1:] if page.name != "design.md"]  # it has no results
README = (ROOT / "README.md").read_text(encoding="utf-8")
PARENTS = {"ppo_v1": "ppo", "ppo_v2": "ppo_v1"}
COMMAND = r"(?:.*&& |PYTHONPATH=\. )?(torchrun --nproc-per-node \d+|python) (\w+)\.py\b([^#\n]*)"
ids = dict(ids=lambda path: path.name)


def fences(text):
    """(language, content, words before it) of every fenced block"""
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [(match[1], match[2].replace("\\\n", " "), text[: match.start()]) for match in found]


def parse(module, flags):
    """As the command line does: some scripts have other defaults for their built-in task."""
    words = shlex.split(flags)
    if not hasattr(module, "parse_args"):
        return tyro.cli(module.Args, args=words)
    with mock.patch.object(sys, "argv", [module.__name__, *words]):
        return module.parse_args()


def commands(text):
    """(launcher, script, flags) of every line to type"""
    lines = [
        line
        for language, block, _ in fences(text)
        if language in ("", "bash")
        for line in block.splitlines()
    ]
    return [match.groups() for line in lines if (match := re.match(COMMAND, line))]


# --- what stands there ---
def test_the_readme_is_one_page():
    lines = README.splitlines()
    prose = [line for line in lines if not line.startswith(("|", "!["))][3:]  # less the badges
    assert len(lines) <= 150 and len(README.split()) <= 1500
    assert not [line for line in prose if len(line) > 280]
    assert "pip install -r requirements.txt && python ppo_v2.py --use-replay-buffer" in README
    assert "pip install -r requirements.txt && pytest" in README


def test_the_chinese_readme_has_the_same_commands_rows_and_numbers():
    def blocks(text):
        return [re.sub(r" +#.*", "", block) for _, block, _ in fences(text)]

    def rows(text):
        tables = [line for line in text.splitlines() if line.startswith("|")]
        return [sorted(re.findall(r"−?\d+(?:[.e]-?\d+)*", line)) for line in tables]

    def numbers(text):
        text = re.sub(r"```.*?```|\]\([^)]*\)|`[^`]*`", "", text, flags=re.S)
        return sorted(re.findall(r"−?\d+(?:\.\d+)*", text))

    assert blocks(README) == blocks(CHINESE)
    assert rows(README) == rows(CHINESE)
    assert numbers(README) == numbers(CHINESE)
    links = [re.findall(r"\]\(([^)]*)\)", text) for text in (README, CHINESE)]
    assert links[0][0] == "README.zh-CN.md" and links[1][0] == "README.md"
    assert links[0][1:] == links[1][1:]


@pytest.mark.parametrize("page", SCRIPT_PAGES, **ids)
def test_a_page_is_short_before_all_runs(page):
    shown, _, _ = page.read_text(encoding="utf-8").partition("## All runs")
    assert len(shown.splitlines()) <= 270, "move the rest under All runs"


@pytest.mark.parametrize("name", SCRIPTS)
def test_lines_and_diffs_in_the_readme(name):
    row = re.search(rf"^\| \[`{name}\.py`\].*$", README, re.M)[0]
    child = (ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert f"| {len(child)} |" in row, len(child)
    if name in PARENTS:
        parent = (ROOT / f"{PARENTS[name]}.py").read_text(encoding="utf-8").splitlines()
        matcher = difflib.SequenceMatcher(None, parent, child, autojunk=False)
        same = sum(block.size for block in matcher.get_matching_blocks())
        changes = f"+{len(child) - same} −{len(parent) - same}"
        assert f"| {changes} |" in row, changes
        assert same >= 0.92 * len(parent)


@pytest.mark.parametrize("page", PAGES, **ids)
def test_links_resolve(page):
    for target in re.findall(r"\]\(((?!http)[^)]*)\)", page.read_text(encoding="utf-8")):
        target = re.sub(
            r"^\.\./\.\./actions(/workflows/\w+\.yml)(/badge\.svg)?$", r".github\1", target
        )  # on GitHub
        if target == "../../deployments/github-pages":
            target = ".github/workflows/page.yml"
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M)
            assert anchor in {
                re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
            }, target

    for name, path, line in re.findall(
        r"\[`(?:\w+\.)?(\w+)`\]\(([\w./]+)#L(\d+)\)", page.read_text(encoding="utf-8")
    ):
        text = (page.parent / path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert re.match(rf"\s*(def|class) {name}\b", text), (
            f"{name}: python docs/build.py --link-lines"
        )


@pytest.mark.parametrize("name", SCRIPTS)
def test_markers_match_the_docstring(name):
    _, docstring, text = (ROOT / f"{name}.py").read_text(encoding="utf-8").split('"""', 2)
    listed = re.findall(r"^    ([\w-]+): (\w+) +- ", docstring, re.M)
    for family in {family for family, _ in listed}:
        found = re.findall(rf"# (?:[^#\n]*; )?{family}: ([\w, ]+)", text)
        marked = {word.strip() for words in found for word in words.split(",")} - {"all"}
        assert marked == {marker for other, marker in listed if other == family}


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_copied_file_names_what_it_needs(name):
    """PEP 723: the versions of requirements.txt, and nothing imported at the top is missing."""
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    block = re.match(r"# /// script\n(.*?)# ///\n", source, re.S)[1].replace("# ", "")
    needs = tomllib.loads(block)["dependencies"]
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert all(need in pins or need in {pin.split("==")[0] for pin in pins} for need in needs)
    imported = {
        module for module in re.findall(r"^(?:import|from) (\w+)", source, re.M)
    } - sys.stdlib_module_names
    assert imported - {"tokenizers"} <= {
        need.split("==")[0] for need in needs
    }  # tokenizers comes with transformers


def test_one_version_of_ruff():
    files = ("pyproject.toml", ".pre-commit-config.yaml")  # CI reads the first
    versions = [
        re.search(r"(?:ruff==|rev: v)([\d.]+)", (ROOT / name).read_text(encoding="utf-8"))[1]
        for name in files
    ]
    assert len(set(versions)) == 1, versions


# --- what a reader types ---
@pytest.mark.parametrize("name", SCRIPTS)
def test_commands_of_the_docstring_parse(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    module = importlib.import_module(name)
    found = re.findall("^    " + COMMAND, module.__doc__.replace("\\\n", " "), re.M)
    assert found and {script for _, script, _ in found} == {name}
    for launcher, _, flags in found:
        ranks = {} if launcher == "python" else {"WORLD_SIZE": "2"}
        with mock.patch.dict(os.environ, ranks):
            parse(module, flags)


@pytest.mark.parametrize("page", PAGES, **ids)
def test_commands_in_the_text_exist(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("questions.jsonl", "game.py", "my_env.py", "demos.pkl"):
        (tmp_path / name).touch()
    text = page.read_text(encoding="utf-8")
    for path, flags in re.findall(r"python ((?:benchmark|docs)/\w+\.py)([^`#\n]*)", text):
        source = (ROOT / path).read_text(encoding="utf-8")
        assert all(f'"{flag}"' in source for flag in re.findall(r"--[\w-]+", flags)), (path, flags)
    typed = (
        [command[1:] for command in commands(text)] if text == README else []
    )  # those of a page are run below
    for script, flags in typed + re.findall(r"`python (\w+)\.py([^`]*)`", text):
        parse(importlib.import_module(script), flags.replace("--seed S", "--seed 1"))
    for extra in re.findall(r"\.\[(\w+)\]", text):
        assert (
            extra
            in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
                "optional-dependencies"
            ]
        )


SMALL = dict.fromkeys(
    ("ppo", "ppo_v1", "ppo_v2"),
    "--num-iterations 2 --batch-size 8 --num-minibatches 2 --sft-steps 2 --eval-size 4",
)
SMALL["het_grpo"] = (
    "--num-tasks 4 --group-size 4 --num-iterations 2 --num-train-tasks 12 --init-exp-before-training 8"
)
SMALL["het_grpo"] += " --eval-size 6"
SMALL["sac_hybrid"] = (
    "--max-steps 60 --training-starts 20 --batch-size 8 --hidden-size 16 --log-interval 15"
)
SMALL["wsrl_warmup"] = (
    "--online-steps 30 --warmup-rollout-steps 5 --batch-size 8 --hidden-size 16 --eval-episodes 1"
    " --buffer-size 100"
)
WHERE = {  # flags that are allowed with some commands only
    "ppo_v1": (lambda flags: "--warmup-steps" in flags, "--warmup-steps 1"),
    "ppo_v2": (
        lambda flags: " --use-replay" in flags,
        "--min-replay-size 4 --replay-sample-size 4",
    ),
    "sac_hybrid": (
        lambda flags: "--eval-episodes 0" not in flags,
        "--eval-episodes 1 --report-episodes 1",
    ),
    "wsrl_warmup": (
        lambda flags: "--learner" not in flags and "--preset scratch" not in flags,
        "--warmup-steps 20",
    ),
}
LOGS_MORE = {  # commands without which a metric of the table is not logged
    "het_grpo": [
        "--env house.py:House --max-turns 2 --max-turn-tokens 2 --use-experience-replay"
        " --num-iterations 6"
    ],
    "wsrl_warmup": [
        "--offline-objective calql --bc-weight 1 --early-stop-patience 30 --online-steps 230"
    ],
}
ELSEWHERE = (
    "rg:",
    "Reacher",
    "sums.jsonl",
    "package:",
)  # an extra; what a page speaks of and does not make
if not importlib.util.find_spec("peft"):
    ELSEWHERE += ("--lora-rank",)
# what the page leaves to the reader's arm
ARM = """
import sys
from types import SimpleNamespace

import numpy as np

arm = SimpleNamespace(move=lambda action: None, is_done=lambda: False)
arm.get_image = lambda: np.zeros((64, 64, 3), np.uint8)
arm.get_pose = arm.get_space_mouse = lambda: np.zeros(7)
sys.modules["my_robot"] = SimpleNamespace(connect=lambda: arm)
input = print
"""


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """An empty folder, but for a model with a chat template, FOLDER, and a demo, expert.pkl, that pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **kwargs: None)
    monkeypatch.setattr(het_grpo, "WARM_START_STEPS", 2)
    tokenizer = ppo.make_tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    tokenizer.save_pretrained("FOLDER")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    special = dict(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **special)
    transformers.LlamaForCausalLM(config).save_pretrained("FOLDER")
    step = dict(
        observations=np.zeros(3, np.float32),
        actions=np.zeros(1, np.float32),
        rewards=0.0,
        dones=True,
    )
    step["next_observations"] = step["observations"]
    (tmp_path / "expert.pkl").write_bytes(pickle.dumps([step] * 2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def walk(page, folder):
    """Does what a page says, with small settings -> {run folder: flags}"""
    later, runs = [], {}
    for language, block, before in fences(page.read_text(encoding="utf-8")):
        name = re.match(r"# (\w+\.py)\n", block) or re.search(
            r"Save this as `([\w.]+)`:\s*$", before
        )
        if name:
            block = block.replace("monotonic() + 0.1", "monotonic()")  # no waiting
            (folder / name[1]).write_text(ARM * ("my_robot" in block) + block)
        elif "final_model" in block and language == "python":
            later.append(block)
        elif language == "python":
            exec(block, {})
        for line in block.splitlines() if language in ("", "bash") else ():
            if line.startswith("echo "):
                subprocess.run(line, shell=True, check=True)
    found = [(*command, "") for command in commands(page.read_text(encoding="utf-8"))]
    found += [("python", page.stem, flags, flags) for flags in LOGS_MORE.get(page.stem, ())]
    for launcher, script, flags, last in found:
        if any(word in flags for word in ELSEWHERE):
            continue
        module, (allowed, more) = (
            importlib.import_module(script),
            WHERE.get(script, (lambda flags: False, "")),
        )
        words = [flags, SMALL[script], "--device cpu", more * allowed(flags), last]
        words += [f"--run-dir runs/{len(runs)}"] * ("--run-dir" not in flags)
        ranks = {} if launcher == "python" else {"WORLD_SIZE": "2"}
        with mock.patch.dict(os.environ, ranks):
            args = parse(module, " ".join(words))
        if launcher != "python":
            continue
        metrics = module.main(args)
        if (folder / args.run_dir / "metrics.jsonl").exists():
            # tiny runs have constant returns, of which no variance can be explained
            metrics.pop("losses/explained_variance", None)
            assert all(math.isfinite(value) for value in metrics.values() if value is not None), (
                script,
                flags,
            )
            runs[args.run_dir] = flags
    for block in later:  # the trained model in the reader's own code
        trained = next((run for run, flags in runs.items() if "my_env" in flags), "runs/0")
        names = dict(obs=np.zeros(3, np.float32))
        names["observation"] = dict(
            image=np.zeros((64, 64, 3), np.uint8), pose=np.zeros(7, np.float32)
        )
        exec(re.sub(r'"runs/[^"]*(/final_model\.pth)"', rf'"{trained}\1"', block), names)
        assert np.abs(names["action"]).max() <= 1
    return runs


def documented_keys(page):
    """Keys in the first column of a page's metrics table, and of those it refers to; `losses/{a,b}` are two."""
    table = re.split(r"\n## ", page.read_text(encoding="utf-8").split("\n## What it logs\n")[1])[0]
    for other in re.findall(r"\]\((\w+\.md)#what-it-logs\)", table):
        yield from documented_keys(page.with_name(other))
    for cell in re.findall(r"^\| (`.*?) \|", table, re.M):
        for key in re.findall(r"`([^`]+)`", cell):
            group = re.fullmatch(r"(.*)\{(.*,.*)\}", key)
            yield from [group[1] + part for part in group[2].split(",")] if group else [key]


# a page of het_grpo.py names a server that does not run here; the script goes on
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("page", SCRIPT_PAGES, **ids)
def test_what_a_page_says_runs_and_logs_what_the_page_lists(page, reader):
    logged, listed = set(), set(documented_keys(page)) | {"global_step"}
    for run in walk(page, reader):
        rows = (reader / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        logged |= {
            re.sub(r"bucket_\d", "bucket_{s}", key) for row in rows for key in json.loads(row)
        }
    assert logged == listed


# --- what was measured ---
def test_tables_of_the_pages_are_what_the_benchmarks_print(tmp_path):
    for path in (ROOT / "benchmark", ROOT / "docs"):
        shutil.copytree(path, tmp_path / path.name)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    command = [sys.executable, tmp_path / "benchmark" / "all.py", "--tables"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = {line for line in done.stdout.splitlines() if line.startswith("|")}
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(printed) > 30 and not [line for line in printed if line not in pages.splitlines()]
    for page in SCRIPT_PAGES:
        _, results = page.read_text(encoding="utf-8").split("\n## Results\n")
        for title in ("What it logs", "Implementation details"):  # no measurements
            results = re.sub(rf"\n## {title}\n.*?(?=\n## |\Z)", "", results, flags=re.S)
        for table in re.findall(r"(?:^\|.*\n)+", results, re.M):
            lines = table.splitlines()
            if lines[0] == "| there | here |":  # names, no measurements
                continue
            assert not set(lines) - printed, (page.name, lines[0])
            assert len(lines) <= 10 or "| setting |" in lines[0], (
                f"{page.name}: more than eight rows, and no grid"
            )


def last_values(name, column, x, **wanted):
    """{seed: value of a column in the row with the largest x} of the rows with these values"""
    rows = csv.DictReader(open(ROOT / "benchmark" / name, encoding="utf-8"))
    rows = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    rows = sorted((row for row in rows if row[column]), key=lambda row: float(row[x]))
    return {row["seed"]: float(row[column]) for row in rows}


def percent(values):
    return f"{100 * np.mean(list(values.values())):.0f} %"


def test_the_table_of_the_readme_is_the_raw_data():
    def lag(correction, rate):
        wanted = dict(part="default", lag="8", correction=correction, learning_rate=rate)
        return last_values("lag_study.csv", "end", "lag", **wanted)

    def replay(task, arm):
        return last_values("replay_study.csv", "accuracy", "responses", task=task, arm=arm)

    def solved(arm):
        return sum(accuracy >= 0.9 for accuracy in replay("rarer", arm).values())

    def lock(arm, **more):
        more = dict(game="lock", arm=arm) | more
        return percent(last_values("het_study.csv", "unguided", "global_step", **more))

    def vault(arm, kind):
        wanted = dict(notes="misleading", arm=arm, setting="mean, entropy .03")
        if arm == "imitation":
            wanted["setting"] = "2 epochs, entropy .03"
        return last_values("survivor_study.csv", kind, "episodes", **wanted)

    def robot(arm):
        return percent(last_values("sac_results.csv", "success_rate", "seed", arm=arm))

    def pendulum(arm, steps):
        wanted = dict(task="no demos", arm=arm, env_steps=str(steps))
        found = last_values("wsrl_study.csv", "return", "env_steps", **wanted)
        return f"−{-np.mean(list(found.values())):.0f}"

    imitation = vault("imitation", "unguided")
    for seed, success in vault("imitation", "guided").items():
        imitation[seed] = (imitation[seed] + success) / 2
    collapsed = sum(end < 0.5 for end in lag("none", "0.0003").values())
    low = percent(lag("none", "0.0001")), percent(lag("dppo", "0.0001"))
    expected = {
        "staleness.md": [percent(lag("dppo", "0.0003")), f"{collapsed} seeds of 5 collapse"],
        "ppo_v2.md": [
            f"{solved('replay')} seeds of 5 learn",
            f"): {solved('rejection sampling')} seeds of 5",
            f"({percent(replay('noisy', 'replay'))}, imitation",
            f"imitation {percent(replay('noisy', 'rejection sampling'))})",
        ],
        "het_grpo.md) | vaults": [
            f"{percent(vault('HET', 'unguided'))} success",
            f"{percent(vault('HET', 'guided'))} with notes",
            f"imitation {percent(imitation)}",
            f"imitation gets to {lock('sft')}",
        ],
        "het_grpo.md) | opening locks: 8": [lock("baseline + replay"), lock("baseline")],
        "sac_hybrid.md": [
            robot("demos + interventions"),
            f"corrections: {robot('demos only')}",
            f"(HG-DAgger): {robot('HG-DAgger')}",
        ],
        "wsrl_warmup.md": [
            f"a return of {pendulum('SAC then SAC', 0)}, the clone of the data {pendulum('bc then SAC', 0)}",
            f"steps: {pendulum('SAC then SAC', 400)}, the clone {pendulum('bc then SAC', 400)}",
        ],
    }
    assert solved("plain PPO") == 0 and min(low) >= "98 %"
    assert robot("demos + interventions") == robot("human")
    table = README.split("## What came out")[1]
    for page, phrases in expected.items():
        row = next(line for line in table.splitlines() if page in line)
        assert not [phrase for phrase in phrases if phrase not in row], (page, phrases)


def test_the_sentence_of_the_robot_and_its_human_is_the_raw_data(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import sac_results as study

    page, rows = (
        (ROOT / "docs" / "sac_hybrid.md").read_text(encoding="utf-8"),
        study.read(study.RESULTS),
    )
    arms = ("demos + interventions", "human")
    robot, human = (
        np.mean([row["steps_to_success"] for row in rows if row["arm"] == arm]) for arm in arms
    )
    assert f"needs {robot:.1f} steps, where the human needs {human:.1f}" in page


def test_the_readme_says_how_fast_an_update_is(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import sac_speed as study

    rows = list(csv.DictReader(open(study.PATH, encoding="utf-8")))
    bare, ours = (study.times(rows, "sac_hybrid.py", 256, layer_norm) for layer_norm in (0, 1))
    assert f"`sac_hybrid.py` is {bare:.2f} times as fast, with LayerNorm {ours:.2f} times" in README
    sbx = study.times(rows, "SBX", 256, 0) / bare
    assert f"SBX is {sbx:.2f} times as fast as `sac_hybrid.py`" in README


def test_names_in_the_page_of_the_design_documents_exist():
    """Tests, functions, classes and options that docs/design.md points to; the second column quotes a document."""
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py"))
    scripts = "\n".join((ROOT / f"{name}.py").read_text(encoding="utf-8") for name in SCRIPTS)
    rows = [
        line.strip("|").split("|")
        for line in (ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and len(line.strip("|").split("|")) == 4
    ]
    missing = []
    for _, _, where, _ in rows[1:]:
        for name in re.findall(r"`([^`]+)`", where):
            if name.startswith("test_"):
                found = (
                    re.search(rf"def {name}\b|/{name}", tests) or (ROOT / "tests" / name).exists()
                )
            elif name.startswith("--"):
                option = name[2:].split()[0].replace("-", "_").removeprefix("no_")
                found = re.search(rf"^    {option}: ", scripts, re.M)
            elif re.fullmatch(r"[\w.]+", name):
                found = re.search(rf"\b{name.rpartition('.')[2]}\b", scripts)
            else:
                continue
            missing += [name] * (not found)
    assert len(rows) > 90 and not missing, missing


def test_every_study_is_listed():
    """benchmark/README.md names each script and each file of numbers, once as a study or as a part."""
    listed = (ROOT / "benchmark" / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "benchmark").iterdir() if path.suffix in (".py", ".csv")]
    assert len(names) > 30 and not [name for name in names if f"`{name}" not in listed]
