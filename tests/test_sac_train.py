"""sac_hybrid.py as a whole: environments, the human, threads, faults, resume, pictures, the command line."""

import itertools
import json
import pickle
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, die_while_saving, forked, same
from conftest import metrics_without_times as rows
from PIL import Image

import sac_hybrid
from sac_hybrid import (
    SETUP_MODES,
    ActorThread,
    Args,
    BarWorld,
    Robot,
    evaluate_policy,
    main,
    parse_args,
)

TINY = sac_hybrid.BAR_WORLD | dict(
    max_steps=60,
    training_starts=20,
    eval_episodes=1,
    report_episodes=1,
    eval_every=30,
    batch_size=8,
    num_demos=3,
    hidden_size=16,
    log_interval=15,
    intervention_steps=100,
    buffer_size=1_000,
    save_every=60,
    capture_video=False,
    device="cpu",
)
FLAGS = [
    word
    for name, value in TINY.items()
    if name != "capture_video"
    for word in (f"--{name}", str(value))
]
COMMAND = [sys.executable, str(ROOT / "sac_hybrid.py"), "--no-capture-video", *FLAGS]


@pytest.fixture(autouse=True)
def no_curves(request):
    """Drawing the curves takes longer than a tiny run."""
    if "pictures" in request.node.name:
        yield
    else:
        with mock.patch("matplotlib.figure.Figure.savefig"):
            yield


def acting():
    return [thread for thread in threading.enumerate() if isinstance(thread, ActorThread)]


def play(env, act, episodes):
    """-> success rate, mean steps of the successes"""
    lengths = []
    for seed in range(episodes):
        env.reset(seed=seed)
        terminated = truncated = False
        while not (terminated or truncated):
            _, _, terminated, truncated, info = env.step(act())
        assert info["is_success"] == terminated
        if terminated:
            lengths.append(env.num_steps)
    return len(lengths) / episodes, np.mean(lengths or [np.inf])


# --- the built-in environment ---
@pytest.mark.parametrize("mode", SETUP_MODES)
def test_the_expert_always_succeeds_and_chance_never_does(mode):
    env = BarWorld(mode, "expert")
    rng = np.random.default_rng(0)
    success, expert_steps = play(env, env.human, 50)
    assert success == 1
    assert play(env, lambda: rng.uniform(-1, 1, env.action_space.shape), 50)[0] == 0
    env = BarWorld(mode)
    success, steps = play(env, env.human, 50)
    assert success >= 0.8 and steps > 1.8 * expert_steps


@pytest.mark.parametrize("mode", SETUP_MODES)
def test_the_environment_is_a_good_citizen(mode):
    from gymnasium.utils.env_checker import check_env

    check_env(BarWorld(mode), skip_render_check=False)


def test_the_environment_passes_the_check_of_stable_baselines3():
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    for mode in SETUP_MODES:
        checker.check_env(BarWorld(mode))


def test_the_bar_is_in_the_image_only():
    env = BarWorld(human="expert")
    one, _ = env.reset(seed=1)
    env.bar[0, :2] *= -1
    two = env.observe()
    assert (one["state"] == two["state"]).all() and (one["image"] != two["image"]).any()
    env.bar[0, 5] += 0.02  # a turn of two degrees shows
    assert (env.observe()["image"] != two["image"]).any()


def test_render_shows_every_part_of_the_state_but_tilt():
    env = BarWorld()
    env.reset(seed=1)
    before = env.render()
    assert before.shape == (640, 320, 3) and before.dtype == np.uint8
    for dim in (0, 1, 2, 5):  # height is in the view from the side
        pose = env.pose.copy()
        env.pose[0, dim] -= 0.3
        changed = (env.render() != before).any(axis=(1, 2))
        assert changed.any(), dim
        assert changed[:320].any() or dim == 2
        env.pose = pose
    env.is_open[:] = False
    assert (env.render() != before).any()
    assert BarWorld("dual-arm-learned-gripper").reset(seed=0)


# --- an environment of one's own ---
OWN = '''
from pathlib import Path

import numpy as np
import torch


class ScriptedHuman:
    """Ten steps; on 3, 4 and 7 the human acts, and closes the gripper. Only `Polite` obeys allow_intervention."""

    polite = False

    def __init__(self, image_keys, action_dim):
        self.dim = action_dim
        self.camera = np.zeros((8, 8, 3), np.uint8)
        self.closed = False

    def observe(self):
        self.camera[:] = 100 + self.t  # one buffer for all images, as cameras have
        return {"image": self.camera[::-1], "proprio": np.full(2, self.t, np.float32)}

    def reset(self):
        self.t, self.seen = 0, []
        return self.observe(), {}

    def step(self, action):
        assert not self.closed
        info = {}
        if self.t in (3, 4, 7) and (self.allow_intervention or not self.polite):
            info["intervene_action"] = np.full(self.dim, -0.75)
            if self.t == 4:  # straight from a network
                info["intervene_action"] = torch.full((self.dim,), -2.0, requires_grad=True)
        self.t += 1
        self.seen.append(action)
        return self.observe(), 0.0, False, self.t == 10, info

    def close(self):
        self.closed = True
        Path(__file__).with_name("closed").touch()


class Polite(ScriptedHuman):
    polite = True


class Succeeds(Polite):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        info["succeed"] = truncated  # as HIL-SERL writes it
        return obs, reward, terminated, truncated, info


class Rescued(Succeeds):
    """Every episode succeeds; in every second one because a human acts, whatever he was told."""

    episodes = 0

    def reset(self):
        self.episodes += 1
        self.polite = self.episodes % 2 == 1
        return super().reset()


class Fines(Polite):
    def step(self, action):
        *rest, info = super().step(action)
        if self.t != 2:
            info["grasp_penalty"] = np.float64(-self.t)
        return *rest, info


class Renders(Polite):
    def render(self):
        return np.full((50, 60, 3), 20 * self.t, np.uint8)


class NoDisplay(Polite):
    def render(self):
        raise RuntimeError("no display")


class Blind(Polite):
    def observe(self):
        return np.full(2, self.t, np.float32)


class Depth(Polite):
    def observe(self):
        return {"depth": np.zeros((32, 32), np.float32)}


class Chunked(Polite):
    """HIL-SERL's ChunkingWrapper: a leading axis of 1"""

    def observe(self):
        return {key: value[None] for key, value in super().observe().items()}


class Once(Polite):
    """A robot that exists once: evaluation in the middle of an episode would move it."""

    made = 0

    def __init__(self, image_keys, action_dim):
        super().__init__(image_keys, action_dim)
        Once.made += 1
        assert Once.made == 1
        self.t = 10

    def reset(self):
        assert self.t in (0, 10), f"reset in the middle of an episode, at {self.t}"
        return super().reset()


class Faulty(ScriptedHuman):
    """The 26th step of a process fails in one way or another."""

    fault, count = "raise", 0

    def step(self, action):
        Faulty.count += 1
        obs, reward, *rest = super().step(action)
        if Faulty.count == 26 and self.fault == "raise":
            raise ZeroDivisionError("motor 3 is hot")
        if Faulty.count == 26 and self.fault == "nan":
            obs["proprio"] = obs["proprio"] * np.nan
        if Faulty.count == 26 and self.fault == "reward":
            reward = float("inf")
        return obs, reward, *rest
'''


def own(tmp_path, name, source=OWN, **options):
    (tmp_path / "own.py").write_text(source)
    small = dict(
        hidden_size=16,
        batch_size=8,
        training_starts=5,
        random_steps=0,
        log_interval=10,
        device="cpu",
        max_steps=10,
        eval_episodes=0,
        report_episodes=0,
        augment_pad=1,
        run_dir=str(tmp_path / "run"),
    )
    return Args(env_id=f"{tmp_path}/own.py:{name}", **small | options)


def buffers_of(monkeypatch):
    """-> list that fills with the buffers that a run makes"""
    buffers = []
    init = sac_hybrid.FrameBuffer.__init__

    def remember(self, *args):
        init(self, *args)
        buffers.append(self)

    monkeypatch.setattr(sac_hybrid.FrameBuffer, "__init__", remember)
    return buffers


def stored(buffer):
    """-> slots and first frames of all transitions, in order"""
    return buffer.read(buffer.ends())


def test_interventions_go_into_both_buffers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    buffers = buffers_of(monkeypatch)
    metrics = main(own(tmp_path, "ScriptedHuman"))
    assert (tmp_path / "closed").exists()  # the environment was closed
    assert (metrics["buffer/online_size"], metrics["buffer/demo_size"]) == (10, 3)
    assert (metrics["charts/intervention_steps"], metrics["charts/intervention_count"]) == (3, 2)
    assert metrics["charts/intervention_rate"] == pytest.approx(0.3)
    for buffer, expected in zip(buffers, (list(range(10)), [3, 4, 7]), strict=True):
        slots, frames = stored(buffer)
        steps = frames["proprio"][:, 0].astype(int).tolist()
        assert steps == expected and (slots["masks"] == 1).all(), "a time limit bootstraps"
        assert frames["image"][:, 0, 0, 0].tolist() == [100 + step for step in steps]
        following = slots["next_obs"]["image"][:, 0, 0, 0].tolist()
        assert following == [101 + step for step in steps], "a camera's buffer is reused"
        human = [set(slots["actions"][steps.index(step)].tolist()) for step in (3, 4, 7)]
        assert human == [{-0.75}, {-1.0}, {-0.75}], "the action of the human, clipped to the box"
    slots, _ = stored(buffers[0])
    last_command = 0.0
    for slot in slots:  # on the executed toggle, whoever made it
        command = slot["actions"][6] if round(float(slot["actions"][6])) else last_command
        toggles = (command < 0) != (last_command < 0)
        assert slot["grasp_penalty"] == pytest.approx(-0.02 * toggles)
        last_command = command
    assert slots["grasp_penalty"].min() < 0
    main(own(tmp_path, "ScriptedHuman", timeout_terminal=True, run_dir=str(tmp_path / "other")))
    assert stored(buffers[2])[0]["masks"].tolist() == [1.0] * 9 + [0.0]


def test_stay_repeats_the_last_command(tmp_path):
    robot = Robot(own(tmp_path, "Polite"))
    robot.reset(0)
    for command in (0, -1, 0, 0, 1, 0):
        robot.step(np.float32([0] * 6 + [command]))
    assert [action[6] for action in robot.env.seen] == [1, -1, -1, -1, 1, 1]


def test_the_weak_command_of_a_human_is_held_as_a_whole_one(tmp_path):
    source = OWN.replace("-0.75)", "-0.51)")  # of all dims, in step 3
    robot = Robot(own(tmp_path, "Polite", source))
    robot.reset(0, allow_intervention=True)
    records = [robot.step(np.zeros(7, np.float32)) for _ in range(8)]
    assert [action[6] for action in robot.env.seen] == [1, 1, 1, 1, -1, -1, -1, -1]
    assert records[3]["actions"][0] == pytest.approx(-0.51)  # the motion is not rounded
    penalties = [record["grasp_penalty"] for record in records]
    assert penalties == pytest.approx([0, 0, 0, -0.02, 0, 0, 0, 0])


def test_actions_are_finite_and_inside_the_bounds(tmp_path):
    """Of these bounds, the center plus the scale is above the upper one after rounding."""
    space = "gym.spaces.Box(np.float32([0.63] * 7), np.float32([0.83] * 7))"
    space = f"self.dim = action_dim\n        self.action_space = {space}"
    source = OWN.replace("self.dim = action_dim", space)
    robot = Robot(own(tmp_path, "Polite", f"import gymnasium as gym\n{source}"))
    assert (robot.center + robot.scale > robot.high).all()
    robot.reset(0)
    for sign in (1, -1):
        robot.step(sign * np.ones(7, np.float32))
        assert robot.env.action_space.contains(robot.env.seen[-1])
    with pytest.raises(ValueError, match="the action is not finite"):
        robot.step(np.full(7, np.nan, np.float32))
    assert len(robot.env.seen) == 2


def test_an_environment_may_have_a_penalty_of_its_own(tmp_path):
    robot = Robot(own(tmp_path, "Fines"))
    robot.reset(0)
    close = np.float32([0] * 6 + [-1])
    penalties = [robot.step(action)["grasp_penalty"] for action in (close, -close, close)]
    assert penalties == pytest.approx([-1, -0.02, -3])


def test_a_rescued_episode_is_no_success(tmp_path, capsys):
    robot = Robot(own(tmp_path, "Rescued"))
    metrics = evaluate_policy(robot.acting_agent, robot, "eval", 0, 4)
    assert metrics["eval/success_rate"] == 0.5 and metrics["eval/steps_to_success"] == 10
    assert "in 2 of 4 episodes" in capsys.readouterr().out


def test_a_human_in_a_wrapper_in_the_middle_is_told():
    """HIL-SERL's SpacemouseIntervention is below other wrappers."""
    robot = Robot(Args())
    human = gym.Wrapper(robot.env)
    robot.env = gym.wrappers.TimeLimit(human, 5)
    for allowed in (True, False):
        robot.reset(0, allow_intervention=allowed)
        told = [env.allow_intervention for env in (robot.env, human, human.unwrapped)]
        assert told == [allowed] * 3


def test_evaluation_is_without_human(tmp_path, capsys):
    for name, counted in (("ScriptedHuman", False), ("Polite", True)):
        robot = Robot(own(tmp_path, name))
        metrics = evaluate_policy(robot.acting_agent, robot, "eval", 0, 3)
        assert bool(metrics) == counted  # no episode left: the policy is not judged
        assert ("in 3 of 3 episodes" in capsys.readouterr().out) != counted
    metrics = main(own(tmp_path, "ScriptedHuman", eval_episodes=2, report_episodes=2))
    assert "eval/success_rate" not in metrics and (tmp_path / "run" / "final_model.pth").exists()
    assert "success rate not tested" in capsys.readouterr().out


@pytest.mark.parametrize("utd", [1.0, 0.0])
def test_a_robot_that_exists_once_is_evaluated_between_episodes(utd, tmp_path):
    options = dict(eval_episodes=2, report_episodes=2, eval_every=15, max_steps=40)
    metrics = main(own(tmp_path, "Once", **options, utd=utd))
    assert metrics["report/episodic_length"] == 10
    evaluated = [row["global_step"] for row in rows(tmp_path / "run") if "eval/success_rate" in row]
    assert evaluated == [10, 20, 30, 40]  # the untrained policy first


def test_a_rewarded_fall_is_no_success():
    """Hopper terminates when it falls, and is rewarded in every step."""
    assert not sac_hybrid.has_succeeded([1.0, 1.0], terminated=True)
    assert sac_hybrid.has_succeeded([0.0, -1.0, 1.0], terminated=True)
    assert not sac_hybrid.has_succeeded([0.0, 1.0], terminated=False)
    assert sac_hybrid.has_succeeded([1.0, 1.0], False, {"succeed": np.bool_(True)})


def test_success_in_the_words_of_hil_serl(tmp_path):
    metrics = main(own(tmp_path, "Succeeds", eval_episodes=1, report_episodes=2))
    assert metrics["report/success_rate"] == metrics["charts/success_rate"] == 1


def test_observations_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"depth is float32 \(32, 32\): .*images are uint8"):
        Robot(own(tmp_path, "Depth"))
    with pytest.raises(
        ValueError, match=r"observation has \['image', 'proprio'\]: expected \['wrist'\]"
    ):
        Robot(own(tmp_path, "Polite", image_keys=["wrist"]))
    robot = Robot(own(tmp_path, "Chunked"))
    assert robot.obs_shapes == {"image": (8, 8, 3), "proprio": (2,)}


@pytest.mark.parametrize(
    "fault, error", [("raise", ZeroDivisionError), ("nan", ValueError), ("reward", ValueError)]
)
def test_an_arm_that_fails_costs_nothing_that_was_learned(fault, error, tmp_path):
    source = OWN.replace('"raise", 0', f'"{fault}", 0')
    with pytest.raises(error):
        main(own(tmp_path, "Faulty", source, max_steps=90))
    saved = torch.load(tmp_path / "run" / "latest.pth")
    assert saved["progress"]["global_step"] == 25 and not acting()
    assert (tmp_path / "closed").exists()
    metrics = main(own(tmp_path, "Polite", max_steps=40, resume=True))
    assert metrics["charts/updates"] == 35 and rows(tmp_path / "run")[-1]["global_step"] == 40


@pytest.mark.parametrize("utd", [1.0, 0.0])
def test_a_learner_that_fails_saves_and_closes_the_arm(utd, tmp_path, monkeypatch):
    """An evaluation on the arm, a log line on a full disk, ..."""

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(sac_hybrid, "show_status", fail)
    with pytest.raises(OSError, match="no space"):
        main(own(tmp_path, "Polite", max_steps=40, log_interval=17, utd=utd))
    saved = torch.load(tmp_path / "run" / "latest.pth")
    assert saved["progress"]["global_step"] == 17 and not acting()
    assert (tmp_path / "closed").exists()


def test_the_arm_stops_before_a_failed_learner_saves(tmp_path, monkeypatch):
    """With --utd 0 the arm does not wait for the learner, and writing the file takes time."""
    source = OWN.replace("assert not self.closed", "time.sleep(0.1)").replace(
        "import torch", "import time\nimport torch"
    )
    saves = []
    save_run = sac_hybrid.save_run

    def wait_and_save(*args):
        for actor in acting():
            actor.join(5)
        saves.append(acting())
        save_run(*args)

    monkeypatch.setattr(sac_hybrid, "save_run", wait_and_save)
    monkeypatch.setattr(sac_hybrid, "show_status", mock.Mock(side_effect=OSError))
    with pytest.raises(OSError):
        main(own(tmp_path, "Polite", source, max_steps=40, log_interval=2, utd=0.0))
    assert saves == [[]]


def test_a_failure_at_the_end_keeps_the_newest_weights(tmp_path, monkeypatch):
    """finish_run loads the best weights; --resume continues with the last ones."""
    options = TINY | dict(run_dir=str(tmp_path / "run"))
    monkeypatch.setattr(sac_hybrid, "select_policy", keep_first)
    with monkeypatch.context() as patch:
        patch.setattr(sac_hybrid.Run, "finish", mock.Mock(side_effect=OSError))
        with pytest.raises(OSError):
            main(Args(**options))
    saved = torch.load(tmp_path / "run" / "latest.pth")
    assert saved["progress"]["best_agent"]["updates"] == 0
    assert saved["agent"]["updates"] == 80
    main(Args(**options, resume=True))
    assert sum("report/success_rate" in row for row in rows(tmp_path / "run")) == 1


def keep_first(state, robot):
    state.progress.best_agent = state.progress.best_agent or state.agent.checkpoint()
    return {}


def test_a_start_that_fails_closes_the_arm(tmp_path):
    (tmp_path / "demo.pkl").write_bytes(b"damaged")
    with pytest.raises(SystemExit, match="demo.pkl"):
        main(own(tmp_path, "Polite", demo_paths=[str(tmp_path / "demo.pkl")]))
    assert (tmp_path / "closed").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["Polite", "Depth"])
def test_an_environment_that_does_not_fit_is_closed(name, tmp_path):
    with pytest.raises((SystemExit, ValueError)):
        Robot(own(tmp_path, name, image_keys=["depth"]))
    assert (tmp_path / "closed").exists()


def test_a_paused_robot_does_not_fill_the_memory():
    """With --utd 0 the updates go on while no line is logged."""
    agent = Robot(Args(**TINY)).make_agent("cpu")
    progress = sac_hybrid.Progress()
    demo_rb = sac_hybrid.FrameBuffer(50, Robot(Args(**TINY)).record_dtype)
    for record in sac_hybrid.make_demos(Args(**TINY), 1):
        demo_rb.insert(record)
    online_rb = sac_hybrid.FrameBuffer(2, Robot(Args(**TINY)).record_dtype)
    state = sac_hybrid.State(None, agent, online_rb, demo_rb, progress, None)
    for _ in range(7):
        sac_hybrid.learn(state)
    assert agent.updates == 7 and progress.counts["losses/critic_loss"] == 7
    assert all(value.shape == () for value in progress.sums.values())


def test_a_loss_that_is_not_a_number_shows_in_the_mean():
    progress = sac_hybrid.Progress()
    for loss in (1.0, 2.0):
        progress.add({"critic_loss": torch.tensor(loss), "rate": 0.5})
    assert progress.take_means() == {"critic_loss": 1.5, "rate": 0.5}
    for loss in (1.0, float("nan")):
        progress.add({"critic_loss": torch.tensor(loss)})
    assert np.isnan(progress.take_means()["critic_loss"])
    assert progress.take_means() == {}


def test_image_only_demos_of_the_manual_train(tmp_path):
    image = np.zeros((8, 8, 3), np.uint8)
    row = dict(
        observations={"image": image},
        actions=np.zeros(7, np.float32),
        next_observations={"image": image},
        rewards=0.0,
        masks=1.0,
        dones=False,
    )
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps([row] * 5))
    demo_paths = [str(tmp_path / "demo.pkl")]
    metrics = main(own(tmp_path, "Polite", demo_paths=demo_paths, image_keys=["image"]))
    assert metrics["buffer/demo_size"] == 5 + 3 and metrics["buffer/demo_rows"] == 4
    saved = torch.load(tmp_path / "run" / "final_model.pth")
    assert saved["obs_shapes"] == {"image": (8, 8, 3)}
    other = str(tmp_path / "other")
    with pytest.raises(SystemExit, match=r"row 0.*\['image'\].*\['image', 'proprio'\]"):
        main(own(tmp_path, "Polite", demo_paths=demo_paths, run_dir=other))
    assert not (tmp_path / "other").exists()  # a bad file leaves no folder behind


def test_a_gymnasium_environment_with_box_observations(tmp_path):
    args = Args(
        env_id="Pendulum-v1",
        setup_mode="single-arm-fixed-gripper",
        run_dir=str(tmp_path / "run"),
        hidden_size=16,
        batch_size=8,
        max_steps=30,
        training_starts=10,
        random_steps=5,
        num_critics=10,
        eval_episodes=0,
        report_episodes=1,
        capture_video=False,
        device="cpu",
    )
    metrics = main(args)
    assert metrics["report/episodic_length"] == 200 and metrics["charts/updates"] == 20
    with pytest.raises(SystemExit, match="Discrete"):
        Robot(Args(env_id="CartPole-v1"))


def test_an_environment_that_cannot_be_made_is_named_with_its_option(tmp_path):
    (tmp_path / "bare.py").write_text("class Bare:\n    pass\n")
    for env_id, reason in (
        (f"{tmp_path}/none.py:Bare", "none.py"),
        (f"{tmp_path}/bare.py:Bear", "Bear"),
        (f"{tmp_path}/bare.py:Bare", "takes no arguments"),
        ("Foo-v0", "Foo"),
    ):
        with pytest.raises((KeyError, OSError, TypeError, gym.error.Error), match=reason):
            Robot(Args(env_id=env_id, setup_mode="single-arm-fixed-gripper"))


def test_the_file_of_a_class_may_import_its_neighbor(tmp_path):
    (tmp_path / "my_driver_of_sac.py").write_text("SPEED = 3\n")
    source = OWN.replace("import torch", "import torch\nfrom my_driver_of_sac import SPEED")
    assert Robot(own(tmp_path, "Polite", source)).obs_shapes


def test_a_gripper_needs_another_action_dim():
    with pytest.raises(SystemExit, match="expected a bounded Box .* single-arm-learned-gripper"):
        Robot(Args(env_id="Pendulum-v1"))


def test_a_class_with_a_seed_gets_it(tmp_path):
    source = (
        OWN
        + """

class Seeded(Polite):
    def reset(self, seed=None):
        self.seed = seed
        return super().reset()


class Wrapper(Seeded):
    def reset(self, **kwargs):
        return super().reset(**kwargs)
"""
    )
    for name in ("Seeded", "Wrapper"):
        robot = Robot(own(tmp_path, name, source))
        robot.reset(7)
        assert robot.env.seed == 7


# --- the loop ---
@pytest.mark.parametrize("mode", SETUP_MODES)
def test_every_mode_trains(mode, tmp_path):
    metrics = main(Args(**TINY, setup_mode=mode, run_dir=str(tmp_path / "run")))
    losses = [value for name, value in metrics.items() if name.startswith("losses/")]
    assert np.isfinite(losses).all()
    assert ("losses/grasp_critic_loss" in metrics) == mode.endswith("learned-gripper")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    written = {"args.json", "metrics.jsonl", "summary.json", "records.bin"}
    assert names == written | {"latest.pth", "checkpoint_60.pth", "final_model.pth"}


def test_hg_dagger_clones_the_human_it_meets(tmp_path):
    metrics = main(Args(**TINY, algorithm="bc", run_dir=str(tmp_path / "run")))
    # demonstrations only, and no reinforcement learning
    assert metrics["buffer/demo_rows"] == 8 and "losses/critic_loss" not in metrics
    num_demos = len(sac_hybrid.make_demos(Args(**TINY), 3))
    assert metrics["buffer/demo_size"] - num_demos == metrics["charts/intervention_steps"] > 0


@pytest.mark.parametrize("algorithm", ["bc", "sac"])
def test_only_sac_acts_with_noise(algorithm):
    """Imitation does not train the standard deviation, so it acts with the mean."""
    robot = Robot(Args(**TINY | dict(intervention_steps=0), algorithm=algorithm))
    record = robot.take_turn(0, robot.acting_agent.acting_weights())
    first_obs = {key: record["obs"][key] for key in robot.obs_shapes}
    assert (record["actions"] == robot.acting_agent.act(first_obs)).all() == (algorithm == "bc")


def test_interventions_become_rarer():
    robot = Robot(Args(intervention_steps=100))
    weights = robot.acting_agent.acting_weights()
    probabilities = []
    for step in (0, 25, 100, 500):
        robot.is_done = True
        robot.take_turn(step, weights)
        probabilities.append(robot.env.intervention_probability)
    assert probabilities == [1.0, 0.75, 0.0, -4.0]


def test_the_best_policy_is_kept_and_judged_on_other_episodes(tmp_path, monkeypatch):
    """Success first, then speed."""
    scores = iter([(0.0, 20), (0.5, 9), (0.8, 8), (0.8, 6), (0.8, 7), (0.1, 9)])
    asked = []

    def judge(agent, robot, group, first_seed, episodes):
        asked.append((agent.updates, group, first_seed))
        success, length = next(scores)
        names = ("success_rate", "episodic_return", "episodic_length")
        return {
            f"{group}/{name}": x for name, x in zip(names, (success, success, length), strict=True)
        }

    monkeypatch.setattr(sac_hybrid, "evaluate_policy", judge)
    monkeypatch.setattr(BarWorld, "TIME_LIMIT", 5)  # episodes end at multiples of 5
    metrics = main(Args(**TINY | dict(eval_every=15, num_demos=0), run_dir=str(tmp_path / "run")))
    selections = [(updates, "eval", 10_000) for updates in (0, 0, 20, 50, 80)]
    assert asked == [*selections, (50, "report", 20_000)]
    assert metrics["report/success_rate"] == 0.1


@pytest.mark.parametrize("utd", [0.5, 3.0])
def test_the_actor_waits_for_the_learner(utd, tmp_path, monkeypatch):
    """With no lead the n-th step is taken by the policy of exactly utd * n updates."""
    seen = []
    updates_of = {}
    take_turn = Robot.take_turn
    acting_weights = sac_hybrid.SACHybridAgent.acting_weights

    def remember(agent):
        weights = acting_weights(agent)
        updates_of[id(weights)] = agent.updates, weights
        return weights

    def look(robot, step, weights):
        seen.append((step, updates_of[id(weights)][0]))
        return take_turn(robot, step, weights)

    monkeypatch.setattr(sac_hybrid.SACHybridAgent, "acting_weights", remember)
    monkeypatch.setattr(Robot, "take_turn", look)
    main(Args(**TINY | dict(max_steps=40, utd=utd), run_dir=str(tmp_path / "run")))
    assert seen == [(step, int(utd * max(0, step - 20))) for step in range(40)]


def test_a_free_running_learner_does_not_hold_up_the_arm(tmp_path, monkeypatch):
    """Each of the first updates lasts until the arm has moved three times more."""
    robots = []
    init = Robot.__init__
    learn = sac_hybrid.learn
    waited = []

    def remember(robot, args):
        init(robot, args)
        robots.append(robot)

    def slow_learn(*args):
        learn(*args)
        taken = len(robots[0].rewards)
        if taken < 6 and len(waited) < 5:
            deadline = time.monotonic() + 20
            while len(robots[0].rewards) < taken + 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            waited.append(time.monotonic() < deadline)

    monkeypatch.setattr(Robot, "__init__", remember)
    monkeypatch.setattr(sac_hybrid, "learn", slow_learn)
    source = OWN.replace("assert not self.closed", "time.sleep(0.01)").replace(
        "import torch", "import time\nimport torch"
    )
    metrics = main(own(tmp_path, "Polite", source, max_steps=40, utd=0.0))
    assert waited and all(waited) and metrics["charts/updates"] > 0
    assert metrics["buffer/online_size"] == 40


def test_a_fast_environment_does_not_prevent_the_updates(tmp_path, monkeypatch):
    """Here another record always waits. The queue of the learner is never seen empty."""
    monkeypatch.setattr(sac_hybrid.queue.Queue, "empty", lambda queue: False)
    updates = []  # at each record that is stored
    store = sac_hybrid.store

    def count(*args):
        updates.append(agents[0].updates)
        store(*args)

    agents = []
    make_agent = Robot.make_agent

    def remember(robot, device):
        agent = make_agent(robot, device)
        if hasattr(robot, "acting_agent"):  # not the copy that acts
            agents.append(agent)
        return agent

    monkeypatch.setattr(Robot, "make_agent", remember)
    monkeypatch.setattr(sac_hybrid, "store", count)
    metrics = main(own(tmp_path, "Polite", max_steps=40, utd=0.0))
    assert len(updates) == 40 and updates[5] == 0
    # An episode has ten steps, and the actor waits at its end: each episode brings an update.
    assert all(later > earlier for earlier, later in itertools.pairwise(updates[9::10]))
    assert 4 <= metrics["charts/updates"] <= 34  # at most one for each record after the fifth


def test_published_weights_are_a_copy():
    agent = sac_hybrid.SACHybridAgent(["image"], 6, 3)
    published = agent.acting_weights()
    kept = published.clone()
    for parameter in agent.acting_parameters():
        parameter.data.add_(1)
    assert torch.equal(published, kept)
    assert torch.allclose(agent.acting_weights(), kept + 1)


# --- resume ---
@pytest.mark.parametrize("name", ["checkpoint_", "latest"])
def test_killed_inside_a_save_and_resumed_is_the_uninterrupted_run(name, tmp_path):
    """SIGKILL before the file gets its name; with random actions and shifted images."""
    options = TINY | dict(save_every=20, random_steps=45, augment_pad=2, max_steps=80)
    killed = tmp_path / "killed"

    def die():
        die_while_saving(name, 2, "before")
        main(Args(**options, run_dir=str(killed)))

    (process,) = forked(die)
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    main(Args(**options, run_dir=str(killed), resume=True))
    main(Args(**options, run_dir=str(tmp_path / "whole")))
    assert rows(killed) == rows(tmp_path / "whole")
    one = torch.load(killed / "latest.pth")
    two = torch.load(tmp_path / "whole" / "latest.pth")
    assert same(one["agent"]["model"], two["agent"]["model"])
    for name in ("critic_optimizer", "actor_optimizer"):
        states = [saved["agent"][name]["state"] for saved in (one, two)]
        for number, state in states[0].items():
            assert same(state, states[1][number])
    records = [(run / "records.bin").read_bytes() for run in (killed, tmp_path / "whole")]
    assert records[0] == records[1]


def test_saving_again_writes_only_what_changed(tmp_path):
    """latest.pth does not grow with the buffers."""
    sizes = []
    for steps in (40, 160):
        run = tmp_path / str(steps)
        options = TINY | dict(max_steps=steps, training_starts=30, log_interval=1_000)
        main(Args(**options, run_dir=str(run)))
        sizes.append((run / "latest.pth").stat().st_size)
    itemsize = Robot(Args()).record_dtype.itemsize
    num_demos = len(sac_hybrid.make_demos(Args(**TINY), 3))
    assert (run / "records.bin").stat().st_size == (160 + num_demos) * itemsize
    assert sizes[1] - sizes[0] < 20 * itemsize


def test_resume_takes_the_saved_options(tmp_path, monkeypatch, capsys):
    run = str(tmp_path / "run")
    first = ["--algorithm", "bc", "--batch-size", "12", "--max-steps", "45", "--lr", "0.002"]
    arguments = ["x", "--run-dir", run, "--no-capture-video", *FLAGS, *first]
    monkeypatch.setattr(sys, "argv", arguments)
    main(parse_args())
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["x", "--run-dir", run, "--resume", "--max-steps", "75"])
    args = parse_args()
    assert (args.algorithm, args.batch_size, args.lr, args.max_steps) == ("bc", 12, 0.002, 75)
    assert "changed: --max-steps 45 -> 75" in capsys.readouterr().out
    metrics = main(args)
    assert metrics["buffer/demo_rows"] == 12
    saved = json.loads((tmp_path / "run" / "args.json").read_text(encoding="utf-8"))
    assert (saved["algorithm"], saved["max_steps"]) == ("bc", 75)
    monkeypatch.setattr(sys, "argv", ["x", "--run-dir", run, "--resume", "--seed", "7"])
    with pytest.raises(SystemExit, match="cannot change --seed from 1"):
        parse_args()
    # they would do nothing, or not fit the networks
    for option in ("--demo-paths x.pkl", "--init-alpha 1", "--hidden-size 9", "--num-critics 3"):
        monkeypatch.setattr(sys, "argv", ["x", "--run-dir", run, "--resume", *option.split()])
        with pytest.raises(SystemExit, match=f"cannot change {option.split()[0]}"):
            parse_args()


@pytest.mark.parametrize(
    "option", ["--env-id Foo-v0", "--setup-mode dual-arm-fixed-gripper", "--image-keys state"]
)
def test_resume_keeps_what_the_records_mean(option, tmp_path, monkeypatch):
    (tmp_path / "args.json").write_text(json.dumps(vars(Args(env_id="Pendulum-v1"))))
    words = ["x", "--run-dir", str(tmp_path), "--resume", *option.split()]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match=f"cannot change {option.split()[0]}"):
        parse_args()


def test_a_resume_that_fails_leaves_the_options_of_the_run(tmp_path):
    run = tmp_path / "run"
    main(Args(**TINY | dict(max_steps=30), run_dir=str(run)))
    kept = (run / "args.json").read_bytes()
    with pytest.raises(RuntimeError, match="size mismatch"):
        main(Args(**TINY | dict(hidden_size=32), run_dir=str(run), resume=True))
    assert (run / "args.json").read_bytes() == kept
    main(Args(**TINY | dict(max_steps=40), run_dir=str(run), resume=True))


def test_resume_of_a_file_without_some_options(tmp_path, monkeypatch):
    """A file of another version may lack an option, a list, too: it has its default."""
    (tmp_path / "args.json").write_text(json.dumps({"seed": 3}))
    monkeypatch.setattr(sys, "argv", ["x", "--run-dir", str(tmp_path), "--resume"])
    args = parse_args()
    assert (args.seed, args.demo_paths, args.image_keys, args.lr) == (3, [], [], 3e-4)


def test_resumed_losses_are_on_the_device_of_the_agent(tmp_path):
    """The loss of the next update is there, and is added."""
    sums = {"losses/critic_loss": torch.tensor(1.0)}
    state = dict(agent={}, rows=[], progress=dict(sums=sums, num_bytes=3))
    (tmp_path / "records.bin").write_bytes(b"saved, and more that is not")
    sac_hybrid.write_checkpoint(tmp_path / "latest.pth", state)
    agent = mock.Mock(raw_alpha=torch.empty((), device="meta"))  # stands for a GPU
    args = Args(run_dir=str(tmp_path), resume=True)
    _, progress = sac_hybrid.load_run(args, agent, SimpleNamespace(spaces={}))
    assert progress.sums["losses/critic_loss"].device.type == "meta"
    assert (tmp_path / "records.bin").read_bytes() == b"sav"


def test_another_utd_on_resume_neither_bursts_nor_stalls(tmp_path):
    run = str(tmp_path / "run")
    main(Args(**TINY, run_dir=run))  # 80 updates
    metrics = main(Args(**TINY | dict(max_steps=70, utd=0.5), run_dir=run, resume=True))
    assert metrics["charts/updates"] == 85
    metrics = main(Args(**TINY | dict(max_steps=80, utd=4.0), run_dir=run, resume=True))
    assert metrics["charts/updates"] == 125


def test_resume_without_a_checkpoint_starts_again(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("half a line")
    (run / "records.bin").write_bytes(b"half a record")
    main(Args(**TINY, run_dir=str(run), resume=True))
    main(Args(**TINY, run_dir=str(tmp_path / "whole")))
    assert rows(run) == rows(tmp_path / "whole")
    records = [(folder / "records.bin").read_bytes() for folder in (run, tmp_path / "whole")]
    assert records[0] == records[1]


class Wide:
    """Another camera, other bounds: the images and actions of records.bin would mean something else."""

    camera = "self.camera = np.zeros((8, 8, 3), np.uint8)"
    space = "import gymnasium as gym; self.action_space = gym.spaces.Box(-2, 2, (action_dim,))"


@pytest.mark.parametrize(
    "change, words",
    [
        (Wide.camera.replace("8, 8", "6, 8"), r"'image': \[8, 8, 3\].*'image': \[6, 8, 3\]"),
        (f"{Wide.camera}; {Wide.space}", r"'high': \[1.*'high': \[2"),
    ],
)
def test_resume_with_another_camera_or_other_bounds(change, words, tmp_path):
    main(own(tmp_path, "Polite"))
    kept = (tmp_path / "run" / "records.bin").read_bytes()
    with pytest.raises(SystemExit, match=f"--resume: .*{words}"):
        main(own(tmp_path, "Polite", OWN.replace(Wide.camera, change), max_steps=20, resume=True))
    assert (tmp_path / "run" / "records.bin").read_bytes() == kept


def test_models_of_another_run_are_never_overwritten(tmp_path):
    options = dict(save_dir=str(tmp_path / "models"))
    main(own(tmp_path, "Polite", **options))
    kept = (tmp_path / "models" / "final_model.pth").read_bytes()
    for resume in (False, True):  # --resume may start a new run
        with pytest.raises(SystemExit, match="--save-dir .*another run"):
            main(own(tmp_path, "Polite", **options, resume=resume, run_dir=str(tmp_path / "new")))
    assert (tmp_path / "models" / "final_model.pth").read_bytes() == kept
    main(own(tmp_path, "Polite", **options, max_steps=20, resume=True))
    assert (tmp_path / "models" / "final_model.pth").read_bytes() != kept


def test_ctrl_c_saves_and_resumes(tmp_path):
    run = tmp_path / "run"
    # So many steps that the signal comes in time, however busy the machine is
    process = subprocess.Popen(
        [*COMMAND, "--max-steps", "100000", "--run-dir", run], stdout=subprocess.PIPE, text=True
    )
    while not (run / "metrics.jsonl").exists() or not rows(run):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert "stopped and saved" in process.communicate(timeout=120)[0] and process.returncode == 0
    steps = torch.load(run / "latest.pth")["progress"]["global_step"] + 40
    main(Args(**TINY | dict(max_steps=steps), run_dir=str(run), resume=True))
    main(Args(**TINY | dict(max_steps=steps), run_dir=str(tmp_path / "whole")))
    assert rows(run) == rows(tmp_path / "whole")
    with pytest.raises(SystemExit, match="never overwritten"):
        main(Args(**TINY, run_dir=str(run)))


def signal_at(monkeypatch, owner, name, nth):
    """Press Ctrl-C in the nth call of a function."""
    real = getattr(owner, name)
    calls = []

    def press(*args):
        calls.append(name)
        if len(calls) == nth:
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(owner, name, press)


def test_ctrl_c_ends_a_free_running_learner(tmp_path, monkeypatch):
    """An actor that does not wait for the learner starts no other episode after a signal."""
    signal_at(monkeypatch, sac_hybrid, "store", 3)
    main(own(tmp_path, "Polite", max_steps=400, utd=0.0))
    saved = torch.load(tmp_path / "run" / "latest.pth")
    assert saved["progress"]["global_step"] == 10 and not acting()


@pytest.mark.parametrize("nth", [2, 4])  # of 2 episodes each: the first, the last evaluation
def test_a_signal_in_an_evaluation_ends_the_run_after_it(nth, tmp_path, monkeypatch, capsys):
    options = TINY | dict(eval_episodes=2, eval_every=60, report_episodes=2)
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at(patch, Robot, "play_policy", nth)
        main(Args(**options, run_dir=str(run)))
    assert ("stopped and saved" in capsys.readouterr().out) == (nth == 2)
    main(Args(**options, run_dir=str(run), resume=True))
    main(Args(**options, run_dir=str(tmp_path / "whole")))
    evaluated = [
        [row for row in rows(folder) if "eval/success_rate" in row]
        for folder in (run, tmp_path / "whole")
    ]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 2
    assert rows(run)[-1] == rows(tmp_path / "whole")[-1]


def test_ctrl_c_before_the_first_step_moves_no_robot(tmp_path, monkeypatch):
    signal_at(monkeypatch, sac_hybrid, "read_demos", 1)
    with pytest.raises(KeyboardInterrupt):
        main(own(tmp_path, "Once", max_steps=40))
    assert (tmp_path / "closed").exists() and not acting()
    assert main(own(tmp_path, "Polite", max_steps=10))["buffer/online_size"] == 10


def test_a_second_ctrl_c_saves_and_closes_the_arm(tmp_path):
    """The episode has no end, and a step takes a second."""
    source = (
        OWN.replace("assert not self.closed", "time.sleep(1)")
        .replace("import torch", "import time\nimport torch")
        .replace("self.t == 10", "False")
    )
    args = own(tmp_path, "Polite", source)
    flags = f"--env-id {args.env_id} --max-steps 99 --hidden-size 16 --run-dir run --device cpu"
    command = [sys.executable, str(ROOT / "sac_hybrid.py"), *flags.split()]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    while not (tmp_path / "run" / "records.bin").exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(3.5)
    process.send_signal(signal.SIGINT)
    message = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert "finishes its episode" in message
    saved = torch.load(tmp_path / "run" / "latest.pth")
    assert saved["progress"]["global_step"] >= 1 and (tmp_path / "closed").exists()


def test_close_waits_until_the_thread_has_left_the_environment(tmp_path, monkeypatch):
    """A human resets the arm when the learner fails."""
    source = OWN.replace("assert not self.closed", "self.go()").replace(
        "import torch", "import time\nimport torch"
    )
    source = source.replace(
        "    def close(self):",
        """    def go(self):
        time.sleep(2)
        Path(__file__).with_name("closed_inside" if self.closed else "moved").touch()

    def close(self):""",
    )
    monkeypatch.setattr(sac_hybrid, "store", mock.Mock(side_effect=OSError))
    with pytest.raises(OSError):
        main(own(tmp_path, "Polite", source, max_steps=40, utd=0.0))
    assert not acting() and (tmp_path / "moved").exists()
    assert not (tmp_path / "closed_inside").exists()


# --- ranks ---
def test_torchrun_with_one_learner_and_two_actors(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "3", *COMMAND[1:], "--run-dir", "run"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert run.returncode == 0, run.stderr
    *_, last, report = rows(tmp_path / "run")
    assert last["global_step"] == 60 and "report/success_rate" in report
    assert last["charts/updates"] == 80 and last["buffer/online_size"] == 60
    assert last["charts/intervention_steps"] > 0  # the flag of the human arrived
    records = np.fromfile(tmp_path / "run" / "records.bin", Robot(Args()).record_dtype)
    records = records[records["demos"] == 0]
    assert records["dones"].sum() >= 2
    first_frames = [record.tobytes() for record in records["obs"]]
    last_frames = [record.tobytes() for record in records["next_obs"]]
    pairs = zip(last_frames, records["dones"], strict=True)
    lost = [frame for frame, done in pairs if not done and frame not in first_frames]
    assert len(lost) <= 2  # the episodes of each actor are unbroken, but for its last step
    assert any(one != two for one, two in zip(last_frames, first_frames[1:], strict=False))


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SMALL = "--hidden-size 16 --batch-size 8 --training-starts 5 --log-interval 10 --device cpu"
SMALL += " --no-capture-video --run-dir run"


def test_the_learner_of_a_torchrun_has_no_environment(tmp_path):
    """The actor makes the only one, and evaluates in it between two episodes (class Once)."""
    announce = """        import os
        Path(__file__).with_name("made_by_" + os.environ["RANK"]).touch()
        Once.made += 1
"""
    (tmp_path / "own.py").write_text(OWN.replace("        Once.made += 1\n", announce))
    flags = f"{SMALL} --env-id own.py:Once --max-steps 40 --eval-every 15 --eval-episodes 2"
    command = [*TORCHRUN, str(ROOT / "sac_hybrid.py"), *flags.split(), "--report-episodes", "2"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert run.returncode == 0, run.stderr
    assert [path.name for path in tmp_path.glob("made_by_*")] == ["made_by_1"]
    evaluated = [row["global_step"] for row in rows(tmp_path / "run") if "eval/success_rate" in row]
    assert evaluated == [10, 20, 30, 40]
    assert rows(tmp_path / "run")[-1]["report/episodic_length"] == 10
    assert (tmp_path / "closed").exists()


def test_a_cable_that_is_pulled_costs_nothing_that_was_learned(tmp_path):
    """The actor of a torchrun fails in its 26th step; the learner saves, and a new run continues."""
    (tmp_path / "own.py").write_text(OWN)
    flags = f"{SMALL} --env-id own.py:Faulty --max-steps 40"
    command = [*TORCHRUN, str(ROOT / "sac_hybrid.py"), *flags.split()]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert run.returncode != 0 and "motor 3 is hot" in run.stderr
    saved = torch.load(tmp_path / "run" / "latest.pth")
    assert saved["progress"]["global_step"] == 25
    run = subprocess.run([*command, "--resume"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert rows(tmp_path / "run")[-1]["global_step"] == 40


# --- pictures ---
def frames_of(path):
    image = Image.open(path)
    frames = []
    for number in range(image.n_frames):
        image.seek(number)
        frames.append(np.asarray(image.convert("RGB")))
    return frames


def test_pictures_of_the_built_in_environment(tmp_path, monkeypatch, capsys):
    """A policy that acts like the expert succeeds on the video, side by side with the human."""
    captions = []
    take_picture = sac_hybrid.take_picture

    def remember(robot, caption):
        captions.append(caption)
        return take_picture(robot, caption)

    monkeypatch.setattr(sac_hybrid, "take_picture", remember)
    env = BarWorld(human="expert")

    def expert(agent, obs, noise=0.0):
        env.__dict__ |= playing.env.__dict__ | {"is_clumsy": False}
        return env.human()

    make_env = sac_hybrid.make_env
    playing = mock.Mock()

    def make(args):
        playing.env = make_env(args)
        return playing.env

    monkeypatch.setattr(sac_hybrid, "make_env", make)
    monkeypatch.setattr(sac_hybrid.SACHybridAgent, "act", expert)
    options = TINY | dict(capture_video=True, report_episodes=2, max_steps=30, num_demos=0)
    metrics = main(Args(**options, run_dir=str(tmp_path / "run")))
    assert metrics["report/success_rate"] == 1
    frames = frames_of(tmp_path / "run" / "policy.gif")
    assert len(frames) > 10 and frames[0].shape == (670, 640, 3)
    assert all((one != two).any() for one, two in zip(frames, frames[1:], strict=False))
    human, policy = [[c for c in captions if c.startswith(name)] for name in ("human", "policy")]
    assert human and policy
    assert Image.open(tmp_path / "run" / "curves.png").size[0] > 1000
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert re.fullmatch(r"success rate 1\.00, 30 environment steps, \d+ s", lines[0])
    assert "pictures" in lines[1] and "final_model.pth" in lines[2]


def test_pictures_of_a_gymnasium_id(tmp_path):
    pytest.importorskip("pygame")
    options = dict(setup_mode="single-arm-fixed-gripper", max_steps=20, report_episodes=1)
    options |= dict(training_starts=5, batch_size=8, hidden_size=16, eval_episodes=0, device="cpu")
    main(Args(env_id="Pendulum-v1", run_dir=str(tmp_path / "run"), **options))
    frames = frames_of(tmp_path / "run" / "policy.gif")
    assert len(frames) > 50 and frames[0].shape == (530, 500, 3)


@pytest.mark.parametrize("name, size", [("Renders", (380, 420)), ("Polite", (350, 320))])
def test_pictures_of_an_environment_of_ones_own(name, size, tmp_path):
    """render() where there is one, else the images, enlarged"""
    main(own(tmp_path, name, report_episodes=1))
    height, width = size
    frames = frames_of(tmp_path / "run" / "policy.gif")
    assert len(frames) == 11
    assert {frame.shape for frame in frames} == {(height, width, 3)}


@pytest.mark.parametrize("name", ["Blind", "NoDisplay"])
def test_no_pictures_where_there_is_nothing_to_see(name, tmp_path, capsys):
    reason = {"Blind": "need at least one array", "NoDisplay": "no display"}
    step = Robot.step
    with mock.patch.object(Robot, "step", autospec=True, side_effect=step) as steps:
        main(own(tmp_path, name, report_episodes=1))
    assert f"there is no policy.gif: {reason[name]}" in capsys.readouterr().out
    assert steps.call_count == 20  # ten of training, ten of the report: none for the video
    assert not (tmp_path / "run" / "policy.gif").exists()


def test_the_page_plays_a_model_as_the_script_does(tmp_path, monkeypatch):
    """Units of the environment, and "stay" repeats the last command."""
    space = "gym.spaces.Box(np.float32([-2] * 7), np.float32([4] * 7))"
    source = OWN.replace("self.dim =", f"self.action_space = {space}\n        self.dim =")
    args = own(tmp_path, "Polite", f"import gymnasium as gym\n{source}\n\nMyEnv = Polite\n")
    main(args)
    robot = Robot(args)
    agent = robot.make_agent("cpu")
    agent.load(tmp_path / "run" / "final_model.pth")
    commands = iter([0, 1, 0, 2, 1, 1, 0, 1, 2, 1] * 2)
    choose = {}  # of the gripper: close, stay, ...

    def act(agent, obs, noise=0.0):
        step = int(obs["proprio"][0])
        action = real_act(agent, obs, noise)
        action[6] = choose.setdefault(step, next(commands) - 1)
        return action

    real_act = sac_hybrid.SACHybridAgent.act
    monkeypatch.setattr(sac_hybrid.SACHybridAgent, "act", act)
    robot.play(agent.act, seed=0)
    page = (ROOT / "docs" / "sac_hybrid.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(import numpy as np\nfrom my_env.*?)```", page, re.S)[1]
    block = block.replace("runs/X", str(tmp_path / "run")).replace("my_env", "own")
    block = block.replace(
        "low, high = -1.0, 1.0", "low, high = env.action_space.low, env.action_space.high"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    names = {}
    exec(block, names)
    assert len(robot.env.seen) == 10
    for one, two in zip(names["env"].seen, robot.env.seen, strict=True):
        assert one == pytest.approx(two, abs=1e-6)
    assert {float(action[6]) for action in robot.env.seen} == {-2, 4}


# --- the command line ---
MANUAL = """
--test quick
--create_data
--test full --max_steps 10000
--demo_paths test_data/success_demo.pkl test_data/failure_demo.pkl --image_keys image --setup_mode
 single-arm-fixed-gripper --max_steps 100000 --batch_size 256 --lr 3e-4 --save_dir ./my_training_results
--log_interval 10
""".replace("\n ", " ")


def test_the_commands_of_the_manual(tmp_path, monkeypatch, capsys):
    """As they stand, but for the name of the script; shortened by what comes after them."""
    monkeypatch.chdir(tmp_path)
    short = "--max-steps 40 --batch-size 8 --training-starts 20 --hidden-size 16 --no-capture-video"
    short += " --eval-episodes 1 --report-episodes 1"
    for number, command in enumerate(filter(None, MANUAL.splitlines())):
        words = shlex.split(command)
        if "--demo_paths" in words:  # its mode has six action dims: make data of that mode
            monkeypatch.setattr(sys, "argv", ["x", "--create_data", *words[3:7]])
            assert main(parse_args()) == {}
            success, failure = (
                pickle.loads((tmp_path / words[number]).read_bytes()) for number in (1, 2)
            )
            assert sum(row["rewards"] for row in success) == 10
            assert sum(row["rewards"] for row in failure) == 0
            assert list(success[0]["observations"]) == ["image"]
        monkeypatch.setattr(sys, "argv", ["x", *words])
        args = parse_args()
        if "--max_steps" in words:
            assert args.max_steps == int(words[words.index("--max_steps") + 1])
        monkeypatch.setattr(sys, "argv", ["x", *words, *short.split(), "--run-dir", str(number)])
        capsys.readouterr()
        metrics = main(parse_args())
        shown = capsys.readouterr().out
        if "--create_data" in words:
            assert metrics == {} and (tmp_path / "test_data" / "failure_demo.pkl").exists()
            continue
        for name in ("critic_loss", "actor_loss", "alpha_loss", "alpha"):  # they are shown
            assert re.search(rf"[ \]]{name} ", shown)
        if "full" in words:
            failures = pickle.loads((tmp_path / "test_data" / "failure_demo.pkl").read_bytes())
            assert metrics["buffer/online_size"] == 40 + len(failures)
    assert (tmp_path / "my_training_results" / "final_model.pth").exists()
    agent = sac_hybrid.SACHybridAgent(
        image_keys=["image"], continuous_action_dim=6, grasp_action_dim=0, device="cpu"
    )
    agent.load(torch.load("my_training_results/final_model.pth"))
    assert agent.act({"image": np.zeros((32, 32, 3), np.uint8)}).shape == (6,)


def test_help_shows_the_true_defaults(monkeypatch, capsys):
    for words, steps in ((["x"], "6000"), (["x", "--env-id", "Pendulum-v1"], "100000")):
        monkeypatch.setattr(sys, "argv", [*words, "--help"])
        with pytest.raises(SystemExit):
            parse_args()
        shown = capsys.readouterr().out
        assert re.search(rf"--max-steps INT.*?\(default: {steps}\)", shown, re.DOTALL)
    monkeypatch.setattr(sys, "argv", ["x"])
    assert parse_args().lr == 1e-3 and "'lr': 0.001" in capsys.readouterr().out


def test_an_environment_from_a_file_is_not_moved_without_a_human(monkeypatch, capsys):
    """It may be a real arm: no evaluation, no random steps, and few steps of an untrained policy,
    unless they are typed."""
    for words, expected in (([], (0, 0, 0)), (["--eval-episodes", "3"], (3, 0, 0))):
        monkeypatch.setattr(sys, "argv", ["x", "--env-id", "arm.py:Arm", *words])
        args = parse_args()
        assert (args.eval_episodes, args.report_episodes, args.random_steps) == expected
        assert args.training_starts == 100 and args.save_every == 500
        assert "'eval_episodes': 0" in capsys.readouterr().out


def test_a_buffer_that_memory_cannot_hold(tmp_path):
    with pytest.raises(SystemExit, match="GB of frames do not fit"):
        main(Args(**TINY | dict(buffer_size=10**9), run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_demonstrations_that_the_buffer_cannot_hold(tmp_path):
    with pytest.raises(SystemExit, match=r"--buffer-size 20: the demonstrations have \d\d frames"):
        main(Args(**TINY | dict(buffer_size=20), run_dir=str(tmp_path / "run")))


def test_fewer_steps_than_were_made_end_a_resumed_run(tmp_path):
    run = tmp_path / "run"
    main(Args(**TINY | dict(max_steps=40), run_dir=str(run)))
    (run / "final_model.pth").unlink()
    metrics = main(Args(**TINY | dict(max_steps=30), run_dir=str(run), resume=True))
    assert metrics["global_step"] == 40 and (run / "final_model.pth").exists()


def test_options_that_make_no_sense():
    for name in ("augment-pad", "seed", "num-demos"):
        with pytest.raises(ValueError, match=name):
            Args(**{name.replace("-", "_"): -1})
    for options, message in (
        (dict(max_steps=0), "--max-steps 0: must be positive"),
        (dict(gamma=1.5), "--gamma 1.5: must be in [0, 1]"),
        (dict(lr=float("inf")), "--lr inf: must be finite and not negative"),
        (dict(buffer_size=0), "--buffer-size 0: must be positive"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Args(**options)
