"""Writes the reading page: the six scripts by idea, each with its reason, equation, code and tests.

    pip install pygments && python docs/build.py    # docs/reading.html, one file, offline
    python docs/build.py --out page.html --source https://github.com/OWNER/REPO/blob/main
    python docs/build.py --link-lines    # no page: line links of the pages, line counts of the READMEs

A child of another script (ppo_v1.py, ppo_v2.py) is shown as the changes to its parent, gathered by marker. Of the
other scripts the marked lines are shown, then all functions, less those that an earlier script has word for word.
What a marker means is read from the docstring of the script. Tests that mention a function are found in tests/.
"""

import argparse
import ast
import base64
import difflib
import functools
import html
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parents[1]
PARENTS = {"ppo.py": None, "ppo_v1.py": "ppo.py", "ppo_v2.py": "ppo_v1.py"}
PARENTS |= {"het_grpo.py": None, "sac_hybrid.py": None, "wsrl_warmup.py": None}
PICTURES = {"ppo_v2": "replay_study", "het_grpo": "het_study"}
PICTURES |= {"sac_hybrid": "sac_ablation", "wsrl_warmup": "wsrl_study"}
# what carries the idea comes first, what every program has comes last
SECTIONS = "math corrections buffer update rollout main networks evaluate".split()
CONTEXT = 3  # unchanged lines around a change
PROOFS = {  # marker -> tests, file::function
    "v1: checkpoint": ["test_v1.py::test_killed_at_any_moment_and_resumed_is_never_stopped"],
    "v1: schedule": ["test_v1.py::test_learning_rate_schedule"],
    "v1: accumulate": [
        "test_equivalence.py::test_micro_batches_give_the_gradient_of_the_minibatch"
    ],
    "v1: memory": ["test_v1.py::test_gradient_checkpointing_has_no_dropout"],
    "v1: lora": [
        "test_lora.py::test_the_reference_is_the_model_that_the_adapters_were_added_to",
        "test_lora.py::test_a_killed_run_goes_on_as_if_never_stopped",
    ],
    "v1: best": ["test_v1.py::test_best_and_final_folders_score_what_was_logged"],
    "v1: kl": [
        "test_math.py::test_adaptive_kl_by_hand",
        "test_v1.py::test_target_kl_stops_the_epochs",
    ],
    "v1: clip": ["test_math.py::test_dual_clip_and_clip_higher"],
    "v1: nan": [
        "test_v1.py::test_a_nan_reward_costs_its_own_answer_and_is_counted",
        "test_v1.py::test_a_batch_without_a_finite_score_is_no_update_and_the_run_goes_on",
    ],
    "v1: distributed": ["test_v1.py::test_two_ranks_make_the_update_of_one"],
    "v2: buffer": [
        "test_v2.py::test_draws_follow_the_priorities_with_replacement",
        "test_v2.py::test_every_minibatch_mixes_in_proportion",
        "test_v2.py::test_the_critic_learns_from_fresh_rollouts_only_with_gains",
    ],
    "v2: lag": ["test_v2.py::test_a_lagged_run_samples_with_the_weights_of_so_many_iterations_ago"],
    "v2: correction": [
        "test_v2.py::test_corrections_by_hand",
        "test_v2.py::test_the_policy_loss_of_every_step_is_that_of_an_oracle",
    ],
    "v2: log": ["test_v2.py::test_a_run_begins_with_the_log_of_another"],
}

EQUATIONS = {  # marker or function -> what the code computes
    "v1: accumulate": (
        "∇L = Σ_{k} ∇L_{k}; each L_{k} is a sum over its tokens, divided by the tokens of the "
        "whole minibatch"
    ),
    "v1: distributed": (
        "g = Σ_{ranks} g_{rank}; every rank divides by the tokens of the whole minibatch"
    ),
    "v1: kl": "β ← β · (1 + clip(KL / target − 1, ±0.2) · n / 10,000)",
    "v1: clip": "L = −min(ρA, clip(ρ, 1 − ε, 1 + ε_{high}) A); where A < 0, L ≤ −cA (dual clip)",
    "v1: schedule": (
        "linear 1 − p, cosine ½ (1 + cos πp), after a linear rise; p is the progress from 0 to 1"
    ),
    "v2: buffer": (
        "P(i) = p_{i} / Σp, p_{i} = (mean positive advantage)^{α} · exp(−age / τ); weight "
        "(N·P(i))^{−β} / max"
    ),
    "v2: lag": "μ_{i} = π_{i−K}: iteration i samples with the weights of K iterations ago",
    "v2: correction": (
        "L = −A · w · log π, with w = r · [kept] and r = π / μ: the rule decides what is kept, "
        "and how large w may be"
    ),
    "warm-up: weights": "L = mean_{i} w_{i} (Q(s_{i}, a_{i}) − y_{i})², with weights of mean 1",
    "warm-up: conservative": (
        "α · (log Σ_{m} exp(Q(s, a_{m}) − log μ(a_{m})) − Q(s, a)); Cal-QL: max(Q(s, a_{m}), "
        "return) for actions of the policy"
    ),
    "warm-up: cloning": "‖tanh(mean(s)) − a‖²",
    "warm-up: replay": (
        "P(i) ∝ (|δ_{i}| + 10^{−6})^{α}; offline share max(min, first · decay^{steps})"
    ),
    "hybrid: grasp": "y = r + penalty + γ · mask · Q_{target}(s′, argmax_{g} Q(s′, g))",
    "hybrid: bc": "‖tanh(mean(s)) − a‖² on rows of demonstrations",
    "hybrid: cloning": "‖tanh(mean(s)) − a‖² on rows of demonstrations",
    "whiten": "(x − mean x) / √(var x + 10^{−8})",
    "token_rewards": "r_{t} = −β (log π − log π_{ref}) + [t is last] · score",
    "k3_kl": "KL(p ‖ q) ≈ q/p − 1 − log(q/p), with samples of p",
    "compute_gae": "δ_{t} = r_{t} + γV_{t+1} − V_{t}, A_{t} = δ_{t} + γλA_{t+1}",
    "policy_loss": "L = −min(ρA, clip(ρ, 1 − ε, 1 + ε) A), ρ = π_{θ} / π_{old}",
    "value_loss": "½ max((V − R)², (V_{old} + clip(V − V_{old}, ±ε) − R)²)",
    "explained_variance": "1 − Var(R − V) / Var(R)",
    "group_advantages": "A_{i} = (R_{i} − mean of the group) / std of the group",
    "weaken_stripped_failures": (
        "where A < 0: A ← A · min(1, π(y | question) / π(y | advice, question))"
    ),
    "grpo_token_losses": (
        "L = −Σ_{tokens} min(ρA, clip(ρ, 1 − ε, 1 + ε_{high}) A) / number of tokens; ε_{high} "
        "is wider for stripped and replayed tokens"
    ),
    "tanh_normal": "a = tanh(u), u = mean + std · noise; log π(a) = log N(u) − Σ log(1 − a²)",
    "td_target": "y = r + γ · mask · V(s′)",
    "grasp_target": "y = r + penalty + γ · mask · Q_{target}(s′, argmax_{g} Q(s′, g))",
    "conservative_gap": "log Σ_{m} exp(Q(s, a_{m}) − log μ(a_{m})) − Q(s, a)",
    "normalize_weights": "w / mean(w)",
    "offline_ratio_at": "max(min, first · decay^{steps})",
    "return_to_go": "G_{t} = r_{t} + γG_{t+1}",
    "td_errors": "δ = Q(s, a) − y",
}
PROOF_WORDS = {  # other markers: words in the names of their tests; without an entry, the word of the marker
    "warm-up: conservative": "conservative|cql",
    "warm-up: cloning": "clon",
    "warm-up: replay": "priorit|retention|offline_share",
    "warm-up: overfitting": "early_stop|dropout|noise_on_obs",
    "hybrid: grasp": "grasp|gripper",
    "hybrid: images": "image|shift|encoder",
    "hybrid: bc": "clon|bc",
    "hybrid: cloning": "clon|bc",
}


# --- reading the scripts ---
class Block(NamedTuple):
    """A top-level function or class: lines first to last (from 0, last excluded), comments above it included."""

    name: str
    section: str
    first: int
    last: int
    summary: str  # first line of its docstring
    text: str  # without the comments above


@functools.cache
def blocks(source: str) -> list[Block]:
    lines, found = source.splitlines(), []
    banners = [
        (i, match[1])
        for i, line in enumerate(lines)
        if (match := re.fullmatch(r"# --- ([\w ]+).* ---", line))
    ]
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            start = first = min(n.lineno for n in [node, *node.decorator_list]) - 1
            while lines[first - 1].startswith("#") and not lines[first - 1].startswith("# ---"):
                first -= 1
            section = ([name for i, name in banners if i < first] or [SECTIONS[0]])[-1].replace(
                " ", "_"
            )
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            text = "\n".join(lines[start : node.end_lineno])
            found.append(Block(node.name, section, first, node.end_lineno, summary, text))
    return found


def importance(section: str) -> int:
    return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS)


def read_markers(source: str) -> dict[str, str]:
    """`v2: buffer` -> what the docstring says about it."""
    found = re.findall(
        r"^    ([\w-]+: \w+) +- (.*(?:\n {12,}.*)*)", ast.get_docstring(ast.parse(source)), re.M
    )
    return {marker: re.sub(r"\s+", " ", text) for marker, text in found}


def own_markers(parent: str, child: str) -> dict[str, str]:
    """Markers that the child has and its parent has not."""
    sources = [(ROOT / name).read_text(encoding="utf-8") for name in (parent, child)]
    old, new = map(read_markers, sources)
    return {marker: text for marker, text in new.items() if marker not in old}


@functools.cache
def tests_of(script: str) -> list[tuple[str, Block]]:
    """(file, test) of all tests in files that import the script"""
    stem, found = script.removesuffix(".py"), []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if re.search(rf"^(import|from) {stem}\b", source, re.M):
            tests = [block for block in blocks(source) if block.name.startswith("test_")]
            found += [(path.name, block) for block in tests]
    return found


def proofs(marker: str, script: str) -> list[str]:
    """Tests of a marker, file::function"""
    if marker in PROOFS:
        return PROOFS[marker]
    words = PROOF_WORDS.get(marker, marker.partition(": ")[2])
    found = [
        f"{name}::{test.name}" for name, test in tests_of(script) if re.search(words, test.name)
    ]
    return found[:3]


class Change(NamedTuple):
    """Lines b0 to b1 of the child, which stand at `rows` of the diff, and the markers they belong to."""

    b0: int
    b1: int
    rows: range
    markers: list[str]


def opcodes(a: list[str], b: list[str]) -> list[list]:
    """As difflib has them, but what is inserted begins with a function and not with the blank lines above it."""
    ops = [list(op) for op in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()]
    for before, op, after in zip(ops, ops[1:], ops[2:], strict=False):
        while op[0] == "insert" and b[op[3]] == b[op[4]] == "":
            for edge, index in (
                (before, 2),
                (before, 4),
                (op, 1),
                (op, 2),
                (op, 3),
                (op, 4),
                (after, 1),
                (after, 3),
            ):
                edge[index] += 1
    return ops


def compare(
    a: list[str], b: list[str], markers: dict[str, str]
) -> tuple[list[tuple], list[Change]]:
    """-> rows of the diff: (sign, line of a or b), and its changes; new functions count as one change each"""
    starts = {i for i in range(1, len(b)) if b[i][:1].strip() and not b[i - 1]}
    diff, changes = [], []
    for tag, a0, a1, b0, b1 in opcodes(a, b):
        if tag == "equal":
            diff += [(" ", i) for i in range(b0, b1)]
            continue
        cuts = [b0, *(i for i in range(b0 + 1, b1) if i in starts and a0 == a1), b1]
        diff += [("-", i) for i in range(a0, a1)]
        top = len(diff) - (a1 - a0)
        for start, end in zip(cuts, cuts[1:], strict=False):
            diff += [("+", i) for i in range(start, end)]
            names = re.findall(r"# (?:[^#\n]*; )?(v\d): ([\w, ]+)", "\n".join(b[start:end]))
            found = [
                f"{version}: {name.strip()}"
                for version, words in names
                for name in words.split(",")
            ]
            found = [name for name in dict.fromkeys(found) if name in markers]
            if not found and start > b0:  # goes on with what the function above belongs to
                found = changes[-1].markers
            changes.append(Change(start, end, range(top, len(diff)), found))
            top = len(diff)
    for i, change in enumerate(
        changes
    ):  # a line without a marker belongs to the marked change next to it
        near = [
            x
            for x in changes[max(i - 1, 0) : i + 2]
            if max(x.b0 - change.b1, change.b0 - x.b1) <= 2 * CONTEXT
        ]
        changes[i] = change._replace(
            markers=change.markers or [m for x in near for m in x.markers][:1]
        )
    return diff, changes


# --- links of the other pages ---
def link_lines(page: Path) -> str:
    """The page, with every function and class that its implementation details name linked to its line."""
    where = {}
    scripts = {"ppo": ("ppo_v1.py", "ppo.py"), "staleness": ("ppo_v2.py",), "design": ()}
    for script in scripts.get(page.stem, (f"{page.stem}.py",)):
        for node in ast.parse((ROOT / script).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                methods = [
                    (f"{node.name}.{x.name}", x)
                    for x in node.body
                    if isinstance(x, ast.FunctionDef)
                ]
                for name, inner in [(node.name, node), *methods]:
                    where[name] = f"../{script}#L{inner.lineno}"
    text, title, details = page.read_text(encoding="utf-8").partition(
        "\n## Implementation details\n"
    )
    details, end, rest = details.partition("\n## ")

    def link(match):
        name = match[1] or match[2]
        return f"[`{name}`]({where[name]})" if name in where else match[0]

    linked = r"\[`([\w.]+)`\]\(\.\./\w+\.py#L\d+\)"
    details = re.sub(linked + r"|(?<!\[)`([\w.]+)`", link, details)
    before, after = (re.sub(linked + "|(?!)()", link, part) for part in (text, rest))
    return before + title + details + end + after


def count_lines(page: Path) -> str:
    """A README, with today's number of lines of each script and of changes to its parent"""
    text = page.read_text(encoding="utf-8")
    for script, parent in PARENTS.items():
        child = (ROOT / script).read_text(encoding="utf-8").splitlines()
        changes = "–"
        if parent:
            lines = (ROOT / parent).read_text(encoding="utf-8").splitlines()
            matcher = difflib.SequenceMatcher(None, lines, child, autojunk=False)
            same = sum(block.size for block in matcher.get_matching_blocks())
            changes = f"+{len(child) - same} −{len(lines) - same}"
        row = rf"(?m)^(\| \[`{script}`\].*) \| \d+ \| (?:–|\+\d+ −\d+) \|"
        text = re.sub(row, rf"\1 | {len(child)} | {changes} |", text)
    return text


# --- writing the page ---
@functools.cache
def colour(source: str) -> list[str]:
    """Lines of Python as HTML; plain names, operators and spaces go without a span, which halves the page."""
    text = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return re.sub(r'<span class="[nopw]">([^<]*)</span>', r"\1", text).split("\n")[
        : len(source.splitlines())
    ]


ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5}(?:v\d)?)")
ARXIV_LINK = r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>'


def with_links(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text[:1].upper() + text[1:]))
    return ARXIV.sub(ARXIV_LINK, text)


def equation(name: str) -> str:
    text = html.escape(EQUATIONS.get(name, ""))
    text = re.sub(r"_\{(.*?)\}", r"<sub>\1</sub>", text)
    text = re.sub(r"\^\{(.*?)\}", r"<sup>\1</sup>", text)
    return f"<p class=equation>{text}</p>" if text else ""


def show_docstring(text: str) -> str:
    """Paragraphs wrap; what is indented or a list keeps its lines and scrolls on a phone."""
    parts = []
    for block in textwrap.dedent(text).strip("\n").split("\n\n"):
        lines = block.splitlines()
        first = next((i for i, line in enumerate(lines) if re.match(r" |[-*] ", line)), len(lines))
        if first:  # a paragraph, or the sentence above a list
            parts.append(f"<p>{with_links(' '.join(lines[:first]))}</p>")
        if first < len(lines):
            kept = textwrap.dedent("\n".join(lines[first:]))
            if re.match(r"[-*] ", kept):
                items = re.split(r"(?m)^[-*] ", kept)[1:]
                parts.append(f"<ul>{''.join(f'<li>{with_links(item)}' for item in items)}</ul>")
            else:
                kept = ARXIV.sub(ARXIV_LINK, html.escape(kept))
                parts.append(f"<pre class=doc>{kept}</pre>")
    return "".join(parts)


def code(rows: list[tuple[str, int | str, str]]) -> str:
    """Rows of (sign, line number, HTML)."""
    kinds = {"+": "add", "-": "gone", " ": ""}
    lines = [
        f'<span class="line {kinds[sign]}"><s>{number}</s>{text or " "}</span>'
        for sign, number, text in rows
    ]
    return f"<pre>{''.join(lines)}</pre>"


def show_test(test: str) -> str:
    name, function = test.split("::")
    source = (ROOT / "tests" / name).read_text(encoding="utf-8")
    block = next(block for block in blocks(source) if block.name == function)
    rows = [(" ", i + 1, line) for i, line in enumerate(colour(source))][block.first : block.last]
    return (
        f"<details class=test><summary>test <code>{function}</code></summary>{code(rows)}</details>"
    )


def show_marker(marker: str, text: str, script: str) -> str:
    """Title, reason, equation and tests"""
    title = f'<h3 id="{marker.replace(": ", "-")}">{marker}</h3><p>{with_links(text)}.</p>'
    return title + equation(marker) + "".join(map(show_test, proofs(marker, script)))


def show_changes(parent: str, child: str, source_url: str) -> str:
    """Changes of a child by marker, what carries the idea first."""
    old, new = ((ROOT / name).read_text(encoding="utf-8") for name in (parent, child))
    markers = own_markers(parent, child)
    places, left, right = blocks(new), colour(old), colour(new)
    new_lines = new.splitlines()
    diff, changes = compare(old.splitlines(), new_lines, markers)
    top = max(
        node.end_lineno
        for node in ast.parse(new).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    added, removed = (sum(sign == kind for sign, _ in diff) for kind in "+-")
    share = 100 * (1 - removed / len(left))
    parts = [f"<p>+{added} −{removed} lines; {share:.0f} % of <code>{parent}</code> is kept.</p>"]

    def place(change):
        inside = [x for x in places if x.first <= change.b0 < x.last]
        begins = [x for x in places if change.b0 <= x.first < change.b1]
        constants = Block("constants", "args", 0, 0, "", "")
        return next(iter(inside + begins), constants)

    rows = [
        (sign, "" if sign == "-" else i + 1, (left if sign == "-" else right)[i])
        for sign, i in diff
    ]

    def show(chosen):
        pieces = []
        for change in (
            chosen
        ):  # with unchanged lines around it, but for new functions; neighbours are shown together
            start, end = change.rows[0], change.rows[-1] + 1
            inside, goes_on = new_lines[change.b0].startswith(" "), new_lines[change.b1 - 1]
            for _ in range(CONTEXT):
                start -= inside and diff[start - 1][0] == " "
                end += bool(goes_on) and end < len(diff) and diff[end][0] == " "
            if pieces and pieces[-1][1] <= start <= pieces[-1][2]:
                pieces[-1][2] = max(end, pieces[-1][2])
            else:
                pieces.append([change, start, end])
        shown = ""
        for change, start, end in pieces:
            name = place(change).name if change.b0 >= top else "imports"
            while not rows[start][2]:
                start += 1
            while not rows[end - 1][2]:
                end -= 1
            where = (
                f'<a href="{source_url}/{child}#L{change.b0 + 1}">{name}, line {change.b0 + 1}</a>'
            )
            shown += f"<p class=where>{where}</p>{code(rows[start:end])}"
        return shown

    end_of_docstring = ast.parse(new).body[0].end_lineno
    changes = [change for change in changes if change.b0 >= end_of_docstring]
    for marker, text in markers.items():
        chosen = [change for change in changes if marker in change.markers and change.b0 >= top]
        chosen.sort(key=lambda change: importance(place(change).section))
        parts.append(show_marker(marker, text, child) + show(chosen))
    rest = [change for change in changes if not change.markers or change.b0 < top]
    parts.append(
        f"<details><summary>imports, and lines without a marker</summary>{show(rest)}</details>"
    )
    return "".join(parts)


def name_at(source: str, line: int) -> str:
    """The innermost function or class at a line, with the class of a method"""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.lineno <= line <= node.end_lineno:
                names.append((node.lineno, node.name))
    return ".".join(name for _, name in sorted(names)) or "constants"


def marked_parts(source: str, marker: str) -> list[tuple[int, int]]:
    """Lines (from 0, last excluded) of the statements that carry a marker, or stand below it"""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    end_of_docstring = ast.parse(source).body[0].end_lineno
    parts = []
    for i, line in enumerate(source.splitlines(), 1):
        if i > end_of_docstring and re.search(rf"# (.*; )?{re.escape(marker)}\b", line):
            below = [node for node in statements if node.lineno >= i]
            same = [node for node in statements if node.lineno <= i <= node.end_lineno]
            if not line.lstrip().startswith("#"):
                node = max(same, key=lambda node: (node.lineno, -node.end_lineno))
            else:
                node = min(below, key=lambda node: (node.lineno, -node.end_lineno))
            first = min(i, node.lineno) - 1
            if not parts or node.end_lineno > parts[-1][1]:  # not inside the part before
                parts.append((first, node.end_lineno))
    return parts


def show_marked(script: str, source_url: str) -> str:
    """The lines of each marker, as statements"""
    source = (ROOT / script).read_text(encoding="utf-8")
    lines, shown = colour(source), ""
    for marker, text in read_markers(source).items():
        shown += show_marker(marker, text, script)
        for first, last in marked_parts(source, marker):
            name = name_at(source, first + 1)
            link = f'<a href="{source_url}/{script}#L{first + 1}">{name}, line {first + 1}</a>'
            indent = len(source.splitlines()[first]) - len(source.splitlines()[first].lstrip())
            rows = code([("+", i + 1, lines[i][indent:]) for i in range(first, last)])
            shown += f"<p class=where>{link}</p>{rows}"
    return shown


def line_of_def(block: Block) -> int:
    """From 1, below the decorators"""
    lines = block.text.splitlines()
    decorators = next(i for i, line in enumerate(lines) if line.startswith(("def ", "class ")))
    return block.last - len(lines) + decorators + 1


def show_block(block: Block, script: str, lines: list[str], source_url: str) -> str:
    """A function or class, folded: summary, equation, code, and the tests that mention it"""
    rows = [(" ", i + 1, lines[i]) for i in range(block.first, block.last)]
    where = f'<a href="{source_url}/{script}#L{block.first + 1}">line {block.first + 1}</a>'
    title = f"<code>{block.name}</code> {with_links(block.summary)} <small>{where}</small>"
    mentions = [
        f'<a href="{source_url}/tests/{name}#L{line_of_def(test)}">{test.name}</a>'
        for name, test in tests_of(script)
        if re.search(rf"\b{block.name}\b", test.text)
    ]
    tested = f"<p class=tested>Tests: {', '.join(mentions[:4])}</p>" if mentions else ""
    inside = equation(block.name) + code(rows) + tested
    return f"<details><summary>{title}</summary>{inside}</details>"


def show_blocks(script: str, seen: dict[str, str], source_url: str) -> str:
    """Functions and classes of a script by section, without those `seen` (text -> script) elsewhere."""
    source = (ROOT / script).read_text(encoding="utf-8")
    places, lines = blocks(source), colour(source)
    _, _, rest = ast.get_docstring(ast.parse(source)).partition("\n")
    parts = [show_docstring(rest), show_marked(script, source_url)]
    for section in sorted(dict.fromkeys(block.section for block in places), key=importance):
        own = [block for block in places if block.section == section and block.text not in seen]
        if own:
            parts.append(f"<h3>{section.replace('_', ' ')}</h3>")
        parts += [show_block(block, script, lines, source_url) for block in own]
    copies = {}
    for block in places:
        if block.text in seen:
            copies.setdefault(seen[block.text], []).append(f"<code>{block.name}</code>")
    for other, names in copies.items():
        parts.append(f"<p class=copies>Word for word as in {other}: {', '.join(names)}.</p>")
    return "".join(parts)


def picture(name: str, alt: str) -> str:
    data = base64.b64encode((ROOT / "docs" / f"{name}.png").read_bytes()).decode()
    return f'<img alt="{alt}" src="data:image/png;base64,{data}">'


STYLE = """
:root{color-scheme:light dark;--b:#fff;--f:#1b1f24;--m:#5f6873;--l:#dde2e8;--add:#dcf5e3;--gone:#fde3e3;
--box:#f6f8fa;--a:#1a5fb4}
@media(prefers-color-scheme:dark){:root{--b:#14171a;--f:#dfe4ea;--m:#98a2ad;--l:#2f353d;--add:#15351f;--gone:#43201f;
--box:#1b1f24;--a:#8ab8f5}}
*{box-sizing:border-box}
body{margin:0;background:var(--b);color:var(--f);font:16px/1.55 system-ui,sans-serif;display:flex}
a{color:var(--a);text-decoration:none}a:hover{text-decoration:underline}
nav{width:200px;flex:none;height:100vh;overflow:auto;position:sticky;top:0;padding:16px;
border-right:1px solid var(--l);font-size:14px}
nav b{display:block;margin-top:12px}nav b a{color:var(--f)}nav span a{display:block;padding-left:10px}
main{flex:1;min-width:0;max-width:1000px;padding:16px 32px 80px}
h1{line-height:1.2;margin:8px 0}h2{margin-top:64px;border-top:3px solid var(--l);padding-top:16px}h3{margin-top:36px}
img{max-width:100%;background:#fff}p,summary{overflow-wrap:anywhere}
code,pre{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:12.5px}
pre{line-height:19px;margin:4px 0 16px;padding:8px 0;background:var(--box);border-radius:6px;overflow-x:auto}
pre.doc{padding:8px 12px}
.equation{margin:8px 0;padding:6px 12px;border-left:3px solid var(--a);font-family:Georgia,'DejaVu Serif',serif}
.tested{margin:-8px 0 16px;font-size:13px;color:var(--m);overflow-wrap:anywhere}
.line{display:block;width:max-content;min-width:100%;padding-right:12px}
.line s{display:inline-block;width:44px;padding-right:10px;text-align:right;color:var(--m);text-decoration:none;
user-select:none}
.add{background:var(--add)}.gone{background:var(--gone)}
.where{margin:20px 0 4px;font-size:14px}.copies,small{color:var(--m)}
summary{cursor:pointer;padding:4px 0}.test summary{color:var(--m);font-size:14px}
@media(max-width:900px){body{display:block}main{padding:8px 14px 60px}h1{font-size:26px}
nav{width:auto;height:auto;position:static;border:0;border-bottom:1px solid var(--l);padding:8px 14px 14px}
nav b{display:inline-block;margin:4px 14px 0 0}nav span{display:none}
code,pre{font-size:11.5px}pre{line-height:17px}.line s{width:34px;padding-right:8px}}
"""
QUESTION = "How do you learn from experience that is not fresh?"
INTRO = """Six scripts, one algorithm each. This page shows them by idea: the reason, the equation, the tests, and the
code that it takes. ppo_v1.py and ppo_v2.py are shown as changes to the script before them: green lines are new, red
lines are removed. Of the others the marked lines come first, then all functions. Click on a line with a triangle."""


def build(source_url: str = "..") -> str:
    sections, contents, seen = [], [], {}
    for script, parent in PARENTS.items():
        source, stem = (ROOT / script).read_text(encoding="utf-8"), script.removesuffix(".py")
        title = ast.get_docstring(ast.parse(source)).partition("\n")[0]
        body = (
            show_changes(parent, script, source_url)
            if parent
            else show_blocks(script, seen, source_url)
        )
        seen = {block.text: script for block in blocks(source)} | seen
        image = picture(PICTURES[stem], f"results of {script}") if stem in PICTURES else ""
        page = f'<a href="{source_url}/docs/{"ppo" if stem == "ppo_v1" else stem}.md">Its page</a>'
        sections.append(
            f"<h2 id={stem}>{script}</h2><p>{with_links(title)} {page}.</p>{image}{body}"
        )
        markers = own_markers(parent, script) if parent else read_markers(source)
        links = "".join(
            f'<a href="#{m.replace(": ", "-")}">{m.partition(": ")[2]}</a>' for m in markers
        )
        contents.append(f'<b><a href="#{stem}">{script}</a></b><span>{links}</span>')
    formatters = [HtmlFormatter(style=name, nobackground=True) for name in ("xcode", "github-dark")]
    light, dark = (formatter.get_style_defs("pre") for formatter in formatters)
    style = f"{STYLE}{light}@media(prefers-color-scheme:dark){{{dark}}}"
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'><link rel=icon href='data:,'>"
    return (
        f"<!doctype html><html lang=en>{head}<title>{QUESTION}</title><style>{style}</style><body>"
        f"<nav>{''.join(contents)}</nav><main><h1>{QUESTION}</h1><p>{INTRO}</p>"
        f"{picture('overview', 'each method beside its simplest rival')}{''.join(sections)}</main></html>\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reading.html")
    parser.add_argument(
        "--source", default="..", help="where the scripts are, for links to their lines"
    )
    parser.add_argument("--link-lines", action="store_true", help="no page: links and counts")
    options = parser.parse_args()
    if options.link_lines:
        for page in (ROOT / "docs").glob("*.md"):
            page.write_text(link_lines(page), encoding="utf-8")
        for page in ROOT.glob("README*.md"):
            page.write_text(count_lines(page), encoding="utf-8")
        sys.exit()
    options.out.write_text(build(options.source), encoding="utf-8")
    print(options.out)
