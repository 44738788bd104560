"""sac_hybrid.py: demo files are untrusted: hostile, damaged and ill-fitting ones end in one sentence."""

import copy
import io
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from sac_hybrid import (
    Args,
    BarWorld,
    Robot,
    SACHybridAgent,
    make_demos,
    read_demos,
    write_demos,
)

ROBOT = Robot(Args())
RECORDS = make_demos(Args(), 3)


def transitions_of(records):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demos.pkl"
        write_demos(path, records)
        return pickle.loads(path.read_bytes())


DEMOS = transitions_of(RECORDS)


def read(path, robot=ROBOT):
    return np.stack(read_demos([str(path)], robot))


def refused(path, *words, robot=ROBOT):
    with pytest.raises(SystemExit) as end:
        read(path, robot)
    message = str(end.value)
    assert str(path) in message and len(message) < 400, message
    assert all(word in message for word in words), message


def check_equal(records):
    for record, demo in zip(records, DEMOS, strict=True):
        for name, source in (("obs", "observations"), ("next_obs", "next_observations")):
            for key in ("image", "state"):
                assert (record[name][key] == demo[source][key]).all()
        assert (record["actions"] == demo["actions"]).all()
        for name in ("rewards", "masks", "dones"):
            assert record[name] == demo[name]


def dump(path, value, protocol=5):
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def columns_of(demos):
    columns = {}
    for demo in demos:
        for name, value in demo.items():
            values = {name: value}
            if isinstance(value, dict):
                values = {f"{name}/{key}": array for key, array in value.items()}
            for column, number in values.items():
                columns.setdefault(column, []).append(number)
    return {name: np.stack(column) for name, column in columns.items()}


def test_every_protocol_and_npz(tmp_path):
    for protocol in range(6):
        check_equal(read(dump(tmp_path / "demo.pkl", DEMOS, protocol)))
    columns = columns_of(DEMOS)
    np.savez(tmp_path / "demo.npz", **columns)
    check_equal(read(tmp_path / "demo.npz"))
    objects = np.array([object()] * len(DEMOS))
    for name, actions in (("objects", objects), ("short", columns["actions"][:-1])):
        np.savez(tmp_path / f"{name}.npz", **columns | {"actions": actions})
        refused(tmp_path / f"{name}.npz")


def test_units_scalars_and_order(tmp_path):
    args = Args(env_id="Pendulum-v1", setup_mode="single-arm-fixed-gripper")
    robot = Robot(args)  # its torque is -2 to 2
    state = np.zeros(3, np.float32)
    path = tmp_path / "demo.pkl"
    row = dict(
        observations=state, next_observations=state, rewards=np.float64(0), dones=np.bool_(False)
    )
    records = read(dump(path, [row | dict(actions=np.float32([u])) for u in (1, -2, 9)]), robot)
    assert records["actions"][:, 0].tolist() == [0.5, -1, 1]
    image = np.asfortranarray(DEMOS[0]["observations"]["image"])
    demos = [DEMOS[0] | dict(observations=DEMOS[0]["observations"] | {"image": image}), *DEMOS[1:]]
    check_equal(read(dump(path, demos)))
    demos[0] = demos[0] | {"actions": demos[0]["actions"].astype(">f8")}
    refused(dump(path, demos), "big-endian")


def test_masks_and_penalties_are_filled_in(tmp_path):
    expert = transitions_of(make_demos(Args(human="expert"), 3))
    bare = [{key: value for key, value in demo.items() if key != "masks"} for demo in expert]
    records = read(dump(tmp_path / "demo.pkl", bare))
    assert records["masks"].tolist() == [1.0 - demo["dones"] for demo in expert]
    penalties = records["grasp_penalty"]  # each episode starts open and closes once
    assert penalties[penalties != 0].tolist() == pytest.approx([-0.02] * 3)


class Chunked:
    """A robot as HIL-SERL wraps it: ChunkingWrapper adds an axis of 1, the gripper wrapper a penalty in the infos."""

    def __init__(self):
        self.env = BarWorld(human="expert")
        self.env.intervention_probability = 1.0

    def wrap(self, obs):
        return {key: value[None] for key, value in obs.items()}

    def reset(self):
        obs, info = self.env.reset(seed=1)
        self.env.takeover_step = 0  # a person holds the space mouse all the time
        self.is_open = True
        return self.wrap(obs), info

    def step(self, action):
        obs, reward, done, truncated, info = self.env.step(action)
        closes = self.is_open and not self.env.is_open.all()
        self.is_open = self.env.is_open.all()
        info |= {"grasp_penalty": -0.03 if closes else 0.0, "succeed": info.pop("is_success")}
        info |= {
            "left": False,
            "right": False,
            "intervene_action": np.asarray(info["intervene_action"]),
        }
        return self.wrap(obs), int(reward), done, truncated, info


def test_a_file_written_like_record_demos(tmp_path):
    """The loop and the names of examples/record_demos.py: zero actions, replaced by those of the person."""
    env = Chunked()
    obs, info = env.reset()
    trajectory = []
    done = False
    while not done:
        actions = np.zeros(7)
        next_obs, reward, done, _, info = env.step(actions)
        if "intervene_action" in info:
            actions = info["intervene_action"]
        row = dict(observations=obs, actions=actions, next_observations=next_obs, rewards=reward)
        row |= dict(masks=1.0 - done, dones=done, infos=info)
        trajectory.append(copy.deepcopy(row))
        obs = next_obs
    assert info["succeed"]
    records = read(dump(tmp_path / "demo.pkl", trajectory))
    assert (
        records["obs"]["image"] == np.concatenate([r["observations"]["image"] for r in trajectory])
    ).all()
    assert (records["actions"] == np.stack([r["actions"] for r in trajectory])).all()
    assert records["rewards"].sum() == 1 and records["masks"].tolist() == [1.0] * (
        len(records) - 1
    ) + [0.0]
    penalties = records["grasp_penalty"]  # of their wrapper, not the -0.02 of this script
    assert penalties[penalties != 0].tolist() == pytest.approx([-0.03])


def test_pickles_of_hil_serl_load_as_they_are_written(tmp_path):
    """Its ChunkingWrapper adds an axis of 1; the actor's own files have the penalty beside the infos."""
    rows = []
    for number, demo in enumerate(DEMOS):
        row = dict(demo) | dict(
            infos={"succeed": np.bool_(True), "left": False}, grasp_penalty=-0.5
        )
        row["grasp_penalty"] = np.float64(-0.1 * number)
        for view in ("observations", "next_observations"):
            row[view] = {key: value[None] for key, value in demo[view].items()}
        rows.append(row)
    records = read(dump(tmp_path / "demo.pkl", rows))
    check_equal(records)
    expected = [-0.1 * number for number in range(len(DEMOS))]
    assert records["grasp_penalty"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_the_recipe_of_the_page_for_lerobot(version, tmp_path):
    """Two episodes of three frames, with the files and columns of LeRobot; images are PNG files in the tables."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    tables = []
    for episode in range(2):
        rows = []
        for frame in range(3):
            file = io.BytesIO()
            Image.fromarray(np.full((96, 128, 3), 50 * episode + frame, np.uint8)).save(file, "PNG")
            row = {"observation.state": [10.0 * episode + frame] * 8, "action": [0.1 * frame] * 7}
            row["observation.images.front"] = dict(bytes=file.getvalue(), path="frame.png")
            row |= dict(episode_index=episode, frame_index=frame, timestamp=0.1 * frame)
            rows.append(row)
        tables.append(pyarrow.Table.from_pylist(rows))
    (tmp_path / "data" / "chunk-000").mkdir(parents=True)
    if version == "v3.0":  # many episodes in a file
        files = {"file-000": pyarrow.concat_tables(tables)}
    else:
        files = {f"episode_{number:06d}": table for number, table in enumerate(tables)}
    for name, table in files.items():
        parquet.write_table(table, tmp_path / "data" / "chunk-000" / f"{name}.parquet")
    page = (ROOT / "docs" / "sac_hybrid.md").read_text(encoding="utf-8")
    (tmp_path / "recipe.py").write_text(re.search(r"```python\n(# lerobot.*?)```", page, re.S)[1])
    subprocess.run(
        [sys.executable, tmp_path / "recipe.py", tmp_path, tmp_path / "demos.pkl"], check=True
    )
    shapes = {"image": [64, 64, 3], "pose": [8]}
    robot = Robot.__new__(Robot)  # without an environment
    robot.set_spaces(Args(), dict(obs_shapes=shapes, low=[-1.0] * 7, high=[1.0] * 7))
    records = read(tmp_path / "demos.pkl", robot)
    assert records["obs"]["pose"][:, 0].tolist() == [0, 1, 10, 11]
    assert records["next_obs"]["pose"][:, 0].tolist() == [1, 2, 11, 12]
    assert records["obs"]["image"][:, 0, 0, 0].tolist() == [0, 1, 50, 51]
    assert records["actions"][:, 0].tolist() == pytest.approx([0, 0.1, 0, 0.1])
    assert records["rewards"].tolist() == [0, 1, 0, 1] and records["masks"].tolist() == [1, 0, 1, 0]


def test_images_of_hil_serl_reach_the_policy():
    """(1,H,W,3) images are images: the policy that saw them as nothing was blind."""
    agent = SACHybridAgent(["image"], 6, 3, obs_shapes={"image": (8, 8, 3)})
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (1, 8, 8, 3)).astype(np.uint8)
    assert (agent.act({"image": image}) == agent.act({"image": image[0]})).all()
    assert (agent.act({"image": image}) != agent.act({"image": 255 - image})).any()
    flipped = image[0, ::-1]  # a negative stride
    assert (agent.act({"image": flipped}) == agent.act({"image": flipped.copy()})).all()
    agent.act({"image": image, "wrist": image})  # an environment may have more than the policy sees
    with pytest.raises(ValueError, match=r"the observation has \['wrist'\]: expected \['image'\]"):
        agent.act({"wrist": image})
    with pytest.raises(ValueError, match=r"image is uint8 \(16, 16, 3\): expected \(8, 8, 3\)"):
        agent.act({"image": np.zeros((16, 16, 3), np.uint8)})
    depth = np.zeros((8, 8), np.float32)
    with pytest.raises(ValueError, match=r"image is float32 \(8, 8\)"):
        agent.act({"image": depth})
    with pytest.raises(ValueError, match=r"image is uint8 \(3, 8, 8\)"):  # channels first
        agent.act({"image": np.zeros((3, 8, 8), np.uint8)})


class Evil:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def hostile_pickles(canary):
    """By hand and by __reduce__, in every protocol, at the top and deep inside."""
    shell = f"touch {canary}"
    calls = [
        Evil(os.system, shell),
        Evil(eval, f"open({canary!r}, 'w')"),
        Evil(exec, f"open({canary!r}, 'w')"),
    ]
    calls += [
        Evil(getattr, "x", "upper"),
        Evil(np.load, canary),
        Evil(np.memmap, canary, "u1", "w+", 0, (1,)),
    ]
    calls += [
        Evil(print, "x"),
        Evil(bytearray, 10),
        Evil(os.putenv, "A", "B"),
        Path("/x"),
        Evil(__import__, "this"),
    ]
    for call in calls:
        for protocol in range(6):
            nested = [DEMOS[0] | {"rewards": call}, [call], {"a": call}, (call,)]
            yield from (pickle.dumps(value, protocol) for value in [call, *nested])
    yield f"cposix\nsystem\n(S'{shell}'\ntR.".encode()
    yield f"(S'{shell}'\niposix\nsystem\n.".encode()  # INST
    yield f"(cposix\nsystem\nS'{shell}'\no.".encode()  # OBJ
    yield (
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93"
        + b"\x8c"
        + bytes([len(shell)])
        + shell.encode()
        + b"\x85R."
    )
    yield b"\x80\x04\x8c\x05numpy\x8c\x10f2py.main.system\x93."  # dotted names
    yield b"cnumpy._core.multiarray\n_reconstruct\n(cposix\nsystem\n(I0\ntS'b'\ntR."
    yield b"\x82\x01."  # EXT1
    yield b"Pabc\n."  # persistent id
    yield b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"."  # a terabyte of bytearray
    yield b"(" * 5000 + b"t" * 5000 + b"."
    yield b"]\x94h\x00a."  # a list that holds itself
    head = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntC\x01btR"
    yield head + b"(I1\n(I9999999999\nt(cnumpy\ndtype\n(S'O8'\nI0\nI1\ntRtI00\n]tb."
    yield head + b"(I1\n(I9999999999\ntcnumpy\ndtype\n(S'f8'\nI0\nI1\ntRI00\nC\x04abcdtb."
    lists = [
        0.0
    ] * 10  # a few hundred bytes that would become gigabytes: nested lists, one array named often
    for _ in range(8):
        lists = [lists] * 10
    yield pickle.dumps([DEMOS[0] | {"actions": lists}])
    yield pickle.dumps(
        [{"rewards": 0.0, "actions": np.zeros(10**5)}] * 100 + [{"x": DEMOS[0]["actions"]}] * 10**4
    )


def test_hostile_pickles_do_nothing(tmp_path):
    events, armed, canary, path = [], [False], tmp_path / "canary", tmp_path / "demo.pkl"
    watched = (
        "os.system",
        "subprocess.Popen",
        "exec",
        "compile",
        "import",
        "os.putenv",
        "ctypes.dlopen",
        "os.remove",
    )
    sys.addaudithook(
        lambda event, args: events.append((event, args)) if armed[0] and event in watched else None
    )
    for data in hostile_pickles(str(canary)):
        path.write_bytes(data)
        armed[0] = True
        refused(path)
        armed[0] = False
    assert not canary.exists() and not events, events[:3]
    dump(path, [DEMOS[0] | {"rewards": np.complex64(1)}])
    refused(path, "dtype c8: not supported")
    path.write_bytes(pickle.dumps([Evil(os.system, "true")]))
    refused(path, "posix.system")  # the message says what it named


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SystemExit, match="none.pkl, row 0: FileNotFoundError"):
        read_demos([str(tmp_path / "none.pkl")], ROBOT)


def test_mutations_are_read_or_refused(tmp_path):
    rng, path, outcomes = np.random.default_rng(0), tmp_path / "demo.pkl", [0, 0]
    sources = [pickle.dumps(DEMOS[:2], protocol) for protocol in range(2, 6)]
    for trial in range(400):
        data = bytearray(sources[trial % 4])
        if trial % 5 == 0:
            del data[int(rng.integers(len(data))) :]
        for _ in range(
            rng.integers(1, 20)
        ):  # the first bytes hold most of the structure, the middle pixels
            data[int(rng.integers(len(data) if rng.random() < 0.3 else min(400, len(data))))] = (
                rng.integers(256)
            )
        path.write_bytes(bytes(data))
        try:
            outcomes[0] += len(read(path)) > 0
        except SystemExit as end:
            assert str(path) in str(end)
            outcomes[1] += 1
    assert sum(outcomes) == 400 and outcomes[1] > 250, outcomes


NEXT = DEMOS[4]["next_observations"]


@pytest.mark.parametrize("change, words", [
    (dict(actions=np.zeros(6, np.float32)), ["row 4", "actions", "(6,)", "(7,)"]),
    (dict(actions=np.full(7, np.nan)), ["row 4", "actions", "not finite"]),
    (dict(actions=[0] * 7), ["row 4", "actions", "list"]),
    (dict(rewards=1e308), ["row 4", "rewards", "float32"]),
    (dict(rewards="1"), ["row 4", "rewards", "str"]),
    (dict(masks=7.0), ["row 4", "masks"]),
    (dict(observations=3.0), ["row 4", "['state']", "['image', 'state']"]),
    (dict(observations={"image": NEXT["image"]}), ["row 4", "['image']", "['image', 'state']"]),
    (dict(next_observations=NEXT | {"image": np.zeros((3, 32, 32), np.uint8)}), ["row 4", "(3, 32, 32)"]),
    (dict(next_observations=NEXT | {"image": np.zeros((32, 32, 3), np.float32)}), ["row 4", "image", "uint8"]),
])  # fmt: skip
def test_ill_fitting_demos_are_named(tmp_path, change, words):
    demos = [dict(demo) for demo in DEMOS]
    demos[4] |= change
    refused(dump(tmp_path / "demo.pkl", demos), *words)


def test_files_that_hold_no_demos_of_this_robot(tmp_path):
    six = Robot(Args(setup_mode="single-arm-fixed-gripper", image_keys=["image"]))
    refused(dump(tmp_path / "demo.pkl", DEMOS), "(7,)", "(6,)", robot=six)
    for content in ({}, [], 3, [3], [{}]):
        refused(dump(tmp_path / "demo.pkl", content))
    (tmp_path / "empty.pkl").touch()
    for name in ("empty.pkl", "missing.pkl"):
        refused(tmp_path / name)
