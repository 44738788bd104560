"""The examples of docs/het_grpo.md as they stand: an environment, summarizers, a memory service."""

import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import ROOT
from test_het_train import chat_model  # noqa: F401

import het_grpo as het

SMALL = dict(num_tasks=4, group_size=4, num_iterations=2, device="cpu")
SMALL |= dict(max_turns=2, max_turn_tokens=2, num_train_tasks=12, eval_size=6)
SMALL |= dict(init_exp_before_training=8)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A folder with the files that the page tells its reader to save."""
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("house", "seams", "services"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    het.load_file.cache_clear()
    text = (ROOT / "docs" / "het_grpo.md").read_text(encoding="utf-8")
    for name, block in re.findall(r"Save this as `(\w+\.\w+)`:\n\n```\w+\n(.*?)```", text, re.S):
        (tmp_path / name).write_text(block, encoding="utf-8")
    monkeypatch.setattr(het.Run, "finish", lambda *args: None)
    monkeypatch.setattr(het, "WARM_START_STEPS", 20)
    return tmp_path


@pytest.fixture
def server(monkeypatch):
    """Answers like a chat endpoint and like a memory service. -> list of (path, body) it has seen"""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            message = dict(content="look in the kitchen")
            answer = dict(choices=[dict(message=message)], answer="the neighbor knows")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{http.server_port}"
    monkeypatch.setenv("LLM_URL", f"{url}/v1/chat/completions")
    monkeypatch.setenv("SERVICE_URL", url)
    yield seen
    http.shutdown()


def run(page, **options):
    env = f"{page}/house.py:House"
    return het.main(het.Args(**SMALL | dict(env=env, run_dir=f"{page}/run") | options))


def advice_of(page):
    lines = (page / "run" / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["advice"] for line in lines}


def test_the_house_gets_its_arguments(page):
    env = het.TextEnv(het.Args(env=f'{page}/house.py:House{{"num_items": 2}}'))
    assert {env.reset(seed)[1]["topic"] for seed in range(9)} == {"lamp", "rope"}
    question, _ = env.reset(0)
    room = env.env.room
    assert question.startswith("Where is the lamp")
    assert env.step(f"the {room}!")[1:3] == (1.0, True)
    assert env.step("no idea")[1] == -1.0, "text without an action costs a point"


def test_the_built_in_summarizer_of_the_page_is_that_of_the_script(page, monkeypatch):
    pools = []
    for name in (None, f"{page}/seams.py:actions_of_successes"):
        pool = het.ExperiencePool(het.Args(summarizer=name))
        t = het.Trajectory(1, topic="lamp", success=True, experience="lamp : kitchen")
        pool.fill_pool([t, het.Trajectory(2, topic="rope", experience="rope : attic")])
        pools.append(pool.records)
    assert pools[0] == pools[1] == [dict(topic="lamp", text="lamp : kitchen")]


def test_a_malformed_note_does_not_discard_the_others(monkeypatch, capsys):
    pool = het.ExperiencePool(het.Args())
    notes = [("lamp", "kitchen"), ("rope", 3), "attic", ["rope", "attic"]]
    monkeypatch.setattr(pool, "summarizer", lambda episodes, ask: notes)
    pool.fill_pool([])
    assert [record["text"] for record in pool.records] == ["kitchen", "attic"]
    assert pool.num_failed_calls == 1, "one call, with two malformed notes"
    assert "--summarizer returned [('lamp', 'kitchen'), ('rope', 3)" in capsys.readouterr().out


def test_another_model_writes_the_notes(page, server):
    metrics = run(page, summarizer=f"{page}/services.py:endpoint")
    assert metrics["exp/failed_calls"] == 0
    assert advice_of(page) == {"", "\n".join(["look in the kitchen"])}
    path, body = server[0]
    assert path == "/v1/chat/completions" and body["messages"][0]["role"] == "user"
    assert "Where is the" in body["messages"][0]["content"]
    assert "Reward: " in body["messages"][0]["content"], "failures are summarized, too"


def test_a_service_keeps_the_notes(page, server):
    functions = dict(summarizer="service_write", retriever="service_find")
    metrics = run(page, **{name: f"{page}/services.py:{x}" for name, x in functions.items()})
    assert metrics["exp/failed_calls"] == 0 and metrics["exp/pool_size"] == 0
    assert advice_of(page) == {"", "the neighbor knows"}
    written = [body for path, body in server if path == "/summary_task_memory"]
    found = [body for path, body in server if path == "/retrieve_task_memory"]
    assert len(written) == 3, "before training and in two iterations"
    assert len(written[0]["trajectories"]) == 8 * 4
    assert {"messages", "score"} == set(written[0]["trajectories"][0])
    assert found[0]["top_k"] == het.RETRIEVE_TOP_K and "Where is the" in found[0]["query"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_a_server_the_run_goes_on_and_counts(page, monkeypatch, capsys):
    monkeypatch.setenv("LLM_URL", "http://127.0.0.1:9/none")
    metrics = run(page, summarizer=f"{page}/services.py:endpoint")
    assert metrics["exp/failed_calls"] == 3 and metrics["exp/pool_size"] == 0
    assert capsys.readouterr().out.count("--summarizer returned") == 3


def test_the_policy_is_asked_what_it_has_learned(page, chat_model, monkeypatch):  # noqa: F811
    answers = []
    real = het.ask_policy

    def ask(*inputs, **options):
        answers.extend(answer or "nothing" for answer in real(*inputs, **options))
        return answers[-16:]

    monkeypatch.setattr(het, "ask_policy", ask)
    options = dict(model_name=chat_model, chat_template=True, system_prompt="Be brief.")
    metrics = run(page, summarizer=f"{page}/seams.py:reflect", **options)
    assert metrics["exp/failed_calls"] == 0 and len(answers) == 48
    notes = {record["text"] for record in saved_pool(page)}
    assert notes == {answer for answer in answers if answer}


def saved_pool(page):
    import torch

    checkpoint = torch.load(page / "run" / "checkpoint.pt", weights_only=True)
    return checkpoint["state"]["pool"]["records"]


def test_the_system_prompt_stands_before_the_question(chat_model):  # noqa: F811
    tokenizer = het.transformers.AutoTokenizer.from_pretrained(chat_model)
    options = dict(model_name=chat_model, chat_template=True, max_turn_tokens=4)
    args = het.Args(**options, system_prompt="Be brief.")
    dialogue = het.Dialogue(tokenizer, args, het.torch.tensor([1]))
    text = "".join(tokenizer.convert_ids_to_tokens(dialogue.prompt("Where?")))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere?")
    reply = "".join(tokenizer.convert_ids_to_tokens(dialogue.reply("Not here.", [7])))
    assert reply == "<|im_end|>\n<|im_start|>user\nNot here.<|im_end|>\n<|im_start|>assistant\n"
