"""het_grpo.py: every number of the spec by hand, the pool, the memory, the presets."""

import json
import random
import time
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
from conftest import ROOT

import het_grpo as het


def rng(seed=0):
    return random.Random(seed)


# --- shares ---
def test_shares():
    for n, guided in ((8, 4), (1, 0), (3, 1), (5, 2)):
        assert sum(het.draw(n, 0.5, rng())) == guided
    assert sum(het.draw(100, 0.29, rng())) == 29
    modes = ("all", "keep", "woexp", "discard", "mixed", "hybrid")
    assert [het.share_of(mode, 0.3) for mode in modes] == [1, 1, 0, 0, 0.3, 0.3]
    assert len({tuple(het.draw(4, 0.5, rng(i))) for i in range(200)}) == 6, (
        "all C(4,2) places come up"
    )


@pytest.mark.parametrize(
    "advised, kept, num_keeping",
    [(4, 4, 4), (3, 2, 4), (3, 0, 4), (8, 8, 8), (8, 2, 2), (0, 0, 4)],
)
def test_other_groups_fill_up_the_share_that_keeps(advised, kept, num_keeping):
    """Of 8 groups 4 are to keep. A recorded success that had advice decides for its group."""
    replayed = []
    for i in range(advised):
        replayed.append(het.Trajectory(i, data_id=i, advice="red", keep=i < kept))
    planned = het.plan_episodes(list(range(8)), replayed, het.Args(), 1, rng())
    keeps = {t.data_id: t.keep for t in planned}
    assert sum(keeps.values()) == num_keeping
    assert all(keeps[t.data_id] == t.keep for t in replayed)
    assert len(planned) == 64 - advised


# --- losses ---
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
    found = het.group_advantages(rewards, torch.zeros(len(rewards))).tolist()
    assert found == pytest.approx(expected, abs=1e-6)
    centered = het.group_advantages(rewards, torch.zeros(len(rewards)), adv_std=False)
    assert centered.tolist() == pytest.approx((rewards - rewards.mean()).tolist(), abs=1e-6)
    mixed = torch.stack(
        [rewards, torch.arange(len(rewards)) * 100.0], 1
    ).flatten()  # beside another group
    groups = torch.tensor([3, 7] * len(rewards))
    assert het.group_advantages(mixed, groups)[::2].tolist() == pytest.approx(expected, abs=1e-6)


# --- text experience ---
NASTY = "{} {0} {name} 100% \\n\n\n</EXP><EXP>\n{{}}"


def test_injection_is_text_in_text():
    template = het.Args().experience_template
    assert (
        template == "\n\nSome Related Experience to help you to complete the task:<EXP>{}</EXP>\n\n"
    )
    before, after = template.split("{}")
    assert (
        het.inject_experience("open {it}", NASTY, template) == before + NASTY + after + "open {it}"
    )
    assert het.inject_experience("open {it}", "", template) == "open {it}"
    assert (
        het.inject_experience("{q}", "{e}", '{"hint": "{}", {0} {x}}\n')
        == '{"hint": "{e}", {0} {x}}\n{q}'
    )


def pool_of(*records):
    pool = het.ExperiencePool(het.Args())
    for record in records:
        pool.add(*record)
    return pool


def test_retrieval_is_by_shared_words_the_rare_and_the_new_first(monkeypatch):
    pool = pool_of(("lock amber", "one"), ("lock brass", "two"), ("lock brass", "three"))
    assert pool.retrieve("lock brass") == "three\ntwo\none"
    assert pool.retrieve("door") == "", "nothing shared, nothing found"
    monkeypatch.setattr(het, "RETRIEVE_TOP_K", 1)
    assert pool.retrieve("Lock AMBER room 7") == "one", "case aside"
    assert pool.retrieve("lock brass") == "three"


def test_retrieval_does_not_depend_on_the_order_of_a_set():
    """Two topics of the same rare words: a sum of floats in set order could tell them apart."""
    words = [f"w{i}" for i in range(40)]
    pool = pool_of((" ".join(words), "old"), (" ".join(reversed(words)), "new"))
    assert pool.retrieve(" ".join(words)) == "new\nold", "a tie: the newest comes first"


def test_the_pool_has_a_cap_no_doubles_and_refuses(monkeypatch):
    monkeypatch.setattr(het, "MAX_NOTES", 4)
    pool = pool_of(*[("amber", f"text {i % 4}") for i in range(7)])
    assert len(pool.records) == 4
    pool.add("amber", "new")
    assert [record["text"] for record in pool.records] == ["text 1", "text 2", "text 3", "new"]
    marked = "x " + het.TEMPLATE.partition("{}")[0].strip() + " y"
    assert not any(pool.is_note(note) for note in [("a", marked), ("a", ""), ("", "b")])
    assert pool.is_note(("a", NASTY)), "braces and </EXP> are just text"
    for template, text in (("{}\n\n", "text"), ("Hint: {}\n", "Hint: red")):
        pool = het.ExperiencePool(het.Args(experience_template=template))
        assert pool.is_note(("a", text)), "a short template may be there by chance"


@pytest.mark.parametrize(
    "line, fine",
    [
        ("{broken", False),
        ('{"topic": "a"}', False),
        ('{"topic": "a", "text": 3}', False),
        ("[1, 2]", False),
        (b"\xff\xfe", False),
    ]
    + [("[" * 100_000, False), ('{"topic": "a", "text": "one\u2028line"}', True)]
    + [(json.dumps(dict(topic="a", text=NASTY)), True)],
)
def test_pool_file(line, fine, tmp_path):
    path = tmp_path / "pool.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(json.dumps(dict(topic="a", text="b")).encode() + b"\n" + line + b"\n")
    pool = pool_of()
    if fine:
        pool.load(path)
        assert pool.records[1] == json.loads(line)
        return
    with pytest.raises(SystemExit, match="pool.jsonl: line 2"):
        pool.load(path)


def test_blank_lines_of_a_pool_file_are_skipped(tmp_path):
    path = tmp_path / "pool.jsonl"
    path.write_text(json.dumps(dict(topic="a", text="b")) + "\n\n")
    pool = pool_of()
    pool.load(path)
    assert pool.records == [dict(topic="a", text="b")]


# --- summarizers and retrievers that fail ---
def game(task=1, success=True):
    turns = [dict(action="red", observation="open", reward=1.0)]
    return het.Trajectory(
        task, topic="amber", turns=turns, success=success, experience="amber : red"
    )


def hang(*inputs):
    time.sleep(60)


def fail(*inputs):
    raise OSError("no network")


@pytest.mark.parametrize("result", [None, 7, "text", [("topic", 3)], [("a", "b", "c")]])
def test_a_summarizer_that_returns_nonsense_is_counted(result, capsys):
    pool = het.ExperiencePool(het.Args())
    pool.summarizer = lambda episodes, ask: result
    pool.fill_pool([game()])
    assert pool.num_failed_calls == 1 and not pool.records
    assert "--summarizer returned" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("function, words", [(fail, "an error"), (hang, "within 0 seconds")])
def test_a_call_that_raises_or_hangs_is_counted_and_the_run_goes_on(
    function, words, capsys, monkeypatch
):
    monkeypatch.setattr(het, "TIME_LIMIT", 0.05)
    monkeypatch.setattr(het, "RETRIEVER_TIME_LIMIT", 0.05)
    pool = het.ExperiencePool(het.Args())
    pool.summarizer = pool.retriever = function
    pool.fill_pool([game()])
    assert pool.retrieve("amber") == ""
    assert pool.num_failed_calls == 2 and not pool.records
    assert capsys.readouterr().out.count(words) == 2


def test_functions_that_hang_are_not_called_for_ever(capsys, monkeypatch):
    monkeypatch.setattr(het, "RETRIEVER_TIME_LIMIT", 0.01)
    pool, calls = het.ExperiencePool(het.Args()), []
    pool.retriever = lambda question, top_k: calls.append(question) or time.sleep(5)
    assert [pool.retrieve(name) for name in "abcde"] == [""] * 5
    assert calls == ["a", "b", "c"] and pool.num_failed_calls == 3
    assert capsys.readouterr().out.count("is not called again") == 1


def test_a_retriever_must_return_a_text(capsys):
    pool = het.ExperiencePool(het.Args())
    pool.retriever = lambda question, top_k: ["a list"]
    assert pool.retrieve("amber") == "" and pool.num_failed_calls == 1
    pool.retriever = lambda question, top_k: f"{question} {top_k}"
    assert pool.retrieve("amber") == "amber 3"


def test_the_summarizer_sees_failures_and_the_built_in_one_leaves_them_out():
    pool, seen = het.ExperiencePool(het.Args()), []
    built_in = pool.summarizer
    pool.summarizer = lambda episodes, ask: seen.extend(episodes) or built_in(episodes, ask)
    pool.fill_pool([game(1), game(2, success=False)])
    assert [(e["task"], e["success"], e["topic"]) for e in seen] == [
        (1, True, "amber"),
        (2, False, "amber"),
    ]
    assert seen[0]["text"].endswith("> red\nopen") and seen[0]["turns"][0]["reward"] == 1.0
    assert pool.records == [dict(topic="amber", text="amber : red")]


# --- trajectory replay ---
def make(task, number=0, success=True, **rest):
    steps = [("assistant", [6, 7]), ("env", [8]), ("assistant", [9])]
    rest = (
        dict(entropy=1.0, old_log_probs=[-1.0, -9.0, -9.0, -2.0], version=1, prompt_ids=[1, 2])
        | rest
    )
    return het.Trajectory(task, 0, number, steps=steps, success=success, **rest)


def manager_of(**options):
    return het.ExperienceManager(het.Args(use_experience_replay=True, **options))


def group(task, successes, n=8):
    return [make(task, i, i < successes) for i in range(n)]


def filled(counts, **options):
    manager = manager_of(**options)
    for task, successes in counts.items():
        manager.update_difficulty2task_dict(group(task, successes))
        manager.save_trajectories_to_memory(
            manager.update_skip_uid_set_and_filter_trajectories(group(task, successes))
        )
    return manager


def test_a_task_is_in_one_bucket_and_a_solved_one_retires():
    manager = filled({7: 3}, retire_solved=True)
    assert len(manager.memory[7]) == 3
    manager.update_difficulty2task_dict(group(7, 5))
    assert manager.valid_tasks() == {5: [7]}
    solved = group(7, 7, n=7)  # beside a replayed one: 7 of 7 is solved
    manager.update_difficulty2task_dict(solved)
    assert manager.update_skip_uid_set_and_filter_trajectories(solved) == []
    assert manager.skip_uid_set == {7} and 7 not in manager.memory
    assert manager.valid_tasks() == {}
    manager.update_difficulty2task_dict(group(7, 2))  # a later imperfect result brings it back
    assert len(manager.update_skip_uid_set_and_filter_trajectories(group(7, 2))) == 2
    manager.save_trajectories_to_memory(group(7, 2)[:2])
    assert not manager.skip_uid_set and manager.valid_tasks() == {2: [7]}


@pytest.mark.parametrize("mode, left", [("argmin", [0, 2]), ("argmax", [1, 2]), ("random", [1, 2])])
def test_memory_keeps_and_gives_what_the_mode_prefers(mode, left, monkeypatch):
    """Entropies 1, 3, 2 in a memory of two; at random the newest stay."""
    monkeypatch.setattr(het, "MAX_TRAJECTORIES_PER_TASK", 2)
    manager = manager_of(exp_select_mode=mode)
    manager.save_trajectories_to_memory(
        [make(1, i, entropy=e) for i, e in enumerate([1.0, 3.0, 2.0])]
    )
    assert [t.rollout_id for t in manager.memory[1]] == left
    if mode != "random":
        worse = make(1, 9, entropy={"argmin": 9.0, "argmax": 0.0}[mode])
        manager.save_trajectories_to_memory([worse])
        assert [t.rollout_id for t in manager.memory[1]] == left, "it comes in only if it is better"
        chosen = manager.get_offpolicy_trajectories_from_memory(1, rng())
        assert [t.rollout_id for t in chosen] == left[:1], "the best of them"


@pytest.mark.parametrize("mode, left", [("argmin", [2, 1]), ("random", [3, 1])])
def test_imitation_keeps_the_shortest_successes_or_the_newest(mode, left, monkeypatch):
    monkeypatch.setattr(het, "MAX_TRAJECTORIES_PER_TASK", 2)
    manager = het.ExperienceManager(het.Args(method="sft", exp_select_mode=mode))
    manager.save_trajectories_to_memory(
        [het.Trajectory(1, steps=[("assistant", [0])] * n) for n in (2, 3, 1)]
    )
    assert [len(t.steps) for t in manager.memory[1]] == left


def test_tasks_come_by_bucket_within_the_bounds():
    counts = Counter()
    manager = filled({s: s for s in range(9)} | {20: 4, 21: 4})
    for seed in range(3000):
        counts[manager.sample_tasks_from_replaypool(1, rng(seed))[0]] += 1
    shares = [counts[task] / 3000 for task in (0, 1, 4, 20, 7, 8)]
    expected = [0, 1 / 7, 1 / 21, 1 / 21, 1 / 7, 0]
    assert shares == pytest.approx(expected, abs=0.03), "a bucket, then a task"
    assert len(set(manager.sample_tasks_from_replaypool(99, rng()))) == 9, "each once"
    manager.num_successes = {4: 0}  # failed today, solved before: the groups that replay is for
    assert manager.sample_tasks_from_replaypool(1, rng()) == [4]


@pytest.mark.parametrize("n, available", [(8, 1), (2, 2), (8, 5)])
def test_one_replayed_member_has_the_last_place(n, available):
    manager = manager_of(group_size=n)
    manager.memory = {task: [make(task, i) for i in range(available)] for task in (5, 6)}
    batch = manager.get_offpolicy_batch([6, 5], rng())
    assert [(t.task, t.data_id, t.rollout_id) for t in batch] == [(6, 0, n - 1), (5, 1, n - 1)]
    assert all(t.is_experience_replay for t in batch)
    assert not any(t.is_experience_replay for stored in manager.memory.values() for t in stored)


@pytest.mark.parametrize(
    "size, valid, split", [(8, 3, (3, 5)), (8, 10, (4, 4)), (7, 10, (3, 4)), (8, 0, (0, 8))]
)
def test_the_mix(size, valid, split):
    manager = filled({i: 4 for i in range(valid)}, num_tasks=size, retire_solved=True)
    mix, seen = het.ExperienceMixCollateFn(manager.args, manager, list(range(40))), []
    for i in range(20):
        experience_tasks, on_policy_tasks = mix(rng(i))
        assert (len(experience_tasks), len(on_policy_tasks)) == split
        assert len({*experience_tasks, *on_policy_tasks}) == size and all(
            task < valid for task in experience_tasks
        )
        seen += on_policy_tasks
    if valid == 0:
        assert sorted(seen[:40]) == list(range(40)) != seen[:40] != seen[40:80], (
            "a pass has every task once"
        )
    manager.skip_uid_set = set(range(20))
    assert all(task >= 20 for _ in range(5) for task in mix(rng())[1]), (
        "retired ones are passed over"
    )
    manager.skip_uid_set = set(range(40))
    assert len(set(sum(mix(rng()), []))) == size, "too few left: retired ones are looked at again"


def test_a_pass_visits_every_task_once_under_replay():
    """Half of each batch is replayed; the other half goes through all tasks before one comes again."""
    manager = filled({i: 4 for i in range(10)})
    mix = het.ExperienceMixCollateFn(manager.args, manager, list(range(40)))
    seen = []
    for i in range(30):
        experience_tasks, on_policy_tasks = mix(rng(i))
        assert len(experience_tasks) == 4 and not {*experience_tasks} & {*on_policy_tasks}
        seen += on_policy_tasks
    assert len(seen) == 120 and set(seen[:50]) == set(range(40))
    visits = Counter(seen) + Counter(mix.waiting)
    assert set(visits.values()) == {mix.num_passes}, "played or waiting, once for each pass"


def test_retired_tasks_do_not_bring_others_twice_into_a_pass():
    manager = manager_of(retire_solved=True)
    manager.skip_uid_set = set(range(20))
    mix = het.ExperienceMixCollateFn(manager.args, manager, list(range(52)))
    seen = sum((mix(rng(i))[1] for i in range(8)), [])
    assert Counter(seen) == {task: 2 for task in range(20, 52)}


# --- options ---
def resolved(**options):
    args = het.Args(**options)
    modes = (args.val_rollout_expmode, args.train_rollout_expmode, args.train_sample_expmode)
    return (*modes, args.rollout_expratio, args.train_sample_keepratio)


def test_presets():
    assert (
        resolved(method="baseline")[:3] == ("woexp", "woexp", "keep") == resolved(enable=False)[:3]
    )
    assert resolved(method="ec") == ("mixed", "mixed", "keep", 0.5, 1.0)
    assert resolved(method="ei", rollout_expratio=0.25) == ("mixed", "mixed", "discard", 0.25, 0.0)
    assert resolved() == resolved(method="het") == ("mixed", "mixed", "hybrid", 0.5, 0.5)
    assert resolved(train_rollout_expmode="all", train_sample_keepratio=0.2)[1::3] == ("all", 0.2)
    assert resolved(method="sft", train_sample_expmode="discard")[:3] == (
        "mixed",
        "mixed",
        "discard",
    )
    assert not het.Args(method="baseline").uses_advice
    assert het.Args(method="baseline", imitate_iterations=3).uses_advice
    for args in (het.Args(), het.Args(enable=False), het.Args(method="ec")):
        assert replace(args) == args == het.Args(**asdict(args)), "a fork may copy its options"


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(train_sample_expmode="keep"), "method het contradicts --train-sample-expmode keep"),
        (dict(train_rollout_expmode="woexp"), "method het contradicts --train-rollout-expmode"),
        (dict(method="ei", enable=False), "--no-enable contradicts --method ei"),
        (dict(group_size=1), "--group-size must be at least 2"),
        (dict(retire_solved=True), "--retire-solved needs --use-experience-replay"),
        (dict(replay_old_logp="recorded"), "needs --use-experience-replay"),
        (dict(exp_ratio=0.25), "--exp-ratio 0.25 needs --use-experience-replay"),
        (dict(exp_ratio=0.1, use_experience_replay=True), "--exp-ratio 0.1 of 8 tasks is no task"),
        (dict(num_tasks=1), "0 of 1 tasks keep the advice"),
        (dict(train_sample_keepratio=1.0), "8 of 8 tasks keep the advice"),
        (dict(updated_freq=-1), "--updated-freq -1: must not be negative"),
        (dict(ent_coef=float("nan")), "--ent-coef nan: must not be negative"),
        (dict(lora_rank=-1), "--lora-rank -1: must not be negative"),
        (dict(exp_select_mode="argmax", method="ec"), "argmax needs replay or imitation"),
        (dict(method="sft", imitate_iterations=2), "contradicts --no-enable, --method sft"),
        (dict(imitate_iterations=2, train_rollout_expmode="all"), "--imitate-iterations contrad"),
        (dict(imitate_iterations=2, method="baseline", enable=False), "contradicts --no-enable"),
        (dict(method="sft", use_experience_replay=True), "imitation cannot be combined"),
        (dict(method="baseline", val_summarizer_save=True), "--val-summarizer-save does nothing"),
        (dict(chat_template=True, model_name="x"), "--chat-template needs --max-turn-tokens 2"),
        (dict(chat_template=True, max_turn_tokens=2), "--chat-template needs --model-name"),
        (dict(system_prompt="x"), "--system-prompt x needs --chat-template"),
        (dict(method="baseline", summarizer="x"), "--summarizer x does nothing: no episode gets"),
    ],
)
def test_an_option_without_effect_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        het.Args(**options)
    nobody = dict(train_rollout_expmode="woexp", val_rollout_expmode="woexp")
    alone = het.Args(method="sft", group_size=1, **nobody)
    assert alone.batch_size == 8, "imitation needs no group"


# --- the games of the study ---
def test_the_judge_errs_in_training_rooms_only(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    import locks

    for game, share in ((locks.Noisy, 0.1), (locks.Noisier, 0.2)):
        envs, wrong = [game() for _ in range(4)], []
        for i in range(2000):
            _, info = envs[i % 4].reset(i % 480)
            presses = info["solution"] if i % 3 else ["red"] * 7
            for action in presses:
                text, reward, ended, _, last = envs[i % 4].step(action)
            assert ended and last["experience"].startswith(info["topic"])
            wrong.append((i % 480 < locks.TRAINING, (text == "open") != bool(reward)))
        assert not any(error for training, error in wrong if not training), (
            "validation asks for the secret"
        )
        assert sum(error for _, error in wrong) / sum(
            training for training, _ in wrong
        ) == pytest.approx(share, abs=0.03)
