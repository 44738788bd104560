"""The reading page: docs/build.py."""

import contextlib
import importlib.util
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


@pytest.fixture(scope="module")
def page():
    return build.build()


def test_every_marker_has_its_words_and_its_proof():
    known = {}
    for _, child in build.PAIRS[:2]:
        known |= build.read_markers((ROOT / child).read_text())
    assert known.keys() == build.PROOFS.keys() and len(known) == 14
    assert known["v2: mix"] == "every minibatch holds fresh and replayed rows in proportion"
    assert "arXiv:2110.00641" in known["v2: correction"]  # on a continuation line


def test_every_link_inside_the_page_resolves(page):
    targets = set(re.findall(r'id="?([^"> ]+)', page))
    links = re.findall(r'href="?#([^"> ]+)', page)
    assert len(links) > 40 and set(links) <= targets
    outside = set(re.findall(r'href="?(https?://[^"> ]+)', page))
    assert outside and all(re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", link) for link in outside)


def test_colours_lose_no_character():
    source = (ROOT / "ppo_v2.py").read_text()
    plain = [re.sub(r"<[^>]+>", "", line) for line in build.colour(source)]
    assert [build.html.unescape(line) for line in plain] == source.splitlines()


def test_both_sides_are_whole(page):
    """Every line of parent and child stands in the table, in order."""
    table = re.search(r"<section id=ppo_v2>.*?</section>", page, re.S)[0]
    for side, name in ((1, "ppo_v1.py"), (3, "ppo_v2.py")):
        rows = [re.split(r"<td[^>]*>", part) for part in re.findall(r"<tr[^>]*>(?:<td>.*?){4}(?=<tr|</tbody)", table)]
        numbers = [int(cells[side]) for cells in rows if cells[side].isdigit()]
        assert numbers == list(range(1, len((ROOT / name).read_text().splitlines()) + 1))


class Browser:
    """Chromium through chromedriver's HTTP interface."""

    def __init__(self, port):
        self.root = f"http://127.0.0.1:{port}"
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]
        wanted = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        self.root += "/session/" + self.post("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def post(self, path, body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.root + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.urlopen(request, timeout=60))["value"]

    def run(self, script):
        return self.post("/execute/sync", {"script": script, "args": []})


@pytest.fixture
def browser():
    if not (shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("google-chrome"))):
        pytest.skip("no chromium with chromedriver here")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL) as driver:
        try:
            for _ in range(100):
                with contextlib.suppress(OSError):
                    browser = Browser(port)
                    break
                time.sleep(0.2)
            yield browser
        finally:
            with contextlib.suppress(Exception):
                urllib.request.urlopen(urllib.request.Request(browser.root, method="DELETE"), timeout=10)
            driver.terminate()


def test_in_a_browser(browser, page, tmp_path):
    (tmp_path / "page.html").write_text(page)
    browser.post("/url", {"url": f"{(tmp_path / 'page.html').as_uri()}"})
    hunk = re.search(r'id="(ppo_v2-\d+)"><td colspan=4><b>v2: buffer</b>', page)[1]
    browser.run(f"document.querySelector('nav a[href=\"#{hunk}\"]').click()")
    box = browser.run(f"const b = document.getElementById('{hunk}').getBoundingClientRect(); return [b.top, b.height]")
    assert -1 <= box[0] < 1000 and box[1] > 10  # the link brought it into view
    shown = f"return document.getElementById('{hunk}').parentElement.innerText"
    assert "use_replay_buffer: bool = False" in browser.run(shown)
    hidden = "return [...document.querySelectorAll('tbody')].filter(b => b.hidden).length"
    folds = browser.run(hidden)
    browser.run("document.querySelector('.fold button').click()")
    assert folds > 20 and browser.run(hidden) == folds - 1
    broken = "return [...document.querySelectorAll('a[href^=\"#\"]')].filter("
    assert browser.run(broken + "a => !document.getElementById(decodeURIComponent(a.hash.slice(1)))).length") == 0
    assert browser.run("return [...document.images].every(i => i.complete && i.naturalWidth > 100)")
    assert browser.post("/se/log", {"type": "browser"}) == []  # no error on the console
