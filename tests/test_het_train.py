"""het_grpo.py through main(): what enters the update, plain GRPO against an oracle, resume, ranks, environments."""

import copy
import enum
import json
import math
import os
import signal
import sys
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    assert_nearly_the_same,
    assert_same_run,
    at_call,
    die_while_saving,
    forked,
    metrics_without_times,
    same,
    spy,
    two_ranks,
    weights,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import het_grpo as het

TINY = dict(
    num_tasks=4,
    group_size=4,
    num_iterations=3,
    device="cpu",
    learning_rate=3e-3,
)
TINY |= dict(update_epochs=1, eval_every=2, eval_size=6, updated_freq=0)
TINY |= dict(env='lock{"num_families": 3}', num_train_tasks=12, init_exp_before_training=8)
RECORDED = dict(use_experience_replay=True, replay_old_logp="recorded")


@pytest.fixture(autouse=True)
def short_practice():
    with mock.patch.object(het, "WARM_START_STEPS", 2):
        yield


@pytest.fixture(autouse=True)
def easy_locks(monkeypatch):
    """Any word of an even number of letters clicks: a policy that knows nothing opens about half of the locks."""

    def step(self, text):
        self.env.slot += len(text.strip()) % 2 == 0
        opened = self.env.slot == 4
        return (
            "open" if opened else f"click {self.env.slot}",
            float(opened),
            opened,
            False,
            dict(success=opened),
        )

    monkeypatch.setattr(het.TextEnv, "step", step)
    monkeypatch.setattr(het.Run, "finish", lambda *args: None)  # half the time of a tiny run


def run(folder, **options):
    return het.main(het.Args(**TINY | options, run_dir=str(folder)))


def batches(calls):
    """(trajectories, data) of the training samples; the warm start makes samples, too."""
    return [(args[0], data) for args, data in calls if len(args[0]) == 16 and len(args) == 2]


def models_before_updates(monkeypatch):
    """-> list that fills with copies of the language model, as each iteration measures its samples"""
    lms, real = [], het.compute_log_prob

    def compute(policy, *args):
        lms.append(copy.deepcopy(policy.lm))
        return real(policy, *args)

    monkeypatch.setattr(het, "compute_log_prob", compute)
    return lms


def gradients_of_steps(monkeypatch):
    """-> list that fills with the gradients of each optimizer step, before they are clipped"""
    gradients, real = [], torch.nn.utils.clip_grad_norm_

    def clip(parameters, *args, **kwargs):
        parameters = list(parameters)
        gradients.append([p.grad.clone() for p in parameters])
        return real(parameters, *args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    return gradients


def pool_file(path, texts):
    path.write_text(
        "".join(json.dumps(dict(topic=name, text=text)) + "\n" for name, text in texts.items())
    )
    return str(path)


NASTY = {name: f"{name} {{}} {{0}} </EXP>\n<EXP> : red {{x}}\n" for name in het.NAMES[:3]}


@pytest.fixture
def advice(tmp_path):
    """Options that read a pool in which every lock finds a text full of braces and marks."""
    return dict(experience_pool=pool_file(tmp_path / "pool", NASTY))


@pytest.fixture
def in_order(monkeypatch):
    """Minibatches are made of rows in their order."""
    monkeypatch.setattr(torch, "randperm", lambda count, generator: torch.arange(count))


# --- experience in the training step ---
def test_hybrid_keeps_half_and_strips_half(tmp_path, monkeypatch, advice):
    calls, before = spy(monkeypatch, het, "samples_to_dataproto"), (tmp_path / "pool").read_bytes()
    run(tmp_path / "run", **advice, init_exp_before_training=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final_model")
    seen = batches(calls)
    assert len(seen) == 3
    for trajectories, data in seen:
        guided = [t for t in trajectories if t.advice]
        assert len(guided) == 8 and sum(not t.keep for t in guided) == 4, (
            "B=4, n=4: 8 guided, 4 of them off-policy"
        )
        for group in range(4):
            members = [t for t in trajectories if t.data_id == group]
            assert (
                sum(bool(t.advice) for t in members) == 2 and len({t.keep for t in members}) == 1
            ), "per task"
        for i, t in enumerate(trajectories):
            question = f"lock {het.NAMES[t.task % 3]} room {t.task // 3:02d}"
            told = het.inject_experience(question, NASTY[het.NAMES[t.task % 3]], het.TEMPLATE)
            assert t.prompt_ids == tokenizer(question).input_ids, "strip(inject(p)) = p"
            assert not t.advice or t.advised_ids == tokenizer(told).input_ids
            prompt = t.advised_ids if t.advice and t.keep else t.prompt_ids
            assert data["ids"][i][data["mask"][i].bool()].tolist() == prompt + sum(
                (ids for _, ids in t.steps), []
            )
            trained = data["ids"][i][-data["response_mask"].shape[1] :][
                data["response_mask"][i].bool()
            ].tolist()
            assert trained == [
                token for role, ids in t.steps if role == "assistant" for token in ids
            ]
            assert bool(data["exp_mask"][i].any()) == (bool(t.advice) and not t.keep)
    row = metrics_without_times(tmp_path / "run")[1]
    assert row["exp/off_frac"] == 0.25 and row["exp/retrieval_empty_frac"] == 0
    assert (tmp_path / "pool").read_bytes() == before, "the user's file is read, never written"


def test_the_pool_is_built_from_training_tasks(tmp_path, monkeypatch, advice):
    added = spy(monkeypatch, het.ExperiencePool, "fill_pool")
    options = dict(num_train_tasks=120, eval_size=40, eval_every=1, num_iterations=5)
    run(tmp_path / "run", **advice, **options | dict(updated_freq=2))
    versions = [{t.version for t in args[1]} for args, _ in added]
    assert versions == [{0}, {2}, {4}], "a file does not replace the first round"
    assert {t.task for args, _ in added for t in args[1]} <= set(range(120))
    assert [row["global_step"] for row in metrics_without_times(tmp_path / "run")[:2]] == [32, 48]
    added.clear()
    run(tmp_path / "leak", val_summarizer_save=True, init_exp_before_training=0, **options)
    assert {t.task for args, _ in added for t in args[1]} == set(range(120, 160))


def test_a_pool_that_was_empty_at_first_is_filled_later(tmp_path, capsys, monkeypatch):
    """The default adds notes in every iteration: one empty round is not plain GRPO for good."""
    assert het.Args().updated_freq > 0
    plain = {k: v for k, v in TINY.items() if k != "updated_freq"}
    options = dict(init_exp_before_training=0, num_iterations=4, run_dir=str(tmp_path / "run"))
    metrics = het.main(het.Args(**plain | options))
    assert metrics["exp/pool_size"] > 0 and metrics["exp/retrieval_empty_frac"] < 1
    assert "no training episode got advice" in capsys.readouterr().out, "said in iteration 1"


def test_a_share_that_is_rounded_down_to_no_episode_is_said(tmp_path, capsys):
    """HET would be plain GRPO without a word."""
    run(tmp_path / "run", rollout_expratio=0.1, num_iterations=1)
    assert "no training episode got advice" in capsys.readouterr().out
    run(tmp_path / "off", rollout_expratio=0.0, num_iterations=1)
    assert "no training episode got advice" not in capsys.readouterr().out


def test_guided_success_is_that_of_episodes_with_advice(tmp_path):
    metrics = run(tmp_path / "run", init_exp_before_training=0)
    assert metrics["exp/pool_size"] == 0
    assert "eval/success_guided" not in metrics and "eval/success_unguided" in metrics


@pytest.mark.parametrize("ratio", [0.5, 0.3])
def test_validation_is_guided_and_unguided_apart(ratio, tmp_path, monkeypatch, advice):
    played = spy(monkeypatch, het.Player, "play")
    metrics = run(tmp_path / "run", **advice, eval_size=12, rollout_expratio=ratio)
    done = played[-1][1]
    assert {t.task for t in done} == set(range(12, 24))
    assert sum(bool(t.advice) for t in done) == math.floor(12 * ratio), "the share holds here, too"
    for guided, name in ((False, "unguided"), (True, "guided")):
        found = [t.success for t in done if bool(t.advice) == guided]
        assert metrics[f"eval/success_{name}"] == sum(found) / len(found)
    assert metrics["eval/success_rate"] == metrics["eval/success_unguided"]


def test_stripped_samples(tmp_path, monkeypatch, advice, in_order):
    """Old log-probs are pi(y|x), so the ratio is 1. Failures weigh pi(y|x) / pi(y|x,advice)."""
    samples, losses = (
        spy(monkeypatch, het, name) for name in ("samples_to_dataproto", "grpo_token_losses")
    )
    run(tmp_path / "run", **advice, method="ei", num_minibatches=1, num_iterations=1)
    trajectories, data = batches(samples)[0]
    new_logprobs, minibatch, args = losses[0][0]
    logprobs, advantages = minibatch["old_logprobs"], minibatch["advantages"]
    group, failures = het.group_advantages(data["rewards"], data["group_ids"]).tolist(), 0
    for i, t in enumerate(trajectories):
        trained = data["response_mask"][i].bool()
        sampled = data["sampler_logprobs"][i][trained]
        now = new_logprobs[i][trained].detach()
        expected = torch.full((len(sampled),), group[i])
        torch.testing.assert_close(logprobs[i][trained], now, atol=1e-5, rtol=0)
        if t.advice:
            assert not torch.allclose(now, sampled, atol=1e-4)
            if group[i] < 0:
                expected, failures = expected * (now - sampled).exp().clamp(max=1), failures + 1
        torch.testing.assert_close(advantages[i][trained], expected, atol=1e-5, rtol=1e-4)
    assert args.off_cliprange_high == 0.6 and failures > 0


def test_sft_is_cross_entropy_on_successes(tmp_path, monkeypatch, advice, in_order):
    """The update of one iteration, written again: mean log-prob of the agent's tokens in what was drawn."""
    samples, losses = (
        spy(monkeypatch, het, name) for name in ("samples_to_dataproto", "minibatch_loss")
    )
    run(tmp_path / "run", method="sft", num_minibatches=1, **advice)
    views = set()
    for (trajectories, data), ((policy, mb, *_), (loss, *_)) in zip(
        batches(samples), losses, strict=True
    ):
        assert (
            all(t.success for t in trajectories)
            and data["response_mask"].sum() == mb["response_mask"].sum()
        )
        mask = mb["response_mask"].bool()
        assert loss.item() == pytest.approx(-mb["old_logprobs"][mask].mean().item(), abs=1e-5)
        views |= {(bool(t.advice), t.keep) for t in trajectories}
    assert len(views) == 4, "guided and not, kept and stripped"


def test_imitation_logs_the_samples_that_it_drew(tmp_path, monkeypatch, advice):
    calls = spy(monkeypatch, het, "samples_to_dataproto")
    run(tmp_path / "run", method="sft", **advice)
    rows = metrics_without_times(tmp_path / "run")[1:]
    for (samples, _), row in zip(batches(calls), rows, strict=True):
        num_stripped = sum(bool(t.advice) and not t.keep for t in samples)
        assert row["exp/off_frac"] == num_stripped / 16
        assert "losses/clipfrac_on" not in row, "cross-entropy has no clip"


def test_imitation_then_grpo(tmp_path, monkeypatch, advice):
    """--imitate-iterations: guided and imitating first, then the method."""
    losses, played = spy(monkeypatch, het, "minibatch_loss"), spy(monkeypatch, het.Player, "play")
    options = dict(method="baseline", imitate_iterations=2, num_iterations=4, num_minibatches=1)
    run(tmp_path / "run", **advice, **options)
    assert [args[3].method for args, _ in losses] == ["sft", "sft", "baseline", "baseline"]
    guided = [sum(t.guided for t in found) for _, found in played if len(found) == 16]
    assert guided == [8, 8, 0, 0]


def test_imitation_keeps_the_typed_share_of_tasks():
    args = het.Args(imitate_iterations=2, train_sample_keepratio=0.25)
    shares = [(args.at(i).method, args.at(i).train_sample_keepratio) for i in (1, 2, 3)]
    assert shares == [("sft", 0.25), ("sft", 0.25), ("het", 0.25)]
    assert het.Args(method="ei", imitate_iterations=2).at(1).train_sample_keepratio == 0.5


def test_the_entropy_bonus_is_part_of_the_loss(tmp_path, monkeypatch, in_order):
    losses = spy(monkeypatch, het, "minibatch_loss")
    options = dict(method="baseline", num_iterations=1, num_minibatches=1)
    for coefficient in (0.0, 0.5):
        run(tmp_path / str(coefficient), ent_coef=coefficient, **options)
    (_, (plain, stats, _)), (_, (with_bonus, *_)) = losses
    assert with_bonus.item() == pytest.approx((plain - 0.5 * stats["entropy"]).item(), abs=1e-6)
    assert not same(weights(tmp_path / "0.0"), weights(tmp_path / "0.5")), "it has a gradient"


def test_each_kind_of_token_gets_its_surrogate(tmp_path, monkeypatch, advice):
    """On-policy, stripped and replayed tokens share one update: the loss by hand, from ratios and masks."""
    losses = spy(monkeypatch, het, "minibatch_loss")
    for name, value in dict(DUAL_CLIP=1.5, CLIP_LOW=0.01, CLIP_HIGH=0.01).items():
        monkeypatch.setattr(het, name, value)
    options = RECORDED | dict(num_minibatches=1, off_cliprange_high=0.02)
    options |= dict(update_epochs=2, learning_rate=1e-2, num_iterations=5)
    run(tmp_path / "run", **advice, **options)
    kinds = torch.zeros(3)
    for (_, mb, *_), (loss, _, logratio) in losses:
        total, replayed = 0.0, mb["replay_mask"].bool()
        assert torch.equal(mb["old_logprobs"][replayed], mb["recorded_old_log_probs"][replayed])
        for place in mb["response_mask"].nonzero().tolist():
            w, a = logratio[*place].exp().item(), mb["advantages"][*place].item()
            kind = int(mb["exp_mask"][*place]) + int(mb["replay_mask"][*place])
            high = 0.02 if kind else 0.01
            value = min(w * a, min(max(w, 0.99), 1 + high) * a)
            value = max(value, 1.5 * a) if a < 0 else value
            total -= value
            kinds[kind] += 1
        assert loss.item() == pytest.approx(total / mb["response_mask"].sum().item(), abs=1e-5)
    assert (kinds > 20).all()


def test_micro_batches_change_nothing(tmp_path, advice):
    for steps in (1, 4):
        run(
            tmp_path / str(steps),
            **advice,
            **RECORDED,
            gradient_accumulation_steps=steps,
            num_iterations=2,
        )
    assert_nearly_the_same(tmp_path / "1", tmp_path / "4")


# --- replay in the training step ---
def test_recorded_log_probs_are_those_of_the_time(tmp_path, monkeypatch, advice):
    """Weights move: replayed tokens carry what was measured when they were sampled, others today's."""
    samples = spy(monkeypatch, het, "samples_to_dataproto")
    replaced = spy(monkeypatch, het, "_replace_recorded_old_log_probs")
    run(tmp_path / "run", num_iterations=5, learning_rate=1e-2, **advice, **RECORDED)
    then, compared = {}, 0
    for (trajectories, _), ((data, old), logprobs) in zip(batches(samples), replaced, strict=True):
        for i, t in enumerate(trajectories):
            mask = data["response_mask"][i].bool()
            assert torch.equal(data["replay_mask"][i].bool(), mask & t.is_experience_replay), (
                "the agent's tokens"
            )
            if t.is_experience_replay:
                assert torch.equal(logprobs[i][mask], then[t.version, t.task, *t.sampler_logprobs])
                compared += not torch.allclose(old[i][mask], logprobs[i][mask], atol=1e-4)
            else:
                assert torch.equal(logprobs[i], old[i])
                then[t.version, t.task, *t.sampler_logprobs] = old[i][mask].clone()
    assert compared > 3


def test_groups_stay_whole_and_replay_is_not_counted(tmp_path, monkeypatch):
    calls, advantages = (
        spy(monkeypatch, het, name) for name in ("samples_to_dataproto", "group_advantages")
    )
    run(tmp_path / "run", num_iterations=6, method="baseline", use_experience_replay=True)
    rows, replays, fresh_in_all = metrics_without_times(tmp_path / "run")[1:], 0, 0
    for (trajectories, _), row, ((rewards, groups, _), result) in zip(
        batches(calls), rows, advantages, strict=True
    ):
        replayed, fresh = (
            [t for t in trajectories if t.is_experience_replay == flag] for flag in (True, False)
        )
        replays, fresh_in_all = replays + len(replayed), fresh_in_all + len(fresh)
        assert row["global_step"] == fresh_in_all and groups.tolist() == [
            i for i in range(4) for _ in range(4)
        ]
        assert [t.data_id for t in trajectories] == groups.tolist() and len(
            {t.task for t in trajectories}
        ) == 4
        assert row["replay/experience_tasks"] == len({t.data_id for t in replayed}) <= 2
        assert row["charts/success_rate"] == sum(t.success for t in fresh) / len(fresh)
        for t, a in zip(trajectories, result, strict=True):
            if t.is_experience_replay:  # a success; in a group with a failure it counts
                assert a > 0 or rewards[groups == t.data_id].min() == 1
    assert replays > 4


def test_todays_log_probs_start_at_ratio_one(tmp_path):
    """recorded: the ratio of a replayed token tells how far the policy has gone; current: it starts at 1."""
    for old, near in (("current", True), ("recorded", False)):
        options = RECORDED | dict(replay_old_logp=old, num_minibatches=1, learning_rate=1e-2)
        run(tmp_path / old, method="baseline", num_iterations=6, **options)
        rows = [row for row in metrics_without_times(tmp_path / old) if "ratio/off_max" in row]
        assert len(rows) > 2 and (max(abs(row["ratio/off_max"] - 1) for row in rows) < 1e-5) == near


def test_members_of_a_group_stand_behind_one_kind_of_prompt(tmp_path, monkeypatch, advice):
    calls = spy(monkeypatch, het, "samples_to_dataproto")
    run(tmp_path / "run", num_iterations=8, **advice, **RECORDED)
    replayed = 0
    for trajectories, _ in batches(calls):
        for group in range(4):
            views = {t.keep for t in trajectories if t.data_id == group and t.advice}
            assert len(views) <= 1
        replayed += sum(t.is_experience_replay and bool(t.advice) for t in trajectories)
    assert replayed > 3


def test_imitation_logs_the_mismatch_of_new_samples_only(tmp_path, advice):
    """After the first iteration its samples may be old, so the difference would be their age."""
    run(tmp_path / "run", method="baseline", imitate_iterations=2, **advice)
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert ["rollout/logprob_mismatch" in row for row in rows] == [True, False, True]


# --- episodes in words ---
def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_episodes_played_again_give_the_reward_that_was_written(tmp_path, monkeypatch, advice):
    monkeypatch.undo()
    monkeypatch.setattr(het.Run, "finish", lambda *args: None)
    run(tmp_path / "run", **advice, max_turns=7)
    rows = read_lines(tmp_path / "run" / "episodes.jsonl")
    assert [row["global_step"] for row in rows] == [32] * 6 + [64] * 6 + [80] * 6
    env = het.TextEnv(het.Args(**TINY))
    for row in rows:
        question, _ = env.reset(row["task"])
        lines = [question]
        for turn in row["turns"]:
            observation, reward, *_ = env.step(turn["action"])
            assert (observation, reward) == (turn["observation"], turn["reward"])
            lines += [f"> {turn['action']}", observation]
        assert row["text"] == "\n".join(lines)
        assert row["reward"] == sum(turn["reward"] for turn in row["turns"])
    kinds = {row["advice"] for row in rows}
    assert "" in kinds and 1 < len(kinds) and kinds <= {"", *NASTY.values()}


def test_a_run_ends_with_an_episode_of_each_kind(tmp_path, capsys, advice):
    run(tmp_path / "run", **advice, num_iterations=1)
    shown = capsys.readouterr().out
    assert shown.count("--- task") == 2 and "advice: none" in shown and "</EXP>" in shown


# --- what is off ---
def test_random_numbers_of_an_environment_do_not_move_those_of_training(tmp_path, monkeypatch):
    """On several ranks each environment runs on one of them, and all must shuffle the batch alike."""
    run(tmp_path / "quiet", init_exp_before_training=0)
    take_turn = het.Player.take_turn

    def noisy(*args):
        torch.rand(3)
        return take_turn(*args)

    monkeypatch.setattr(het.Player, "take_turn", noisy)
    run(tmp_path / "noisy", init_exp_before_training=0)
    assert_same_run(tmp_path / "quiet", tmp_path / "noisy")


def test_everything_off_is_plain_grpo(tmp_path, monkeypatch):
    """Share 0 of a poisoned pool, and a memory of NaNs that is never drawn from, change no number."""
    run(tmp_path / "plain", method="baseline")
    real = het.ExperienceManager.save_trajectories_to_memory

    def poisoned(self, trajectories):
        real(
            self,
            [het.replace(t, old_log_probs=[math.nan] * len(t.old_log_probs)) for t in trajectories],
        )

    monkeypatch.setattr(het.ExperienceManager, "save_trajectories_to_memory", poisoned)
    poison = pool_file(tmp_path / "pool", {name: "poison" for name in het.NAMES[:3]})
    none = dict(rollout_expratio=0.0, val_rollout_expmode="woexp", init_exp_before_training=0)
    none |= dict(updated_freq=0)
    # the pool's words are in the vocabulary: take those of the plain run
    words = het.vocabulary
    monkeypatch.setattr(het, "vocabulary", lambda *inputs: words(*inputs[:2], [], inputs[3]))
    run(tmp_path / "off", experience_pool=poison, exp_ratio=0.0, **none, **RECORDED)
    plain, other = (metrics_without_times(tmp_path / name) for name in ("plain", "off"))
    for row in plain + other:
        for key in [
            k
            for k in row
            if k.startswith("replay/") or k in ("exp/pool_size", "exp/retrieval_empty_frac")
        ]:
            row.pop(key)
    assert plain == other and plain[-1]["losses/grad_norm"] > 0
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "off"))


def test_one_step_against_an_oracle(tmp_path, monkeypatch, in_order):
    """Plain GRPO written again, row by row, without padding: losses, gradients and weights of one iteration."""
    calls, starts = (
        spy(monkeypatch, het, "samples_to_dataproto"),
        models_before_updates(monkeypatch),
    )
    gradients, clip = gradients_of_steps(monkeypatch), torch.nn.utils.clip_grad_norm_
    options = dict(num_iterations=1, update_epochs=2, temperature=0.9, learning_rate=1e-2)
    metrics = run(tmp_path / "run", method="baseline", **options)
    (trajectories, _), lm, theirs = batches(calls)[0], starts[0], list(gradients)

    def logp(t):
        ids = t.prompt_ids + [token for _, part in t.steps for token in part]
        every, place, terms = (
            torch.log_softmax(lm(torch.tensor([ids])).logits[0] / 0.9, -1),
            len(t.prompt_ids),
            [],
        )
        for role, part in t.steps:
            terms += [
                every[place + i - 1][token] for i, token in enumerate(part) if role == "assistant"
            ]
            place += len(part)
        return torch.stack(terms)

    advantages = []
    for t in trajectories:
        rewards = [other.reward for other in trajectories if other.data_id == t.data_id]
        mean = sum(rewards) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
        advantages.append((t.reward - mean) / (std + 1e-6))
    assert any(advantages)
    with torch.no_grad():
        old = [logp(t) for t in trajectories]
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.0)
    mean_loss = 0.0
    for step in range(4):
        total, count = 0.0, 0
        for i in range(8 * (step % 2), 8 * (step % 2) + 8):
            ratio, a = (logp(trajectories[i]) - old[i]).exp(), advantages[i]
            value = torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
            total, count = (
                total + (value.clamp(min=3.0 * a) if a < 0 else value).sum(),
                count + len(ratio),
            )
        optimizer.zero_grad()
        (-total / count).backward()
        for p, gradient in zip(lm.parameters(), theirs[step], strict=True):
            torch.testing.assert_close(p.grad, gradient, atol=5e-6, rtol=2e-3)
        clip(lm.parameters(), 1.0)
        optimizer.step()
        mean_loss -= (total / count).item() / 4
    assert metrics["losses/policy_loss"] == pytest.approx(mean_loss, abs=1e-5) and len(theirs) == 4
    final = weights(tmp_path / "run")
    for key, value in lm.state_dict().items():
        torch.testing.assert_close(value, final[key], atol=5e-4, rtol=1e-3)


def test_validation_changes_nothing_that_training_reads(tmp_path):
    """Nor does the global generator; another seed does."""
    for name, options in dict(a=dict(eval_every=9), b=dict(eval_every=1), c=dict(seed=2)).items():
        torch.rand(3)
        run(
            tmp_path / name, updated_freq=1, num_iterations=4, use_experience_replay=True, **options
        )
    rows = [metrics_without_times(tmp_path / name) for name in "abc"]
    assert "eval/success_guided" in rows[1][2] and "eval/success_guided" not in rows[0][2]
    for row in sum(rows, []):
        for key in [key for key in row if key.startswith("eval/")]:
            row.pop(key)
    assert rows[0] == rows[1] != rows[2]
    states = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in "ab"]
    assert states[0]["state"] == states[1]["state"]


# --- checkpoint ---
LONG = dict(
    num_iterations=6, save_every=1, updated_freq=2, retire_solved=True, use_experience_replay=True
)


def test_killed_runs_end_like_one_never_stopped(tmp_path):
    """Pool, memory, buckets, skip set, latch, place in the pass, reference: a loss of any would show."""
    run(tmp_path / "whole", **LONG)
    killed = tmp_path / "killed"

    def go_on(before, **options):
        before()
        run(killed, **LONG | options, resume=True)

    def interrupted():
        at_call(het, "validate", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))

    for nth, where in ((1, "before"), (2, "after"), (2, "half")):
        (process,) = forked(
            lambda nth=nth, where=where: go_on(
                lambda: die_while_saving("checkpoint.pt", nth, where)
            )
        )
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    (process,) = forked(lambda: go_on(interrupted, save_every=100))
    process.join(60)
    assert process.exitcode == 0, "SIGTERM saves and ends"
    assert torch.load(killed / "checkpoint.pt", weights_only=True)["state"]["iteration"] == 4
    with pytest.raises(SystemExit, match="already exists"):
        run(killed, **LONG)
    run(killed, **LONG, resume=True)
    assert_same_run(tmp_path / "whole", killed)
    episodes = [
        (folder / "episodes.jsonl").read_text(encoding="utf-8")
        for folder in (tmp_path / "whole", killed)
    ]
    assert episodes[0] == episodes[1]
    states = [
        torch.load(folder / "checkpoint.pt", weights_only=True)
        for folder in (tmp_path / "whole", killed)
    ]
    assert states[0]["state"] == states[1]["state"]
    rows = metrics_without_times(killed)
    assert rows[-1]["replay/trajectories"] > 0 and any(
        row.get("replay/experience_tasks") for row in rows
    )
    assert [row["charts/learning_rate"] for row in rows[1:]] == pytest.approx(
        [3e-3 * (1 - i / 6) for i in range(6)]
    )


def resume(monkeypatch, folder, *flags):
    """What the command line with --resume does."""
    command = ["het_grpo.py", "--resume", "--run-dir", str(folder), *flags]
    monkeypatch.setattr(sys, "argv", command)
    return het.main(het.parse_args())


@pytest.mark.parametrize(
    "flags",
    [
        "--max-turns 5",
        "--num-train-tasks 16",
        "--group-size 8",
        "--experience-pool x",
        "--method sft",  # its recorded successes have no log-probs
        "--use-experience-replay",
        "--temperature 0.5",  # of the recorded log-probs
        "--success-reward 2",  # of the recorded successes
    ],
)
def test_resume_refuses_what_the_run_was_built_on(flags, tmp_path, monkeypatch):
    (tmp_path / "x").write_text("")
    run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"cannot change {flags.split()[0]}"):
        resume(monkeypatch, tmp_path / "run", *flags.split())


def test_resume_takes_the_saved_options_and_what_is_typed(tmp_path, monkeypatch, capsys):
    run(tmp_path / "run", train_sample_keepratio=0.25)
    planned = spy(monkeypatch, het, "plan_episodes")
    resume(monkeypatch, tmp_path / "run", "--num-iterations", "4", "--rollout-expratio", "0.25")
    assert [sum(t.guided for t in episodes) for _, episodes in planned] == [4]
    assert [len({t.data_id for t in episodes if t.keep}) for _, episodes in planned] == [1]
    changed = [line for line in capsys.readouterr().out.splitlines() if "changed: " in line]
    assert changed == [
        "changed: --num-iterations 3 -> 4",
        "changed: --rollout-expratio 0.5 -> 0.25",
    ]


def test_nan_never_reaches_the_weights(tmp_path, monkeypatch):
    real, calls = het.minibatch_loss, []

    def poisoned(*args):
        calls.append(args)
        loss, *rest = real(*args)
        return loss * (math.nan if len(calls) in (1, 4) else 1.0), *rest

    monkeypatch.setattr(het, "minibatch_loss", poisoned)
    run(tmp_path / "run", method="baseline")
    rows = metrics_without_times(tmp_path / "run")
    assert [row["losses/skipped_steps"] for row in rows[1:]] == [1, 1, 0]
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run").values())
    monkeypatch.setattr(het.TextEnv, "step", lambda self, text: ("open", math.nan, True, False, {}))
    with pytest.raises(SystemExit, match="finite"):
        run(tmp_path / "all", method="baseline")


# --- ranks ---
@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fsdp"])
def test_two_ranks_make_the_update_of_one(fsdp, tmp_path, advice):
    options = dict(
        num_iterations=2, gradient_accumulation_steps=2, learning_rate=1e-3, **advice, **RECORDED
    )
    run(tmp_path / "one", **options)
    assert two_ranks(lambda rank: run(tmp_path / "two", fsdp=fsdp, **options)) == [0, 0]
    assert_nearly_the_same(tmp_path / "one", tmp_path / "two")
    episodes = [
        (tmp_path / name / "episodes.jsonl").read_text(encoding="utf-8") for name in ("one", "two")
    ]
    assert episodes[0] == episodes[1], "written once"
    last = metrics_without_times(tmp_path / "one")[2]
    assert last["replay/experience_tasks"] > 0 and last["exp/off_frac"] > 0
    if fsdp:  # sharded, stopped and resumed
        longer = options | dict(num_iterations=3, resume=True)
        assert two_ranks(lambda rank: run(tmp_path / "two", fsdp=True, **longer)) == [0, 0]
        assert len(metrics_without_times(tmp_path / "two")) == 4


def test_a_rank_without_an_episode_does_not_stop_the_others(tmp_path):
    """One held-out task and two ranks: the second plays nothing, but it has weights to send."""
    options = dict(eval_size=1, num_iterations=1, init_exp_before_training=0, fsdp=True)
    assert two_ranks(lambda rank: run(tmp_path / "two", **options)) == [0, 0]
    assert len(metrics_without_times(tmp_path / "two")) == 2


def test_one_rank_asks_the_summarizer_and_an_error_that_cannot_be_sent_is_counted(tmp_path):
    """An HTTPError holds an open file: it must not travel between processes."""
    (tmp_path / "notes.py").write_text(
        "import os\n\n\ndef fails(episodes, ask):\n"
        "    error = OSError('no network')\n    error.file = open(__file__)\n    raise error\n"
    )
    options = dict(summarizer=f"{tmp_path}/notes.py:fails", updated_freq=1, num_iterations=2)
    assert two_ranks(lambda rank: run(tmp_path / "two", **options)) == [0, 0]
    rows = metrics_without_times(tmp_path / "two")
    assert [row["exp/failed_calls"] for row in rows[1:]] == [2, 3]


def test_failures_of_a_retriever_are_counted_on_all_ranks(tmp_path):
    """It fails on the second rank only, once in an iteration: the questions of a group are asked once."""
    (tmp_path / "find.py").write_text(
        "import os\n\n\ndef find(question, top_k):\n"
        "    return '' if os.environ['RANK'] == '0' else None\n"
    )
    options = dict(retriever=f"{tmp_path}/find.py:find", num_iterations=2, eval_size=1)
    assert two_ranks(lambda rank: run(tmp_path / "two", **options)) == [0, 0]
    first, second = metrics_without_times(tmp_path / "two")[1:]
    assert 0 < first["exp/failed_calls"] < second["exp/failed_calls"]
    longer = options | dict(num_iterations=3)
    assert two_ranks(lambda rank: run(tmp_path / "two", **longer, resume=True)) == [0, 0]
    assert two_ranks(lambda rank: run(tmp_path / "whole", **longer)) == [0, 0]
    resumed, whole = (metrics_without_times(tmp_path / name)[3] for name in ("two", "whole"))
    assert resumed["exp/failed_calls"] == whole["exp/failed_calls"]


def test_a_retriever_alone_needs_no_notes(tmp_path):
    """Nobody would search them, so no first round is played for them."""
    (tmp_path / "find.py").write_text("def find(question, top_k):\n    return 'red'\n")
    retriever = f"{tmp_path}/find.py:find"
    metrics = run(tmp_path / "run", retriever=retriever, updated_freq=1)
    assert metrics["exp/pool_size"] == 0 and metrics["exp/retrieval_empty_frac"] == 0
    assert metrics["global_step"] == 3 * 16
    (tmp_path / "write.py").write_text("def write(episodes, ask):\n    return [('a', 'b')]\n")
    options = dict(retriever=retriever, summarizer=f"{tmp_path}/write.py:write", num_iterations=1)
    assert run(tmp_path / "both", **options)["exp/pool_size"] == 1


def test_the_size_of_the_pool_is_what_the_episodes_could_read(tmp_path, monkeypatch):
    sizes, real = [], het.Player.play

    def play(self, trajectories, *args):
        sizes.append(len(self.pool.records))
        return real(self, trajectories, *args)

    monkeypatch.setattr(het.Player, "play", play)
    run(tmp_path / "run", updated_freq=1, init_exp_before_training=0, eval_every=100)
    rows = metrics_without_times(tmp_path / "run")
    assert [row["exp/pool_size"] for row in rows] == sizes[:4] and sizes[1] == 0 < sizes[2]
    assert sizes[3] == sizes[4], "the evaluation of an iteration reads the notes of its episodes"


# --- environments ---
def test_what_an_environment_hears_and_says(monkeypatch):
    monkeypatch.undo()
    env = het.TextEnv(het.Args())
    question, info = env.reset(13)
    assert question == "lock brass room 01" and info["topic"] == "brass"
    assert env.reset(1)[1]["solution"] == (secret := info["solution"]) and len(secret) == 4, (
        "a family shares it"
    )
    wrong = next(color for color in env.actions if color != secret[1])
    said = [secret[0], wrong, "sing", f"well, {secret[1].upper()}!", *secret[2:]]
    told = [env.step(text) for text in said]
    replies = [
        "click 1",
        "jam 1",
        "not an action : red green blue gold",
        "click 2",
        "click 3",
        "open",
    ]
    assert [t[0] for t in told] == replies and [t[1] for t in told] == [0, 0, -1, 0, 0, 1]
    assert told[-1][2] and told[-1][4]["experience"] == "brass : " + " ".join(secret)
    assert env.step("sing")[4]["success"], "a last turn without an action keeps the result"
    assert told[-1][4]["success"], "one slip does not undo a solved game"
    assert not any(t[4].get("success") for t in told[:-1])
    secrets = {tuple(env.reset(het.PRACTICE + 12 * i)[1]["solution"]) for i in range(99)}
    assert len(secrets) > 50, "the warm start learns no secret"
    cliff = het.TextEnv(
        het.Args(env="CliffWalking-v1")
    )  # of Gymnasium: actions are said as numbers
    assert list(cliff.actions) == ["0", "1", "2", "3"] and cliff.reset(5)[0] == "36"
    assert cliff.step("0")[:2] == ("24", -1.0) and cliff.step("what")[1] == -1, (
        "nonsense is no way out"
    )


class Odd:
    """An environment of Gymnasium's kinds: a space, NumPy values, an empty observation."""

    def __init__(self, space):
        self.action_space = space

    def reset(self, seed):
        return "", {}

    def step(self, action):
        self.heard = action
        return "", np.float32(0.0), np.bool_(True), False, dict(success=np.bool_(True))


def odd_env(monkeypatch, space):
    monkeypatch.undo()
    monkeypatch.setattr(het, "load_object", lambda place: lambda: Odd(space))
    return het.TextEnv(het.Args(env="some:Odd"))


def test_actions_may_be_negative_numbers(monkeypatch):
    env = odd_env(monkeypatch, gym.spaces.Discrete(3, start=-1))
    env.reset(0)
    assert env.actions == {"-1": -1, "0": 0, "1": 1}
    for text, action in (("-1", -1), ("I take -1.", -1), ("not -1 but 1", 1), ("0", 0)):
        env.step(text)
        assert env.env.heard == action, text
    assert env.step("10")[1] == -1.0, "no action is part of another word"


def test_names_of_actions_may_be_of_any_kind(monkeypatch):
    """MiniGrid has a class of numbers; a language model may write a name in its own case."""
    kinds = enum.IntEnum("Kind", "left right", start=0)
    env = odd_env(monkeypatch, gym.spaces.Discrete(2))
    for actions, text, action in (
        (kinds, "1", 1),
        (["Go", "Go left"], "I go LEFT", 1),
        (["Go", "Go left"], "Gold, left, go!", 0),
    ):
        monkeypatch.setattr(Odd, "actions", actions, raising=False)
        env = het.TextEnv(het.Args(env="some:Odd"))
        env.reset(0)
        env.step(text)
        assert env.env.heard == action, text


def test_what_an_environment_says_can_be_written_as_json(monkeypatch):
    env = odd_env(monkeypatch, gym.spaces.Discrete(2))
    env.reset(0)
    assert json.loads(json.dumps(env.step("1"))) == ["", 0.0, True, False, {"success": True}]


def test_many_small_rewards_reach_the_bar(monkeypatch):
    """Ten times 0.1 is 0.9999999999999999."""
    monkeypatch.undo()
    monkeypatch.setattr(het, "load_object", lambda place: lambda: Odd(None))
    env = het.TextEnv(het.Args(env="some:Odd"))
    env.reset(0)
    ended = [False] * 9 + [True]
    env.env.step = lambda action: ("", 0.1, ended.pop(0), False, {})
    assert [env.step("go")[4]["success"] for _ in range(10)] == [False] * 9 + [True]


def test_a_missing_class_is_named(tmp_path):
    (tmp_path / "empty_game.py").write_text("")
    with pytest.raises(SystemExit, match="there is no Game in"):
        het.TextEnv(het.Args(env=f"{tmp_path}/empty_game.py:Game"))


ENVIRONMENT = """
import sibling

loads = sibling.loaded.append(1)


class Game:
    actions = ("left", "right")

    def __init__(self, size=2):
        self.size = size

    def reset(self, seed):
        sibling.resets.append(seed)
        return f"door {sibling.words[seed % len(sibling.words)]}", {}

    def step(self, action):
        return "the end", 0.0, True, False, dict(success=self.size == 5)
"""


def environment(folder, monkeypatch, words):
    monkeypatch.undo()
    monkeypatch.setattr(het.Run, "finish", lambda *args: None)
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("sibling", "game"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    het.load_file.cache_clear()
    (folder / "sibling.py").write_text(f"loaded = []\nresets = []\nwords = {words!r}\n")
    (folder / "game.py").write_text(ENVIRONMENT)
    return f"{folder / 'game.py'}:Game"


def test_an_environment_file_is_loaded_once_with_its_folder_and_arguments(tmp_path, monkeypatch):
    """A sibling import works, the class gets its arguments, and info["success"] counts."""
    env = environment(tmp_path, monkeypatch, ["oak", "fir"])
    metrics = run(tmp_path / "run", env=env + '{"size": 5}', max_turns=2)
    assert metrics["charts/success_rate"] > 0, "what the environment says, with a reward of 0"
    sibling = sys.modules["sibling"]
    assert sum(sibling.loaded) == 1, "for all of its environments"
    assert run(tmp_path / "small", env=env, max_turns=2)["charts/success_rate"] == 0


def test_a_file_may_have_the_name_of_a_module(tmp_path):
    """import_module("queue") would give the one of the standard library."""
    (tmp_path / "queue.py").write_text("def notes(episodes, ask):\n    return [('a', 'b')]\n")
    pool = het.ExperiencePool(het.Args(summarizer=f"{tmp_path}/queue.py:notes"))
    pool.fill_pool([])
    assert pool.records == [dict(topic="a", text="b")]


def test_a_model_of_ones_own_is_not_practised_with(chat_model, tmp_path, monkeypatch):
    """Every reset is one of an episode: held-out tasks are played in evaluations only."""
    env = environment(tmp_path, monkeypatch, ["oak", "fir"])
    options = dict(model_name=chat_model, max_turns=1, num_iterations=1, eval_every=9)
    run(tmp_path / "run", env=env, **options, init_exp_before_training=0)
    resets = sys.modules["sibling"].resets
    assert len(resets) == 6 + 16 + 6 and max(resets) < 12 + 6


def test_a_word_that_the_tiny_model_does_not_know_is_said(tmp_path, monkeypatch, capsys):
    env = environment(tmp_path, monkeypatch, [f"word{chr(97 + i)}" for i in range(26)])
    monkeypatch.setattr(het, "vocabulary", lambda *inputs: ["door", "left", "right"])
    run(tmp_path / "run", env=env, max_turns=1)
    assert "the model reads <unk> in 'door word" in capsys.readouterr().out


def test_success_needs_an_end(tmp_path, monkeypatch):
    """A game whose steps are worth nothing is not won by saying nothing until the turns are over."""
    monkeypatch.setattr(het.TextEnv, "step", lambda self, text: ("more", 0.0, False, False, {}))
    assert run(tmp_path / "run", success_reward=0.0, method="baseline")["charts/success_rate"] == 0


@pytest.fixture
def chat_model(tmp_path):
    """A tiny model folder with a chat template, one token per character, EOS and turn marks of its own."""
    vocab = ["<pad>", "<|im_end|>", "<|im_start|>", "<unk>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = dict(pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    ids = dict(eos_token_id=1, pad_token_id=0, bos_token_id=None)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_chat_turns_are_those_of_the_template(chat_model, tmp_path, monkeypatch):
    calls = spy(monkeypatch, het, "samples_to_dataproto")
    options = dict(
        model_name=chat_model, chat_template=True, max_turns=3, max_turn_tokens=4, temperature=0.7
    )
    metrics = run(tmp_path / "run", **options, num_iterations=1, init_exp_before_training=0)
    assert metrics["rollout/logprob_mismatch"] < 1e-5
    tokenizer = het.transformers.AutoTokenizer.from_pretrained(chat_model)
    trajectories, data = batches(calls)[0]
    forced, start, end = 0, "<|im_start|>", "<|im_end|>"
    for i, t in enumerate(trajectories):
        text = lambda ids: "".join(tokenizer.convert_ids_to_tokens(ids))  # noqa: E731
        assert text(t.prompt_ids).startswith(f"{start}user\nlock ")
        assert text(t.prompt_ids).endswith(f"{end}\n{start}assistant\n")
        for (role, ids), (_, after) in zip(t.steps, t.steps[1:], strict=False):
            if (
                role == "assistant"
            ):  # an end that was not sampled belongs to the environment: no loss
                forced += ids[-1] != 1
                first = end if ids[-1] != 1 else ""
                assert text(after).startswith(f"{first}\n{start}user\n")
                assert (
                    text(after).endswith(f"{end}\n{start}assistant\n")
                    and text(after).count(start) == 2
                )
        num_sampled = sum(len(ids) for role, ids in t.steps if role == "assistant")
        assert int(data["response_mask"][i].sum()) == num_sampled
    assert forced > 0


def test_without_a_template_an_answer_stands_right_behind_question_and_observation(chat_model):
    """What goes on from "First key:" has to go on from "Second key:"; a line break after one is another text."""
    tokenizer = het.transformers.AutoTokenizer.from_pretrained(chat_model)
    dialogue = het.Dialogue(tokenizer, het.Args(), torch.tensor([1]))
    text = lambda ids: "".join(tokenizer.convert_ids_to_tokens(ids))  # noqa: E731
    assert text(dialogue.prompt("First key:")) == "First key:"
    assert text(dialogue.reply("Second key:", [7])) == "\nSecond key:"


def test_an_observation_may_be_empty():
    tokenizer = het.make_word_tokenizer(["red"])
    dialogue = het.Dialogue(tokenizer, het.Args(), torch.tensor([1]))
    assert dialogue.reply("", [1]) == []


def test_a_system_prompt_may_have_any_marks(chat_model):
    tokenizer = het.transformers.AutoTokenizer.from_pretrained(chat_model)
    replies = []
    for prompt in ("", "Mail a@@b @@@@ c"):
        options = dict(model_name=chat_model, chat_template=True, max_turn_tokens=4)
        args = het.Args(**options, system_prompt=prompt)
        dialogue = het.Dialogue(tokenizer, args, torch.tensor([1]))
        replies.append(dialogue.reply("go @@ on", [7]))
    assert replies[0] == replies[1]


def test_a_row_does_not_depend_on_its_neighbours():
    args = het.Args(**TINY)
    envs = [het.TextEnv(args) for _ in range(6)]
    words = het.vocabulary(envs[0], [0, 1, 2], [], args)
    lm, tokenizer, eos_ids = het.load_agent(args, words)
    policy, dialogue = het.Policy(lm, eos_ids, 1.0), het.Dialogue(tokenizer, args, eos_ids)
    pool = het.ExperiencePool(args)
    pool.add("amber", "amber : red")
    player = het.Player(policy, dialogue, envs, pool, args)
    uniforms = torch.rand(6, 1, 7, generator=torch.Generator().manual_seed(0))

    def play(rows):
        games = [het.Trajectory(i, data_id=i, guided=True) for i in rows]
        player.play_part(games, uniforms)
        return games

    together = play(list(range(6)))
    assert [bool(t.advice) for t in together] == [True, False, False] * 2
    for i in range(6):
        alone = play([i])[0]
        assert alone.steps == together[i].steps
        assert alone.sampler_logprobs == pytest.approx(together[i].sampler_logprobs, abs=1e-5)


def test_the_command_fills_the_run_folder(run_script, tmp_path):
    flags = [
        word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    done = run_script("het_grpo.py", *flags, "--run-dir", "out", "--use-experience-replay")
    assert done.returncode == 0, done.stderr
    assert "[3/3]" in done.stdout
    files = "args.json metrics.jsonl summary.json curves.png checkpoint.pt episodes.jsonl final_model".split()
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(files)
