"""Tasks, held-out prompts, and where scores come from."""

import json
import sys

import pytest
import torch
from conftest import run, spy

import ppo
import ppo_v1

TOKENIZER = ppo.make_tiny_tokenizer()


def test_sort_asks_for_sorted_lists_and_holds_the_same_prompts_out_for_every_seed():
    train, held_out, verifier = ppo.make_task(ppo.Args(min_digits=2, max_digits=4))
    assert {len(answer) for _, answer in train} == {2, 3, 4}
    assert all(prompt == question + "=" and sorted(question) == list(answer)
               for prompt, answer in train for question in [prompt[:-1]])  # fmt: skip
    assert len(held_out) == 256 and not {prompt for prompt, _ in train} & {
        prompt for prompt, _ in held_out
    }
    assert ppo.make_task(ppo.Args(min_digits=2, max_digits=4, seed=7))[1] == held_out
    assert verifier(["21="] * 3, ["12", "21", "012"], ["12"] * 3) == [1, 0, 0]


def test_at_most_a_tenth_of_the_distinct_prompts_is_held_out():
    """Of the 100 lists of two digits ten are held out, however often each of them occurs."""
    train, held_out, _ = ppo.make_task(ppo.Args(min_digits=2, max_digits=2))
    assert len(held_out) == len(dict(held_out)) == 10 and len(dict(train)) == 90
    assert len(train) > 17_000


def test_the_warm_start_teaches_the_form_and_not_the_order():
    """After it answers are permutations of the question's digits, and most are not sorted."""
    torch.manual_seed(0)
    args = ppo.Args(min_digits=2, max_digits=2, sft_steps=60)
    lm, tokenizer, eos_ids = ppo.load_lm(args)
    train, held_out, verifier = ppo.make_task(args)
    with pytest.MonkeyPatch.context() as patch:
        calls = spy(patch, tokenizer.__class__, "__call__")
        ppo.warm_start(lm, train, tokenizer, args)
    halves = [
        text.removesuffix("<eos>").split("=") for (_, texts, *_), _ in calls for text in texts
    ]
    assert len(halves) == 60 * 64 and all(
        sorted(question) == sorted(answer) for question, answer in halves
    )
    in_order = [answer == "".join(sorted(answer)) for _, answer in halves if len(set(answer)) == 2]
    assert sum(in_order) / len(in_order) == pytest.approx(0.5, abs=0.05)
    rows = ppo.rollout(ppo.PolicyWithValue(lm, eos_ids, 1.0), held_out, tokenizer, verifier, args)
    assert rows["ended"].mean() > 0.9 and rows["response_mask"].sum(
        1
    ).float().mean() == pytest.approx(3, abs=0.3)


def write(folder, *rows):
    """A line separator inside a string, carriage returns between lines."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "data.jsonl").write_text("\r\n".join(lines), encoding="utf-8", newline="")
    return str(folder / "data.jsonl")


def test_jsonl_columns_and_split(tmp_path):
    rows = [{"prompt": f"p\u2028{i}", "answer": i} for i in range(10)] + ["", "   "]
    rows += [{"question": f"q{i}", "answer": f"so #### {i}"} for i in range(10)]
    rows += [
        {"problem": f"r{i}", "solution": f"2 gives \\boxed{{2}}, so \\boxed{{{i}}}."}
        for i in range(10)
    ] + [""]
    train, held_out, _ = ppo.make_task(ppo.Args(task=f"jsonl:{write(tmp_path, *rows)}"))
    assert len(held_out) == 3 and len(train) == 27
    assert {prompt for prompt, _ in train + held_out} == {
        f"{c}{i}" for c in ("p\u2028", "q", "r") for i in range(10)
    }
    assert all(answer == prompt[-1] for prompt, answer in train + held_out)


def test_every_prompt_comes_once_per_pass_in_a_new_order(tmp_path, monkeypatch):
    path = write(tmp_path, *[{"prompt": f"p{i}", "answer": i} for i in range(10)])
    calls, options = (
        spy(monkeypatch, ppo, "rollout"),
        dict(batch_size=9, num_minibatches=1, num_iterations=2),
    )
    run(ppo, tmp_path / "run", task=f"jsonl:{path}", **options, eval_every=9)
    start, first, second, _ = ([prompt for prompt, _ in args[1]] for args, _ in calls)
    assert (
        sorted(first) == sorted(second) == sorted({f"p{i}" for i in range(10)} - set(start))
        and first != second
    )


@pytest.mark.parametrize(
    "bad",
    [
        '{"prompt": "b"',
        '{"prompt": "b", "reply": 1}',
        '{"prompt": "b", "answer": null}',
        '{"prompt": [{"role": "user", "content": "b"}], "answer": 1}',
        "[1, 2]",
        "7",
        "\udcff",
    ],
)
def test_jsonl_errors_name_the_line(bad, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n' + bad, errors="surrogateescape")
    with pytest.raises(
        SystemExit,
        match=r"data.jsonl, line 3: must be a JSON object with prompt \(question, problem\) and answer \(solution\)$",
    ):
        run(ppo, tmp_path / "run", task=f"jsonl:{path}")
    assert not (tmp_path / "run").exists()


def test_long_prompts_are_left_out_and_too_few_are_refused(tmp_path, capsys):
    pairs = [("x" * n, "1") for n in (1, 2, 3, 900)]
    assert ppo_v1.drop_long_prompts(pairs, TOKENIZER, ppo_v1.Args()) == pairs
    short = ppo_v1.drop_long_prompts(pairs, TOKENIZER, ppo_v1.Args(max_prompt_length=3))
    assert short == pairs[:3] and "left out 1 prompts" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no prompt is left for training, or none for"):
        ppo_v1.drop_long_prompts(pairs[3:], TOKENIZER, ppo_v1.Args(max_prompt_length=3))
    path = write(tmp_path, {"prompt": "x", "answer": 1})
    with pytest.raises(SystemExit, match="at least two different prompts are needed"):
        ppo.make_task(ppo.Args(task=f"jsonl:{path}"))


@pytest.mark.parametrize(
    "response, answer, score",
    [
        ("72", "72", 1), ("The answer is 72.", "72", 1), ("so 1,072", "1072", 1), ("72 apples, 3 pears", "72", 0),
        (r"\boxed{x+1}", "x+1", 1), ("#### -4", "-4", 1), ("Paris", "Paris", 1), ("paris is it", "Paris", 0),
        ("", "5", 0), ("0.50", ".5", 1), (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1), (r"\boxed{\frac{1}{2}}", "2", 0), ("10^{3}", "3", 0),
        ("7 + 12 = 19", "19", 1), ("**72**", "72", 1), ("$72.50", "72.5", 1), (".50", "0.5", 1),
        ("2 gives 10^{3}", "2", 0), ("Answer:72", "72", 1), (r"\boxed{10,\!000}", "10000", 1),
        (r"72\text{ cm}", "72", 1), (r"\boxed{10,000}", r"10,\!000", 1), ("50%", r"50\%", 1), ("18", r"\$18", 1),
        (r"\boxed{72}", r"72\text{ cm}", 1), (r"\boxed{x + 3}", "3", 0), (r"\boxed{- 3}", "3", 0),
        (r"\boxed{- 3}", "-3", 1), (r"\boxed{5 \pi}", "5", 0), (r"\boxed{3\text{ or }4}", "34", 0),
        (r"\boxed{x = 3}", "3", 1), ("2*36", "236", 0), (r"\boxed{\text{yes}}", r"\text{no}", 0),
    ],
)  # fmt: skip
def test_verify(response, answer, score):
    assert ppo.verify(response, answer) == score


def scores_of(scorer=None, **options):
    """Scores of sampled answers of the untrained tiny model, of which some end in time and some do not."""
    args = ppo.Args(**options, max_response_length=30)
    torch.manual_seed(0)
    lm, tokenizer, eos_ids = ppo.load_lm(args)
    policy = ppo.PolicyWithValue(lm, eos_ids, 1.0)
    rows = ppo.rollout(policy, [("21=", "12")] * 64, tokenizer, scorer, args, torch.rand(64, 30))
    assert 0 < rows["ended"].mean() < 1
    return rows["scores"], rows["ended"]


def test_the_built_in_point_needs_an_ending():
    """A scorer sees prompts, texts without EOS and answers; a reward function decides for itself what an end is."""

    def right(prompts, responses, answers):
        assert prompts == ["21="] * 64 and answers == ["12"] * 64 and len(set(responses)) > 32
        assert all(isinstance(text, str) and "<eos>" not in text for text in responses)
        return [1.0] * 64

    for reward_fn, without_end in ((None, 0), (f"{__file__}:right", 1)):
        scores, ended = scores_of(right, reward_fn=reward_fn)
        assert torch.equal(scores, ended + without_end * (1 - ended))


def test_a_special_token_inside_a_response_is_seen_by_the_scorer(monkeypatch):
    """1 2 <pad> <unk> 3 4 must not become 1234."""
    tokenizer, seen = ppo.make_tiny_tokenizer(), []
    digits = tokenizer("1234").input_ids
    ids = torch.tensor([[*digits[:2], 0, 2, *digits[2:], 1]])
    response = dict(response_ids=ids, response_mask=torch.ones_like(ids))
    monkeypatch.setattr(ppo, "generate", lambda *args: response)
    args = ppo.Args()
    policy = ppo.PolicyWithValue(ppo.make_tiny_lm(tokenizer), torch.tensor([1]), 1.0)
    scorer = lambda prompts, responses, answers: seen.extend(responses) or [0.0]  # noqa: E731
    ppo.rollout(policy, [("4321=", "1234")], tokenizer, scorer, args)
    assert seen == ["12<pad><unk>34"]


@pytest.mark.parametrize("body", ["[0.0] * 3", "[]"])
def test_a_reward_function_with_the_wrong_number_of_scores_ends_with_a_sentence(body, tmp_path):
    (tmp_path / "reward.py").write_text(
        f"def mine(prompts, responses, answers):\n    return {body}\n"
    )
    with pytest.raises(
        SystemExit, match=r"^the reward function returned \d scores for 8 responses"
    ):
        run(ppo_v1, tmp_path / "run", reward_fn=f"{tmp_path / 'reward.py'}:mine")


def test_a_reward_function_that_is_not_there_is_named_before_the_model_is_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ppo, "load_lm", None)
    (tmp_path / "reward.py").write_text("")
    with pytest.raises(KeyError, match="mine"):
        run(ppo, tmp_path / "run", reward_fn=f"{tmp_path / 'reward.py'}:mine")
    with pytest.raises(ValueError, match="--reward-fn absent.py:mine: must be file.py:function"):
        ppo.Args(reward_fn="absent.py:mine")


def test_a_reward_function_may_import_files_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "my_helper.py").write_text("POINTS = 0.5\n")
    lines = (
        "import my_helper\ndef mine(prompts, *_):\n    return [my_helper.POINTS] * len(prompts)\n"
    )
    (tmp_path / "reward.py").write_text(lines)
    _, _, scorer = ppo.make_task(ppo.Args(reward_fn=f"{tmp_path / 'reward.py'}:mine"))
    assert scorer(["a", "b"], ["", ""], ["", ""]) == [0.5, 0.5]


def test_a_run_whose_responses_are_cut_off_says_so(tmp_path, capsys):
    """The default length is that of the built-in task."""
    run(ppo, tmp_path / "run", batch_size=32, sft_steps=0, max_response_length=1)
    assert capsys.readouterr().out.count("over 90 % of responses are cut off") == 1


def test_a_chat_template_wraps_the_prompt():
    tokenizer = ppo.make_tiny_tokenizer()
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}<me>{% endif %}"
    for chat, text in ((True, "<user>hi</><me>"), (False, "hi")):
        assert tokenizer.decode(ppo.encode(tokenizer, ["hi"], chat).input_ids[0]) == text
