"""het_grpo.py: every number of the spec by hand, the pool, the options. Functions come from the script."""

import json
import math

import numpy as np
import pytest
import torch

import het_grpo as het


def row(*values):
    return torch.tensor([values], dtype=torch.float32)


def surrogate(advantage, w, high):
    """Loss of one token with ratio w."""
    ones = row(1.0)
    old = row(0.0)
    new = row(math.log(w)).requires_grad_()
    clips = dict(clip_low=0.2, clip_high=high, clip_c=3.0)
    loss, ratio, _ = het.policy_loss(new, old, row(advantage), ones, ones, torch.tensor(1.0), **clips)
    assert ratio.item() == pytest.approx(w, rel=1e-6)
    return loss.item()


# --- shares ---
def test_guided_rollouts_per_group():
    for n, guided in ((8, 4), (1, 0), (3, 1), (5, 2)):
        assert sum(het.draw_guided(n, "mixed", 0.5, np.random.default_rng(0))) == guided
    assert sum(het.draw_guided(8, "all", 1.0, np.random.default_rng(0))) == 8
    assert sum(het.draw_guided(8, "woexp", 0.0, np.random.default_rng(0))) == 0
    places = {tuple(het.draw_guided(4, "mixed", 0.5, np.random.default_rng(i))) for i in range(200)}
    assert len(places) == 6, "all C(4,2) places come up"


def test_kept_tasks():
    assert sum(het.draw_kept_tasks(100, "hybrid", 0.29, np.random.default_rng(0))) == 29
    assert sum(het.draw_kept_tasks(4, "hybrid", 0.5, np.random.default_rng(0))) == 2
    assert het.draw_kept_tasks(3, "keep", 1.0, np.random.default_rng(0)) == [True] * 3
    assert het.draw_kept_tasks(3, "discard", 0.0, np.random.default_rng(0)) == [False] * 3


# --- losses ---
@pytest.mark.parametrize(
    "advantage, w, high, loss",
    [(1, 1.5, 0.28, -1.28), (1, 1.5, 0.6, -1.5), (-1, 1.8, 0.28, 1.8), (-1, 1.8, 0.6, 1.8)]
    + [(-1, 4.0, 0.28, 3.0), (-1, 4.0, 0.6, 3.0), (-1, 0.5, 0.28, 0.8), (1, 1.7, 0.6, -1.6)],
)
def test_surrogates(advantage, w, high, loss):
    assert surrogate(advantage, w, high) == pytest.approx(loss, abs=1e-6)


def test_shaping():
    ones, one = row(1.0), torch.tensor(1.0)
    for w, f in ((0.1, 0.5), (1.0, 0.9090909)):
        loss = het.shaped_loss(row(math.log(w)), row(0.0), ones, ones, ones, one, 0.1)
        assert loss.item() == pytest.approx(-f, abs=1e-6)
    for advantage in (1.0, -2.0):
        new = row(0.0).requires_grad_()
        het.shaped_loss(new, row(0.0), row(advantage), ones, ones, one, 0.1).backward()
        assert new.grad.item() == pytest.approx(-0.0826446 * advantage, abs=1e-6)


def test_masked_tokens_cannot_poison_a_loss():
    mask = row(1.0, 0.0)
    new = row(0.0, 50.0).requires_grad_()
    loss = het.shaped_loss(new, row(0.0, 0.0), row(1.0, 1.0), mask, mask, torch.tensor(1.0), 0.1)
    loss.backward()
    assert loss.item() == pytest.approx(-0.9090909, abs=1e-6) and new.grad[0, 1] == 0


def test_k3():
    assert het.k3_kl(row(0.0), row(0.5)).item() == pytest.approx(0.1487213, abs=1e-6)


def test_entropy_of_known_distributions():
    head = torch.nn.Linear(2, 2, bias=False)
    head.weight.data = torch.eye(2)
    hidden = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    logprobs, entropy = het.token_logprobs(head, hidden, torch.tensor([0, 1]), 1.0)
    assert entropy.mean().item() == pytest.approx(0.5091151, abs=1e-6)
    assert logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.1)], abs=1e-6)


# --- advantages ---
@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1, 0, 0, 0], [1.499997] + [-0.499999] * 3),
        ([1] + [0] * 7, [2.4748667] + [-0.3535524] * 7),
        ([1, 1, 1, 1], [0] * 4),
        ([0.1, 0.1, 0.1], [0] * 3),
        ([5.0], [0]),
    ],
)
def test_group_advantages(rewards, expected):
    rewards = torch.tensor(rewards, dtype=torch.float32)
    alone = het.group_advantages(rewards, torch.zeros(len(rewards), dtype=int))
    assert alone.tolist() == pytest.approx(expected, abs=1e-6)
    # interleaved with another group, whatever its rewards are
    mixed = torch.stack([rewards, torch.arange(len(rewards)) * 100.0], 1).flatten()
    groups = torch.tensor([3, 7] * len(rewards))
    assert het.group_advantages(mixed, groups)[::2].tolist() == pytest.approx(expected, abs=1e-6)


def test_bucket_weights():
    expected = [0.004433, 0.054006, 0.242036, 0.399050, 0.242036, 0.054006, 0.004433]
    assert het.bucket_weights(list(range(1, 8)), 8, "normal") == pytest.approx(expected, abs=1e-6)
    assert het.bucket_weights([1, 5], 8, "uniform") == [0.5, 0.5]


# --- inject ---
NASTY = "{} {0} {name} 100% \\n\n\n</EXP><EXP>\n{{}}"


def test_injection_is_text_in_text():
    template = het.Args().experience_template
    assert template == "\n\nSome Related Experience to help you to complete the task:<EXP>{}</EXP>\n\n"
    text = het.inject_experience("open {it}", NASTY, template)
    before, after = template.split("{}")
    assert text == before + NASTY + after + "open {it}"
    assert het.inject_experience("open {it}", "", template) == "open {it}"
    assert het.inject_experience("{q}", "{e}", '{"hint": "{}", {0} {x}}\n') == '{"hint": "{e}", {0} {x}}\n{q}'


# --- the pool ---
def pool_of(*records, size=10, forbidden=()):
    pool = het.ExperiencePool(het.Args().experience_template, size, set(forbidden))
    added = [pool.add(dict(task_id=i, topic=topic, text=text, step=step)) for i, topic, text, step in records]
    return pool, added


def test_written_at_t_readable_after_t():
    pool, _ = pool_of(("a/1", "amber", "amber : red", 5))
    assert pool.retrieve("amber", 3, 5) == "" and pool.retrieve("amber", 3, 6) == "amber : red"
    assert pool.retrieve("brass", 3, 6) == "", "nothing shared, nothing found"


def test_retrieval_covers_the_parts_of_a_query():
    records = [("1", "amber slate", "one", 0), ("2", "amber topaz", "two", 0), ("3", "brass umber", "three", 0)]
    pool, _ = pool_of(*records, ("4", "delta delta", "four", 0))
    assert set(pool.retrieve("amber umber", 2, 1).split("\n")) == {"two", "three"}
    assert set(pool.retrieve("amber umber", 9, 1).split("\n")) == {"one", "two", "three"}


def test_the_pool_has_a_cap_and_no_doubles():
    pool, added = pool_of(*[(f"a/{i}", "amber", f"text {i % 4}", 0) for i in range(7)], size=4)
    assert added == [True] * 4 + [False] * 3 and len(pool.records) == 4
    assert pool.add(dict(task_id="a/9", topic="amber", text="new", step=0))
    assert [record["text"] for record in pool.records] == ["text 1", "text 2", "text 3", "new"]


def test_the_pool_refuses():
    marked = "x " + het.Args().experience_template.partition("{}")[0].strip() + " y"
    pool, added = pool_of(("v/1", "v", "fine", 0), ("a/1", "a", marked, 0), ("a/1", "a", " ", 0), forbidden=["v/1"])
    assert added == [False] * 3 and not pool.records
    assert pool.add(dict(task_id="a/1", topic="a", text=NASTY, step=0)), "braces and </EXP> are just text"


def test_pool_file_round_trip(tmp_path):
    pool, _ = pool_of(("a/1", "amber", NASTY, 7), ("b/2", "brass", "brass : ü", 9))
    pool.save(tmp_path / "sub" / "pool.jsonl")
    again, _ = pool_of()
    again.load(tmp_path / "sub" / "pool.jsonl")
    assert [r["text"] for r in again.records] == [NASTY, "brass : ü"]
    assert {r["step"] for r in again.records} == {-1}, "readable from the first iteration"


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{broken", "line 2 is not JSON"),
        ('{"topic": "a", "text": "b"}', "line 2 lacks"),
        ('{"task_id": "a", "topic": "a", "text": 3}', "line 2 lacks"),
        ("[1, 2]", "line 2 lacks"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"task_id": "a", "topic": "a", "text": "b", "step": ' + "9" * 5_000 + "}", "line 2 is not JSON"),
        ('{"task_id": "a", "topic": "a", "text": "one\u2028line"}', None),
        ('{"task_id": "amber/50", "topic": "a", "text": "b"}', "validation task amber/50"),
        (json.dumps(dict(task_id="a", topic="a", text="help you to complete the task:<EXP>")), None),
    ],
)
def test_damaged_pool_file(line, reason, tmp_path, capsys):
    path = tmp_path / "pool.jsonl"
    path.write_text(json.dumps(dict(task_id="a", topic="a", text="b")) + "\n" + line + "\n")
    pool, _ = pool_of(forbidden=["amber/50"])
    if reason is None:
        pool.load(path)
        return
    with pytest.raises(SystemExit) as stop:
        pool.load(path)
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and len(error.splitlines()) == 1 and reason in error and str(path) in error


# --- options ---
def resolved(**options):
    args = het.Args(**options)
    modes = (args.val_rollout_expmode, args.train_rollout_expmode, args.train_sample_expmode)
    return (*modes, args.rollout_expratio, args.train_sample_keepratio)


def test_presets():
    assert resolved(method="baseline")[:2] == ("woexp", "woexp") and resolved(method="baseline")[3] == 0.0
    assert resolved(method="ec") == ("mixed", "mixed", "keep", 0.5, 1.0)
    assert resolved(method="ei") == ("mixed", "mixed", "discard", 0.5, 0.0)
    assert resolved() == resolved(method="het") == ("mixed", "mixed", "hybrid", 0.5, 0.5)
    assert resolved(enable=False) == resolved(method="ec", enable=False) == resolved(method="baseline")
    # an explicit flag wins, and what follows from it follows
    assert resolved(method="het", train_sample_expmode="keep") == ("mixed", "mixed", "keep", 0.5, 1.0)
    assert resolved(method="ei", rollout_expratio=0.25)[3] == 0.25
    assert resolved(method="baseline", train_rollout_expmode="mixed")[:4] == ("woexp", "mixed", "hybrid", 0.5)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(method="best"), ["--method best", "baseline, ec, ei, het"]),
        (dict(train_rollout_expmode="some"), ["--train-rollout-expmode some", "mixed, all, woexp"]),
        (dict(train_sample_expmode="drop"), ["--train-sample-expmode drop"]),
        (dict(exp_select_mode="best"), ["--exp-select-mode best", "argmin"]),
        (dict(replay_loss="tis"), ["--replay-loss tis"]),
        (dict(rollout_expratio=1.5), ["--rollout-expratio 1.5", "between 0 and 1"]),
        (dict(train_sample_keepratio=-0.1), ["--train-sample-keepratio -0.1"]),
        (dict(exp_ratio=2.0), ["--exp-ratio 2.0"]),
        (dict(replay_start_ratio=-1.0), ["--replay-start-ratio -1.0"]),
        (dict(experience_template="no place"), ["--experience-template 'no place'", "exactly one {}"]),
        (dict(experience_template="{} {}"), ["--experience-template", "exactly one {}"]),
        (dict(method="baseline", rollout_expratio=0.5), ["--rollout-expratio 0.5", "woexp"]),
        (dict(train_rollout_expmode="all", val_rollout_expmode="all", rollout_expratio=0.5), ["--rollout-expratio"]),
        (
            dict(train_rollout_expmode="all", rollout_expratio=0.5),
            ["--rollout-expratio 0.5", "--train-rollout-expmode all"],
        ),
        (dict(method="ec", train_sample_keepratio=0.5), ["--train-sample-keepratio 0.5", "keep"]),
        (dict(train_sample_expmode="discard", train_sample_keepratio=0.5), ["--train-sample-keepratio", "discard"]),
        (
            dict(use_experience_replay=True, group_size=4, offpolicy_trajectories_per_task=4),
            ["--offpolicy-trajectories-per-task 4", "--group-size 4"],
        ),
        (
            dict(group_size=4, offpolicy_trajectories_per_task=5),
            ["--offpolicy-trajectories-per-task 5", "--group-size 4"],
        ),
        (dict(experience_lbound=5, experience_rbound=3), ["--experience-rbound 3", "--experience-lbound 5"]),
        (dict(success_reward=float("nan")), ["--success-reward nan", "finite"]),
        (dict(seed=2**64), ["--seed 18446744073709551616", "2**32"]),
        (dict(use_experience_replay=True, experience_lbound=0, experience_rbound=0), ["--experience-rbound 0"]),
        (dict(use_experience_replay=True, experience_rbound=9), ["--experience-rbound 9"]),
        (dict(experience_lbound=-2), ["--experience-lbound -2"]),
        (dict(max_staleness=0), ["--max-staleness 0"]),
        (dict(num_rollouts=0), ["--num-rollouts 0"]),
        (dict(replay_old_logp="old"), ["--replay-old-logp old", "recorded, current"]),
        (dict(enable=False, train_rollout_expmode="mixed"), ["--train-rollout-expmode mixed", "--no-enable"]),
        (dict(clip_c=1.0), ["--clip-c 1.0"]),
        (dict(num_families=25), ["--num-families 25", "24"]),
        (dict(num_tasks=3, num_minibatches=5), ["--num-minibatches 5", "24"]),
        (dict(learning_rate=float("nan")), ["--learning-rate nan"]),
    ],
)
def test_bad_options(options, words, capsys):
    with pytest.raises(SystemExit) as stop:
        het.Args(**options)
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and len(error.splitlines()) == 1 and all(word in error for word in words), error
