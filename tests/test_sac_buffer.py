"""sac_hybrid.py: the frame buffer against a naive one that stores everything, and the contents of a batch."""

import numpy as np
import pytest

from sac_hybrid import Args, FrameBuffer, SACHybridAgent, make_record_dtype, sample_batch, store

SHAPES = dict(image=(2, 2, 3), state=(2,), wrist=(1, 2, 3))
RECORD = make_record_dtype(SHAPES, action_dim=3)


def record(start: int, end: int):
    """Every key of a frame tells the number of its moment."""
    row = np.zeros((), RECORD)
    for view, number in (("obs", start), ("next_obs", end)):
        digits = [number % 256, number // 256 % 256, number // 65536]
        row[view]["image"] = digits
        row[view]["wrist"] = digits
        row[view]["state"] = number
    row["actions"] = start
    row["grasp_penalty"] = -start
    return row


def pairs(buffer, num_rows=400, seed=0):
    """Sampled transitions as (number of the first frame, number of the second)"""
    ends = np.random.default_rng(seed).choice(buffer.ends(), num_rows)
    slots, frames = buffer.read(ends)
    for view in (frames, slots["next_obs"]):
        for key in ("image", "wrist"):
            digits = view[key].reshape(num_rows, -1, 3)[:, 0].astype(int)
            assert (digits @ [1, 256, 65536] == view["state"][:, 0]).all()
    starts = frames["state"][:, 0].astype(int)
    assert (slots["actions"][:, 1] == starts).all()
    assert (slots["grasp_penalty"] == -starts).all()
    ends = slots["next_obs"]["state"][:, 0].astype(int)
    return set(zip(starts.tolist(), ends.tolist(), strict=True))


def test_a_gap_or_an_end_costs_one_more_frame():
    buffer = FrameBuffer(100, RECORD)
    for step in (5, 6, 10, 11):
        buffer.insert(record(step, step + 1))
    assert pairs(buffer) == {(5, 6), (6, 7), (10, 11), (11, 12)}
    assert len(buffer) == 4 and buffer.num_frames == 6  # N + E frames


def test_a_transition_goes_with_its_first_frame():
    a, b, c, d, e = 10, 11, 12, 20, 21
    buffer = FrameBuffer(4, RECORD)
    for start, end in ((a, b), (b, c), (d, e)):
        buffer.insert(record(start, end))
    assert buffer.is_end.tolist() == [True, False, True, False]  # e has overwritten a: e, b, c, d
    assert pairs(buffer) == {(b, c), (d, e)}


def test_a_frame_is_stored_once():
    """200 000 frames of 64 pixels take 2.46 GB, which is not touched before it is used."""
    dtype = make_record_dtype({"image": (64, 64, 3)}, action_dim=7)
    assert FrameBuffer(200_000, dtype).slots.nbytes == pytest.approx(2.46e9, rel=1e-2)


@pytest.mark.parametrize("gap", [0.2, 0.9])  # 0.9: two robots take turns
@pytest.mark.parametrize("capacity, seed", [(2, 4), (5, 0), (23, 1), (64, 2), (1000, 3)])
def test_random_inserts_against_naive(capacity, seed, gap):
    """Naive: a list of (start, end, number of the first frame); the oldest frames are dropped first."""
    rng = np.random.default_rng(seed)
    buffer = FrameBuffer(capacity, RECORD)
    naive = []
    num_written = 0
    moment = 0
    for i in range(2_000):
        if i == 0 or rng.random() < gap:  # a gap, or a new episode
            moment += 2
            num_written += 1
        naive.append((moment, moment + 1, num_written - 1))
        buffer.insert(record(moment, moment + 1))
        moment += 1
        num_written += 1
        if i % 499 == 0 or i == 1_999:
            oldest = num_written - capacity
            expected = {(start, end) for start, end, first in naive if first >= oldest}
            assert buffer.num_frames == num_written and len(buffer) == len(expected)
            assert pairs(buffer, 20 * capacity, seed=i) <= expected
            slots, frames = buffer.read(buffer.ends())
            views = (frames["state"], slots["next_obs"]["state"])
            starts, ends = [view[:, 0].astype(int).tolist() for view in views]
            assert set(zip(starts, ends, strict=True)) == expected


def test_samples_are_uniform():
    buffer = FrameBuffer(64, RECORD)
    for step in range(300):
        buffer.insert(record(3 * step, 3 * step + (1 if step % 4 else 3)))
    agent = agent_with(0, batch_size=60_000)
    states = sample_batch(agent, buffer, FrameBuffer(2, RECORD))["obs"]["state"]
    _, counts = np.unique(states[:, 0], return_counts=True)
    expected = 60_000 / len(buffer)
    assert len(counts) == len(buffer) and abs(counts - expected).max() < 6 * expected**0.5


def test_who_acted_decides_where_a_record_goes():
    """A demonstration, a step of the policy, a step of the human"""
    online, demo = FrameBuffer(50, RECORD), FrameBuffer(50, RECORD)
    for step, flags in enumerate((dict(demos=1), {}, dict(interventions=1))):
        row = record(10 * step, 10 * step + 1)
        for name, value in flags.items():
            row[name] = value
        store(row, online, demo)
    assert pairs(online) == {(10, 11), (20, 21)} and pairs(demo) == {(0, 1), (20, 21)}


def agent_with(num_grippers, **options):
    args = Args(**dict(augment_pad=0, hidden_size=4) | options)
    return SACHybridAgent(
        ["image"], 3 - num_grippers, 3**num_grippers if num_grippers else 0, "cpu", args, SHAPES
    )


def test_a_batch_always_has_b_rows_and_the_last_are_demos():
    agent = agent_with(1, batch_size=9)
    online, demo, empty = (FrameBuffer(50, RECORD) for _ in range(3))
    online.insert(record(1, 2))
    demo.insert(record(7, 8))
    assert not sample_batch(agent, online, empty)["is_demo"].any()
    assert sample_batch(agent, empty, demo)["is_demo"].all()
    batch = sample_batch(agent, online, demo)
    assert batch["is_demo"].tolist() == [False] * 5 + [True] * 4
    assert batch["obs"]["state"][:, 0].tolist() == [1] * 5 + [7] * 4
    assert batch["next_obs"]["state"][:, 0].tolist() == [2] * 5 + [8] * 4
    assert batch["actions"][:, 1].tolist() == [1] * 5 + [7] * 4
    assert batch["actions"].shape == (9, 2)
    assert batch["grasps"].tolist() == [2] * 9  # 1 and 7 both mean open
    bc = agent_with(1, batch_size=9, algorithm="bc", num_demos=1)
    assert sample_batch(bc, online, demo)["is_demo"].all()


def test_a_batch_depends_on_seed_and_update_and_shifts_both_views():
    buffer = FrameBuffer(300, RECORD)
    empty = FrameBuffer(2, RECORD)
    for step in range(100):
        buffer.insert(record(3 * step, 3 * step + 1))

    def draw(update, **options):
        agent = agent_with(0, **options)
        agent.updates = update
        return sample_batch(agent, buffer, empty)

    assert (draw(4)["actions"] == draw(4)["actions"]).all()
    assert (draw(4)["actions"] != draw(5)["actions"]).any()
    assert (draw(4)["actions"] != draw(4, seed=2)["actions"]).any()
    plain = draw(4)
    shifted = draw(4, augment_pad=1)
    for view in ("obs", "next_obs"):
        assert shifted[view]["image"].shape == plain[view]["image"].shape
        assert (shifted[view]["state"] == plain[view]["state"]).all()
