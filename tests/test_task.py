"""Tasks, held-out prompts and scorers."""

import json
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

import ppo


def always(prompts):
    """Every prompt is short."""
    return [len(prompt) for prompt in prompts]


@pytest.mark.parametrize("name", ["sort", "add"])
def test_generated_tasks(name):
    task = ppo.make_task(ppo.Args(task=name), always)
    drawn = [task.train(i) for i in range(500)]
    assert drawn == [task.train(i) for i in range(500)], "a position of the stream names a prompt"
    other = ppo.make_task(ppo.Args(task=name, seed=2), always)
    assert drawn != [other.train(i) for i in range(500)]
    for prompt, answer in drawn + task.evaluation:
        question = prompt.removesuffix("=")
        expected = "".join(sorted(question)) if name == "sort" else str(sum(map(int, question.split("+"))))
        assert answer == expected
    assert not {p for p, _ in drawn} & {p for p, _ in task.evaluation}
    assert task.evaluation == other.evaluation


def test_sort_lengths_and_scramble():
    task = ppo.make_task(ppo.Args(min_digits=2, max_digits=5), always)
    assert {len(task.train(i)[1]) for i in range(300)} == {2, 3, 4, 5}
    scrambled = {task.scramble(random.Random(i), "123") for i in range(200)}
    assert scrambled == {"123", "132", "213", "231", "312", "321"}, "right in form, right by chance only"


def write(tmp_path, *rows):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_jsonl_columns_and_split(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(10)]
    rows += [{"question": f"q{i}", "answer": f"so #### {i}"} for i in range(10)]
    rows += [{"problem": f"r{i}", "solution": f"2 gives \\boxed{{2}}, so \\boxed{{{i}}}."} for i in range(10)] + [""]
    task = ppo.make_task(ppo.Args(task=f"jsonl:{write(tmp_path, *rows)}"), always)
    held_out = {p for p, _ in task.evaluation}
    assert len(held_out) == 3
    passes = [[task.train(27 * k + i) for i in range(27)] for k in range(2)]
    for one in passes:
        assert {p for p, _ in one} | held_out == {f"{c}{i}" for c in "pqr" for i in range(10)}
        assert all(answer == prompt[1:] for prompt, answer in one)
    assert passes[0] != passes[1], "each pass has its own order"


def test_jsonl_with_fractions_and_strange_line_ends(tmp_path):
    row = {"problem": "half of one?\u2028", "solution": "so \\boxed{\\frac{1}{2}}."}
    path = tmp_path / "data.jsonl"
    path.write_text("\r\n".join([json.dumps(row, ensure_ascii=False)] * 3), encoding="utf-8", newline="")
    assert ppo.read_jsonl(str(path)) == [(row["problem"], "\\frac{1}{2}")] * 3
    answers = ["\\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{3}}", "\\frac{1}{2}"]
    assert ppo.verify([""] * 3, answers, ["\\frac{1}{2}"] * 3) == [1.0, 0.0, 1.0]


def test_long_prompts_are_left_out(tmp_path, capsys):
    path = write(tmp_path, *[{"prompt": "x" * n, "answer": 1} for n in (1, 2, 3, 900)])
    task = ppo.make_task(ppo.Args(task=f"jsonl:{path}"), always)
    assert "1 of 4 prompts" in capsys.readouterr().out
    assert {len(p) for p, _ in task.evaluation} | {len(task.train(i)[0]) for i in range(2)} == {1, 2, 3}


def test_reward_function_replaces_the_verifier(tmp_path):
    path = tmp_path / "mine.py"
    body = "return [len(r) + float(a) for r, a in zip(responses, answers)]"
    path.write_text(f"def count(prompts, responses, answers):\n    {body}\n")
    args = ppo.Args(reward_fn=f"{path}:count", missing_eos_penalty=0.5)
    scorer = ppo.make_scorer(args, ppo.make_task(args, always), "cpu")
    scores = ppo.score_responses(scorer, args, ("a", "b"), ["xx", ""], ("3", "4"), [True, False])
    assert scores.tolist() == [5.0, 3.5]


def test_a_verifier_point_needs_an_ending():
    args = ppo.Args()
    scorer = ppo.make_scorer(args, ppo.make_task(args, always), "cpu")
    scores = ppo.score_responses(scorer, args, ("21=", "21="), ["12", "12"], ("12", "12"), [True, False])
    assert scores.tolist() == [1, 0]


def test_reward_model_scores_text(tmp_path):
    """The pooled position is the last of the text even where the text holds the pad token; padding cannot shift it."""
    tokenizer = ppo.make_tiny_tokenizer()
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_labels=1)
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    args = ppo.Args(reward_model_name=str(tmp_path))
    scorer = ppo.make_scorer(args, ppo.make_task(args, always), "cpu")
    scores = scorer(["ab", "a"], ["c", "longer text"], ["", ""])
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in ("abc", "alonger text")]
    hidden = [model.model(row).last_hidden_state[0, -1] for row in ids]
    assert scores == pytest.approx([model.score(h).item() for h in hidden], abs=1e-6) and scores[0] != scores[1]


def test_chat_template_wraps_the_prompt():
    tokenizer = ppo.make_tiny_tokenizer()
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<me>{% endif %}"
    assert tokenizer.decode(ppo.encode_prompts(tokenizer, ["hi"], True)[0]) == "<user>hi</><me>"
    assert tokenizer.decode(ppo.encode_prompts(tokenizer, ["hi"], False)[0]) == "hi"
