"""sac_hybrid.py as a whole: environments, the human, threads, faults, resume, the command line."""

import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import tyro
from conftest import ROOT, die_while_saving, forked, same
from conftest import metrics_without_times as rows

import sac_hybrid
from sac_hybrid import MODES, Args, BarWorld, Link, Robot, SACHybridAgent, evaluate_robot, main

TINY = dict(
    max_steps=60, training_starts=20, eval_episodes=1, report_episodes=1, batch_size=8, num_demos=3
)
TINY |= dict(hidden_size=16, log_interval=15, intervention_steps=100, device="cpu", eval_every=30)
FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
COMMAND = [sys.executable, str(ROOT / "sac_hybrid.py"), *FLAGS]


def acting():
    return [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def play(env, act, episodes):
    """-> success rate, mean steps of the successes"""
    lengths = []
    for seed in range(episodes):
        env.reset(seed=seed)
        terminated = truncated = False
        while not (terminated or truncated):
            *_, terminated, truncated, _ = env.step(act())
        lengths += [env.steps] if terminated else []
    return len(lengths) / episodes, float(np.mean(lengths or [0]))


# --- the built-in environment and its human ---
@pytest.mark.parametrize("mode", MODES)
def test_expert_human_and_chance(mode):
    """Who teaches always gets there, the human in twice the time of the expert; chance never does."""
    env, rng = BarWorld(mode, "expert"), np.random.default_rng(0)
    success, expert_steps = play(env, env.human, 50)
    assert (
        success == 1 and play(env, lambda: rng.uniform(-1, 1, env.action_space.shape), 50)[0] == 0
    )
    env = BarWorld(mode)
    success, steps = play(env, env.human, 50)
    assert success >= 0.9 and steps > 1.8 * expert_steps


def test_the_bar_is_in_the_picture_only():
    env = BarWorld(human="expert")
    one, _ = env.reset(seed=1)
    env.object[0, :2] *= -1
    two = env.observe()
    assert (one["state"] == two["state"]).all() and (one["image"] != two["image"]).any()
    env.object[0, 5] += 0.02  # anti-aliased: a turn of two degrees shows
    assert (env.observe()["image"] != two["image"]).any()


# --- an environment of one's own ---
OWN = '''
import numpy as np
import torch


class ScriptedHuman:
    """Ten steps; on 3, 4 and 7 the human acts, and closes the gripper. Heeds allow_intervention only as `polite`."""

    polite = False

    def __init__(self, image_keys, action_dim):
        self.dim = action_dim

    def observe(self):
        return {"image": np.full((8, 8, 3), 100 + self.t, np.uint8), "proprio": np.full(2, self.t, np.float32)}

    def reset(self):
        self.t, self.seen = 0, []
        return self.observe(), {}

    def step(self, action):
        info = {}
        if self.t in (3, 4, 7) and (self.allow_intervention or not self.polite):
            info["intervene_action"] = np.full(self.dim, -0.75)
            if self.t == 4:  # straight from a network
                info["intervene_action"] = torch.full((self.dim,), -2.0, requires_grad=True)
        self.t += 1
        self.seen.append(action)
        return self.observe(), 0.0, False, self.t == 10, info


class Polite(ScriptedHuman):
    polite = True


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
        encoder="softmax",
        hidden_size=16,
        batch_size=8,
        training_starts=5,
        random_steps=0,
        log_interval=10,
    )
    small |= dict(
        device="cpu",
        max_steps=10,
        eval_episodes=0,
        report_episodes=0,
        run_dir=str(tmp_path / "run"),
    )
    return Args(env_id=f"{tmp_path}/own.py:{name}", **small | options)


def test_interventions_go_into_both_buffers(tmp_path, monkeypatch):
    buffers, init = [], sac_hybrid.FrameBuffer.__init__
    monkeypatch.setattr(
        sac_hybrid.FrameBuffer, "__init__", lambda s, *a: (init(s, *a), buffers.append(s))[0]
    )
    metrics = main(own(tmp_path, "ScriptedHuman"))
    assert (metrics["buffer/online_size"], metrics["buffer/demo_size"]) == (10, 3)
    assert (metrics["charts/intervention_steps"], metrics["charts/intervention_count"]) == (3, 2)
    assert metrics["charts/intervention_rate"] == pytest.approx(0.3)
    for rb, expected in zip(buffers, (list(range(10)), [3, 4, 7]), strict=True):
        rows = rb.slots[np.flatnonzero(rb.starts)]
        steps = rows["obs"]["proprio"][:, 0].astype(int).tolist()
        assert steps == expected and (rows["masks"] == 1).all(), "a time limit bootstraps"
        human = [set(rows["actions"][steps.index(step)].tolist()) for step in (3, 4, 7)]
        assert human == [{-0.75}, {-1.0}, {-0.75}], (
            "the human's action is what is stored, clipped to the box"
        )
    rows, held = buffers[0].slots[np.flatnonzero(buffers[0].starts)], 0.0
    for row in rows:  # on the executed toggle, whoever made it
        now = row["actions"][6] if round(float(row["actions"][6])) else held
        assert row["grasp_penalty"] == pytest.approx(-0.02 * ((now < 0) != (held < 0)))
        held = now
    assert rows["grasp_penalty"].min() < 0
    main(own(tmp_path, "ScriptedHuman", timeout_terminal=True, run_dir=str(tmp_path / "other")))
    assert buffers[2].slots["masks"][:10].tolist() == [1.0] * 9 + [0.0]


def test_stay_holds_the_last_command(tmp_path):
    robot = Robot(own(tmp_path, "Polite"), human=False)
    robot.begin(0)
    for command in (0, -1, 0, 0, 1, 0):
        robot.step(np.float32([0] * 6 + [command]))
    assert [action[6] for action in robot.env.seen] == [0, -1, -1, -1, 1, 1]


def test_evaluation_is_without_human(tmp_path, capsys):
    for name, counted in (("ScriptedHuman", False), ("Polite", True)):
        robot = Robot(own(tmp_path, name), human=False)
        agent = SACHybridAgent(*robot.dims, "cpu", robot.args, *robot.sizes)
        assert (
            bool(evaluate_robot(agent, robot, 0, 3)) == counted
        )  # nothing left: the policy is not judged
        assert ("in 3 of 3 episodes" in capsys.readouterr().out) != counted
    metrics = main(own(tmp_path, "ScriptedHuman", eval_episodes=2, report_episodes=2))
    assert "eval/success_rate" not in metrics and (tmp_path / "run" / "final_model.pth").exists()


@pytest.mark.parametrize(
    "fault, error", [("raise", ZeroDivisionError), ("nan", ValueError), ("reward", ValueError)]
)
def test_an_arm_that_fails_costs_nothing_that_was_learned(fault, error, tmp_path):
    source = OWN.replace('"raise", 0', f'"{fault}", 0')
    with pytest.raises(error):
        main(own(tmp_path, "Faulty", source, max_steps=90))
    saved = torch.load(tmp_path / "run" / "latest.pth")
    assert saved["progress"][4] == 25 and not acting()
    metrics = main(own(tmp_path, "Polite", max_steps=40, resume=True))
    assert metrics["charts/updates"] == 35 and rows(tmp_path / "run")[-1]["global_step"] == 40


def test_image_only_demos_of_the_manual_train(tmp_path, capsys):
    image, action = np.zeros((8, 8, 3), np.uint8), np.zeros(7, np.float32)
    row = dict(
        observations={"image": image},
        actions=action,
        next_observations={"image": image},
        rewards=0.0,
    )
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps([row | dict(masks=1.0, dones=False)] * 5))
    main(own(tmp_path, "Polite", demo_paths=(str(tmp_path / "demo.pkl"),)))
    assert "the demos do not have ['proprio']" in capsys.readouterr().out
    assert torch.load(tmp_path / "run" / "final_model.pth")["sizes"] == ((8, 8, 3), 0)


def test_a_gymnasium_environment_with_box_observations(tmp_path):
    sizes = dict(
        hidden_size=16,
        batch_size=8,
        max_steps=30,
        training_starts=10,
        random_steps=5,
        num_critics=10,
    )
    options = dict(
        setup_mode="single-arm-fixed-gripper", eval_episodes=0, report_episodes=1, device="cpu"
    )
    metrics = main(Args(env_id="Pendulum-v1", run_dir=str(tmp_path / "run"), **sizes, **options))
    assert metrics["eval/episodic_length"] == 200 and metrics["charts/updates"] == 20
    with pytest.raises(SystemExit, match="Discrete"):
        Robot(Args(env_id="CartPole-v1"), human=False)


# --- the loop ---
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains(mode, tmp_path):
    metrics = main(Args(**TINY, setup_mode=mode, run_dir=str(tmp_path / "run")))
    losses = [v for k, v in metrics.items() if k.startswith("losses/")]
    assert np.isfinite(losses).all() and ("losses/grasp_critic_loss" in metrics) == mode.endswith(
        "learned-gripper"
    )
    names = {path.name for path in (tmp_path / "run").iterdir()}
    written = {"args.json", "metrics.jsonl", "summary.json", "curves.png"}
    assert names == written | {"latest.pth", "checkpoint_60.pth", "final_model.pth"}


def test_hg_dagger_clones_the_human_it_meets(tmp_path):
    metrics = main(Args(**TINY, algorithm="bc", run_dir=str(tmp_path / "run")))
    assert (
        metrics["buffer/demo_rows"] == 8 and "losses/critic_loss" not in metrics
    )  # all rows, no reinforcement
    demos = len(sac_hybrid.make_demos(Args(**TINY), 3))
    assert metrics["buffer/demo_size"] - demos == metrics["charts/intervention_steps"] > 0


def test_the_human_withdraws():
    env = Robot(Args(intervention_steps=100), human=True)
    chances = []
    for step in (0, 25, 100, 500):
        env.begin(step)
        chances.append(env.env.intervention_probability)
    assert chances == [1.0, 0.75, 0.0, 0.0]


def test_the_best_policy_is_kept_and_judged_on_other_episodes(tmp_path, monkeypatch):
    """Success first, then speed."""
    scores, asked = iter([(0.5, 9), (0.8, 8), (0.8, 6), (0.8, 7), (0.1, 9)]), []

    def judge(agent, robot, first_seed, episodes):
        asked.append((agent.updates, first_seed))
        success, length = next(scores)
        return {
            "eval/success_rate": success,
            "eval/episodic_return": success,
            "eval/episodic_length": length,
        }

    monkeypatch.setattr(sac_hybrid, "evaluate_robot", judge)
    metrics = main(Args(**TINY | dict(eval_every=15), run_dir=str(tmp_path / "run")))
    assert asked == [(0, 10_000), (20, 10_000), (50, 10_000), (80, 10_000), (50, 20_000)]
    assert metrics["eval/success_rate"] == 0.1


@pytest.mark.parametrize("utd", [0.5, 3.0])
def test_taking_turns(utd, tmp_path, monkeypatch):
    """With no lead the actor's n-th step is taken by the policy of exactly utd * n updates."""
    seen, take_turn, publish = [], Robot.take_turn, Link.publish

    def remember(self, agent):
        publish(self, agent)
        self.weights.updates = agent.updates

    def look(self, agent, step, weights):
        seen.append((step, weights.updates))
        return take_turn(self, agent, step, weights)

    monkeypatch.setattr(Link, "publish", remember)
    monkeypatch.setattr(Robot, "take_turn", look)
    main(Args(**TINY | dict(max_steps=40, utd=utd), run_dir=str(tmp_path / "run")))
    assert seen == [(step, int(utd * max(0, step - 20))) for step in range(40)]


def test_snapshots_are_never_half_updated():
    agent = SACHybridAgent(["image"], 6, 3, "cpu", state_dim=7)
    link = Link([], [])
    link.publish(agent)
    before, held = link.weights, link.weights.clone()
    for param in agent.acting():  # one after the other, as an optimizer would
        param.data.add_(1)
        assert torch.equal(link.weights, held)
    link.publish(agent)
    assert torch.equal(before, held) and torch.allclose(link.weights, held + 1), (
        "replaced, never changed"
    )


# --- resume ---
@pytest.mark.parametrize("name", ["checkpoint_", "latest"])
def test_killed_inside_a_save_and_resumed_is_the_uninterrupted_run(name, tmp_path):
    """SIGKILL before the file gets its name; at random actions, inside an episode, images shifted."""
    options, killed = (
        TINY | dict(save_every=20, random_steps=45, augment_pad=2),
        tmp_path / "killed",
    )

    def die():
        die_while_saving(name, 2, "before")
        main(Args(**options, run_dir=str(killed)))

    (process,) = forked(die)
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    main(Args(**options, run_dir=str(killed), resume=True))
    main(Args(**options, run_dir=str(tmp_path / "whole")))
    assert rows(killed) == rows(tmp_path / "whole")
    one, two = (
        torch.load(folder / "latest.pth")["agent"] for folder in (killed, tmp_path / "whole")
    )
    moments = [
        [o["state"][0]["exp_avg_sq"] for o in agent["_extra_state"]["optimizers"]]
        for agent in (one, two)
    ]
    assert same(one, two) and all(map(torch.equal, *moments))


def test_ctrl_c_saves_and_resumes(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*COMMAND, "--max-steps", "120", "--run-dir", run], stdout=subprocess.PIPE, text=True
    )
    while not (run / "metrics.jsonl").exists() or not rows(run):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert "stopped and saved" in process.communicate(timeout=120)[0] and process.returncode == 0
    assert torch.load(run / "latest.pth")["progress"][4] < 120
    main(Args(**TINY | dict(max_steps=120), run_dir=str(run), resume=True))
    steps = [row["global_step"] for row in rows(run)]
    assert steps == sorted(steps) and steps.count(120) == 2  # none twice, but for the report
    with pytest.raises(FileExistsError):  # no run overwrites another
        main(Args(**TINY, run_dir=str(run)))


# --- ranks ---
def test_torchrun(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        *COMMAND[1:],
    ]
    run = subprocess.run(
        [*command, "--run-dir", "run"], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert run.returncode == 0, run.stderr
    last = rows(tmp_path / "run")[-2]
    assert (
        last["global_step"] == 60
        and last["charts/updates"] == 80
        and last["buffer/online_size"] == 60
    )
    assert last["charts/intervention_steps"] > 0  # the human's flag crossed the wire


# --- the command line ---
def test_create_data_and_full_test_use_both_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(Args(create_data=True)) == {}
    success, failure = (
        sac_hybrid.load_columns(f"test_data/{name}_demo.pkl") for name in ("success", "failure")
    )
    assert sum(success["rewards"]) == sum(success["dones"]) == 10 and sum(failure["rewards"]) == 0
    metrics = main(Args(**TINY | dict(num_demos=3), test="full", run_dir="run"))
    assert metrics["buffer/online_size"] == 60 + len(
        sac_hybrid.load_columns("test_data/failure_demo.pkl")["rewards"]
    )


def test_the_command_line(capsys):
    main(Args(test="quick", device="cpu"))
    shown = capsys.readouterr().out
    for name in (
        "critic_loss",
        "grasp_critic_loss",
        "actor_loss",
        "alpha_loss",
        "alpha",
    ):  # the manual: they are shown
        assert f" {name} " in shown or f"] {name} " in shown
    assert "without human: success_rate" in shown
    manual = "--demo_paths /path/to/demo1.pkl /path/to/demo2.pkl --image_keys image"
    manual += " --setup_mode single-arm-fixed-gripper --max_steps 100000 --batch_size 256 --lr 3e-4"
    manual += " --save_dir ./my_training_results"
    with pytest.raises(SystemExit, match="/path/to/demo1.pkl"):
        main(tyro.cli(Args, args=manual.split()))


def test_a_buffer_that_memory_cannot_hold(tmp_path):
    with pytest.raises(SystemExit, match="GB of frames do not fit"):
        main(Args(**TINY, buffer_size=10**9, run_dir=str(tmp_path / "run")))
