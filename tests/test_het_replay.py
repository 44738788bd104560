"""het_grpo.py: the methods of the replay checklist one by one, then one walk through all of them."""

import dataclasses

import numpy as np
import pytest
import torch

import het_grpo as het


def make(task_id, rollout_id=0, success=True, entropy=1.0, version=1, replay=False, **fields):
    steps = [("assistant", [10 + rollout_id]), ("env", [20, 21]), ("assistant", [11])]
    defaults = dict(
        trajectory_id=f"{version}/{task_id}/{rollout_id}", task_id=task_id, data_id=0, rollout_id=rollout_id,
        prompt_ids=[1, 2], rollout_prompt_ids=[1, 2], steps=steps, sampler_logprobs=[-1.0, -2.0],
        reward=float(success), success=success, injected=False, summary="", is_experience_replay=replay,
        old_log_probs=[-1.0, 0.0, 0.0, -2.0], entropy=entropy, version=version,
    )  # fmt: skip
    return het.Trajectory(**defaults | fields)


def group(task_id, successes, n=8, **fields):
    return [make(task_id, i, i < successes, **fields) for i in range(n)]


def manager_of(**options):
    strict = dict(experience_lbound=0, retire_solved=True, bucket_weights="normal", exp_select_mode="argmin")
    return het.ExperienceManager(het.Args(use_experience_replay=True, **strict | options))


def rng(seed=0):
    return np.random.default_rng(seed)


# --- update_difficulty2task_dict ---
def test_a_task_is_in_the_bucket_of_its_last_result():
    manager = manager_of()
    manager.update_difficulty2task_dict(group("a", 3) + group("b", 0))
    assert manager.difficulty2task_dict == {3: ["a"], 0: ["b"]}
    manager.update_difficulty2task_dict(group("a", 5))
    assert manager.difficulty2task_dict == {0: ["b"], 5: ["a"]}


def test_replayed_trajectories_are_not_counted():
    manager = manager_of()
    manager.update_difficulty2task_dict(group("a", 2, n=7) + [make("a", 7, replay=True)])
    assert manager.difficulty2task_dict == {2: ["a"]}
    manager.update_difficulty2task_dict(group("a", 7, n=7) + [make("a", 7, replay=True)])
    assert manager.difficulty2task_dict == {8: ["a"]}, "all that were played: solved"


# --- update_skip_uid_set_and_filter_trajectories ---
def test_solved_tasks_retire_and_come_back():
    manager = manager_of()
    first = group("a", 5)
    manager.update_difficulty2task_dict(first)
    storable = manager.update_skip_uid_set_and_filter_trajectories(first)
    manager.save_trajectories_to_memory(storable)
    assert [t.rollout_id for t in storable] == [0, 1, 2, 3, 4] and len(manager.memory["a"]) == 5
    solved = group("a", 8, version=2)
    manager.update_difficulty2task_dict(solved)
    assert manager.update_skip_uid_set_and_filter_trajectories(solved) == []
    assert manager.skip_uid_set == {"a"} and manager.difficulty2task_dict == {} and manager.memory == {}
    again = group("a", 6, version=3)
    manager.update_difficulty2task_dict(again)
    storable = manager.update_skip_uid_set_and_filter_trajectories(again)
    assert manager.skip_uid_set == set() and manager.difficulty2task_dict == {6: ["a"]} and len(storable) == 6


def test_solved_tasks_may_stay():
    manager = manager_of(retire_solved=False)
    solved = group("a", 8)
    manager.update_difficulty2task_dict(solved)
    storable = manager.update_skip_uid_set_and_filter_trajectories(solved)
    manager.save_trajectories_to_memory(storable)
    assert len(storable) == 8 and manager.skip_uid_set == set() and manager.difficulty2task_dict == {8: ["a"]}
    assert manager.sample_tasks_from_replaypool(9, 2, rng()) == [], "known: nothing to gain"
    manager.update_difficulty2task_dict(group("a", 5, version=2))
    assert manager.sample_tasks_from_replaypool(9, 3, rng()) == ["a"], "forgotten: what it knew is still there"


def test_solved_is_a_matter_of_fresh_rollouts():
    manager = manager_of()
    batch = group("a", 7, n=7) + [make("a", 7, replay=True)]
    manager.update_difficulty2task_dict(batch)
    assert manager.update_skip_uid_set_and_filter_trajectories(batch) == [] and manager.skip_uid_set == {"a"}
    failed = group("b", 0, n=7) + [make("b", 7, replay=True)]  # a replayed success must not be stored again
    assert manager.update_skip_uid_set_and_filter_trajectories(failed) == []


# --- save_trajectories_to_memory ---
@pytest.mark.parametrize(
    "mode, entropies, kept",
    [
        ("argmin", [3, 1, 2], [1, 2]),
        ("argmax", [3, 1, 2], [3, 2]),
        ("random", [3, 1, 2], [1, 2]),
        ("argmin", [1, 2, 3], [1, 2]),
        ("argmax", [1, 2, 3], [2, 3]),
    ],
)
def test_a_full_memory(mode, entropies, kept):
    manager = manager_of(exp_select_mode=mode, max_trajectories_per_task=2)
    manager.save_trajectories_to_memory([make("a", i, entropy=float(e)) for i, e in enumerate(entropies)])
    assert sorted(t.entropy for t in manager.memory["a"]) == sorted(kept)


def test_memory_takes_fresh_successes_only():
    for bad in (make("a", success=False), make("a", replay=True), make("a", old_log_probs=[])):
        with pytest.raises(AssertionError):
            manager_of().save_trajectories_to_memory([bad])


# --- sample_tasks_from_replaypool ---
def filled(results, **options):
    manager = manager_of(**options)
    for task_id, successes in results.items():
        trajectories = group(task_id, successes)
        manager.update_difficulty2task_dict(trajectories)
        manager.save_trajectories_to_memory(manager.update_skip_uid_set_and_filter_trajectories(trajectories))
    return manager


def test_only_half_known_tasks_are_drawn():
    manager = filled({"zero": 0, "one": 1, "seven": 7, "all": 8})
    assert sorted(manager.sample_tasks_from_replaypool(9, 2, rng())) == ["one", "seven"]
    manager = filled({"one": 1, "two": 2, "six": 6}, experience_lbound=1, experience_rbound=5)
    assert manager.sample_tasks_from_replaypool(9, 2, rng()) == ["two"]


def test_a_task_at_zero_is_eligible_through_older_successes_where_the_bound_says_so():
    for low, expected in ((0, []), (-1, ["a"])):
        manager = filled({"a": 3, "never": 0}, experience_lbound=low)
        manager.update_difficulty2task_dict(group("a", 0, version=2))
        assert manager.sample_tasks_from_replaypool(9, 3, rng()) == expected


def test_bucket_frequencies():
    manager = filled({f"task{s}": s for s in range(1, 8)})
    counts = {s: 0 for s in range(1, 8)}
    for seed in range(3000):
        counts[int(manager.sample_tasks_from_replaypool(1, 2, rng(seed))[0][4:])] += 1
    expected = [0.004433, 0.054006, 0.242036, 0.399050, 0.242036, 0.054006, 0.004433]
    assert [counts[s] / 3000 for s in counts] == pytest.approx(expected, abs=0.03)


def test_stale_trajectories_stay_away():
    manager = filled({"a": 4}, max_staleness=5)
    assert manager.sample_tasks_from_replaypool(1, 6, rng()) == ["a"]
    assert manager.sample_tasks_from_replaypool(1, 7, rng()) == []


# --- get_offpolicy_trajectories_from_memory ---
@pytest.mark.parametrize("mode, expected", [("argmin", [1, 2]), ("argmax", [0, 3])])
def test_choice_by_entropy(mode, expected):
    manager = manager_of(exp_select_mode=mode, offpolicy_trajectories_per_task=2)
    for i, entropy in enumerate([4.0, 1.0, 2.0, 3.0]):
        manager.memory.setdefault("a", []).append(make("a", i, entropy=entropy))
    found = manager.get_offpolicy_trajectories_from_memory("a", 2, rng())
    assert [t.rollout_id for t in found] == expected
    # the current policy's entropy wins over the stored one, unless told otherwise
    flipped = lambda stored: [-t.entropy for t in stored]  # noqa: E731
    found = manager.get_offpolicy_trajectories_from_memory("a", 2, rng(), flipped)
    assert [t.rollout_id for t in found] == {"argmin": [0, 3], "argmax": [1, 2]}[mode]
    manager.args.use_current_policy_entropy = False
    found = manager.get_offpolicy_trajectories_from_memory("a", 2, rng(), flipped)
    assert [t.rollout_id for t in found] == expected


def test_random_choice_reaches_all():
    manager = filled({"a": 4}, exp_select_mode="random")
    draws = [manager.get_offpolicy_trajectories_from_memory("a", 2, rng(i))[0].rollout_id for i in range(50)]
    assert set(draws) == {0, 1, 2, 3}


# --- get_offpolicy_batch ---
@pytest.mark.parametrize("n, k, available, replayed", [(8, 2, 1, 1), (2, 2, 2, 1), (8, 2, 5, 2)])
def test_room_for_fresh_ones(n, k, available, replayed):
    manager = manager_of(group_size=n)
    manager.args.offpolicy_trajectories_per_task = k  # k >= n does not pass the command line; the cap holds anyhow
    manager.save_trajectories_to_memory([make("a", i) for i in range(available)])
    batch = manager.get_offpolicy_batch(["a"], 2, rng())
    assert len(batch) == replayed and [t.rollout_id for t in batch] == list(range(n - replayed, n))


def test_replayed_ones_join_the_group_of_their_task():
    manager = filled({"a": 4, "b": 4})
    batch = manager.get_offpolicy_batch(["b", "a"], 2, rng())
    assert [(t.task_id, t.data_id, t.rollout_id) for t in batch] == [("b", 0, 7), ("a", 1, 7)]
    assert all(t.is_experience_replay for t in batch)
    assert not any(t.is_experience_replay for stored in manager.memory.values() for t in stored)


# --- convert_offpolicy_to_cmt, tokenize_steps, get_extra, samples_to_dataproto ---
def test_the_split_is_at_the_first_token_of_the_agent():
    steps = [("env", [5]), ("assistant", [6, 7]), ("env", [8]), ("assistant", [9])]
    for replay in (False, True):
        prompt, response, loss_mask, prefix_mask = het.tokenize_steps([1, 2], steps, replay)
        assert (prompt, response, loss_mask) == ([1, 2, 5], [6, 7, 8, 9], [1, 1, 0, 1])
        assert prefix_mask == [int(replay) * bit for bit in loss_mask]
        assert sum(loss_mask) == 3, "a replayed trajectory trains"


def test_conversion_uses_the_view_that_was_recorded():
    for keep in (True, False):
        stored = make("a", injected=True, keep=keep, rollout_prompt_ids=[9, 9, 1, 2])
        back = het.convert_offpolicy_to_cmt(stored, 3, 7)
        data = het.samples_to_dataproto([back], 0, "cpu")
        assert data["prompt_ids"].tolist() == [[9, 9, 1, 2] if keep else [1, 2]]
        assert (back.data_id, back.rollout_id, back.is_experience_replay) == (3, 7, True)


def test_extra_says_what_is_off_policy():
    cases = {  # injected, keep, replay -> stripped, off_policy
        (False, False, False): (False, False),  # retrieval was empty: nothing to strip
        (True, True, False): (False, False),  # kept is on-policy
        (True, False, False): (True, True),
        (False, True, True): (False, True),
        (True, False, True): (False, True),  # was recorded on the stripped view
    }
    for (injected, keep, replay), expected in cases.items():
        extra = het.get_extra(make("a", injected=injected, keep=keep, replay=replay))
        assert (extra["stripped"], extra["off_policy"]) == expected
        assert extra["is_experience_replay"] == replay and extra["trajectory_id"] == "1/a/0"


def test_two_masks():
    on, stripped = make("a", 0), make("a", 1, injected=True, keep=False, rollout_prompt_ids=[9, 1, 2])
    replayed = het.convert_offpolicy_to_cmt(make("a", 2), 0, 2)
    data = het.samples_to_dataproto([on, stripped, replayed], 0, "cpu")
    assert data["loss_mask"].tolist() == [[1, 0, 0, 1]] * 3
    assert data["exp_mask"].tolist() == [[0] * 4, [1, 0, 0, 1], [1, 0, 0, 1]]
    assert data["replay_mask"].tolist() == [[0] * 4, [0] * 4, [1, 0, 0, 1]]
    old = torch.full((3, 4), -7.0)
    new = het._replace_recorded_old_log_probs(data, old)
    assert new.tolist() == [[-7.0] * 4, [-7.0] * 4, [-1.0, -7.0, -7.0, -2.0]]


def test_keep_and_discard_differ_in_the_prompt_only():
    both = [make("a", injected=True, keep=keep, rollout_prompt_ids=[9, 9, 1, 2]) for keep in (True, False)]
    kept, stripped = (het.samples_to_dataproto([t], 0, "cpu") for t in both)
    assert kept["prompt_ids"].tolist() == [[9, 9, 1, 2]] and stripped["prompt_ids"].tolist() == [[1, 2]]
    for name in ("response_ids", "response_mask", "loss_mask", "rewards"):
        assert torch.equal(kept[name], stripped[name])


def test_log_probs_go_by_id_not_by_place():
    fresh = [make("a", i, entropy=0.0, old_log_probs=[]) for i in range(3)]
    data = het.samples_to_dataproto(fresh[::-1], 0, "cpu")
    values = torch.tensor([[2.0] * 4, [1.0] * 4, [0.0] * 4])
    het.attach_log_probs(fresh, data, values, values[:, 0] * 10, version=5)
    assert [t.old_log_probs for t in fresh] == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    assert [(t.entropy, t.version) for t in fresh] == [(0.0, 5), (10.0, 5), (20.0, 5)]


# --- tasks ---
def tasks_of(count):
    return [het.AgentTask(str(i), f"q{i}", "", ()) for i in range(count)]


def ids(tasks):
    return [task.task_id for task in tasks]


@pytest.mark.parametrize("size, valid, split", [(8, 3, (3, 5)), (8, 10, (4, 4)), (7, 10, (3, 4)), (8, 0, (0, 8))])
def test_the_mix(size, valid, split):
    manager = filled({str(i): 4 for i in range(valid)})
    queue = het.TaskQueue(tasks_of(40), seed=1)
    mix = het.ExperienceMixCollateFn(manager, queue, 0.5)
    seen = []
    for i in range(20):
        drawn = queue.take(size, set())
        experience_tasks, on_policy_tasks = mix(drawn, 2, rng(i))
        assert (len(experience_tasks), len(on_policy_tasks)) == split
        assert len(set(ids(experience_tasks + on_policy_tasks))) == size
        assert all(int(i) < valid for i in ids(experience_tasks))
        unused = set(ids(drawn)) - set(ids(experience_tasks + on_policy_tasks))
        assert set(ids([queue.tasks[i] for i in queue.returned])) >= unused, "they go back to the queue"
        seen += ids(on_policy_tasks)
    if valid == 0:
        assert sorted(seen[:40], key=int) == [str(i) for i in range(40)], "a pass has every task once"


def test_the_queue_loses_nothing_and_skips_the_retired():
    queue = het.TaskQueue(tasks_of(10), seed=1)
    drawn = queue.take(4, set())
    queue.put_back(drawn[2:])
    assert ids(queue.take(4, set()))[:2] == ids(drawn[2:])
    skip = {str(i) for i in range(7)}
    for _ in range(5):
        taken = ids(queue.take(3, skip))
        assert sorted(taken) == ["7", "8", "9"]
    assert len(set(ids(queue.take(5, skip)))) == 5, "too few left: retired ones are looked at again"
    assert len(set(ids(queue.take(5, {str(i) for i in range(10)})))) == 5


def test_the_queue_is_a_function_of_seed_and_position():
    first, second = het.TaskQueue(tasks_of(10), 1), het.TaskQueue(tasks_of(10), 1)
    for _ in range(7):
        expected = ids(first.take(3, set()))
        second.position, second.returned = second.position, list(second.returned)  # what a checkpoint carries
        assert ids(second.take(3, set())) == expected
    assert ids(het.TaskQueue(tasks_of(10), 2).take(10, set())) != ids(het.TaskQueue(tasks_of(10), 1).take(10, set()))


# --- all of it ---
def test_the_whole_flow():
    """Roll out, count, save, draw, fetch, convert, mix, replace: what comes back is what was stored."""
    manager = manager_of(group_size=4, offpolicy_trajectories_per_task=1, num_tasks=4)
    queue = het.TaskQueue(tasks_of(12), 1)
    mix = het.ExperienceMixCollateFn(manager, queue, 0.5)
    stored_logprobs = {}
    for iteration in range(1, 6):
        experience_tasks, on_policy_tasks = mix(queue.take(4, manager.skip_uid_set), iteration, rng(iteration))
        replayed = manager.get_offpolicy_batch(ids(experience_tasks), iteration, rng(iteration))
        assert len(replayed) == len(experience_tasks) == (0 if iteration == 1 else 2)
        fresh = []
        for data_id, task in enumerate(experience_tasks + on_policy_tasks):
            n = 4 - sum(t.data_id == data_id for t in replayed)
            fresh += [
                make(task.task_id, i, i < 2, data_id=data_id, version=iteration, old_log_probs=[]) for i in range(n)
            ]
        manager.update_difficulty2task_dict(fresh)
        trajectories = sorted(fresh + replayed, key=lambda t: (t.data_id, t.rollout_id))
        assert len(trajectories) == 16
        shuffled = [trajectories[i] for i in rng(iteration).permutation(16)]
        data = het.samples_to_dataproto(shuffled, 0, "cpu")
        old = torch.randn(data["loss_mask"].shape, generator=torch.Generator().manual_seed(iteration))
        het.attach_log_probs(fresh, data, old, old.mean(1), iteration)
        for t, values in zip(shuffled, old.tolist(), strict=True):
            if not t.is_experience_replay:
                stored_logprobs[t.trajectory_id] = values
        manager.save_trajectories_to_memory(manager.update_skip_uid_set_and_filter_trajectories(fresh))
        logprobs = het._replace_recorded_old_log_probs(data, old)
        for i, t in enumerate(shuffled):
            trained = data["loss_mask"][i].bool()
            expected = torch.tensor(stored_logprobs[t.trajectory_id] if t.is_experience_replay else old[i].tolist())
            assert torch.equal(logprobs[i][trained], expected[trained])
            assert not t.is_experience_replay or t.version < iteration
        copy = het.ExperienceManager(manager.args)
        copy.load(manager.state())
        assert dataclasses.asdict(copy.memory[fresh[0].task_id][0]) and copy.state() == manager.state()
