"""sac_hybrid.py: the frame buffer against a naive one that stores everything, its memory, and threads."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sac_hybrid import Args, FrameBuffer, check_memory, sample_batch

SPEC = {"image": ((2, 2, 3), np.dtype("u1")), "wrist": ((1, 2, 3), np.dtype("u1")), "state": ((2,), np.dtype("f4"))}


def frame(number: int) -> dict:
    """All keys of one moment tell its number."""
    digits = np.array([number % 256, number // 256 % 256, number // 65536], np.uint8)
    obs = {key: np.broadcast_to(digits, shape).copy() for key, (shape, _) in SPEC.items() if key != "state"}
    return obs | {"state": np.full(2, number, np.float32)}


def transition(start: int, end: int, reward: float = 0.0) -> dict:
    row = dict(obs=frame(start), next_obs=frame(end), actions=np.full(3, start, np.float32))
    return row | dict(rewards=reward, masks=1.0, grasp_penalty=-float(start))


def pairs(buffer, n=400, seed=0):
    batch = buffer.sample(n, np.random.default_rng(seed))
    for name in ("obs", "next_obs"):  # every key is of the same moment
        for key in ("image", "wrist"):
            pixels = batch[name][key].reshape(n, -1, 3)[:, 0].astype(int)
            assert (pixels @ [1, 256, 65536] == batch[name]["state"][:, 0]).all()
    starts = batch["obs"]["state"][:, 0].astype(int)
    assert (batch["actions"][:, 1] == starts).all() and (batch["grasp_penalty"] == -starts).all()
    return set(zip(starts.tolist(), batch["next_obs"]["state"][:, 0].astype(int).tolist(), strict=True))


def test_gaps_do_not_pair():
    buffer = FrameBuffer(100, SPEC, 3)
    for step in (5, 6, 10, 11):
        buffer.insert(transition(step, step + 1))
    assert pairs(buffer) == {(5, 6), (6, 7), (10, 11), (11, 12)}
    assert len(buffer) == 4 and buffer.filled == 6  # N + E frames


def test_episode_end_and_truncation_do_not_pair():
    buffer = FrameBuffer(100, SPEC, 3)
    for start, end in ((0, 1), (1, 2), (50, 51), (51, 52)):  # the next episode begins elsewhere
        buffer.insert(transition(start, end))
    assert pairs(buffer) == {(0, 1), (1, 2), (50, 51), (51, 52)}


@pytest.mark.parametrize("capacity", [2, 3, 4, 7, 16])
def test_ring_wraps(capacity):
    buffer = FrameBuffer(capacity, SPEC, 3)
    for step in range(40):
        buffer.insert(transition(step, step + 1))
        newest = {(i, i + 1) for i in range(max(0, step + 2 - capacity), step + 1)}
        assert pairs(buffer, 60 * capacity) == newest


def random_inserts(num_inserts, capacity, seed, check_every):
    """Naive: a list of (start, end, frames it occupies); the oldest frames fall out first."""
    rng = np.random.default_rng(seed)
    buffer, naive, written, tail, number = FrameBuffer(capacity, SPEC, 3), [], 0, None, 0
    for i in range(num_inserts):
        if tail is None or rng.random() < 0.2:  # a new piece: an episode ended, or a gap
            number += 2
            start = number
        else:
            start = tail
        number += 1
        tail = number
        written += 1 + (start != number - 1 or not naive or naive[-1][1] != start)
        naive.append((start, tail, written))  # `written`: frames ever written up to its last one
        buffer.insert(transition(start % 2**24, tail % 2**24))
        if i % check_every == 0 or i == num_inserts - 1:
            alive = {(start, end) for start, end, at in naive if at - 1 > written - capacity}
            naive = [row for row in naive if row[2] - 1 > written - capacity]
            assert len(buffer) == len(alive)
            assert pairs(buffer, 20 * capacity, seed=i) <= alive
            starts = buffer.slots[: buffer.size]
            state = buffer.frames["state"][:, 0].astype(int)
            stored = [state[slots % capacity].tolist() for slots in (starts, starts + 1)]
            assert set(zip(*stored, strict=True)) == alive


@pytest.mark.parametrize(("capacity", "seed"), [(5, 0), (23, 1), (64, 2), (1000, 3)])
def test_random_inserts_against_naive(capacity, seed):
    random_inserts(6_000, capacity, seed, check_every=499)


@pytest.mark.slow
def test_a_million_random_inserts():
    random_inserts(1_000_000, 777, 4, check_every=9973)


def test_samples_are_uniform():
    buffer = FrameBuffer(64, SPEC, 3)
    for step in range(300):
        buffer.insert(transition(3 * step, 3 * step + (1 if step % 4 else 3)))
    starts = buffer.sample(60_000, np.random.default_rng(0))["obs"]["state"][:, 0]
    _, counts = np.unique(starts, return_counts=True)
    assert len(counts) == len(buffer)
    expected = 60_000 / len(buffer)
    assert abs(counts - expected).max() < 6 * expected**0.5


def test_memory():
    buffer = FrameBuffer(200_000, {"image": ((64, 64, 3), np.dtype(np.uint8))}, 7)  # not touched, so not really taken
    assert buffer.frames["image"].nbytes == pytest.approx(2.46e9, rel=1e-2)


def test_refuses_what_memory_cannot_hold(capsys):
    spec = {"image": ((128, 128, 3), np.dtype(np.uint8))}
    check_memory(Args(), spec)
    with pytest.raises(SystemExit) as end:
        check_memory(Args(buffer_size=10**9), spec)
    err = capsys.readouterr().err
    assert end.value.code == 2 and "--buffer-size 1000000000" in err and err.count("\n") == 1


def test_state_dict_continues_exactly():
    one, two = FrameBuffer(20, SPEC, 3), FrameBuffer(20, SPEC, 3)
    for step in range(31):
        one.insert(transition(step, step + 1))
    two.load_state_dict(one.state_dict())
    for buffer in (one, two):
        buffer.insert(transition(31, 32))
        buffer.insert(transition(40, 41))
    for name in ("obs", "next_obs"):
        batches = [buffer.sample(50, np.random.default_rng(1)) for buffer in (one, two)]
        assert all((batches[0][name][key] == batches[1][name][key]).all() for key in SPEC)


def test_batch_has_always_b_rows_and_counts_demos():
    rng, online, demo = np.random.default_rng(0), FrameBuffer(50, SPEC, 3), FrameBuffer(50, SPEC, 3)
    online.insert(transition(1, 2))
    assert sample_batch(online, demo, 9, 0.5, rng, "cpu")["is_demo"].tolist() == [False] * 9
    demo.insert(transition(7, 8))
    batch = sample_batch(online, demo, 9, 0.5, rng, "cpu")
    assert batch["is_demo"].tolist() == [False] * 5 + [True] * 4
    assert batch["obs"]["state"][:, 0].tolist() == [1] * 5 + [7] * 4
    assert sample_batch(FrameBuffer(50, SPEC, 3), demo, 9, 0.5, rng, "cpu")["is_demo"].all()


def test_concurrent_insert_and_sample_never_mix_records():
    buffer, errors, stop = FrameBuffer(30, SPEC, 3), [], threading.Event()
    buffer.insert(transition(0, 1))

    def sample(seed):
        try:
            while not stop.is_set():
                seen = pairs(buffer, 64, seed)
                assert all(end == start + 1 for start, end in seen)
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=sample, args=(seed,)) for seed in (1, 2)]
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for reader in readers:
            reader.start()
        for step in range(1, 2500):
            step = step if step % 7 else step + 100_000
            buffer.insert(transition(step, step + 1))
    finally:
        stop.set()
        sys.setswitchinterval(old)
    for reader in readers:
        reader.join()
    assert not errors, errors[0]
