"""wsrl_warmup.py: data files of every kind, wrong ones in one line, where an episode ends, what quality means."""

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from wsrl_warmup import (
    DATA_COLUMNS,
    Args,
    ControlEnv,
    compute_data_quality,
    episode_slices,
    load_offline_data,
    make_sources,
    read_source,
    return_to_go,
)

ENV = ControlEnv("Pendulum-v1")  # 3 observations, 1 action within +-2
ARGS = Args(env_id="Pendulum-v1")


def walk(n=6, start=0.0, **others):
    """An unbroken walk: next_obs[t] is obs[t+1]"""
    obs = start + np.arange(n + 1, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    columns = dict(obs=obs[:-1], actions=np.linspace(-2, 2, n, dtype=np.float32)[:, None], rewards=np.ones(n))
    return columns | dict(next_obs=obs[1:], terminations=np.zeros(n, bool), truncations=np.zeros(n, bool)) | others


def save(path, columns):
    np.savez(path, **columns)
    return str(path)


def refused(capsys, path, *words, code=2):
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        load_offline_data(ARGS, ENV, [f"demos={path}"])
    err = capsys.readouterr().err
    assert end.value.code == code and err.count("\n") == 1 and all(word in err for word in words), err


def test_npz_reaches_the_buffer_unchanged(tmp_path):
    path = save(tmp_path / "a.npz", walk(terminations=np.arange(6) == 5))
    columns, lines = load_offline_data(ARGS, ENV, [path])
    assert columns["actions"][:, 0] == pytest.approx(np.linspace(-1, 1, 6))  # the environment's +-2 is the policy's +-1
    assert columns["rewards"] == pytest.approx(np.full(6, 0.1))  # reward_scale of Pendulum
    assert columns["masks"].tolist() == [1, 1, 1, 1, 1, 0]
    assert columns["returns"] == pytest.approx(return_to_go(np.full(6, 0.1), 0.99))
    assert lines == ["demos: 1 episodes, 6 rows, weight 2, return 6.0, quality 0.67, successes 1"]


def test_truncation_bootstraps_and_termination_does_not(tmp_path):
    columns, lines = load_offline_data(ARGS, ENV, [save(tmp_path / "a.npz", walk(truncations=np.arange(6) == 5))])
    assert (columns["masks"] == 1).all() and "successes 0" in lines[0]  # cut off on its largest reward: no success


def test_sources_files_and_weights(tmp_path):
    a, b, c = (
        save(tmp_path / f"{x}.npz", walk(start=10.0 * i, truncations=np.arange(6) == 5)) for i, x in enumerate("abc")
    )
    specs = [f"demos={a}", f"demos={b}:3.5", f"random={c}", f"mine={c}", a]
    columns, lines = load_offline_data(ARGS, ENV, specs)
    # one return only: quality is (0 + 0.5 + 0.5) / 3, so its factor is 5/6
    assert np.unique(columns["weights"]) == pytest.approx(np.array([0.5, 1.0, 2.0, 3.5]) * 5 / 6)
    assert columns["weights"][6] == pytest.approx(3.5 * 5 / 6) and len(columns["rewards"]) == 30
    assert [line.split(":")[0] for line in lines] == ["demos", "random", "mine"] and "3 episodes, 18 rows" in lines[0]
    assert Args(offline_data=("demos=a",)).offline_data == ("demos=a",)


def test_a_path_may_hold_an_equals_sign(tmp_path, monkeypatch):
    (tmp_path / "lr=0.1,tau=1").mkdir()
    path = save(tmp_path / "lr=0.1,tau=1" / "a.npz", walk(truncations=np.arange(6) == 5))
    for spec, name, weight in ((f"mine={path}", "mine", 1), (f"mine={path}:3", "mine", 3), (path, "demos", 2)):
        _, (line,) = load_offline_data(ARGS, ENV, [spec])
        assert line.startswith(f"{name}: 1 episodes, 6 rows, weight {weight:g},")
    monkeypatch.chdir(tmp_path)
    for spec, name in (
        ("mine=lr=0.1,tau=1/a.npz", "mine"),
        ("./lr=0.1,tau=1/a.npz:2.5", "demos"),
        (f"={path}", "demos"),
    ):
        assert load_offline_data(ARGS, ENV, [spec])[1][0].startswith(f"{name}: 1 episodes, 6 rows")


def test_demo_pickles_of_the_sibling(tmp_path):
    c = walk()
    transitions = [
        dict(observations={"state": c["obs"][i], "image": np.zeros((2, 2, 3), np.uint8)}, actions=c["actions"][i],
             next_observations={"state": c["next_obs"][i]}, rewards=1.0, masks=float(i != 3), dones=i in (3, 5))
        for i in range(6)
    ]  # fmt: skip
    for protocol in (2, 5):
        (tmp_path / "demo.pkl").write_bytes(pickle.dumps(transitions, protocol))
        columns = read_source(str(tmp_path / "demo.pkl"), ENV)
        assert (columns["obs"] == c["obs"]).all() and (columns["next_obs"] == c["next_obs"]).all()
        assert columns["terminations"].tolist() == [0, 0, 0, 1, 0, 0]
        assert columns["truncations"].tolist() == [0, 0, 0, 0, 0, 1]  # done, but the mask goes on
    assert [s.stop for s in episode_slices(columns)] == [4, 6]


def test_a_hostile_pickle_does_not_run(tmp_path, capsys):
    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/owned",)

    (tmp_path / "demo.pkl").write_bytes(pickle.dumps([Hostile()]))
    refused(capsys, tmp_path / "demo.pkl", "refused", "system")
    assert not (tmp_path / "owned").exists()


def test_other_names(tmp_path):
    c = walk()
    names = dict(obs="observations", next_obs="next_observations", terminations="terminals", truncations="timeouts")
    columns = read_source(save(tmp_path / "a.npz", {names.get(name, name): c[name] for name in c}), ENV)
    assert all((columns[name] == c[name]).all() for name in DATA_COLUMNS)


@pytest.mark.parametrize(
    "others, words",
    [
        (dict(obs=np.zeros((6, 4))), ["obs", "(6, 4)", "(6, 3)"]),
        (dict(actions=np.zeros((6, 2))), ["actions", "(6, 2)", "(6, 1)"]),
        (dict(rewards=np.zeros((6, 1))), ["rewards"]),
        (dict(rewards=np.array([0, 1, np.nan, 1, 1, 1])), ["rewards", "row 2", "not finite"]),
        (dict(next_obs=np.full((6, 3), np.inf)), ["next_obs", "row 0", "not finite"]),
        (dict(actions=np.array(["a"] * 6)[:, None]), ["actions"]),
        (dict(rewards=np.zeros(5)), ["rewards", "(5,)", "(6,)"]),
    ],
)
def test_wrong_columns_end_in_one_line(tmp_path, capsys, others, words):
    refused(capsys, save(tmp_path / "a.npz", walk(**others)), "a.npz", *words)


def test_unreadable_files_end_in_one_line(tmp_path, capsys):
    refused(capsys, tmp_path / "absent.npz", "absent.npz")
    refused(capsys, tmp_path / "absent.pkl", "absent.pkl")
    empty = {name: column[:0] for name, column in walk().items()}
    refused(capsys, save(tmp_path / "empty.npz", empty), "empty.npz", "empty")
    refused(capsys, save(tmp_path / "none.npz", {}), "lacks 'obs'")
    (tmp_path / "empty.pkl").write_bytes(pickle.dumps([]))
    refused(capsys, tmp_path / "empty.pkl", "lacks 'obs'")
    (tmp_path / "ragged.pkl").write_bytes(pickle.dumps([{"rewards": 1.0, "observations": np.zeros(i)} for i in (3, 4)]))
    refused(capsys, tmp_path / "ragged.pkl", "lacks 'obs', or its rows differ in shape")
    (tmp_path / "text.pkl").write_bytes(b"not a pickle")
    refused(capsys, tmp_path / "text.pkl", "refused")
    path = save(tmp_path / "whole.npz", walk())
    (tmp_path / "cut.npz").write_bytes(Path(path).read_bytes()[:700])
    refused(capsys, tmp_path / "cut.npz", "refused")
    save(tmp_path / "objects.npz", walk(rewards=np.array([object()] * 6)))
    refused(capsys, tmp_path / "objects.npz", "refused")
    refused(capsys, f"{path}:-1", "positive")
    refused(capsys, save(tmp_path / "scalar.npz", walk(rewards=np.float32(1))), "rewards", "shape ()")


def test_minari_names_its_package_or_reads(capsys):
    with pytest.raises(SystemExit) as end:
        read_source("minari:no/such-v0", ENV)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and ("minari" in err)


def test_minari_episodes(monkeypatch):
    import types

    c = walk(4)
    parts = [
        dict(observations=np.vstack([c["obs"], c["next_obs"][-1:]])) | {n: c[n] for n in DATA_COLUMNS if "obs" not in n}
    ]
    data = types.SimpleNamespace(iterate_episodes=lambda: [types.SimpleNamespace(**part) for part in parts * 2])
    monkeypatch.setitem(sys.modules, "minari", types.SimpleNamespace(load_dataset=lambda name: {"a/b-v0": data}[name]))
    columns = read_source("minari:a/b-v0", ENV)
    assert len(columns["rewards"]) == 8 and (columns["next_obs"][:4] == c["next_obs"]).all()
    assert [s.stop for s in episode_slices(columns)] == [4, 8]  # the second starts over: no row continues


def test_a_trajectory_cut_in_two_is_two():
    """No flag marks the gap: without the check, the first part's returns would hold the second's rewards."""
    cut = {name: np.concatenate([walk(3)[name], walk(3, start=50.0)[name]]) for name in DATA_COLUMNS}
    assert [(s.start, s.stop) for s in episode_slices(cut)] == [(0, 3), (3, 6)]
    assert [(s.start, s.stop) for s in episode_slices(walk(6))] == [(0, 6)]
    ended = walk(6, terminations=np.arange(6) == 1, truncations=np.arange(6) == 3)
    assert [s.stop for s in episode_slices(ended)] == [2, 4, 6]


def test_returns_stop_at_the_cut(tmp_path):
    cut = {name: np.concatenate([walk(3)[name], walk(3, start=50.0)[name]]) for name in DATA_COLUMNS}
    columns, _ = load_offline_data(ARGS, ENV, [save(tmp_path / "a.npz", cut)])
    assert columns["returns"] == pytest.approx([0.29701, 0.199, 0.1] * 2)


def quality(rewards=(0.0, 1.0), success=False, terminated=False, bounds=(0.0, 4.0), longest=10):
    return compute_data_quality(dict(rewards=rewards, success=success, terminated=terminated), bounds, longest)


def test_quality_by_hand_and_monotone():
    assert quality((0.0, 1.0), True, True) == pytest.approx((1 + 0.25 + 0.9) / 3)
    assert quality((0.0, 1.0)) == pytest.approx((0 + 0.25 + 0.5) / 3)
    assert quality((0.0, 1.0), terminated=True) == pytest.approx((0 + 0.25 + 0.1) / 3)
    by_return = [quality((x,)) for x in (-9, 0, 1, 3, 4, 99)]
    assert by_return == sorted(by_return) and by_return[1] < by_return[2] < by_return[3]
    assert quality((1.0,), True, True) > quality((0.5, 0.5), True, True) > quality((1.0, 0.0)) > 0  # sooner is better
    assert quality((1.0,), terminated=True) < quality((0.5, 0.5), terminated=True) < quality((1.0,))  # falls: later is
    extremes = [quality(r, s, t) for r in ((-1e9,), (1e9,), (1.0,) * 50) for s in (0, 1) for t in (0, 1)]
    assert 0 <= min(extremes) and max(extremes) <= 1 and quality((1.0,), bounds=(3.0, 3.0)) == pytest.approx(1 / 3)


def test_sources_made_here(tmp_path):
    args = Args(env_id="Pendulum-v1", data_size=400)
    specs = make_sources(args, ENV, tmp_path)
    columns, lines = load_offline_data(args, ENV, specs)
    returns = [float(line.split("return ")[1].split(",")[0]) for line in lines]
    assert returns[0] > -500 > returns[2] and returns[0] > returns[1] > returns[2]  # demos, suboptimal, random
    assert len(columns["rewards"]) == 1200 and np.abs(columns["actions"]).max() <= 1
    before = (tmp_path / "demos.npz").read_bytes()
    (tmp_path / "random.npz").unlink()
    make_sources(args, ENV, tmp_path)  # as after a kill: what is there stays, what is missing comes again
    assert (tmp_path / "demos.npz").read_bytes() == before
    again, _ = load_offline_data(args, ENV, specs)
    assert all((again[name] == columns[name]).all() for name in columns)


def test_success_is_seen_in_the_data(tmp_path):
    env = ControlEnv("MountainCarContinuous-v0")
    args = Args(data_size=1)
    _, lines = load_offline_data(args, env, make_sources(args, env, tmp_path)[::2])
    assert "successes 1" in lines[0] and "successes 0" in lines[1]
