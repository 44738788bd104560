"""wsrl_warmup.py: data files of every kind, wrong ones in one line, where an episode ends, what quality means."""

import os
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from wsrl_warmup import (
    COLUMNS,
    Args,
    compute_data_quality,
    episode_slices,
    load_offline_data,
    make_env,
    make_sources,
    read_source,
    return_to_go,
)

ARGS = Args(env_id="Pendulum-v1")  # 3 observations, 1 action within +-2
ENV = make_env("Pendulum-v1")


def walk(n=6, start=0.0, **others):
    """An unbroken walk: next_obs[t] is obs[t+1]"""
    obs = start + np.arange(n + 1, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    columns = dict(
        obs=obs[:-1], actions=np.linspace(-2, 2, n, dtype=np.float32)[:, None], rewards=np.ones(n)
    )
    return (
        columns
        | dict(next_obs=obs[1:], terminations=np.zeros(n, bool), truncations=np.zeros(n, bool))
        | others
    )


LAST = np.arange(6) == 5


def save(path, columns):
    np.savez(path, **columns)
    return str(path)


def refused(path, *words):
    with pytest.raises(SystemExit) as end:
        load_offline_data(ARGS, [f"demos={path}"], ENV)
    assert "\n" not in end.value.code and all(word in end.value.code for word in words), (
        end.value.code
    )


def test_npz_reaches_the_buffer(tmp_path, capsys):
    rows, number, returns = load_offline_data(
        ARGS, [save(tmp_path / "a.npz", walk(terminations=LAST))], ENV
    )
    assert rows["actions"][:, 0] == pytest.approx(
        np.linspace(-1, 1, 6)
    )  # the environment's +-2 is the policy's +-1
    assert rows["rewards"] == pytest.approx(np.full(6, 0.1))  # reward_scale of Pendulum
    assert (
        rows["masks"].tolist() == [1, 1, 1, 1, 1, 0]
        and returns == {"demos": 6.0}
        and set(number) == {0}
    )
    assert rows["returns"] == pytest.approx(return_to_go(np.full(6, 0.1), 0.99))
    assert rows["weights"] == pytest.approx(
        2 * (0.5 + 2 / 3) * 1.5
    )  # demos, quality (1 + 0.5 + 0.5) / 3, success
    assert capsys.readouterr().out == "demos: 1 episodes, return 6.0\n"
    rows, *_ = load_offline_data(ARGS, [save(tmp_path / "a.npz", walk(truncations=LAST))], ENV)
    assert (rows["masks"] == 1).all()  # cut off: it bootstraps, and is no success
    assert rows["weights"] == pytest.approx(2 * (0.5 + 1 / 3))


def test_sources_weights_and_names(tmp_path, monkeypatch):
    folder = tmp_path / "lr=0.1,tau=1"
    folder.mkdir()
    a, b, c = (save(folder / f"{i}.npz", walk(start=10.0 * i, truncations=LAST)) for i in range(3))
    specs = [f"demos={a}", f"demos={b}:3.5", f"random={c}", f"mine={c}", a]
    rows, number, returns = load_offline_data(ARGS, specs, ENV)
    # one return only: quality is (0 + 0.5 + 0.5) / 3, so its factor is 5/6
    weights = np.array([2.0, 3.5, 0.5, 1.0, 2.0]).repeat(6) * 5 / 6
    assert rows["weights"] == pytest.approx(weights) and list(returns) == [
        "demos",
        "random",
        "mine",
    ]
    assert number.tolist() == np.arange(5).repeat(6).tolist()
    monkeypatch.chdir(tmp_path)
    assert list(load_offline_data(ARGS, ["./lr=0.1,tau=1/0.npz:2.5"], ENV)[2]) == ["demos"]


def transitions(**others):
    c = walk()
    rows = []
    for i in range(6):
        row = dict(
            observations={"state": c["obs"][i], "image": np.zeros((2, 2, 3), np.uint8)},
            actions=c["actions"][i],
        )
        row |= dict(
            next_observations={"state": c["next_obs"][i]},
            rewards=1.0,
            masks=float(i != 3),
            dones=i in (3, 5),
        )
        rows.append(row | others)
    return rows


def test_demo_pickles_of_the_sibling(tmp_path):
    for protocol in (2, 5):
        (tmp_path / "demo.pkl").write_bytes(pickle.dumps(transitions(), protocol))
        columns = read_source(str(tmp_path / "demo.pkl"), 3, 1)
        assert (columns["obs"] == walk()["obs"]).all() and (
            columns["next_obs"] == walk()["next_obs"]
        ).all()
        assert columns["terminations"].tolist() == [0, 0, 0, 1, 0, 0]
        assert columns["truncations"].tolist() == [0, 0, 0, 0, 0, 1]  # done, but the mask goes on
    assert [s.stop for s in episode_slices(columns)] == [4, 6]


def test_hostile_and_damaged_files_end_in_one_line(tmp_path):
    """The loader is that of sac_hybrid.py, word for word: test_sac_demos.py tries more."""

    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/owned",)

    images = [
        dict(observations={"image": np.zeros(2)}, actions=0.0, rewards=0.0, masks=1.0, dones=False)
    ]
    wrong = {
        "system": [Hostile()],
        "rewards of row 0": transitions(rewards=1e308),
        "column is missing": images,
    }
    for words, content in wrong.items():
        (tmp_path / "demo.pkl").write_bytes(pickle.dumps(content))
        refused(tmp_path / "demo.pkl", "demo.pkl", words)
    assert not (tmp_path / "owned").exists()
    (tmp_path / "cut.npz").write_bytes(
        Path(save(tmp_path / "whole.npz", walk())).read_bytes()[:700]
    )
    for path in ("cut.npz", "absent.npz"):
        refused(tmp_path / path, path)


@pytest.mark.parametrize(
    "others, words",
    [
        (dict(obs=np.zeros((6, 4))), ["obs", "(3,)"]),
        (dict(actions=np.zeros((6, 2))), ["actions", "(1,)"]),
        (dict(rewards=np.array([0, 1, np.nan, 1, 1, 1])), ["rewards of row 2"]),
        (dict(next_obs=np.full((6, 3), np.inf)), ["next_obs of row 0"]),
        (dict(actions=np.array(["a"] * 6)[:, None]), ["actions"]),
        (dict(rewards=np.zeros(5)), ["6", "5"]),
        ({name: column[:0] for name, column in walk().items()}, ["0"]),
    ],
)
def test_wrong_columns_end_in_one_line(tmp_path, others, words):
    refused(save(tmp_path / "a.npz", walk(**others)), "a.npz", *words)


def test_minari_episodes(monkeypatch):
    c = walk(4)
    parts = dict(observations=np.vstack([c["obs"], c["next_obs"][-1:]])) | {
        n: c[n] for n in COLUMNS if "obs" not in n
    }
    episodes = [types.SimpleNamespace(**parts)] * 2
    data = types.SimpleNamespace(iterate_episodes=lambda: episodes)
    monkeypatch.setitem(
        sys.modules,
        "minari",
        types.SimpleNamespace(load_dataset=lambda name: {"a/b-v0": data}[name]),
    )
    columns = read_source("minari:a/b-v0", 3, 1)
    assert len(columns["rewards"]) == 8 and (columns["next_obs"][:4] == c["next_obs"]).all()
    assert [s.stop for s in episode_slices(columns)] == [
        4,
        8,
    ]  # the second starts over: no row continues


def test_a_trajectory_cut_in_two_is_two(tmp_path):
    """No flag marks the gap: without the check, the first part's returns would hold the second's rewards."""
    cut = {name: np.concatenate([walk(3)[name], walk(3, start=50.0)[name]]) for name in COLUMNS}
    assert [(s.start, s.stop) for s in episode_slices(cut)] == [(0, 3), (3, 6)]
    assert [(s.start, s.stop) for s in episode_slices(walk(6))] == [(0, 6)]
    ended = walk(6, terminations=np.arange(6) == 1, truncations=np.arange(6) == 3)
    assert [s.stop for s in episode_slices(ended)] == [2, 4, 6]
    rows, *_ = load_offline_data(ARGS, [save(tmp_path / "a.npz", cut)], ENV)
    assert rows["returns"] == pytest.approx([0.29701, 0.199, 0.1] * 2)


def quality(rewards=(0.0, 1.0), terminated=False, bounds=(0.0, 4.0), longest=10):
    return compute_data_quality(dict(rewards=rewards, terminations=[terminated]), bounds, longest)


def test_quality_by_hand_and_monotone():
    """A success ends by itself on its largest, positive reward."""
    assert quality((0.0, 1.0), True) == pytest.approx((1 + 0.25 + 0.9) / 3)
    assert quality((0.0, 1.0)) == pytest.approx((0 + 0.25 + 0.5) / 3)
    assert quality((1.0, 0.0), terminated=True) == pytest.approx((0 + 0.25 + 0.1) / 3)
    by_return = [quality((x,)) for x in (-9, 0, 1, 3, 4, 99)]
    assert by_return == sorted(by_return) and by_return[1] < by_return[2] < by_return[3]
    assert (
        quality((1.0,), True) > quality((0.5, 0.5), True) > quality((1.0, 0.0)) > 0
    )  # sooner is better
    assert (
        quality((1.0, 0.0), True) < quality((0.5, 0.5, 0.0), True) < quality((1.0,))
    )  # falls: later is
    extremes = [quality(r, t) for r in ((-1e9,), (1e9,), (1.0,) * 50) for t in (0, 1)]
    assert (
        0 <= min(extremes)
        and max(extremes) <= 1
        and quality((1.0,), bounds=(3.0, 3.0)) == pytest.approx(1 / 3)
    )


def test_sources_made_here(tmp_path):
    args = Args(env_id="Pendulum-v1", data_size=400)
    specs = make_sources(args, ("demos", "suboptimal", "random"), tmp_path)
    rows, _, returns = load_offline_data(args, specs, ENV)
    assert (
        returns["demos"] > -500 > returns["random"]
        and returns["demos"] > returns["suboptimal"] > returns["random"]
    )
    assert len(rows) == 1200 and np.abs(rows["actions"]).max() <= 1
    before = (tmp_path / "demos.npz").read_bytes()
    (tmp_path / "random.npz").unlink()
    make_sources(
        args, ("demos", "random"), tmp_path
    )  # as after a kill: what is there stays, what is missing comes
    assert (tmp_path / "demos.npz").read_bytes() == before
    assert (load_offline_data(args, specs, ENV)[0] == rows).all()
