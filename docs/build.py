"""Writes the reading page: side-by-side diffs of the siblings, each hunk with its idea, its paper and its tests.

    python docs/build.py                    # docs/reading.html, one file, offline
    python docs/build.py --out page.html

Standard library only. What a marker means is read from the child's docstring, what proves it from PROOFS below.
"""

import argparse
import ast
import base64
import difflib
import html
import io
import keyword
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAIRS = [("ppo.py", "ppo_v1.py"), ("ppo_v1.py", "ppo_v2.py"), ("sac_hybrid.py", "wsrl_warmup.py")]
PICTURES = {"ppo_v2.py": "replay_study.png", "wsrl_warmup.py": "wsrl_study.png"}
CONTEXT = 3  # unchanged lines shown around a hunk; the rest unfolds
PROOFS = {  # marker -> tests, file::function
    "v1: checkpoint": [
        "test_v1.py::test_killed_at_any_moment_and_resumed_is_never_stopped",
        "test_v1.py::test_a_signal_saves_and_ends_and_the_run_goes_on_as_if_never_stopped",
    ],
    "v1: schedule": ["test_v1.py::test_learning_rate_schedule"],
    "v1: accumulate": [
        "test_equivalence.py::test_micro_batches_give_the_gradient_of_the_minibatch",
        "test_math.py::test_micro_batches_add_up",
    ],
    "v1: memory": [
        "test_math.py::test_token_logprobs_in_chunks_equal_the_whole_gradient_included",
        "test_v1.py::test_gradient_checkpointing_has_no_dropout",
        "test_v1.py::test_bf16_stays_near",
    ],
    "v1: best": [
        "test_v1.py::test_best_and_final_folders_score_what_was_logged",
        "test_v1.py::test_an_early_stop_says_why_and_a_resumed_run_ends_there_too",
    ],
    "v1: kl": ["test_math.py::test_adaptive_kl_by_hand", "test_v1.py::test_target_kl_stops_the_epochs"],
    "v1: clip": ["test_math.py::test_dual_clip_and_clip_higher"],
    "v1: nan": ["test_v1.py::test_a_nan_reward_costs_its_own_answer_and_is_counted"],
    "v1: distributed": ["test_v1.py::test_two_ranks_make_the_update_of_one"],
    "v2: buffer": [
        "test_v2.py::test_draws_follow_the_priorities_with_replacement",
        "test_v2.py::test_drawn_data_is_what_was_sampled",
        "test_v1.py::test_killed_at_any_moment_and_resumed_is_never_stopped",
    ],
    "v2: correction": [
        "test_v2.py::test_corrections_by_hand",
        "test_v2.py::test_unchanged_weights_give_ratio_one_and_weight_one",
        "test_v2.py::test_fresh_rows_weigh_exactly_one_and_stale_rows_what_they_should",
    ],
    "v2: imitation": ["test_v2.py::test_the_critic_learns_from_fresh_rollouts_only_with_gains"],
    "v2: mix": ["test_v2.py::test_every_minibatch_mixes_in_proportion"],
    "v2: status": ["test_v2.py::test_efficiency_by_hand", "test_v2.py::test_status_line"],
}


# --- colour ---
def colour(source: str) -> list[str]:
    """Lines of Python as HTML, with a span around keywords, strings, comments, numbers and names being defined."""
    lines = source.splitlines()
    spans = [[] for _ in lines]  # (start, end, class) of each line
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = {tokenize.STRING: "s", tokenize.COMMENT: "c", tokenize.NUMBER: "n"}.get(token.type)
        if tokenize.tok_name[token.type].startswith("FSTRING"):
            kind = "s"
        if token.type == tokenize.NAME and (keyword.iskeyword(token.string) or token.string == "self"):
            kind = "k"
        elif token.type == tokenize.NAME and before in ("def", "class"):
            kind = "d"
        before = token.string
        if kind:
            (first, start), (last, end) = token.start, token.end
            for row in range(first, last + 1):
                left, right = start if row == first else 0, end if row == last else len(lines[row - 1])
                spans[row - 1].append((left, right, kind))
    coloured = []
    for line, marks in zip(lines, spans, strict=True):
        text, at = "", 0
        for left, right, kind in marks:
            text += html.escape(line[at:left]) + f'<i class="{kind}">{html.escape(line[left:right])}</i>'
            at = right
        coloured.append(text + html.escape(line[at:]))
    return coloured


# --- meaning ---
def read_markers(source: str) -> dict[str, str]:
    """`v2: buffer` -> what the docstring says about it."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    found = re.findall(r"^    (v\d: \w+) +- (.*(?:\n {12,}.*)*)", docstring, re.M)
    return {marker: re.sub(r"\s+", " ", text) for marker, text in found}


def blocks(source: str) -> list[tuple[int, str]]:
    """First line and name of every top-level function and class."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [(min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.name) for node in nodes]


def names_of(lines: list[str], start: int, end: int, markers: dict, places: list) -> list[str]:
    """Markers of a hunk, or where there is none the top-level block it stands in."""
    text, found = "\n".join(lines[start:end]), []
    for version, names in re.findall(r"# (v\d): ([\w, ]+)", text):
        found += [f"{version}: {name.strip()}" for name in names.split(",")]
    found = [name for name in dict.fromkeys(found) if name in markers]
    inside = [name for first, name in places if first <= start + 1]
    return found or [inside[-1] if inside else "docstring and imports"]


def describe(name: str, markers: dict) -> str:
    """A hunk's heading: what it is for, the papers named there, the tests that prove it."""
    text = re.sub(
        r"arXiv:(\d{4}\.\d{5})", r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>', html.escape(markers[name])
    )
    tests = " ".join(f'<a href="#{test}">{test.split("::")[1]}</a>' for test in PROOFS[name])
    return f"<b>{name}</b> {text} <span class=tests>proved by {tests}</span>"


# --- page ---
def row(left, right, kind=""):
    cells = "".join(f"<td>{number or ''}<td><code>{text}</code>" for number, text in (left, right))
    return f"<tr{f' class={kind}' if kind else ''}>{cells}"


def folded(rows: list[str]) -> str:
    """Unchanged lines: the ends as context, the middle behind a button."""
    if len(rows) <= 2 * CONTEXT + 2:
        return f"<tbody>{''.join(rows)}</tbody>"
    head, middle, tail = rows[:CONTEXT], rows[CONTEXT:-CONTEXT], rows[-CONTEXT:]
    button = f"<tr class=fold><td colspan=4><button>{len(middle)} unchanged lines</button>"
    return (
        f"<tbody>{''.join(head)}</tbody><tbody>{button}</tbody>"
        f"<tbody hidden>{''.join(middle)}</tbody><tbody>{''.join(tail)}</tbody>"
    )


def compare(parent: str, child: str) -> tuple[str, str, set[str]]:
    """-> table, list of its hunks for the sidebar, tests it links to"""
    sources = [(ROOT / name).read_text() for name in (parent, child)]
    a, b = (source.splitlines() for source in sources)
    left, right = map(colour, sources)
    markers, places = read_markers(sources[1]), blocks(sources[1])
    table, contents, tests, stem = [], [], set(), child.removesuffix(".py")
    opcodes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    number = 0
    for tag, a0, a1, b0, b1 in opcodes:
        if tag == "equal":
            pairs = zip(range(a0, a1), range(b0, b1), strict=True)
            table.append(folded([row((i + 1, left[i]), (j + 1, right[j])) for i, j in pairs]))
            continue
        number += 1
        names = names_of(b, b0, b1, markers, places)
        anchor = f"{stem}-{number}"
        contents.append(f'<li><a href="#{anchor}">{", ".join(names)}</a> <small>+{b1 - b0} −{a1 - a0}</small>')
        headings = "<br>".join(describe(name, markers) if name in markers else f"<b>{name}</b>" for name in names)
        tests |= {test for name in names for test in PROOFS.get(name, []) if name in markers}
        lines = [f'<tr class=head id="{anchor}"><td colspan=4>{headings}']
        for i in range(max(a1 - a0, b1 - b0)):
            old = (a0 + i + 1, left[a0 + i]) if a0 + i < a1 else (0, "")
            new = (b0 + i + 1, right[b0 + i]) if b0 + i < b1 else (0, "")
            lines.append(row(old, new, "change" if old[0] and new[0] else "add" if new[0] else "gone"))
        table.append(f"<tbody class=hunk>{''.join(lines)}</tbody>")
    same = sum(a1 - a0 for tag, a0, a1, *_ in opcodes if tag == "equal")
    title = f"{parent} → {child}"
    counts = f"{number} hunks, +{len(b) - same} −{len(a) - same}, {100 * same / len(a):.0f} % of {parent} kept"
    picture = ROOT / "docs" / PICTURES.get(child, "none")
    image = ""
    if picture.exists():
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f'<img alt="learning curves of {child}" src="data:image/png;base64,{data}">'
    head = f"<tr><th><th>{parent}<th><th>{child}"
    section = (
        f"<section id={stem}><h2>{title}</h2><p>{counts}</p>{image}<table>{head}{''.join(table)}</table></section>"
    )
    return section, f"<h3><a href=#{stem}>{title}</a></h3><ol>{''.join(contents)}</ol>", tests


def show_test(test: str) -> str:
    """The source of one test, coloured, under the anchor that hunks link to."""
    name, function = test.split("::")
    source = (ROOT / "tests" / name).read_text()
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == function)
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = colour(source)[first - 1 : node.end_lineno]
    return f'<h4 id="{test}">tests/{name}, line {node.lineno}</h4><pre>{chr(10).join(lines)}</pre>'


STYLE = """
:root{color-scheme:light dark;--b:#fff;--f:#1b1f24;--m:#6a737d;--l:#e4e8ec;--add:#e3f6e8;--gone:#fdeaea;--head:#eef2fb;
--k:#a0306a;--s:#20643a;--c:#6a737d;--n:#1a5fb4;--d:#5b3fb0}
@media(prefers-color-scheme:dark){:root{--b:#14171a;--f:#dfe4ea;--m:#98a2ad;--l:#2a2f36;--add:#17301f;--gone:#3a1d20;
--head:#1d2433;--k:#f08bbb;--s:#8fd6a4;--c:#98a2ad;--n:#8ab8f5;--d:#bba6f5}}
body{margin:0;background:var(--b);color:var(--f);font:15px/1.5 system-ui,sans-serif;display:flex}
nav{width:260px;flex:none;height:100vh;overflow:auto;position:sticky;top:0;padding:0 16px;box-sizing:border-box;
border-right:1px solid var(--l);font-size:13px}nav ol{padding-left:22px}nav small{color:var(--m)}
main{flex:1;min-width:0;padding:0 24px 80px}a{color:var(--n)}img{max-width:100%;background:#fff}
table{border-collapse:collapse;width:100%;table-layout:fixed}th{text-align:left;padding:4px}
th:nth-child(odd),td:nth-child(odd):not([colspan]){width:44px}
td{vertical-align:top;padding:0 6px;overflow-wrap:anywhere}td:nth-child(odd):not([colspan]){color:var(--m);
text-align:right;font:11px/18px ui-monospace,monospace;user-select:none}
code,pre{font:12px/18px ui-monospace,monospace;white-space:pre-wrap}code i,pre i{font-style:normal}
pre{background:var(--head);padding:8px 12px}
.add td:nth-child(n+3),.change td:nth-child(n+3){background:var(--add)}
.gone td:nth-child(-n+2),.change td:nth-child(-n+2){background:var(--gone)}
.head td{background:var(--head);padding:6px 10px;border-top:2px solid var(--d)}
.tests,p{color:var(--m)}.tests a{margin-left:6px}
.head:target td{outline:2px solid var(--d)}
.fold button{width:100%;border:0;background:var(--l);color:var(--m);cursor:pointer}
i.k{color:var(--k)}i.s{color:var(--s)}i.c{color:var(--c)}i.n{color:var(--n)}i.d{color:var(--d);font-weight:600}
@media(max-width:900px){nav{display:none}main{padding:0 8px}}
"""
SCRIPT = """
document.addEventListener("click", e => {
  if (!e.target.matches(".fold button")) return;
  const fold = e.target.closest("tbody");
  fold.nextElementSibling.hidden = false; fold.remove();
});
document.addEventListener("keydown", e => {  // n and p: next and previous hunk
  if (e.key !== "n" && e.key !== "p" || e.ctrlKey || e.metaKey) return;
  const tops = [...document.querySelectorAll(".head")], at = t => t.getBoundingClientRect().top;
  const to = e.key === "n" ? tops.find(t => at(t) > 60) : tops.filter(t => at(t) < 20).pop();
  if (to) to.scrollIntoView();
});
"""


def build() -> str:
    present = [pair for pair in PAIRS if all((ROOT / name).exists() for name in pair)]
    sections, contents, tests = zip(*[compare(*pair) for pair in present], strict=True)
    proofs = "".join(show_test(test) for test in sorted(set().union(*tests)))
    intro = "What each script adds to the one it comes from. Unchanged lines unfold; keys n and p go from hunk to hunk."
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>How to read the diffs</title>"
        f"<meta name=viewport content='width=device-width'><link rel=icon href='data:,'><style>{STYLE}</style>"
        f"<body><nav>{''.join(contents)}<h3><a href=#tests>tests</a></h3></nav>"
        f"<main><h1>How to read the diffs</h1><p>{intro}</p>{''.join(sections)}"
        f"<section id=tests><h2>Tests</h2>{proofs}</section></main><script>{SCRIPT}</script></html>\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reading.html")
    out = parser.parse_args().out
    out.write_text(build())
    print(out)
