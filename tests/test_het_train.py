"""het_grpo.py through main(): what enters the update, plain GRPO against an oracle, resume, ranks, environments."""

import copy
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import sys

import pytest
import torch
from conftest import ROOT, metrics_without_times
from test_equivalence import assert_same_run, weights
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import het_grpo as het

fork = multiprocessing.get_context("fork")  # children start with torch imported
TINY = dict(hidden_size=16, num_layers=1, warm_start_steps=2, num_tasks=4, group_size=4, num_iterations=3, device="cpu")
TINY |= dict(num_families=3, num_rooms=4, init_exp_tasks=8, eval_every=2, eval_size=6, learning_rate=3e-3)
REPLAY = dict(use_experience_replay=True, replay_start="progress", replay_start_ratio=0.0)
REPLAY |= dict(replay_loss="shape", replay_old_logp="recorded", experience_lbound=0, bucket_weights="normal")


@pytest.fixture(autouse=True)
def easy_locks(monkeypatch):
    """Any word of an even number of letters clicks: a policy that knows nothing opens about half of the locks."""

    def step(self, action):
        if len(action.strip()) % 2:
            return f"jam {self.slot}", 0.0, False
        self.slot += 1
        return ("open", 1.0, True) if self.slot == 4 else (f"click {self.slot}", 0.0, False)

    monkeypatch.setattr(het.LockEnv, "step", step)
    monkeypatch.setattr(het, "plot_curves", lambda *args: None)  # half the time of a tiny run; test_command_line draws


def run(folder, **options):
    return het.main(het.Args(**TINY | options, run_dir=str(folder)))


def record(monkeypatch, name):
    """Calls of a function of the script: [(args, kwargs, result), ...]"""
    calls, real = [], getattr(het, name)

    def wrapped(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append((args, kwargs, result))
        return result

    monkeypatch.setattr(het, name, wrapped)
    return calls


def freeze(monkeypatch):
    """Optimizer steps that leave the weights alone, warm start included."""
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: None)


def pool_file(path, texts):
    lines = [dict(task_id=f"{name}/0", topic=name, text=text) for name, text in texts.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


NASTY = {name: f"{name} {{}} {{0}} </EXP>\n<EXP> : red {{x}}\n" for name in het.NAMES[:3]}


# --- experience in the training step ---
def batches(calls):
    """(trajectories, data) of the training samples; warm start and replay checks make samples, too."""
    return [(a[0], data) for a, k, data in calls if a[0][0].trajectory_id[:1].isdigit() and len(a[0]) == 16 and not k]


def test_hybrid_keeps_half_and_strips_half(tmp_path, monkeypatch):
    calls = record(monkeypatch, "samples_to_dataproto")
    run(tmp_path / "run", experience_pool=pool_file(tmp_path / "pool", NASTY))
    seen = batches(calls)
    assert len(seen) == 3
    tokenizer = het.load_agent(het.Args(**TINY), het.make_lock_world(het.Args(**TINY)))[1]
    for trajectories, data in seen:
        guided = [t for t in trajectories if t.injected]
        assert len(guided) == 8 and sum(not t.keep for t in guided) == 4, "B=4, n=4: 8 guided, 4 of them off-policy"
        assert int(data["exp_mask"].any(1).sum()) == 4 and int(data["replay_mask"].sum()) == 0
        assert {sum(t.injected for t in trajectories if t.data_id == i) for i in range(4)} == {2}
        for i in range(4):
            assert len({t.keep for t in trajectories if t.data_id == i}) == 1, "decided per task"
        for i, t in enumerate(trajectories):
            name, room = t.task_id.split("/")
            query = tokenizer(f"lock {name} room {int(room):02d}").input_ids
            assert t.prompt_ids == query, "strip(inject(p)) = p"
            text = het.inject_experience(
                f"lock {name} room {int(room):02d}", NASTY[name], het.Args().experience_template
            )
            assert t.rollout_prompt_ids == (tokenizer(text).input_ids if t.injected else query)
            row = data["prompt_ids"][i][data["prompt_mask"][i].bool()].tolist()
            assert row == (t.rollout_prompt_ids if t.injected and t.keep else query)
            response = data["response_ids"][i][data["response_mask"][i].bool()].tolist()
            assert response == [token for _, ids in t.steps for token in ids]
            trained = data["response_ids"][i][data["loss_mask"][i].bool()].tolist()
            assert trained == [token for role, ids in t.steps if role == "assistant" for token in ids]
            assert bool(data["exp_mask"][i].any()) == (t.injected and not t.keep)
    row = metrics_without_times(tmp_path / "run")[1]
    assert row["exp/off_frac"] == 0.25 and row["exp/kept_tasks"] == row["exp/stripped_tasks"] == 2


@pytest.mark.parametrize("method, kept, stripped", [("ec", 4, 0), ("ei", 0, 4), ("het", 2, 2), ("baseline", 0, 0)])
def test_methods(method, kept, stripped, tmp_path):
    run(tmp_path / "run", method=method, experience_pool=pool_file(tmp_path / "pool", NASTY))
    for row in metrics_without_times(tmp_path / "run")[1:]:
        assert (row["exp/kept_tasks"], row["exp/stripped_tasks"]) == (kept, stripped)
        assert row["exp/off_frac"] == stripped * 2 / 16
        assert ("success/guided" in row) == (method != "baseline") == ("ratio/off_max" in row or method == "ec")
        assert row["losses/first_ratio_error"] < 1e-5


def test_empty_retrieval_is_on_policy(tmp_path):
    run(tmp_path / "run", method="ei", init_exp_before_training=False)
    for row in metrics_without_times(tmp_path / "run")[1:]:
        assert row["exp/off_frac"] == 0 and row["exp/retrieval_empty_frac"] == 1 and "success/guided" not in row


def test_the_pool_is_built_from_training_tasks(tmp_path):
    path = tmp_path / "pool"
    run(tmp_path / "run", experience_pool=str(path), updated_freq=1, num_rooms=40)
    args = het.Args(**TINY | dict(num_rooms=40))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {r["task_id"] for r in records} <= {t.task_id for t in het.make_lock_world(args).train}
    rows = metrics_without_times(tmp_path / "run")
    assert rows[0]["exp/pool_size"] > 0 and rows[0]["global_step"] == 32 and rows[1]["global_step"] == 48


def test_validation_successes_enter_only_on_demand(tmp_path, capsys):
    path, options = tmp_path / "pool", dict(init_exp_before_training=False, eval_every=1)
    run(tmp_path / "a", experience_pool=str(path), **options)
    assert path.read_text() == ""
    monkey = pytest.MonkeyPatch()
    monkey.setattr(het.LockEnv, "step", lambda self, action: ("open", 1.0, True))
    run(tmp_path / "b", experience_pool=str(path), val_summarizer_save=True, **options)
    monkey.undo()
    validation = {t.task_id for t in het.make_lock_world(het.Args(**TINY)).validation}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert (
        records and {r["task_id"] for r in records} <= validation and "--val-summarizer-save" in capsys.readouterr().out
    )


def test_a_pool_file_with_a_validation_task_is_refused(tmp_path, capsys):
    task = het.make_lock_world(het.Args(**TINY)).validation[0]
    path = tmp_path / "pool"
    path.write_text(json.dumps(dict(task_id=task.task_id, topic=task.topic, text="x")) + "\n")
    fails(capsys, lambda: run(tmp_path / "run", experience_pool=str(path)), "line 1", f"validation task {task.task_id}")
    assert not (tmp_path / "run").exists()
    run(tmp_path / "leak", experience_pool=str(path), val_summarizer_save=True)


def test_validation_is_guided_and_unguided_apart(tmp_path, monkeypatch):
    collected = record(monkeypatch, "collect")
    metrics = run(tmp_path / "run", experience_pool=pool_file(tmp_path / "pool", NASTY))
    _, jobs, *_ = collected[-1][0]
    done = collected[-1][2]
    assert [bool(job.experience) for job in jobs] == [False, True] * 6, "every held-out task both ways"
    for guided, name in ((False, "unguided"), (True, "guided")):
        found = [t.success for t in done if t.injected == guided]
        assert metrics[f"eval/success_{name}"] == sum(found) / 6 and len(found) == 6
    assert metrics["eval/success_rate"] == metrics["eval/success_unguided"]


def test_tokens_that_were_not_sampled_carry_no_loss(tmp_path, monkeypatch):
    """Two-token turns: EOS is sampled or not; the environment's words never train."""
    calls = record(monkeypatch, "samples_to_dataproto")
    run(tmp_path / "run", max_turn_tokens=2, warm_start_steps=20)
    for trajectories, data in batches(calls):
        for i, t in enumerate(trajectories):
            assert int(data["loss_mask"][i].sum()) == len(t.sampler_logprobs) <= 2 * 7
    rows = metrics_without_times(tmp_path / "run")
    assert all(row["rollout/logprob_mismatch"] < 1e-5 for row in rows[1:]), "sampler and trainer see the same"


def test_temperature_is_one_for_sampling_and_training(tmp_path):
    run(tmp_path / "run", temperature=0.7)
    assert all(row["rollout/logprob_mismatch"] < 1e-5 for row in metrics_without_times(tmp_path / "run")[1:])


@pytest.mark.parametrize("old", ["stripped", "behavior"])
def test_old_log_probs_of_stripped_samples(old, tmp_path, monkeypatch):
    """stripped: pi_old(y|x), ratio 1 at first; behavior: what the sampler had, experience in sight."""
    samples, losses = record(monkeypatch, "samples_to_dataproto"), record(monkeypatch, "policy_loss")
    path = pool_file(tmp_path / "pool", NASTY)
    options = dict(method="ei", off_old_logp=old, num_minibatches=1, num_iterations=1)
    run(tmp_path / "run", experience_pool=path, **options)
    trajectories, data = batches(samples)[0]
    logprobs = losses[0][0][1]  # in the order of the shuffle
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    new_logprobs = losses[0][0][0]
    for place, i in enumerate(order.tolist()):
        t, trained = trajectories[i], data["loss_mask"][i].bool()
        sampled, used = torch.tensor(t.sampler_logprobs), logprobs[place][trained]
        now = new_logprobs[place][trained].detach()
        if t.injected and old == "stripped":
            assert not torch.allclose(used, sampled, atol=1e-4)
            torch.testing.assert_close(used, now, atol=1e-5, rtol=0)
        else:
            torch.testing.assert_close(used, sampled, atol=1e-5, rtol=0)


def test_truncated_importance_weights(tmp_path, monkeypatch):
    """tis: a stripped token weighs min(pi_old(y|x) / pi_old(y|x,e), cap), the denominator being what was sampled."""
    samples, losses = record(monkeypatch, "samples_to_dataproto"), record(monkeypatch, "policy_loss")
    options = dict(method="ei", off_policy_loss="tis", tis_cap=1.01, num_minibatches=1, num_iterations=1)
    run(tmp_path / "run", experience_pool=pool_file(tmp_path / "pool", NASTY), **options)
    trajectories, data = batches(samples)[0]
    logprobs, weights_of = losses[1][0][1], losses[1][0][4]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    found = []
    for place, i in enumerate(order.tolist()):
        t, trained = trajectories[i], data["loss_mask"][i].bool()
        w = (logprobs[place][trained] - torch.tensor(t.sampler_logprobs)).exp().clamp(max=1.01) * t.injected
        torch.testing.assert_close(weights_of[place][trained], w, atol=1e-4, rtol=0)
        found += w.tolist() if t.injected else []
    assert min(found) < 0.99 and max(found) == pytest.approx(1.01)


def test_variants_of_the_off_policy_loss_do_something(tmp_path):
    finals = {}
    variants = dict(clip={}, shape=dict(off_policy_loss="shape"), tis=dict(off_policy_loss="tis"))
    variants |= dict(
        behavior=dict(off_old_logp="behavior"), mask=dict(off_policy_neg="mask"), kl=dict(kl_loss_coef=0.1)
    )
    for name, options in variants.items():
        path = pool_file(tmp_path / "pool", NASTY)
        metrics = run(tmp_path / name, method="ei", num_iterations=2, experience_pool=path, **options)
        assert all(math.isfinite(value) for value in metrics.values())
        finals[name] = weights(tmp_path / name)["lm_head.weight"]
    names = list(finals)
    different = [not torch.equal(finals[a], finals[b]) for i, a in enumerate(names) for b in names[:i]]
    assert all(different)


def test_masked_negatives_leave_loss_and_count(tmp_path, monkeypatch):
    losses = record(monkeypatch, "policy_loss")
    path = pool_file(tmp_path / "pool", NASTY)
    run(tmp_path / "run", method="ei", off_policy_neg="mask", experience_pool=path, num_iterations=1, num_minibatches=1)
    (_, _, advantages, trained, on_weights, num_tokens), _, _ = losses[0]
    off = (1 - on_weights).bool() & trained.bool()
    assert off.any() and (advantages[off] >= 0).all() and num_tokens == trained.sum()


@pytest.mark.parametrize("stripped_loss, replay_loss", [("clip", "shape"), ("shape", "clip")])
def test_each_kind_of_token_gets_its_surrogate(stripped_loss, replay_loss, tmp_path, monkeypatch):
    """On-policy, stripped and replayed tokens share one update; every trained token is in exactly one of the losses."""
    clipped, shaped = record(monkeypatch, "policy_loss"), record(monkeypatch, "shaped_loss")
    samples = record(monkeypatch, "samples_to_dataproto")
    options = dict(
        num_iterations=3, num_minibatches=1, clip_high=0.21, off_cliprange_high=0.77, clip_low=0.1, clip_c=5.0
    )
    options |= REPLAY | dict(off_policy_loss=stripped_loss, replay_loss=replay_loss, shaping_beta=0.3)
    run(tmp_path / "run", experience_pool=pool_file(tmp_path / "pool", NASTY), **options)
    shuffle, kinds = torch.Generator().manual_seed(2), torch.zeros(3)
    for i, (_, data) in enumerate(batches(samples)):
        order = torch.randperm(16, generator=shuffle)
        on, off = clipped[2 * i], clipped[2 * i + 1]
        assert on[1] == dict(clip_high=0.21, clip_low=0.1, clip_c=5.0)
        assert off[1] == dict(clip_high=0.77, clip_low=0.1, clip_c=5.0)
        assert shaped[i][0][6] == 0.3
        mask = data["loss_mask"][order].bool()
        exp, replay = data["exp_mask"][order].bool()[mask], data["replay_mask"][order].bool()[mask]
        weights_of = [call[0][4][mask] for call in (on, off, shaped[i])]
        shapes = replay if replay_loss == "shape" else exp & ~replay
        for weight, expected in zip(weights_of, (~exp, exp & ~shapes, shapes), strict=True):
            assert torch.equal(weight, expected.float())
        assert on[0][5] == off[0][5] == shaped[i][0][5] == mask.sum(), "one token count for all"
        kinds += torch.tensor([w.sum() for w in weights_of])
    assert (kinds > 0).all()


def test_micro_batches_change_nothing(tmp_path):
    path = pool_file(tmp_path / "pool", NASTY)
    for steps in (1, 4):
        options = dict(gradient_accumulation_steps=steps, num_iterations=2, **REPLAY)
        run(tmp_path / str(steps), experience_pool=path, **options)
    expected = weights(tmp_path / "1")
    for key, value in weights(tmp_path / "4").items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-4)


# --- replay in the training step ---
@pytest.mark.parametrize("reverse", [False, True], ids=["sorted", "reordered"])
def test_replay_at_unchanged_weights_has_ratio_one(reverse, tmp_path, monkeypatch):
    if reverse:  # whatever reorders the batch must not mix up log-probs
        real = het.samples_to_dataproto
        monkeypatch.setattr(het, "samples_to_dataproto", lambda rows, *a, **k: real(rows[::-1], *a, **k))
    replaced = record(monkeypatch, "_replace_recorded_old_log_probs")
    freeze(monkeypatch)
    run(tmp_path / "run", num_iterations=4, **REPLAY | dict(experience_lbound=-1))
    tokens = 0
    for (data, old), _, logprobs in replaced:
        replay = data["replay_mask"].bool()
        tokens += int(replay.sum())
        assert (((old - logprobs).exp() - 1).abs() < 1e-5)[data["loss_mask"].bool()].all()
        assert torch.equal(replay.any(1), replay.any(1) & data["exp_mask"].bool().any(1))
        for i in replay.any(1).nonzero().flatten().tolist():
            assert torch.equal(replay[i], data["loss_mask"][i].bool()), "every token of the agent, none of the others"
            assert not torch.equal(data["recorded_old_log_probs"][i], old[i]) or len(replaced) > 1
    assert tokens > 20


def test_recorded_log_probs_are_those_of_the_time(tmp_path, monkeypatch):
    """Weights move: replayed tokens carry what was measured when they were sampled, stripped ones today's."""
    replaced = record(monkeypatch, "_replace_recorded_old_log_probs")
    attached = record(monkeypatch, "attach_log_probs")
    path = pool_file(tmp_path / "pool", NASTY)
    run(tmp_path / "run", num_iterations=5, learning_rate=1e-2, experience_pool=path, **REPLAY)
    then, compared, stripped_rows = {}, 0, 0
    for ((data, old), _, logprobs), ((_, _, values, _, version), _, _) in zip(replaced, attached, strict=True):
        for i, trajectory_id in enumerate(data["trajectory_ids"]):
            replay = data["replay_mask"][i].bool()
            if replay.any():
                expected, length = then[trajectory_id], int(data["response_mask"][i].sum())
                assert torch.equal(logprobs[i][:length][replay[:length]], expected[replay[:length]])
                compared += not torch.allclose(old[i][replay], logprobs[i][replay], atol=1e-4)
            else:
                assert torch.equal(logprobs[i], old[i])
                stripped_rows += int(data["exp_mask"][i].any())
                then[trajectory_id] = values[i][: int(data["response_mask"][i].sum())].clone()
    assert compared > 3 and stripped_rows > 3


def test_groups_stay_whole_and_replay_is_not_counted(tmp_path, monkeypatch):
    calls = record(monkeypatch, "samples_to_dataproto")
    advantages = record(monkeypatch, "group_advantages")
    run(tmp_path / "run", num_iterations=5, method="baseline", offpolicy_trajectories_per_task=2, **REPLAY)
    rows, replays = metrics_without_times(tmp_path / "run")[1:], 0
    fresh_in_all = 0
    for (trajectories, _), row, ((rewards, groups), _, _) in zip(batches(calls), rows, advantages, strict=True):
        replayed = [t for t in trajectories if t.is_experience_replay]
        replays += len(replayed)
        fresh_in_all += 16 - len(replayed)
        assert row["global_step"] == fresh_in_all and groups.tolist() == [i for i in range(4) for _ in range(4)]
        assert [t.data_id for t in trajectories] == groups.tolist()
        assert len({t.task_id for t in trajectories}) == 4, "the replayed ones sit in the group of their task"
        assert row["replay/experience_tasks"] == len({t.data_id for t in replayed}) <= 2
        assert row["charts/success_rate"] == sum(t.success for t in trajectories if not t.is_experience_replay) / (
            16 - len(replayed)
        )
    assert replays > 4


def test_latch(tmp_path, monkeypatch):
    """A batch at .35 leaves it off, .36 puts it on, .10 later leaves it on."""
    rates = iter([0.35, 0.36, 0.10, 0.10])
    real = het.collect

    def collect(policy, jobs, *args):
        done = real(policy, jobs, *args)
        if args[4].isdigit():  # a training batch: the label is its iteration
            wanted = round(next(rates) * len(done))
            for i, t in enumerate(sorted(done, key=lambda t: (t.rollout_id, t.data_id))):
                t.success, t.reward = i < wanted, float(i < wanted)
        return done

    monkeypatch.setattr(het, "collect", collect)
    sizes = dict(num_tasks=20, group_size=5, num_rooms=20, num_iterations=4, num_minibatches=1, experience_lbound=-1)
    start = dict(use_experience_replay=True, replay_start="success", replay_start_ratio=0.35)
    run(tmp_path / "run", **sizes, method="baseline", **start)
    used = [row["replay/experience_tasks"] for row in metrics_without_times(tmp_path / "run")[1:]]
    assert used[:2] == [0, 0] and used[2] > 0 and used[3] > 0


def test_rescued_groups(tmp_path):
    options = REPLAY | dict(num_iterations=8, group_size=2, num_tasks=8, experience_lbound=-1)
    run(tmp_path / "run", method="baseline", **options)
    rows = metrics_without_times(tmp_path / "run")[1:]
    assert sum(row["groups/rescued"] for row in rows) > 0
    assert all(row["groups/rescued"] <= row["groups/all_fail"] for row in rows)
    assert all(0 < row["replay/age_mean"] <= row["replay/age_max"] for row in rows if "replay/age_mean" in row)


def test_todays_log_probs_start_at_ratio_one(tmp_path, monkeypatch):
    """recorded: the ratio of a replayed token tells how far the policy has gone; current: it starts at 1."""
    for old, near in (("current", True), ("recorded", False)):
        options = REPLAY | dict(replay_old_logp=old, replay_loss="clip", num_minibatches=1, learning_rate=1e-2)
        run(tmp_path / old, method="baseline", num_iterations=6, **options)
        rows = [row for row in metrics_without_times(tmp_path / old) if "ratio/off_max" in row]
        assert len(rows) > 2 and (max(abs(row["ratio/off_max"] - 1) for row in rows) < 1e-5) == near


@pytest.mark.parametrize("retire", [True, False])
def test_retirement(retire, tmp_path, monkeypatch):
    """Everything is solved: tasks retire with their trajectories, or stay, in the bucket of n."""
    monkeypatch.setattr(het.LockEnv, "step", lambda self, action: ("open", 1.0, True))
    run(tmp_path / "run", **REPLAY | dict(retire_solved=retire, method="baseline", experience_rbound=4))
    rows = metrics_without_times(tmp_path / "run")[1:]
    replayed = [row["replay/experience_tasks"] for row in rows]
    assert replayed == ([0, 0, 0] if retire else [0, 2, 2])
    assert [row["replay/skip_set"] for row in rows] == ([4, 8, 12] if retire else [0, 0, 0])
    assert [row["replay/trajectories"] > 0 for row in rows] == [not retire] * 3
    for row in rows:  # 3 of 3 beside a replayed one is solved, too
        assert sum(row[f"replay/bucket_{s}"] for s in range(4)) == 0 and (row["replay/bucket_4"] > 0) != retire


def test_retired_tasks_are_not_drawn(tmp_path, monkeypatch):
    """Two families are solved at once, the third never: after a pass the batches are made of the third."""
    step = lambda self, action: ("open", 1.0, True) if self.name != "amber" else ("jam 0", 0.0, False)  # noqa: E731
    monkeypatch.setattr(het.LockEnv, "step", step)
    collected = record(monkeypatch, "collect")
    run(tmp_path / "run", **REPLAY | dict(retire_solved=True, method="baseline", num_iterations=6, eval_every=0))
    names = [{job.task.topic for job in a[1]} for a, _, _ in collected if a[6].isdigit()]
    assert len(names) == 6 and names[0] != {"amber"}
    assert names[3:] == [{"amber"}] * 3, "12 tasks, 4 in a batch: a pass is 3 iterations"


def test_a_replayed_success_counts_in_the_advantages_of_its_group(tmp_path, monkeypatch):
    samples, advantages = record(monkeypatch, "samples_to_dataproto"), record(monkeypatch, "group_advantages")
    run(tmp_path / "run", num_iterations=6, method="baseline", **REPLAY | dict(experience_lbound=-1))
    replays = 0
    for (trajectories, _), ((rewards, groups), _, result) in zip(batches(samples), advantages, strict=True):
        assert rewards.tolist() == [t.reward for t in trajectories]
        for i, t in enumerate(trajectories):
            if t.is_experience_replay:
                replays += 1
                solved = rewards[groups == groups[i]].min() == 1
                assert t.reward == 1 and (result[i] == 0 if solved else result[i] > 0)
    assert replays > 4


def test_replay_chooses_by_the_entropy_of_today(tmp_path, monkeypatch):
    """The stored values are turned round: by default nobody reads them, with the option off they decide."""
    real = het.attach_log_probs

    def turned(trajectories, data, old, entropys, version):
        real(trajectories, data, old, -entropys, version)

    options = REPLAY | dict(num_iterations=6, method="baseline", experience_lbound=-1, max_trajectories_per_task=99)
    for current in (True, False):
        flag = dict(use_current_policy_entropy=current)
        run(tmp_path / f"a{current}", **options | flag)
        with monkeypatch.context() as patch:
            patch.setattr(het, "attach_log_probs", turned)
            run(tmp_path / f"b{current}", **options | flag)
        rows = [metrics_without_times(tmp_path / f"{name}{current}") for name in "ab"]
        assert (rows[0] == rows[1]) == current


def test_stored_entropy_is_a_mean_over_the_tokens_of_the_agent(tmp_path, monkeypatch):
    measured, attached = record(monkeypatch, "compute_log_prob"), record(monkeypatch, "attach_log_probs")
    run(tmp_path / "run", num_iterations=1, method="baseline", **REPLAY)
    (_, data, *_), _, (_, entropys) = measured[0]
    for i, mean in enumerate(attached[0][0][3].tolist()):
        assert mean == pytest.approx(entropys[i][data["loss_mask"][i].bool()].mean().item(), abs=1e-6)


def test_behavior_log_probs_stay_out_of_the_memory(tmp_path, monkeypatch):
    """off_old_logp behavior replaces log-probs of stripped fresh samples; stored and replayed ones keep theirs."""
    losses, replaced = record(monkeypatch, "policy_loss"), record(monkeypatch, "_replace_recorded_old_log_probs")
    path = pool_file(tmp_path / "pool", NASTY)
    options = dict(method="ei", off_old_logp="behavior", num_minibatches=1, num_iterations=5, learning_rate=1e-2)
    run(tmp_path / "run", debug_replay=True, experience_pool=path, **options, **REPLAY)
    shuffle, replayed, stripped, used = torch.Generator().manual_seed(2), 0, 0, iter(losses)
    for (data, _), _, recorded in replaced:
        order = torch.randperm(16, generator=shuffle)
        (_, logprobs, *_), _, _ = next(used)
        if data["exp_mask"].any():
            next(used)  # the call for off-policy tokens
        replay, exp = data["replay_mask"][order].bool(), data["exp_mask"][order].bool()
        assert torch.equal(logprobs[replay], recorded[order][replay])
        changed = (logprobs - recorded[order]).abs() > 1e-4
        assert not changed[~exp].any()
        replayed, stripped = replayed + int(replay.sum()), stripped + int(changed.sum())
    assert replayed > 10 and stripped > 10


def test_the_pool_grows_every_so_many_iterations(tmp_path, monkeypatch):
    added = []
    monkeypatch.setattr(het.ExperiencePool, "add_successes", lambda self, ts, topics, step: added.append(step))
    run(tmp_path / "run", updated_freq=3, num_iterations=7, eval_every=0)
    assert added == [-1, 3, 6]


def test_a_run_can_be_as_long_as_its_rollouts(tmp_path):
    """Without replay 64 rollouts are 4 iterations of 16; with it more, and the rate falls with the rollouts."""
    whole = dict(method="baseline", eval_every=0, learning_rate=1e-2)
    run(tmp_path / "iterations", num_iterations=4, **whole)
    run(tmp_path / "rollouts", num_rollouts=64, **whole)
    assert_same_run(tmp_path / "iterations", tmp_path / "rollouts")
    run(tmp_path / "replay", num_rollouts=64, **whole, **REPLAY)
    rows = metrics_without_times(tmp_path / "replay")
    steps = [row["global_step"] for row in rows]
    assert steps[0] == 0 and len(steps) > 5 and steps[-2] < 64 <= steps[-1] < 80
    rates = [1e-2 * (1 - step / 64) for step in steps[:-1]]
    assert [row["charts/learning_rate"] for row in rows[1:]] == pytest.approx(rates)
    assert "eval/success_rate" in rows[-1] and (tmp_path / "replay" / "final_model").exists()
    run(tmp_path / "pool", num_rollouts=64, eval_every=0)
    rows = metrics_without_times(tmp_path / "pool")
    assert [row["global_step"] for row in rows] == [32, 48, 64], "what fills the pool counts"


def test_debug_flag(tmp_path, monkeypatch, capsys):
    run(tmp_path / "good", debug_replay=True, **REPLAY)
    real = het.attach_log_probs

    def off_by_one(trajectories, data, old, *rest):
        real(trajectories, data, old.roll(1, 0), *rest)

    monkeypatch.setattr(het, "attach_log_probs", off_by_one)
    with pytest.raises(SystemExit):
        run(tmp_path / "bad", debug_replay=True, **REPLAY)
    assert "--debug-replay" in capsys.readouterr().err


# --- what is off ---
def test_everything_off_is_plain_grpo(tmp_path):
    """Share 0 of a poisoned pool, and replay that never begins, change no number."""
    run(tmp_path / "plain", method="baseline")
    poison = pool_file(tmp_path / "pool", {name: "poison" for name in het.NAMES[:3]})
    run(tmp_path / "share0", exp_name="x", rollout_expratio=0.0, val_rollout_expmode="woexp", experience_pool=poison)
    plain, other = (metrics_without_times(tmp_path / name) for name in ("plain", "share0"))
    for row in plain + other:
        for key in ("exp/pool_size", "exp/retrieval_empty_frac"):
            row.pop(key, None)
    assert plain == other and plain[-1]["losses/grad_norm"] > 0
    first, second = weights(tmp_path / "plain"), weights(tmp_path / "share0")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_replay_with_share_0_may_hold_nans(tmp_path, monkeypatch):
    run(tmp_path / "a", exp_ratio=0.0, **REPLAY)
    real = het.ExperienceManager.save_trajectories_to_memory

    def poisoned(self, trajectories):
        for t in trajectories:
            t.old_log_probs = [math.nan] * len(t.old_log_probs)
        real(self, trajectories)

    monkeypatch.setattr(het.ExperienceManager, "save_trajectories_to_memory", poisoned)
    run(tmp_path / "b", exp_ratio=0.0, **REPLAY)
    assert_same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("kl_loss_coef, ent_coef", [(0.0, 0.0), (0.5, 0.2)])
def test_one_step_against_an_oracle(kl_loss_coef, ent_coef, tmp_path, monkeypatch):
    """Plain GRPO written again, row by row, without padding: losses, gradients and weights of one iteration."""
    models = []
    calls, losses = record(monkeypatch, "samples_to_dataproto"), record(monkeypatch, "policy_loss")
    real_clip = torch.nn.utils.clip_grad_norm_
    gradients = []

    def clip(parameters, most):
        parameters = list(parameters)
        gradients.append([p.grad.clone() for p in parameters])
        return real_clip(parameters, most)

    real_compute = het.compute_log_prob

    def compute(policy, *args):
        models.append(copy.deepcopy(policy.lm))
        return real_compute(policy, *args)

    monkeypatch.setattr(het, "compute_log_prob", compute)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    lr = 1e-2
    options = dict(num_iterations=1, update_epochs=2, temperature=0.9, kl_loss_coef=kl_loss_coef, ent_coef=ent_coef)
    metrics = run(tmp_path / "run", method="baseline", learning_rate=lr, **options)
    trajectories, _ = batches(calls)[0]
    lm = models[0]

    def logp(t):
        ids = t.prompt_ids + [token for _, part in t.steps for token in part]
        logits = lm(torch.tensor([ids])).logits[0] / 0.9
        place, terms, entropies = len(t.prompt_ids), [], []
        for role, part in t.steps:
            for token in part:
                if role == "assistant":
                    every = torch.log_softmax(logits[place - 1], -1)
                    terms.append(every[token])
                    entropies.append(-(every.exp() * every).sum())
                place += 1
        return torch.stack(terms), torch.stack(entropies)

    advantages = {}
    for group in range(4):
        rewards = [t.reward for t in trajectories if t.data_id == group]
        mean = sum(rewards) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 3)
        for t in trajectories:
            if t.data_id == group:
                advantages[t.trajectory_id] = (t.reward - mean) / (std + 1e-6)
    assert any(advantages.values())
    with torch.no_grad():
        old = {t.trajectory_id: logp(t)[0] for t in trajectories}  # the start policy's, too: the reference
    optimizer = torch.optim.AdamW(lm.parameters(), lr=lr, eps=1e-5, weight_decay=0.0)
    shuffle, step, mean_loss = torch.Generator().manual_seed(2), 0, 0.0
    for _ in range(2):
        for part in torch.randperm(16, generator=shuffle).chunk(2):
            rows = [trajectories[i] for i in part.tolist()]
            total, extra, count = 0.0, 0.0, 0
            for t in rows:
                new, entropies = logp(t)
                ratio = (new - old[t.trajectory_id]).exp()
                extra = extra + kl_loss_coef * (1 / ratio - 1 + ratio.log()).sum() - ent_coef * entropies.sum()
                a = advantages[t.trajectory_id]
                for w in ratio:
                    bounded = torch.clamp(w, 0.8, 1.28)
                    value = min(w * a, bounded * a)
                    if a < 0:
                        value = max(value, 3.0 * a * torch.ones(()))
                    total, count = total + value, count + 1
            loss = -total / count
            optimizer.zero_grad()
            (loss + extra / count).backward()
            for p, theirs in zip(lm.parameters(), gradients[step], strict=True):
                torch.testing.assert_close(p.grad, theirs, atol=2e-6, rtol=1e-3)
            real_clip(lm.parameters(), 1.0)
            assert losses[step][2][0].item() == pytest.approx(loss.item(), abs=1e-6)
            optimizer.step()
            mean_loss, step = mean_loss + loss.item() / 4, step + 1
    assert metrics["losses/policy_loss"] == pytest.approx(mean_loss, abs=1e-6) and step == len(gradients) == 4
    final = weights(tmp_path / "run")
    for key, value in lm.state_dict().items():
        torch.testing.assert_close(value, final[key], atol=2e-4, rtol=1e-3)


def test_one_seed_one_result(tmp_path):
    for name in "ab":
        torch.rand(3)  # the global generator must not matter
        run(tmp_path / name, updated_freq=1, **REPLAY)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    run(tmp_path / "c", seed=2, updated_freq=1, **REPLAY)
    assert metrics_without_times(tmp_path / "c") != metrics_without_times(tmp_path / "a")


def test_validation_changes_nothing_that_training_reads(tmp_path):
    for every in (0, 1):
        run(tmp_path / str(every), eval_every=every, updated_freq=1, num_iterations=4, **REPLAY)
    rows = [metrics_without_times(tmp_path / str(every)) for every in (0, 1)]
    assert "eval/success_guided" in rows[1][2] and "eval/success_unguided" in rows[1][2]
    assert not any("eval/success_rate" in row for row in rows[0][1:-1])
    for row in rows[0] + rows[1]:
        for key in [key for key in row if key.startswith("eval/")]:
            row.pop(key)
    assert rows[0] == rows[1]
    states = [het.load_checkpoint(tmp_path / e / "checkpoints" / "checkpoint_00000004.pt") for e in "01"]
    for key in ("replay", "pool", "queue", "counters"):
        assert states[0][key] == states[1][key]
    assert torch.equal(states[0]["sample_rng"], states[1]["sample_rng"])


# --- checkpoint ---
LONG = dict(num_iterations=6, save_every=1, keep_checkpoints=2, updated_freq=2, kl_loss_coef=0.01)
LONG |= dict(use_experience_replay=True, replay_start="success", replay_start_ratio=0.05)


def child(folder, before=None, **options):
    """A training process, forked; `before` runs in it first."""

    def target():
        sys.stdout = sys.stderr = open(os.devnull, "w")
        if before:
            before()
        run(folder, **LONG | options)

    process = fork.Process(target=target)
    process.start()
    return process


def die_at_save(nth, after):
    calls, real = {"n": 0}, os.replace

    def replace(*paths):
        calls["n"] += 1
        if calls["n"] < nth:
            return real(*paths)
        if after:
            real(*paths)
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace


def test_killed_runs_end_like_one_never_stopped(tmp_path):
    """Pool with its file, replay, buckets, skip set, latch, queue, generators, reference: a loss of any would show."""
    run(tmp_path / "whole", **LONG, experience_pool=str(tmp_path / "pool1"), num_rollouts=112)
    killed, deaths, rng = tmp_path / "killed", 0, random.Random(0)
    options = dict(resume="auto", experience_pool=str(tmp_path / "pool2"), num_rollouts=112)
    for nth, after in ((1, False), (1, True), (2, True), (3, False)):  # checkpoint, pool file, checkpoint ...
        process = child(killed, lambda n=nth, a=after: die_at_save(n, a), **options)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        deaths += 1
    for _ in range(2):
        process = child(killed, **options)
        process.join(0.2 + 0.5 * rng.random())
        deaths += process.is_alive()
        process.kill()
        process.join()
    run(killed, **LONG | options)
    assert deaths >= 4
    assert_same_run(tmp_path / "whole", killed)
    assert (tmp_path / "pool1").read_text() == (tmp_path / "pool2").read_text()
    rows = metrics_without_times(killed)
    assert rows[-1]["replay/trajectories"] > 0 and any(row.get("replay/experience_tasks") for row in rows)


def test_skip_set_and_plateau_survive_a_stop(tmp_path, monkeypatch):
    """Tasks of one family retire, evaluation stands still: what is drawn and the rate depend on both after a resume."""

    def step(self, action):
        lucky = self.name == "amber" or len(action) % 2 == 0
        return ("open", 1.0, True) if lucky else ("jam 0", 0.0, False)

    monkeypatch.setattr(het.LockEnv, "step", step)
    options = LONG | dict(retire_solved=True, method="baseline", lr_scheduler_type="plateau", plateau_patience=3)
    options |= dict(eval_every=1, num_iterations=8)
    run(tmp_path / "whole", **options)
    run(tmp_path / "parts", **options | dict(num_iterations=4))
    assert het.load_checkpoint(tmp_path / "parts" / "checkpoints" / "checkpoint_00000004.pt")["replay"]["skip"]
    run(tmp_path / "parts", **options, resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    rates = [row["charts/learning_rate"] for row in metrics_without_times(tmp_path / "whole")[1:]]
    assert len(set(rates)) > 1


def test_sigterm_saves_and_ends(tmp_path):
    def send():
        real = het.validate

        def validate(*args):
            if args[6] == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*args)

        het.validate = validate

    process = child(tmp_path / "cut", before=send, save_every=0)
    process.join(60)
    assert process.exitcode == 0 and (tmp_path / "cut" / "checkpoints" / "checkpoint_00000002.pt").exists()
    run(tmp_path / "whole", **LONG)
    run(tmp_path / "cut", **LONG, resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def fails(capsys, call, *words, code=2):
    with pytest.raises(SystemExit) as stop:
        call()
    error = capsys.readouterr().err.strip()
    assert stop.value.code == code and len(error.splitlines()) == 1 and all(str(w) in error for w in words), error


def test_bad_input(tmp_path, capsys):
    run(tmp_path / "run", num_iterations=1)
    path = tmp_path / "run" / "checkpoints" / "checkpoint_00000001.pt"
    fails(capsys, lambda: run(tmp_path / "run"), "holds a run already")
    fails(capsys, lambda: run(tmp_path / "run", resume="auto", num_families=2), "--num-families 2", "3")
    fails(capsys, lambda: run(tmp_path / "new", resume=str(tmp_path)), f"--resume {tmp_path}: no checkpoints")
    fails(capsys, lambda: run(path), f"--run-dir {path}", "not a folder")
    path.write_bytes(path.read_bytes()[:1000])
    fails(capsys, lambda: run(tmp_path / "run", resume="auto"), path, "damaged")
    torch.save({"args": {}, "policy": {}}, path)
    fails(capsys, lambda: run(tmp_path / "run", resume="auto"), path, "not one of")
    (tmp_path / "pool").write_text('{"task_id": "amber/0", "topic": "amber", "text": "x"}\n{oops\n')
    fails(capsys, lambda: run(tmp_path / "new", experience_pool=str(tmp_path / "pool")), "pool: line 2")
    fails(capsys, lambda: run(tmp_path / "new", env="Nothing-v9"), "--env Nothing-v9")
    fails(capsys, lambda: run(tmp_path / "new", env="no_such_module:Env"), "--env no_such_module:Env")
    fails(capsys, lambda: run(tmp_path / "new", env="CartPole-v1"), "--env CartPole-v1", "arrays of numbers")
    fails(capsys, lambda: run(tmp_path / "new", group_size=1), "--group-size 1", "2 or more")
    fails(capsys, lambda: run(tmp_path / "new", num_tasks=16), "--num-tasks 16", "12")
    fails(capsys, lambda: run(tmp_path / "new", max_context=5), "--max-context 5")
    fails(capsys, lambda: run(tmp_path / "new", max_context=9999), "--max-context 9999", "2048")
    fails(capsys, lambda: run(tmp_path / "new", model_name=str(tmp_path)), "--model-name")
    fails(capsys, lambda: run(tmp_path / "new", chat_template=True), "--chat-template")
    assert not (tmp_path / "new").exists(), "nothing written"


def test_command_line(run_script, tmp_path):
    done = run_script("het_grpo.py", "--method", "best")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "--method" in done.stderr
    flags = [f"--{key}" if i % 2 else f"--{key.replace('_', '-')}" for i, key in enumerate(TINY)]
    flags = [str(x) for pair in zip(flags, TINY.values(), strict=True) for x in pair]
    done = run_script("het_grpo.py", *flags, "--run-dir", "out", "--use-experience-replay")
    assert done.returncode == 0, done.stderr
    for name in ("args.json", "metrics.jsonl", "summary.json", "curves.png", "training_config.json", "final_model"):
        assert (tmp_path / "out" / name).exists()


def test_nan_never_reaches_the_weights(tmp_path, monkeypatch):
    real, calls = het.policy_loss, {"n": 0}

    def wrapped(*args, **kwargs):
        calls["n"] += 1
        loss, ratio, clipped = real(*args, **kwargs)
        return loss * (math.nan if calls["n"] in (1, 4) else 1.0), ratio, clipped

    monkeypatch.setattr(het, "policy_loss", wrapped)
    metrics = run(tmp_path / "run", method="baseline")
    assert metrics["losses/skipped_steps"] == 2
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run").values())


def test_nan_reward(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(het.LockEnv, "step", lambda self, action: ("open", math.nan, True))
    metrics = run(tmp_path / "skip", method="baseline")
    assert metrics["losses/skipped_steps"] == 6 and "losses/policy_loss" not in metrics
    run(tmp_path / "epochs", method="baseline", num_iterations=2, update_epochs=6)  # 12 updates, but 2 bad batches
    fails(capsys, lambda: run(tmp_path / "fail", method="baseline", nan_rewards="fail"), "reward", "nan")


# --- ranks ---
def launch(folder, world_size, **options):
    """world_size forked ranks, as torchrun would start them. -> exit codes"""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def target(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        sys.stdout = sys.stderr = open(os.devnull, "w")
        run(folder, **options)

    ranks = [fork.Process(target=target, args=(rank,)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(100)
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fsdp"])
def test_two_ranks_make_the_update_of_one(fsdp, tmp_path):
    path = pool_file(tmp_path / "pool", NASTY)
    options = dict(num_iterations=2, gradient_accumulation_steps=2, learning_rate=1e-3, off_policy_loss="tis")
    options |= dict(experience_pool=path, kl_loss_coef=0.01, **REPLAY)
    run(tmp_path / "one", **options)
    pool_file(tmp_path / "pool", NASTY)
    assert launch(tmp_path / "two", 2, fsdp=fsdp, **options) == [0, 0]
    one, two = metrics_without_times(tmp_path / "one"), metrics_without_times(tmp_path / "two")
    assert len(one) == len(two) == 3, "one log"
    assert one[2]["replay/experience_tasks"] > 0 and one[2]["exp/off_frac"] > 0
    for a, b in zip(one[1:], two[1:], strict=True):
        for key, value in a.items():
            assert b[key] == pytest.approx(value, rel=2e-3, abs=1e-4), key
    expected = weights(tmp_path / "one")
    for key, value in weights(tmp_path / "two").items():
        torch.testing.assert_close(value, expected[key], atol=2e-5, rtol=1e-3)


def test_two_sharded_ranks_resume_exactly(tmp_path):
    options = LONG | dict(fsdp=True, num_iterations=3, lr_scheduler_type="constant")
    assert launch(tmp_path / "whole", 2, **options) == [0, 0]
    assert launch(tmp_path / "parts", 2, **options | dict(num_iterations=2)) == [0, 0]
    assert launch(tmp_path / "parts", 2, **options, resume="auto") == [0, 0]
    rows = [metrics_without_times(tmp_path / name) for name in ("whole", "parts")]
    assert rows[0] == rows[1] and len(rows[0]) == 4
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("options", [dict(gradient_checkpointing=True), dict(bf16=True), dict(ent_coef=0.01)], ids=str)
def test_memory_and_entropy_options(options, tmp_path):
    plain, other = run(tmp_path / "a", num_iterations=1), run(tmp_path / "b", num_iterations=1, **options)
    near = 1e-4 if "gradient_checkpointing" in options else 0.05
    assert other["losses/entropy"] == pytest.approx(plain["losses/entropy"], rel=near)
    assert all(math.isfinite(value) for value in other.values())


# --- environments ---
def test_lock(monkeypatch):
    monkeypatch.undo()
    game = het.LockEnv("amber", (0, 1, 2, 3))
    assert game.reset() == ""
    told = [game.step(action) for action in ("red", "red", "what", "green", " blue ", "gold")]
    assert [text for text, _, _ in told] == ["click 1", "jam 1", "jam 1", "click 2", "click 3", "open"]
    assert told[-1][1:] == (1.0, True) and game.summary([]) == "amber : red green blue gold"


def test_rooms_and_pairs_are_held_out():
    world = het.make_lock_world(het.Args())
    assert len(world.train) == 12 * 20 and len(world.validation) == 504
    assert not {t.task_id for t in world.train} & {t.task_id for t in world.validation}
    assert {t.topic for t in world.train} == {t.topic for t in world.validation}
    parts = het.make_lock_world(het.Args(env="lock-parts", num_families=16))
    trained, held_out = {t.topic for t in parts.train}, {t.topic for t in parts.validation}
    assert len(trained) == 12 and len(held_out) == 4 and not trained & held_out
    assert {word for topic in held_out for word in topic.split()} == {w for t in trained for w in t.split()}
    secrets = {t.topic: t.rules[1] for t in parts.train}
    for task in parts.validation:
        left, right = task.topic.split()
        halves = (
            {s[:2] for name, s in secrets.items() if left in name},
            {s[2:] for n, s in secrets.items() if right in n},
        )
        assert halves == ({task.rules[1][:2]}, {task.rules[1][2:]}), "advice about parts recombines"


@pytest.mark.parametrize("name", ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"])
def test_toy_text_in_words(name):
    world = het.make_gym_world(het.Args(env=name, num_rooms=3))
    game = world.make_env(world.train[0])
    first = game.reset()
    assert first == game.reset(), "a task is one seed: the members of a group start alike"
    text, reward, done = game.step(f"I think I will go {game.actions[-1]}.")
    assert text and first and not text.startswith("not an action")
    assert game.step("sing")[0].startswith("not an action")
    assert not {t.task_id for t in world.train} & {t.task_id for t in world.validation}


def test_frozen_lake_trains(tmp_path):
    metrics = run(tmp_path / "run", env="FrozenLake-v1", max_turns=8, eval_size=6)
    assert metrics["charts/episodic_length"] > 1 and metrics["losses/first_ratio_error"] < 1e-5


ENV_FILE = '''
import gymnasium as gym
class Guess(gym.Env):
    """Say yes."""
    observation_space = gym.spaces.Text(99)
    action_space = gym.spaces.Text(99)
    def reset(self, seed=None, options=None):
        return f"question {seed}", {}
    def step(self, action):
        return "again", float("ques" in action), "ques" in action, False, {}
'''


def test_module_class(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_game.py").write_text(ENV_FILE)
    monkeypatch.chdir(tmp_path)
    metrics = run(tmp_path / "run", env="my_game:Guess", max_turns=4, num_families=1)
    assert metrics["charts/success_rate"] > 0
    (tmp_path / "bad_game.py").write_text(
        ENV_FILE.replace('return "again"', 'raise KeyError("lost")\n        return "again"')
    )
    fails(capsys, lambda: run(tmp_path / "bad", env="bad_game:Guess"), "--env", "step(", "KeyError('lost')", code=1)


@pytest.fixture
def chat_model(tmp_path):
    """A tiny model folder with a chat template, one token per character, EOS and turn marks of its own."""
    vocab = ["<pad>", "<|im_end|>", "<|im_start|>", "<unk>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token="<unk>"))
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
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_chat_turns_are_those_of_the_template(chat_model, tmp_path, monkeypatch):
    calls = record(monkeypatch, "samples_to_dataproto")
    options = dict(model_name=chat_model, chat_template=True, env="FrozenLake-v1", max_turns=3, max_turn_tokens=4)
    metrics = run(tmp_path / "run", **options, num_iterations=1, init_exp_before_training=False)
    assert metrics["rollout/logprob_mismatch"] < 1e-5 and metrics["losses/first_ratio_error"] < 1e-5
    args = het.Args(**TINY | options)
    tokenizer = het.load_agent(args, het.make_gym_world(args))[1]
    trajectories, data = batches(calls)[0]
    forced = 0
    for i, t in enumerate(trajectories):
        text = lambda ids: "".join(tokenizer.convert_ids_to_tokens(ids))  # noqa: E731
        start, end = "<|im_start|>", "<|im_end|>"
        assert text(t.prompt_ids).startswith(f"{start}user\nlake ")
        assert text(t.prompt_ids).endswith(f"{end}\n{start}assistant\n")
        for (role, ids), (_, after) in zip(t.steps, t.steps[1:], strict=False):
            if role == "assistant":  # an end that was not sampled belongs to the environment: no loss
                forced += ids[-1] != 1
                first = end if ids[-1] != 1 else ""
                assert text(after).startswith(f"{first}\n{start}user\n")
                assert text(after).endswith(f"{end}\n{start}assistant\n") and text(after).count(start) == 2
        assert int(data["loss_mask"][i].sum()) == len(t.sampler_logprobs)
    assert forced > 0


def test_a_row_does_not_depend_on_its_neighbours():
    args = het.Args(**TINY)
    world = het.make_lock_world(args)
    policy, tokenizer, eos_ids, pad_id = het.load_agent(args, world)
    dialogue = het.Dialogue(tokenizer, False, eos_ids)
    uniforms = torch.rand(6, 7, generator=torch.Generator().manual_seed(0))
    jobs = [het.Job(world.train[i], i, 0, "amber : red" * (i % 2)) for i in range(6)]
    together = het.rollout(policy, jobs, world.make_env, dialogue, pad_id, args, "x", uniforms)
    for i in range(6):
        alone = het.rollout(policy, jobs[i : i + 1], world.make_env, dialogue, pad_id, args, "x", uniforms[i : i + 1])[
            0
        ]
        assert alone.steps == together[i].steps
        assert alone.sampler_logprobs == pytest.approx(together[i].sampler_logprobs, abs=1e-5)


def test_shared_blocks_exist_once():
    """The language-model core is ppo_v1.py's: test_drift.py compares the texts, this that there are enough of them."""
    import ast

    names = [
        {
            n.name
            for n in ast.parse((ROOT / f"{s}.py").read_text()).body
            if isinstance(n, ast.FunctionDef | ast.ClassDef)
        }
        for s in ("het_grpo", "ppo_v1")
    ]
    assert len(names[0] & names[1]) >= 30
