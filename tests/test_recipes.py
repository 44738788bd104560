"""The recipes of docs/ppo.md run as they are typed, and do what the page says."""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT

import ppo

SMALL = dict(num_iterations=2, batch_size=8, sft_steps=2, eval_size=4, device="cpu")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """An empty folder, in which a call writes a code block of the page to the file that the block names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo.Run, "finish", lambda self, *panels: None)

    def write(name):
        page = (ROOT / "docs" / "ppo.md").read_text(encoding="utf-8")
        block = re.search(rf"^```python\n(# {name}\n.*?)^```$", page, re.S | re.M)[1]
        Path(name).write_text(block, encoding="utf-8")

    return write


def save_reward_model(folder, num_labels):
    tokenizer = ppo.make_tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=num_labels,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model, tokenizer


def test_a_reward_model_scores_each_response_as_if_it_were_alone(recipe):
    recipe("reward_model.py")
    model, tokenizer = save_reward_model("FOLDER", num_labels=1)
    prompts, responses = ["312=", "9071=", "5="], ["123", "0", "5555555"]
    expected = []
    for prompt, response in zip(prompts, responses, strict=True):
        text = tokenizer(prompt + response, return_tensors="pt")
        expected.append(model(**text).logits.item())
    score = runpy.run_path("reward_model.py")["score"]
    assert score(prompts, responses, ["123", "0179", "5"]) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 3

    sampled = []
    add_advantages = ppo.add_advantages
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ppo, "add_advantages", lambda *args: (sampled.append(args[0]), add_advantages(*args))
        )
        ppo.main(ppo.Args(**SMALL, reward_fn="reward_model.py:score", run_dir="run"))
    text = tokenizer.batch_decode(
        [
            torch.cat([prompt[keep == 1], response[mask == 1]])
            for prompt, keep, response, mask in zip(
                sampled[0]["prompt_ids"],
                sampled[0]["prompt_mask"],
                sampled[0]["response_ids"],
                sampled[0]["response_mask"],
                strict=True,
            )
        ]
    )
    texts = [words.removesuffix("<eos>") for words in text]
    expected = [model(**tokenizer(words, return_tensors="pt")).logits.item() for words in texts]
    assert sampled[0]["scores"].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_with_two_labels_is_refused(recipe):
    recipe("reward_model.py")
    save_reward_model("FOLDER", num_labels=2)
    with pytest.raises(RuntimeError, match="size mismatch|mismatched"):
        runpy.run_path("reward_model.py")


def test_reasoning_gym(recipe):
    pytest.importorskip("reasoning_gym")
    recipe("sums.py")
    runpy.run_path("sums.py", run_name="__main__")
    pairs = ppo.read_pairs("sums.jsonl")
    assert len(pairs) > 1000
    prompts = [prompt for prompt, _ in pairs[:3]]
    right = [answer for _, answer in pairs[:3]]
    score = runpy.run_path("sums.py")["score"]
    assert score(prompts, [f" {answer}\n" for answer in right], right) == [1.0] * 3
    assert max(score(prompts, [answer + "1" for answer in right], right)) < 1.0
    assert max(score(prompts, ["no idea"] * 3, right)) == 0.0
    task = dict(task="jsonl:sums.jsonl", reward_fn="sums.py:score", max_response_length=16)
    metrics = ppo.main(ppo.Args(**SMALL | dict(sft_steps=0), **task, run_dir="run"))
    assert 0 <= metrics["eval/score"] < 0.5


def test_a_critic_of_its_own(recipe, monkeypatch):
    recipe("own_critic.py")
    monkeypatch.setattr(ppo, "PolicyWithValue", ppo.PolicyWithValue)  # put back after the test
    spec = importlib.util.spec_from_file_location("own_critic", "own_critic.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))

    policies, updates = [], []
    update = ppo.update

    def watch(policy, optimizer, batch, args):
        before = {name: x.clone() for name, x in policy.state_dict().items()}
        _, _, values = ppo.logprobs_and_values(policy, batch)
        updates.append((batch["values"], values.detach(), before))
        policies.append(policy)
        return update(policy, optimizer, batch, args)

    monkeypatch.setattr(ppo, "update", watch)
    ppo.main(ppo.Args(**SMALL, run_dir="run", vf_coef=1.0, num_minibatches=2))
    sampled, trained, before = updates[1]
    assert sampled.abs().max() > 1e-4  # the critic has learned something by now
    assert torch.allclose(sampled, trained, atol=1e-5)  # two caches, reordered alike
    after = policies[1].state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert "critic.value_head.weight" in moved and "critic.lm.lm_head.weight" not in moved
    assert any(name.startswith("critic.lm.model.layers") for name in moved)
    assert any(name.startswith("lm.model.layers") for name in moved)
    assert "value_head.weight" not in moved  # the head on the policy's model is idle
    model = transformers.AutoModelForCausalLM.from_pretrained("run/final_model")
    assert sum(x.numel() for x in model.parameters()) < 200_000  # the policy only
