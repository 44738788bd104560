"""sac_hybrid.py: the frame buffer against a naive one that stores everything, and what a batch is made of."""

import numpy as np
import pytest

from sac_hybrid import ActionLayout, Args, FrameBuffer, sample_batch

FRAME = [("image", "u1", (2, 2, 3)), ("wrist", "u1", (1, 2, 3)), ("state", "f4", (2,))]
SCALARS = ("rewards", "masks", "grasp_penalty")
RECORD = np.dtype(
    [
        ("obs", FRAME),
        ("next_obs", FRAME),
        ("actions", "f4", (3,)),
        *((name, "f4") for name in SCALARS),
    ]
)


def record(start: int, end: int):
    """All keys of one moment tell its number."""
    row = np.zeros((), RECORD)
    for view, number in (("obs", start), ("next_obs", end)):
        row[view]["image"] = row[view]["wrist"] = [
            number % 256,
            number // 256 % 256,
            number // 65536,
        ]
        row[view]["state"] = number
    row["actions"], row["grasp_penalty"] = start, -start
    return row


def pairs(buffer, n=400, seed=0):
    slots, following = buffer.sample(n, np.random.default_rng(seed))
    for view in (slots["obs"], following):  # every key is of the same moment
        for key in ("image", "wrist"):
            assert (
                view[key].reshape(n, -1, 3)[:, 0].astype(int) @ [1, 256, 65536]
                == view["state"][:, 0]
            ).all()
    starts = slots["obs"]["state"][:, 0].astype(int)
    assert (slots["actions"][:, 1] == starts).all() and (slots["grasp_penalty"] == -starts).all()
    return set(zip(starts.tolist(), following["state"][:, 0].astype(int).tolist(), strict=True))


def test_a_gap_or_an_end_costs_one_frame_more():
    buffer = FrameBuffer(100, RECORD)
    for step in (5, 6, 10, 11):
        buffer.insert(record(step, step + 1))
    assert pairs(buffer) == {(5, 6), (6, 7), (10, 11), (11, 12)}
    assert len(buffer) == 4 and buffer.written == 6  # N + E frames
    image = [
        ("image", "u1", (64, 64, 3))
    ]  # a frame is stored once: 200 000 take 2.46 GB, not yet touched
    row = np.dtype(
        [
            ("obs", image),
            ("next_obs", image),
            ("actions", "f4", (7,)),
            *((name, "f4") for name in SCALARS),
        ]
    )
    assert FrameBuffer(200_000, row).slots.nbytes == pytest.approx(2.46e9, rel=1e-2)


@pytest.mark.parametrize("capacity, seed", [(2, 4), (5, 0), (23, 1), (64, 2), (1000, 3)])
def test_random_inserts_against_naive(capacity, seed):
    """Naive: a list of (start, end, frames written up to its last one); the oldest frames fall out first."""
    rng, buffer = np.random.default_rng(seed), FrameBuffer(capacity, RECORD)
    naive, written, tail, number = [], 0, None, 0
    for i in range(3_000):
        fresh = tail is None or rng.random() < 0.2  # a new piece: an episode ended, or a gap
        start = number + 2 if fresh else tail
        number = tail = start + 1
        written += 2 if fresh else 1
        naive.append((start, tail, written))
        buffer.insert(record(start, tail))
        if i % 499 == 0 or i == 2_999:
            alive = {(start, end) for start, end, at in naive if at - 1 > written - capacity}
            assert len(buffer) == len(alive) and pairs(buffer, 20 * capacity, seed=i) <= alive
            starts, state = (
                np.flatnonzero(buffer.starts),
                buffer.slots["obs"]["state"][:, 0].astype(int),
            )
            stored = [state[slots % capacity].tolist() for slots in (starts, starts + 1)]
            assert set(zip(*stored, strict=True)) == alive


def test_samples_are_uniform():
    buffer = FrameBuffer(64, RECORD)
    for step in range(300):
        buffer.insert(record(3 * step, 3 * step + (1 if step % 4 else 3)))
    starts = buffer.sample(60_000, np.random.default_rng(0))[0]["obs"]["state"][:, 0]
    counts, expected = np.unique(starts, return_counts=True)[1], 60_000 / len(buffer)
    assert len(counts) == len(buffer) and abs(counts - expected).max() < 6 * expected**0.5


def test_a_restored_ring_goes_on_where_it_was():
    one, two = FrameBuffer(20, RECORD), FrameBuffer(20, RECORD)
    for step in range(31):
        one.insert(record(step, step + 1))
    two.load_state_dict(one.state_dict())
    for buffer in (one, two):
        buffer.insert(record(31, 32))
        buffer.insert(record(40, 41))
    assert pairs(one) == pairs(two) and (31, 32) in pairs(two)


def test_a_batch_has_always_b_rows_the_last_of_them_demos():
    args, layout = Args(batch_size=9), ActionLayout(3, 1)
    online, demo, empty = (FrameBuffer(50, RECORD) for _ in range(3))
    online.insert(record(1, 2))
    demo.insert(record(7, 8))
    assert not sample_batch(args, online, empty, layout, 0, "cpu")["is_demo"].any()
    assert sample_batch(args, empty, demo, layout, 0, "cpu")["is_demo"].all()
    batch = sample_batch(args, online, demo, layout, 0, "cpu")
    assert batch["is_demo"].tolist() == [False] * 5 + [True] * 4
    assert (
        batch["obs"]["state"][:, 0].tolist() == [1] * 5 + [7] * 4 == batch["actions"][:, 1].tolist()
    )
    assert (
        batch["actions"].shape == (9, 2) and batch["grasps"].tolist() == [2] * 9
    )  # 1 and 7 both say: open
    cloned = sample_batch(Args(batch_size=9, algorithm="bc"), online, demo, layout, 0, "cpu")
    assert cloned["is_demo"].all()


def test_a_batch_is_a_function_of_seed_and_update_and_shifts_both_views():
    layout, rb, empty = ActionLayout(3, 0), FrameBuffer(300, RECORD), FrameBuffer(2, RECORD)
    for step in range(100):
        rb.insert(record(3 * step, 3 * step + 1))
    draw = lambda update, **o: sample_batch(Args(**o), rb, empty, layout, update, "cpu")  # noqa: E731
    assert (draw(4)["rewards"] == draw(4)["rewards"]).all() and (
        draw(4)["actions"] != draw(5)["actions"]
    ).any()
    assert (draw(4)["actions"] != draw(4, seed=2)["actions"]).any()
    plain, shifted = draw(4), draw(4, augment_pad=1)
    for view in ("obs", "next_obs"):
        assert shifted[view]["image"].shape == plain[view]["image"].shape
        assert (shifted[view]["state"] == plain[view]["state"]).all()
