"""The reading page: docs/build.py."""

import html
import importlib.util
import json
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
CHILDREN = [(parent, child) for child, parent in build.PARENTS.items() if parent]


@pytest.fixture(scope="module")
def page():
    return build.build()


def section(page, child):
    return re.search(rf"<h2 id={child[:-3]}>.*?(?=<h2|</main>)", page, re.S)[0]


def markers():
    """(script, marker, its words) of all six, without those of a parent"""
    for script, parent in build.PARENTS.items():
        source = (ROOT / script).read_text(encoding="utf-8")
        found = build.own_markers(parent, script) if parent else build.read_markers(source)
        yield from ((script, marker, text) for marker, text in found.items())


def test_every_marker_has_its_words_its_proof_and_its_code(page):
    known = list(markers())
    assert {script for script, _, _ in known} >= {"ppo_v1.py", "ppo_v2.py", "wsrl_warmup.py"}
    assert build.PROOFS.keys() <= {marker for _, marker, _ in known}
    for script, marker, text in known:
        proofs = build.proofs(marker, script)
        assert text and proofs, marker
        part = re.search(rf'<h3 id="{marker.replace(": ", "-")}">.*?(?=<h3|<h2|$)', page, re.S)[0]
        assert all(f"<code>{test.partition('::')[2]}</code>" in part for test in proofs)
        assert 'class="line add"' in part, marker


def test_equations_stand_beside_what_they_describe(page):
    sources = [(ROOT / script).read_text(encoding="utf-8") for script in build.PARENTS]
    functions = {block.name for source in sources for block in build.blocks(source)}
    described = functions | {marker for _, marker, _ in markers()}
    shown = [name for name in build.EQUATIONS if name in described and build.equation(name) in page]
    assert len(shown) >= 24, sorted(build.EQUATIONS.keys() - described)
    assert "r<sub>t</sub> + γV<sub>t+1</sub> − V<sub>t</sub>" in page


def test_marked_parts_are_whole_statements():
    source = '"""Doc."""\nx = 1  # a: b\nif x:  # a: b\n    y = 2\n# a: b\n\ndef f():\n    pass\n'
    assert build.marked_parts(source, "a: b") == [(1, 2), (2, 4), (4, 8)]
    assert build.name_at(source, 8) == "f"


def test_every_link_resolves(page):
    targets = set(re.findall(r'id="?([\w-]+)', page))
    links = re.findall(r'href="#([^"]+)"', page)
    assert len(links) > 15 and set(links) <= targets
    for path, line, name in set(re.findall(r'href="\.\./([^"#]+)(?:#L(\d+)">(\w+))?', page)):
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        if line and name not in ("line", "imports", "constants", "main"):
            assert any(
                re.match(rf"(def|class) {name}\b", text) for text in lines[: int(line) + 6]
            ), (path, line, name)
    papers = re.findall(r'href="(https?:[^"]+)', page)
    assert papers and all(
        re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}(v\d)?", link) for link in papers
    )


@pytest.mark.parametrize("parent, child", CHILDREN)
def test_every_change_is_shown_under_its_marker(page, parent, child):
    a, source = (
        (ROOT / parent).read_text(encoding="utf-8").splitlines(),
        (ROOT / child).read_text(encoding="utf-8"),
    )
    b, markers = source.splitlines(), build.own_markers(parent, child)
    diff, _ = build.compare(a, b, markers)
    assert [(a if sign == "-" else b)[i] for sign, i in diff if sign != "+"] == a
    assert [i for sign, i in diff if sign != "-"] == list(range(len(b)))
    end = next(i for i, line in enumerate(b) if line == '"""')  # of the docstring
    added = {i + 1 for sign, i in diff if sign == "+" and i > end and b[i]}
    shown = {int(n) for n in re.findall(r'class="line add"><s>(\d+)', section(page, child))}
    assert added <= shown <= {i + 1 for sign, i in diff if sign == "+"}
    for marker in markers:
        part = re.search(
            rf'<h3 id="{marker.replace(": ", "-")}">.*?(?=<h3|$)', section(page, child), re.S
        )[0]
        marked = {
            i + 1
            for i, line in enumerate(b)
            if i > end and re.search(rf"# (.*; )?{marker}\b(?!`)", line)
        }
        assert marked and marked <= {
            int(n) for n in re.findall(r'class="line add"><s>(\d+)', part)
        }, marker


CHECK = """<iframe id=f height=844 src=page.html></iframe><script>f.width = WIDTH; f.onload = () => {
const d = f.contentDocument, height = x => x.getBoundingClientRect().height;
f.contentWindow.location.hash = "#v2-buffer";
const fold = d.querySelector("#v2-buffer ~ details"), closed = height(fold); fold.open = true;
document.body.textContent = JSON.stringify({width: d.documentElement.scrollWidth, opened: height(fold) - closed,
top: d.getElementById("v2-buffer").getBoundingClientRect().top,
nav: d.querySelector("nav a[href='#v2-buffer']").offsetHeight,
images: [...d.images].map(i => i.naturalWidth)})}</script>"""


@pytest.mark.parametrize("width", [390, 1400])
def test_in_a_browser(page, tmp_path, width):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no chromium here")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (tmp_path / "check.html").write_text(CHECK.replace("WIDTH", str(width)), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --window-size=1500,1000".split()
    flags += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    url = (tmp_path / "check.html").as_uri()
    shown = subprocess.run(
        [chromium, *flags, url], capture_output=True, text=True, timeout=120
    ).stdout
    found = json.loads(html.unescape(re.search(r"<body>(.*?)</body>", shown, re.S)[1]))
    assert found["width"] <= width, "nothing but code scrolls sideways"
    assert abs(found["top"]) < 5 and found["opened"] > 40 and min(found["images"]) > 100
    assert (found["nav"] > 0) == (width > 900)
