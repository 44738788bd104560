"""wsrl_warmup.py: data files of every kind, wrong ones in one line, where an episode ends, what quality means."""

import os
import pickle
import re
import sys
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT

import wsrl_warmup
from wsrl_warmup import (
    Args,
    compute_data_quality,
    env_units,
    load_offline_data,
    make_gym_env,
    make_row_dtype,
    make_source,
    obs_statistics,
    read_source,
    return_to_go,
    split_episodes,
    to_rows,
    write_transitions,
)

ENV = make_gym_env("Pendulum-v1")  # 3 observations, 1 action within +-2
LAST = np.arange(6) == 5


def walk(n=6, start=0.0, **others):
    """An unbroken walk: next_observations[t] is observations[t+1]"""
    obs = start + np.arange(n + 1, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    columns = dict(observations=obs[:-1], next_observations=obs[1:], rewards=np.ones(n))
    columns["actions"] = np.linspace(-2, 2, n, dtype=np.float32)[:, None]
    return columns | dict(masks=np.ones(n), dones=np.zeros(n, bool)) | others


def save(path, columns):
    np.savez(path, **columns)
    return str(path)


def load(path, **options):
    return load_offline_data(Args(**dict(offline_data_path=[str(path)]) | options), ENV)


def refused(path, *words):
    with pytest.raises(SystemExit) as end:
        load(path)
    message = end.value.code
    assert "\n" not in message and all(word in message for word in words), message


def test_npz_reaches_the_buffer(tmp_path, capsys):
    path = save(tmp_path / "a.npz", walk(masks=1.0 - LAST, dones=LAST, rewards=1.0 * LAST))
    rows, _, returns = load(path)
    # the environment's +-2 is the policy's +-1
    assert rows["actions"][:, 0] == pytest.approx(np.linspace(-1, 1, 6))
    assert rows["masks"].tolist() == [1, 1, 1, 1, 1, 0] and returns == {path: 1.0}
    assert rows["returns"] == pytest.approx(return_to_go(LAST, 0.99))
    # demos, quality (1 + 0.5 + 0.5) / 3, success
    assert rows["weights"] == pytest.approx(2 * (0.5 + 2 / 3) * 1.5)
    assert capsys.readouterr().out == f"{path}: 1 episodes, 6 rows, mean return 1.0\n"
    rows, *_ = load(save(tmp_path / "b.npz", walk(dones=LAST)))
    assert (rows["masks"] == 1).all()  # cut off: it bootstraps, and is no success
    assert rows["weights"] == pytest.approx(2 * (0.5 + 1 / 3))


def test_a_file_needs_masks_or_dones(tmp_path, capsys):
    columns = walk()
    del columns["masks"], columns["dones"]
    refused(save(tmp_path / "a.npz", columns), "masks or dones")
    capsys.readouterr()
    rows = read_source(save(tmp_path / "b.npz", columns | dict(masks=1.0 - LAST)), ENV)
    assert rows["dones"].tolist() == [0, 0, 0, 0, 0, 1] and capsys.readouterr().out == ""
    rows = read_source(save(tmp_path / "c.npz", columns | dict(dones=LAST)), ENV)
    assert rows["masks"].tolist() == [1, 1, 1, 1, 1, 0]
    assert "c.npz has no masks: each end of an episode counts" in capsys.readouterr().out


def test_three_sources_with_a_path_and_a_weight_each(tmp_path):
    a, b, c, d = (save(tmp_path / f"{i}.npz", walk(start=10.0 * i, dones=LAST)) for i in range(4))
    args = Args(offline_data_path=[a, b], suboptimal_data_path=[c], random_data_path=[d])
    rows, _, returns = load_offline_data(args, ENV)
    # one return only: quality is (0 + 0.5 + 0.5) / 3, so its factor is 5/6
    weights = np.array([2.0, 2.0, 1.0, 0.5]).repeat(6) * 5 / 6
    assert rows["weights"] == pytest.approx(weights)
    assert list(returns) == [a, b, c, d]
    args = Args(offline_data_path=[a], demo_weight=3.5)
    assert load_offline_data(args, ENV)[0]["weights"] == pytest.approx(3.5 * 5 / 6)


def test_columns_that_a_file_has_are_kept_and_the_others_are_filled(tmp_path):
    """With weights and without returns, Cal-QL would have raised the policy's values to 0."""
    columns = walk(dones=LAST, rewards=-np.ones(6))
    rows, *_ = load(save(tmp_path / "a.npz", columns | dict(weights=np.arange(6) + 1.0)))
    assert rows["weights"].tolist() == [1, 2, 3, 4, 5, 6]
    assert rows["returns"] == pytest.approx(return_to_go(-np.ones(6), 0.99))
    assert rows["quality"] == pytest.approx((0 + 0.5 + 0.5) / 3)
    rows, *_ = load(save(tmp_path / "b.npz", columns | dict(returns=np.arange(6) - 9.0)))
    assert rows["returns"].tolist() == [-9, -8, -7, -6, -5, -4]
    assert rows["weights"] == pytest.approx(2 * (0.5 + 1 / 3))
    refused(
        save(tmp_path / "c.npz", columns | dict(returns=np.full(6, np.nan))), "returns of row 0"
    )


def test_cloning_imitates_demonstrations_or_the_best_quarter(tmp_path):
    def source(i, level):
        rewards = np.full(6, float(level))
        return save(tmp_path / f"{i}.npz", walk(start=10.0 * i, dones=LAST, rewards=rewards))

    paths = [source(i, level) for i, level in enumerate((0, 9, 1, 2, 3))]
    args = Args(offline_data_path=paths[:1], random_data_path=paths[1:])
    rows, *_ = load_offline_data(args, ENV)
    assert rows["is_cloned"].tolist() == [1] * 6 + [0] * 24  # the worst source, but it is the demos
    args = Args(suboptimal_data_path=paths[2:4], random_data_path=[paths[1], paths[4]])
    rows, *_ = load_offline_data(args, ENV)
    assert rows["rewards"][rows["is_cloned"] == 1].tolist() == [9] * 6


def transitions(wrap=lambda value: value, **others):
    """As HIL-SERL writes them, with images, infos and a grasp_penalty that nobody here reads"""
    columns = walk()
    rows = []
    for i in range(6):
        row = dict(
            observations={
                "state": wrap(columns["observations"][i]),
                "image": np.zeros((1, 2, 2, 3), np.uint8),
            },
            actions=columns["actions"][i],
            next_observations={"state": wrap(columns["next_observations"][i])},
            rewards=1.0,
            masks=float(i != 3),
            dones=i in (3, 5),
            infos={"succeed": False},
            grasp_penalty=-0.02,
        )
        rows.append(row | others)
    return rows


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: x[None]], ids=["vector", "chunked"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_demo_pickles_of_hil_serl(tmp_path, protocol, wrap):
    """A leading axis of 1, which ChunkingWrapper adds, is removed."""
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps(transitions(wrap), protocol))
    rows = read_source(str(tmp_path / "demo.pkl"), ENV)
    assert (rows["obs"] == walk()["observations"]).all()
    assert (rows["next_obs"] == walk()["next_observations"]).all()
    assert rows["masks"].tolist() == [1, 1, 1, 0, 1, 1]
    assert [len(episode) for episode in split_episodes(rows)] == [4, 2]


def test_observations_with_several_keys_are_joined_like_those_of_the_environment(tmp_path):
    class Goal(gym.Env):
        """Two vectors with names, like gymnasium-robotics"""

        box = gym.spaces.Box(-1, 1, (2,))
        observation_space = gym.spaces.Dict(observation=box, desired_goal=box)
        action_space = gym.spaces.Box(-1, 1, (1,))

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            raw = dict(observation=np.float32([0.1, 0.2]), desired_goal=np.float32([0.3, 0.4]))
            return raw, {}

    gym.register("Goal-v0", Goal)
    env = make_gym_env("Goal-v0")
    obs, _ = env.reset(seed=0)
    raw = dict(observation=np.float32([0.1, 0.2]), desired_goal=np.float32([0.3, 0.4]))
    row = dict(observations=raw, next_observations=raw, actions=np.zeros(1), rewards=0, dones=True)
    assert to_rows([row], env, "a.pkl")["obs"][0] == pytest.approx(obs)
    assert obs.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("shape", [(8, 8, 3), (8, 8)], ids=["image", "depth"])
def test_an_environment_with_images_is_refused_by_name(shape):
    class Camera(gym.Env):
        camera = gym.spaces.Box(0, 255, shape, np.uint8)
        observation_space = gym.spaces.Dict(state=gym.spaces.Box(-1, 1, (2,)), wrist=camera)
        action_space = gym.spaces.Box(-1, 1, (1,))

    gym.register("Camera-v0", Camera)
    with pytest.raises(SystemExit, match="wrist"):
        make_gym_env("Camera-v0")


def test_nested_observations_are_refused_by_name():
    class Nested(gym.Env):
        box = gym.spaces.Box(-1, 1, (2,))
        observation_space = gym.spaces.Dict(robot=gym.spaces.Dict(arm=box))
        action_space = gym.spaces.Box(-1, 1, (1,))

    gym.register("Nested-v0", Nested)
    with pytest.raises(SystemExit, match="robot"):
        make_gym_env("Nested-v0")


@pytest.mark.parametrize("name", ["Discrete", "Tuple"])
def test_observations_that_are_no_vectors_are_refused_by_name(name):
    spaces = dict(Discrete=gym.spaces.Discrete(5))
    spaces["Tuple"] = gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2,))])

    class Odd(gym.Env):
        observation_space = spaces[name]
        action_space = gym.spaces.Box(-1, 1, (1,))

    gym.register(f"{name}-v0", Odd)
    with pytest.raises(SystemExit, match=f"state as {name}"):
        make_gym_env(f"{name}-v0")


def test_an_observation_that_is_one_number_or_one_column_fits():
    class Scalar(gym.Env):
        observation_space = gym.spaces.Dict(
            number=gym.spaces.Box(-1, 1, ()), column=gym.spaces.Box(-1, 1, (3, 1))
        )
        action_space = gym.spaces.Box(-1, 1, (1,))

    gym.register("Scalar-v0", Scalar)
    assert make_gym_env("Scalar-v0").observation_space.shape == (4,)


def test_a_constant_observation_has_a_spread_of_one():
    """Without data the bounds of the space are the statistics. Here low is high in one of them."""
    space = gym.spaces.Box(np.float32([-2, 1]), np.float32([2, 1]))
    mean, std = obs_statistics(space, np.zeros((0, 2)))
    assert mean.tolist() == [0, 1] and std.tolist() == [2, 1]


def test_statistics_of_many_rows_are_summed_in_float64():
    space = gym.spaces.Box(-np.inf, np.inf, (2,))
    obs = np.tile(np.float32([[1000, 0], [1001, 3]]), (500_000, 1))
    mean, std = obs_statistics(space, obs)
    assert mean == pytest.approx([1000.5, 1.5]) and std == pytest.approx([0.5, 1.5])


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3),
        gym.spaces.Box(-np.inf, np.inf, (1,)),
        gym.spaces.Box(np.float32([0, 1]), np.float32([1, 1])),
        gym.spaces.Box(-1, 1, (2, 2)),
    ],
)
def test_actions_that_cannot_be_scaled_are_refused(space):
    class Odd(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,))
        action_space = space

    gym.register("Odd-v0", Odd)
    with pytest.raises(SystemExit, match="expected a bounded Box"):
        make_gym_env("Odd-v0")


def test_hostile_and_damaged_files_end_in_one_line(tmp_path):
    """The unpickler is that of sac_hybrid.py, word for word: test_sac_demos.py tries more."""

    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/owned",)

    no_state = {"image": np.zeros(2)}
    wrong = {
        "system": [Hostile()],
        "rewards of row 0": transitions(rewards=1e308),
        "observations: expected numbers in each row: KeyError('state')": transitions(
            observations=no_state
        ),
        "actions: expected numbers in each row: KeyError('actions')": [
            dict(observations=np.zeros(3), dones=True)
        ],
        "no transitions": [],
        "masks": transitions(masks=2.0),
        "big-endian": transitions(rewards=np.array(1.0, ">f8")),
    }
    for words, content in wrong.items():
        (tmp_path / "demo.pkl").write_bytes(pickle.dumps(content))
        refused(tmp_path / "demo.pkl", "demo.pkl", words)
    assert not (tmp_path / "owned").exists()
    whole = Path(save(tmp_path / "whole.npz", walk())).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[:700])
    for path in ("cut.npz", "absent.npz", "absent.pkl"):
        refused(tmp_path / path, path)


@pytest.mark.parametrize(
    "others, words",
    [
        (dict(observations=np.zeros((6, 4))), ["observations of row 0", "expected 3"]),
        (dict(actions=np.zeros((6, 2))), ["actions of row 0", "expected 1"]),
        (dict(rewards=np.array([0, 1, np.nan, 1, 1, 1])), ["rewards of row 2", "nan"]),
        (dict(next_observations=np.full((6, 3), np.inf)), ["next_observations of row 0"]),
        (dict(actions=np.array(["a"] * 6)[:, None]), ["actions: expected numbers in each row"]),
        (dict(rewards=np.zeros(5)), ["shorter"]),
        (dict(weights=np.array([1, 1, 0, 1, 1, 1])), ["weights must be above 0"]),
        ({name: column[:0] for name, column in walk().items()}, ["no transitions"]),
    ],
)
def test_wrong_columns_end_in_one_line(tmp_path, others, words):
    refused(save(tmp_path / "a.npz", walk(**others)), "a.npz", *words)


def recipe(name, monkeypatch, *words):
    """Run a script of the page."""
    page = (ROOT / "docs" / "wsrl_warmup.md").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
    exec(re.search(rf"```python\n(# {name}\n.*?)```", page, re.S)[1], {})


def test_the_minari_recipe_of_the_page(tmp_path, monkeypatch):
    columns = walk(4)
    parts = dict(
        observations=np.vstack([columns["observations"], columns["next_observations"][-1:]]),
        actions=columns["actions"],
        rewards=columns["rewards"],
        terminations=np.array([False, False, False, True]),
        truncations=np.zeros(4, bool),
    )
    episodes = [types.SimpleNamespace(**parts)] * 2
    data = types.SimpleNamespace(iterate_episodes=lambda: episodes)
    minari = types.SimpleNamespace(load_dataset=lambda name: {"a/b-v0": data}[name])
    monkeypatch.setitem(sys.modules, "minari", minari)
    recipe("minari_to_npz.py", monkeypatch, "a/b-v0", tmp_path / "a.npz")
    rows = read_source(str(tmp_path / "a.npz"), ENV)
    assert len(rows) == 8 and (rows["next_obs"][:4] == columns["next_observations"]).all()
    assert rows["masks"].tolist() == [1, 1, 1, 0] * 2
    assert [len(episode) for episode in split_episodes(rows)] == [4, 4]


def test_a_data_set_of_the_real_minari(tmp_path, monkeypatch):
    """Two episodes of Pendulum, which a time limit ends, written and read by the library"""
    minari = pytest.importorskip("minari")
    pytest.importorskip("jax")  # minari needs it to write a data set
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    env = minari.DataCollector(gym.make("Pendulum-v1", max_episode_steps=7))
    played = []
    for seed in range(2):
        obs, _ = env.reset(seed=seed)
        for _ in range(7):
            action = env.action_space.sample()
            next_obs, reward, _, _, _ = env.step(action)
            played.append((obs, action / 2, reward, next_obs))
            obs = next_obs
    names = dict(algorithm_name="random", author="a", author_email="a@b.c")
    env.create_dataset("pendulum/random-v0", code_permalink="https://example.org", **names)
    env.close()
    recipe("minari_to_npz.py", monkeypatch, "pendulum/random-v0", tmp_path / "a.npz")
    rows = read_source(str(tmp_path / "a.npz"), ENV)
    for row, (obs, action, reward, next_obs) in zip(rows, played, strict=True):
        assert row["obs"] == pytest.approx(obs) and row["next_obs"] == pytest.approx(next_obs)
        assert row["actions"] == pytest.approx(action) and row["rewards"] == pytest.approx(reward)
    assert (rows["masks"] == 1).all()
    assert [len(episode) for episode in split_episodes(rows)] == [7, 7]


@pytest.mark.parametrize("kind", ["npz", "hdf5"])
@pytest.mark.parametrize("with_next", [True, False], ids=["next", "no next"])
def test_the_d4rl_recipe_of_the_page(kind, with_next, tmp_path, monkeypatch):
    """Three episodes: one terminates, one is cut off by a time limit, one has no end in the file."""
    parts = [walk(3), walk(3, start=10.0), walk(3, start=20.0)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    data = {name: columns[name] for name in ("observations", "actions", "rewards")}
    data |= dict(terminals=np.arange(9) == 2, timeouts=np.arange(9) == 5)
    if with_next:
        data["next_observations"] = columns["next_observations"]
    source = tmp_path / f"source.{kind}"
    if kind == "npz":
        np.savez(source, **data)
    else:
        with pytest.importorskip("h5py").File(source, "w") as file:
            for name, column in data.items():
                file[name] = column
            file["metadata/algorithm"] = "SAC"  # a group, as D4RL has it
    recipe("d4rl_to_npz.py", monkeypatch, source, tmp_path / "a.npz")
    rows = read_source(str(tmp_path / "a.npz"), ENV)
    if with_next:
        assert rows["masks"].tolist() == [1, 1, 0] + [1] * 6
        assert [len(episode) for episode in split_episodes(rows)] == [3, 3, 3]
        assert (rows["next_obs"] == columns["next_observations"]).all()
    else:  # the last rows of the second and third episode have no next observation
        assert rows["masks"].tolist() == [1, 1, 0, 1, 1, 1, 1]
        assert [len(episode) for episode in split_episodes(rows)] == [3, 2, 2]
        assert rows["next_obs"][:, 0].tolist()[3:] == [11, 12, 21, 22]


def test_a_trajectory_cut_in_two_is_two(tmp_path):
    """No flag marks the gap: without the check, the first part's returns would hold the second's rewards."""
    cut = {name: np.concatenate([walk(3)[name], walk(3, start=50.0)[name]]) for name in walk()}
    rows, *_ = load(save(tmp_path / "a.npz", cut))
    assert [len(episode) for episode in split_episodes(rows)] == [3, 3]
    assert rows["returns"] == pytest.approx([2.9701, 1.99, 1.0] * 2)
    whole, *_ = load(save(tmp_path / "b.npz", walk(6)))
    assert len(split_episodes(whole)) == 1
    ended, *_ = load(save(tmp_path / "c.npz", walk(6, dones=np.isin(np.arange(6), [1, 3]))))
    assert [len(episode) for episode in split_episodes(ended)] == [2, 2, 2]
    masks = 1.0 - np.isin(np.arange(6), [1, 3])  # the file has dones, but not at a termination
    ended, *_ = load(save(tmp_path / "d.npz", walk(6, masks=masks)))
    assert [len(episode) for episode in split_episodes(ended)] == [2, 2, 2]


def test_the_number_of_episodes_shows_that_rows_are_shuffled(tmp_path, capsys):
    """Each of their episodes has one row, and its return is a reward."""
    order = np.random.default_rng(0).permutation(30)
    columns = walk(30)
    load(save(tmp_path / "a.npz", columns))
    assert "a.npz: 1 episodes, 30 rows" in capsys.readouterr().out
    load(save(tmp_path / "b.npz", {name: column[order] for name, column in columns.items()}))
    assert "b.npz: 30 episodes, 30 rows" in capsys.readouterr().out


def test_actions_out_of_bounds_are_clipped_and_their_share_is_printed(tmp_path, capsys):
    rows = read_source(save(tmp_path / "a.npz", walk(actions=np.full((6, 1), 2.0002))), ENV)
    assert (rows["actions"] == 1).all() and capsys.readouterr().out == ""  # a matter of rounding
    actions = np.array([[-2.5], [2], [0], [0], [0], [9]])
    rows = read_source(save(tmp_path / "b.npz", walk(actions=actions)), ENV)
    assert rows["actions"][:, 0].tolist() == [-1, 1, 0, 0, 0, 1]
    assert "b.npz: 33.3% of the actions are out of bounds" in capsys.readouterr().out


def test_a_next_observation_may_differ_by_rounding(tmp_path):
    """The episode is one, not six of a row each, whose returns would be their rewards."""
    columns = walk(6, dones=LAST)
    columns["next_observations"] = columns["next_observations"] * np.float32(1 + 1e-6)
    rows, *_ = load(save(tmp_path / "a.npz", columns))
    assert (rows["next_obs"][:-1] != rows["obs"][1:]).all() and len(split_episodes(rows)) == 1
    assert rows["returns"][0] == pytest.approx(return_to_go(np.ones(6), 0.99)[0])
    columns["observations"] = columns["observations"] + np.float32([0.0, 0.0, 0.05])
    assert len(split_episodes(load(save(tmp_path / "b.npz", columns))[0])) == 6


def quality(rewards=(0.0, 1.0), terminated=False, bounds=(0.0, 4.0), longest=10):
    trajectory = dict(rewards=rewards, masks=[float(not terminated)])
    return compute_data_quality(trajectory, bounds, longest)


def test_quality_by_hand_and_monotone():
    """A success terminates with its only positive reward."""
    assert quality((0.0, 1.0), True) == pytest.approx((1 + 0.25 + 0.9) / 3)
    assert quality((0.0, 1.0)) == pytest.approx((0 + 0.25 + 0.5) / 3)
    assert quality((1.0, 0.0), terminated=True) == pytest.approx((0 + 0.25 + 0.1) / 3)
    by_return = [quality((x,)) for x in (-9, 0, 1, 3, 4, 99)]
    assert by_return == sorted(by_return) and by_return[1] < by_return[2] < by_return[3]
    # an early success is better, and so is a late failure
    assert quality((1.0,), True) > quality((0.0, 1.0), True) > quality((1.0, 0.0)) > 0
    assert quality((1.0, 0.0), True) < quality((0.5, 0.5, 0.0), True) < quality((1.0,))
    extremes = [quality(r, t) for r in ((-1e9,), (1e9,), (1.0,) * 50) for t in (0, 1)]
    assert 0 <= min(extremes) and max(extremes) <= 1
    assert quality((1.0,), bounds=(3.0, 3.0)) == pytest.approx(1 / 3)


def test_the_built_in_task_makes_two_sources_and_no_demos():
    args = Args(**wsrl_warmup.default_options())
    rows, heldout, returns = load_offline_data(args, ENV)
    assert -900 > returns["random"] < returns["suboptimal"] > -900
    assert len(rows) == 8000 and len(heldout) == 0 and np.abs(rows["actions"]).max() <= 1


def test_every_tenth_episode_is_held_out(monkeypatch):
    args = Args(**wsrl_warmup.default_options() | dict(early_stop_patience=1))
    rows, heldout, _ = load_offline_data(args, ENV)
    assert (len(rows), len(heldout)) == (7200, 800)
    starts = {tuple(row["obs"]) for row in rows}
    assert not any(tuple(row["obs"]) in starts for row in heldout)
    args.offline_objective = "bc"  # which imitates ten of the forty episodes
    rows, heldout, _ = load_offline_data(args, ENV)
    assert (len(rows), len(heldout)) == (7800, 200)
    assert (heldout["is_cloned"] == 1).all() and rows["is_cloned"].sum() == 1800


def test_early_stopping_needs_episodes_to_hold_out(tmp_path):
    path = save(tmp_path / "a.npz", walk(dones=LAST))
    with pytest.raises(SystemExit, match="ten episodes"):
        load(path, early_stop_patience=1)


def test_make_data_writes_each_source_once(tmp_path, monkeypatch):
    monkeypatch.setattr(make_source, "__defaults__", (200,))
    args = Args(make_data=str(tmp_path / "data"))
    wsrl_warmup.main(args)
    names = dict(offline_data_path="demos", suboptimal_data_path="suboptimal")
    names["random_data_path"] = "random"
    paths = {option: [f"{tmp_path}/data/{name}.pkl"] for option, name in names.items()}
    rows, _, returns = load_offline_data(Args(**paths), ENV)
    demos, suboptimal, random = returns.values()
    assert len(rows) == 600 and demos > suboptimal > random
    with pytest.raises(FileExistsError):  # nothing is overwritten
        wsrl_warmup.main(args)
    with pytest.raises(SystemExit, match="--expert-path"):
        wsrl_warmup.main(Args(make_data=f"{tmp_path}/new", env_id="MountainCarContinuous-v0"))
    assert not (tmp_path / "new").exists()


def test_what_the_warm_up_writes_is_what_it_kept(tmp_path):
    """In the units of the environment, with its ratings: they cannot be computed again from single rows."""
    rows = np.zeros(3, make_row_dtype(ENV))
    rows["obs"] = np.arange(9).reshape(3, 3)
    rows["actions"] = [[-0.5], [0.25], [1.0]]
    rows["rewards"], rows["masks"] = [1, 2, 3], [1, 1, 0]
    rows["weights"], rows["quality"], rows["returns"] = [1, 2, 3], 0.7, [-5, 6, 7]
    rows["is_cloned"] = [0, 1, 0]
    write_transitions(tmp_path / "kept.pkl", rows, ENV)
    written = pickle.loads((tmp_path / "kept.pkl").read_bytes())
    assert [float(row["actions"][0]) for row in written] == [-1.0, 0.5, 2.0]
    assert (env_units(ENV, rows["actions"])[:, 0] == [-1.0, 0.5, 2.0]).all()
    args = Args(learner=True, checkpoint_path="warm", demo_path=str(tmp_path / "kept.pkl"))
    assert (load_offline_data(args, ENV)[0] == rows).all()
