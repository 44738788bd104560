"""sac_hybrid.py: demo files are untrusted: hostile, damaged and ill-fitting ones end in one line."""

import copy
import os
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sac_hybrid import ActionLayout, Args, RobotEnv, load_pickle, make_demos, read_demos

ARGS = Args(setup_mode="single-arm-learned-gripper")
ENV = RobotEnv(ARGS)
DEMOS = make_demos(ARGS, 3, seed=0)


def read(path, layout=None):
    env = copy.copy(ENV)
    env.layout = layout or ENV.layout
    return read_demos(str(path), env, -0.02)


def refused(path, capsys, *words, **options):
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        read(path, **options)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and str(path) in err, err
    assert all(word in err for word in words), err


def check_equal(demos):
    assert len(demos) == len(DEMOS)
    for demo, original in zip(demos, DEMOS, strict=True):
        for name, source in (("obs", "observations"), ("next_obs", "next_observations")):
            assert all((demo[name][key] == original[source][key]).all() for key in ENV.obs_spec)
        assert (demo["actions"] == original["actions"]).all()
        assert (demo["rewards"], demo["masks"]) == (original["rewards"], original["masks"])


@pytest.mark.parametrize("protocol", range(6))
def test_protocols(tmp_path, protocol):
    path = tmp_path / "demo.pkl"
    path.write_bytes(pickle.dumps(DEMOS, protocol))
    check_equal(read(path))


def test_actions_are_in_the_units_of_the_environment(tmp_path):
    env = RobotEnv(Args(env_id="Pendulum-v1", setup_mode="single-arm-fixed-gripper"))  # torque from -2 to 2
    state = np.zeros(3, np.float32)
    rows = [dict(observations=state, actions=np.float32([u]), next_observations=state, rewards=0.0) for u in (1, -2, 9)]
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps(rows))
    assert [float(demo["actions"][0]) for demo in read_demos(str(tmp_path / "demo.pkl"), env, 0.0)] == [0.5, -1, 1]


def test_numpy_scalars_fortran_order_and_big_endian(tmp_path):
    demos = [dict(demo) for demo in DEMOS]
    demos[0]["actions"] = demos[0]["actions"].astype(">f8")
    demos[0]["rewards"], demos[0]["dones"] = np.float64(0.0), np.bool_(False)
    image = np.asfortranarray(demos[0]["observations"]["image"])
    demos[0]["observations"] = demos[0]["observations"] | {"image": image}
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps(demos))
    check_equal(read(tmp_path / "demo.pkl"))


def test_npz(tmp_path, capsys):
    columns = {name: np.stack([demo[name] for demo in DEMOS]) for name in ("actions", "rewards", "masks", "dones")}
    for name in ("observations", "next_observations"):
        columns |= {f"{name}/{key}": np.stack([demo[name][key] for demo in DEMOS]) for key in ENV.obs_spec}
    np.savez(tmp_path / "demo.npz", **columns)
    check_equal(read(tmp_path / "demo.npz"))
    np.savez(tmp_path / "objects.npz", **columns | {"actions": np.array([object()] * len(DEMOS))})
    refused(tmp_path / "objects.npz", capsys)
    np.savez(tmp_path / "short.npz", **columns | {"actions": columns["actions"][:-1]})
    refused(tmp_path / "short.npz", capsys)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "demo.npz").read_bytes()[:3000])
    refused(tmp_path / "cut.npz", capsys)
    for name, columns in (("scalars", dict(actions=np.float32(1))), ("nothing", {}), ("none", dict(actions=[]))):
        np.savez(tmp_path / f"{name}.npz", **columns)
        refused(tmp_path / f"{name}.npz", capsys, "one length")


def test_masks_and_penalty_are_filled_in(tmp_path):
    demos = [{key: value for key, value in demo.items() if key != "masks"} for demo in DEMOS]
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps(demos))
    read_back = read(tmp_path / "demo.pkl")
    assert [demo["masks"] for demo in read_back] == [1.0 - demo["dones"] for demo in DEMOS]
    toggles = [demo["grasp_penalty"] for demo in read_back if demo["grasp_penalty"]]
    assert toggles == [pytest.approx(-0.02)] * 3  # each expert episode closes once, and starts open


class Evil:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def hostile_pickles(canary):
    """By hand and by __reduce__, in every protocol, at the top and deep inside."""
    shell = f"touch {canary}"
    calls = [Evil(os.system, shell), Evil(eval, f"open({canary!r}, 'w')"), Evil(exec, f"open({canary!r}, 'w')")]
    calls += [Evil(getattr, "x", "upper"), Evil(np.load, canary), Evil(np.memmap, canary, "u1", "w+", 0, (1,))]
    calls += [Evil(print, "x"), Evil(bytearray, 10), Evil(os.putenv, "A", "B"), Path("/x")]
    calls += [Evil(__import__, "antigravity")]
    for call in calls:
        for protocol in range(6):
            nested = [DEMOS[0] | {"rewards": call}, [call], {"a": call}, (call,)]
            yield from (pickle.dumps(value, protocol) for value in [call, *nested])
    code = f"cposix\nsystem\n(S'{shell}'\ntR.".encode()
    yield code
    yield f"(S'{shell}'\niposix\nsystem\n.".encode()  # INST
    yield f"(cposix\nsystem\nS'{shell}'\no.".encode()  # OBJ
    yield b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + b"\x8c" + bytes([len(shell)]) + shell.encode() + b"\x85R."
    yield b"\x80\x04\x8c\x05numpy\x8c\x10f2py.main.system\x93."  # dotted names
    yield b"cnumpy._core.multiarray\n_reconstruct\n(cposix\nsystem\n(I0\ntS'b'\ntR."
    yield b"\x82\x01."  # EXT1
    yield b"Pabc\n."  # persistent id
    yield b"\x80\x04]r" + struct.pack("<I", 2**31 - 1) + b"."  # a memo that would take 32 GB
    yield b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"."  # a terabyte of bytearray
    yield b"c_codecs\nencode\n(V\\u0041\nS'zlib'\ntR."
    yield b"(" * 5000 + b"t" * 5000 + b"."
    yield b"]\x94h\x00a."  # a list that holds itself
    # numpy state that its own C code would take: object array, giant shape, fields
    head = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntC\x01btR"
    yield head + b"(I1\n(I9999999999\nt(cnumpy\ndtype\n(S'O8'\nI0\nI1\ntRtI00\n]tb."
    yield head + b"(I1\n(I9999999999\ntcnumpy\ndtype\n(S'f8'\nI0\nI1\ntRI00\nC\x04abcdtb."


def test_hostile_pickles_do_nothing(tmp_path, capsys):
    events, armed = [], [True]
    watched = ("os.system", "subprocess.Popen", "exec", "compile", "import", "os.putenv", "ctypes.dlopen", "os.remove")
    sys.addaudithook(lambda event, args: events.append((event, args)) if armed[0] and event in watched else None)
    canary, path = tmp_path / "canary", tmp_path / "demo.pkl"
    count = 0
    armed[0] = False
    for data in hostile_pickles(str(canary)):
        path.write_bytes(data)
        armed[0] = True
        try:
            refused(path, capsys)
        finally:
            armed[0] = False
        count += 1
    assert count > 300 and not canary.exists() and not events, events[:3]
    path.write_bytes(pickle.dumps([Evil(os.system, "true")]))
    refused(path, capsys, "posix.system")  # the message says what it named


def test_a_thousand_mutations(tmp_path, capsys):
    rng, path = np.random.default_rng(0), tmp_path / "demo.pkl"
    small = make_demos(ARGS, 1, seed=1)[:2]
    outcomes = {"read": 0, "refused": 0}
    sources = [pickle.dumps(small, protocol) for protocol in range(2, 6)]
    for trial in range(1000):
        data = bytearray(sources[trial % len(sources)])
        if trial % 5 == 0:
            del data[int(rng.integers(len(data))) :]
        for _ in range(rng.integers(1, 20)):
            if data:  # the first kilobyte and the end hold most of the structure, the middle pixels
                at = int(rng.integers(len(data))) if rng.random() < 0.3 else int(rng.integers(min(400, len(data))))
                data[at] = rng.integers(256)
        path.write_bytes(bytes(data))
        capsys.readouterr()
        try:
            read(path)
            outcomes["read"] += 1
        except SystemExit as end:
            err = capsys.readouterr().err
            assert end.code == 2 and err.count("\n") == 1 and str(path) in err, err
            outcomes["refused"] += 1
    assert outcomes["refused"] > 700, outcomes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(actions=np.zeros(6, np.float32)), ["transition 4", "actions", "(6,)", "expected (7,)"]),
        (dict(actions=np.full(7, np.nan)), ["transition 4", "actions", "not finite"]),
        (dict(actions=[0] * 7), ["transition 4", "actions", "list"]),
        (dict(rewards=np.inf), ["transition 4", "rewards", "not finite"]),
        (dict(rewards="1"), ["transition 4", "rewards", "str"]),
        (dict(observations={"image": np.zeros((3, 32, 32), np.uint8)}), ["transition 4", "lacks 'state'", "--no-use"]),
        (dict(observations=3.0), ["transition 4", "lacks 'image'"]),
        (dict(next_observations=None), ["transition 4"]),
    ],
)
def test_ill_fitting_demos_are_named(tmp_path, capsys, change, words):
    demos = [dict(demo) for demo in DEMOS]
    demos[4] |= change
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps(demos))
    refused(tmp_path / "demo.pkl", capsys, *words)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((3, 32, 32), np.uint8), ["(3, 32, 32)", "expected (32, 32, 3)", "channels come last"]),
        (np.zeros((64, 64, 3), np.uint8), ["(64, 64, 3)", "expected (32, 32, 3)"]),
        (np.zeros((32, 32, 3), np.float32), ["float32", "expected uint8"]),
    ],
)
def test_ill_fitting_images_are_named(tmp_path, capsys, image, words):
    demos = [dict(demo) for demo in DEMOS]
    demos[2]["next_observations"] = demos[2]["next_observations"] | {"image": image}
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps(demos))
    refused(tmp_path / "demo.pkl", capsys, "transition 2", "next_observations['image']", *words)


def test_seven_numbers_in_a_mode_with_six(tmp_path, capsys):
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps(DEMOS))
    layout = ActionLayout.of_mode("single-arm-fixed-gripper")
    refused(tmp_path / "demo.pkl", capsys, "transition 0", "(7,)", "expected (6,)", layout=layout)


def test_not_a_list_missing_empty(tmp_path, capsys):
    refused(tmp_path / "missing.pkl", capsys)
    for content in ({}, [], 3, [3], [{}]):
        (tmp_path / "demo.pkl").write_bytes(pickle.dumps(content))
        refused(tmp_path / "demo.pkl", capsys)
    (tmp_path / "demo.pkl").write_bytes(b"")
    refused(tmp_path / "demo.pkl", capsys)


def test_load_pickle_reads_plain_values(tmp_path):
    value = [{"a": (1, 2.5, "x", None, True), "b": {1, 2}}]
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(value))
    assert load_pickle(str(tmp_path / "plain.pkl")) == value
