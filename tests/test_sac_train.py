"""sac_hybrid.py as a whole: environments, the human, threads, faults, resume, the command line."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from conftest import ROOT

import sac_hybrid
from sac_hybrid import MODES, Args, BarWorld, Link, Robot, SACHybridAgent, evaluate_robot, main

TINY = dict(max_steps=60, training_starts=20, eval_episodes=1, report_episodes=1, batch_size=8, num_demos=3)
TINY |= dict(hidden_size=16, log_interval=15, intervention_steps=100, device="cpu", eval_every=30)
FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
COMMAND = [sys.executable, str(ROOT / "sac_hybrid.py"), *FLAGS]


def rows(run_dir):
    """metrics.jsonl without what a clock says"""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "time" not in k and "SPS" not in k} for line in lines]


def acting():
    return [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def play(env, act, episodes, first_seed=0):
    """-> success rate, mean steps of the successes"""
    lengths = []
    for seed in range(first_seed, first_seed + episodes):
        env.reset(seed=seed)
        terminated = truncated = False
        while not (terminated or truncated):
            obs, reward, terminated, truncated, info = env.step(act())
            assert reward == info["is_success"] == terminated and not (terminated and truncated)
        lengths += [env.steps] if terminated else []
    return len(lengths) / episodes, float(np.mean(lengths or [0]))


# --- the built-in environment and its human ---
@pytest.mark.parametrize("mode", MODES)
def test_expert_human_and_chance(mode):
    env, rng = BarWorld(mode, "expert"), np.random.default_rng(0)
    success, expert_steps = play(env, env.human, 50)
    assert success == 1.0 and env.action_space.shape == (MODES[mode][0],)
    assert play(env, lambda: rng.uniform(-1, 1, env.action_space.shape), 100)[0] == 0
    env = BarWorld(mode)
    success, steps = play(env, env.human, 100)  # he gets there, in twice the time
    assert success >= 0.9 and steps > 1.9 * expert_steps


@pytest.mark.parametrize("mode", MODES)
def test_every_continuous_dim_matters(mode):
    """The expert with one dim of the action frozen fails."""
    env, layout = BarWorld(mode, "expert"), Robot(Args(setup_mode=mode), human=False).layout
    for dim in layout.continuous:
        frozen = lambda dim=dim: env.human() * (np.arange(layout.action_dim) != dim)  # noqa: E731
        assert play(env, frozen, 20)[0] <= 0.5, dim


def test_gripper_needs_pose_and_lift_and_the_bar_is_in_the_picture_only():
    env = BarWorld(human="expert")
    env.reset(seed=1)
    env.step([0, 0, 0, 0, 0, 0, -1])
    assert env.width == 0 and not env.held  # closed on nothing; the expert opens again, and recovers
    terminated = False
    while not terminated and env.steps < 15:
        *_, terminated, _, _ = env.step(env.human())
    assert terminated and env.held.all() and env.pose[0, 2] > 0.5
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
    small = dict(encoder="softmax", hidden_size=16, batch_size=8, training_starts=5, random_steps=0, log_interval=10)
    small |= dict(device="cpu", max_steps=10, eval_episodes=0, report_episodes=0, run_dir=str(tmp_path / "run"))
    return Args(env_id=f"{tmp_path}/own.py:{name}", **small | options)


def test_interventions_go_into_both_buffers(tmp_path, monkeypatch):
    buffers, init = [], sac_hybrid.FrameBuffer.__init__
    monkeypatch.setattr(sac_hybrid.FrameBuffer, "__init__", lambda s, *a: (init(s, *a), buffers.append(s))[0])
    metrics = main(own(tmp_path, "ScriptedHuman"))
    assert (metrics["buffer/online_size"], metrics["buffer/demo_size"]) == (10, 3)
    assert (metrics["charts/intervention_steps"], metrics["charts/intervention_count"]) == (3, 2)
    assert metrics["charts/intervention_rate"] == pytest.approx(0.3)
    online, demo = buffers
    for rb in buffers:  # the human's action is what is stored, clipped to the box; a time limit bootstraps
        starts = np.flatnonzero(rb.starts)
        steps = rb.slots["obs"]["proprio"][starts, 0].astype(int).tolist()
        assert steps == (list(range(10)) if rb is online else [3, 4, 7]) and (rb.slots["masks"][starts] == 1).all()
        actions = rb.slots["actions"][starts]
        human = [actions[steps.index(step)] for step in (3, 4, 7)]
        assert [set(action.tolist()) for action in human] == [{-0.75}, {-1.0}, {-0.75}]
    closing = [online.slots["grasp_penalty"][i] for i in np.flatnonzero(online.starts)]
    held, expected = 0.0, []
    for action in online.slots["actions"][np.flatnonzero(online.starts)]:  # on the executed toggle, whoever made it
        now = action[6] if round(float(action[6])) else held
        expected.append(-0.02 * ((now < 0) != (held < 0)))
        held = now
    assert closing == pytest.approx(expected) and min(closing) < 0
    assert main(own(tmp_path, "ScriptedHuman", timeout_terminal=True, run_dir=str(tmp_path / "other")))
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
        scores = evaluate_robot(agent, robot, 0, 3)
        assert bool(scores) == counted  # nothing left: the policy is not judged
        assert ("in 3 of 3 episodes" in capsys.readouterr().out) != counted
    metrics = main(own(tmp_path, "ScriptedHuman", eval_episodes=2, report_episodes=2))
    assert "without human: cannot judge" in capsys.readouterr().out
    assert "eval/success_rate" not in metrics and (tmp_path / "run" / "final_model.pth").exists()


@pytest.mark.parametrize("fault, error", [("raise", ZeroDivisionError), ("nan", ValueError), ("reward", ValueError)])
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
    row = dict(observations={"image": image}, actions=action, next_observations={"image": image}, rewards=0.0)
    (tmp_path / "demo.pkl").write_bytes(pickle.dumps([row | dict(masks=1.0, dones=False)] * 5))
    main(own(tmp_path, "Polite", demo_paths=(str(tmp_path / "demo.pkl"),)))
    assert "the demos do not have ['proprio']" in capsys.readouterr().out
    assert torch.load(tmp_path / "run" / "final_model.pth")["sizes"] == ((8, 8, 3), 0)


def test_a_gymnasium_environment_with_box_observations(tmp_path):
    own = dict(setup_mode="single-arm-fixed-gripper", eval_episodes=0, hidden_size=16, batch_size=8, device="cpu")
    own |= dict(max_steps=30, training_starts=10, random_steps=5, report_episodes=1, num_critics=10)
    metrics = main(Args(env_id="Pendulum-v1", run_dir=str(tmp_path / "run"), **own))
    assert metrics["eval/episodic_length"] == 200 and metrics["charts/updates"] == 20
    with pytest.raises(SystemExit, match="Discrete"):
        Robot(Args(env_id="CartPole-v1"), human=False)


# --- the loop ---
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains(mode, tmp_path):
    metrics = main(Args(**TINY, setup_mode=mode, run_dir=str(tmp_path / "run")))
    losses = [v for k, v in metrics.items() if k.startswith("losses/")]
    assert np.isfinite(losses).all() and ("losses/grasp_critic_loss" in metrics) == mode.endswith("learned-gripper")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    written = {"args.json", "metrics.jsonl", "summary.json", "curves.png"}
    assert names == written | {"latest.pth", "checkpoint_60.pth", "final_model.pth"}


def test_hg_dagger_clones_the_human_it_meets(tmp_path):
    metrics = main(Args(**TINY, algorithm="bc", run_dir=str(tmp_path / "run")))
    assert metrics["buffer/demo_rows"] == 8 and "losses/critic_loss" not in metrics  # all rows, no reinforcement
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
        return {"eval/success_rate": success, "eval/episodic_return": success, "eval/episodic_length": length}

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


def test_lead_is_bounded(tmp_path, monkeypatch):
    leads, receive = [], Link.receive

    def look(self):
        time.sleep(0.003)  # the actor is the faster one
        leads.append(sum(turn.done() for turn in self.pending))
        return receive(self)

    monkeypatch.setattr(Link, "receive", look)
    metrics = main(Args(**TINY | dict(max_lead=4), run_dir=str(tmp_path / "run")))
    assert 1 < max(leads) <= 5 and metrics["charts/updates"] == 80


def test_snapshots_are_never_half_updated():
    agent, stop = SACHybridAgent(["image"], 6, 3, "cpu", state_dim=7), threading.Event()
    link = Link([lambda step, weights: weights], range(10**6))
    link.publish(agent)

    def learn():
        value = 0.0
        while not stop.is_set():
            value += 1
            with torch.no_grad():
                for param in agent.acting():  # one after the other, as an optimizer would
                    param.fill_(value)
            link.publish(agent)

    learner, seen = threading.Thread(target=learn), []
    learner.start()
    try:
        while len(seen) < 30:
            link.grant(*link.actors)
            _, snapshot = link.receive()
            if snapshot[0] >= 1 and not (seen and seen[-1] == snapshot[0]):
                assert (snapshot == snapshot[0]).all()
                time.sleep(0.002)
                assert (snapshot == snapshot[0]).all()  # a copy: later updates do not reach it
                seen.append(snapshot[0].item())
    finally:
        stop.set()
        learner.join()
    assert seen == sorted(seen)


def test_an_exception_in_the_learner_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(SACHybridAgent, "update", lambda self, batch, full: 1 / 0)
    start = time.time()
    with pytest.raises(ZeroDivisionError):
        main(Args(**TINY, run_dir=str(tmp_path / "run")))
    assert time.time() - start < 20 and not acting()


# --- resume ---
def same_weights(*run_dirs):
    one, two = (torch.load(path / "latest.pth")["agent"] for path in run_dirs)
    moments = [[o["state"][0]["exp_avg_sq"] for o in agent["_extra_state"]["optimizers"]] for agent in (one, two)]
    names = [name for name, value in one.items() if isinstance(value, torch.Tensor)]
    return all(torch.equal(one[n], two[n]) for n in names) and all(map(torch.equal, *moments))


def test_resume_after_sigkill_is_the_uninterrupted_run(tmp_path):
    options = dict(max_steps=90, save_every=25, augment_pad=2)
    main(Args(**TINY | options, run_dir=str(tmp_path / "whole")))
    killed = tmp_path / "killed"
    flags = ["--max-steps", "90", "--save-every", "25", "--augment-pad", "2", "--run-dir", str(killed)]
    process = subprocess.Popen([*COMMAND, *flags], stdout=subprocess.DEVNULL)
    while not (killed / "checkpoint_50.pth").exists() or not (killed / "latest.pth").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (killed / "latest.pth.tmp").write_bytes(b"half a file")  # as if killed while saving
    main(Args(**TINY | options, run_dir=str(killed), resume=True))
    assert rows(killed) == rows(tmp_path / "whole") and same_weights(killed, tmp_path / "whole")


@pytest.mark.parametrize("name", ["checkpoint_40", "latest"])
def test_a_kill_inside_a_save_and_a_stop_at_random_steps(name, tmp_path, monkeypatch):
    options, replace = TINY | dict(save_every=20, eval_episodes=0, report_episodes=0, random_steps=45), os.replace

    class Killed(BaseException):
        pass

    def dying(source, target):
        if name in str(target) and (tmp_path / "killed" / "checkpoint_20.pth").exists():
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", dying)
        main(Args(**options, run_dir=str(tmp_path / "killed")))
    main(Args(**options, run_dir=str(tmp_path / "killed"), resume=True))
    main(Args(**options, run_dir=str(tmp_path / "whole")))
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert same_weights(tmp_path / "killed", tmp_path / "whole")


def test_ctrl_c_saves_and_resumes(tmp_path):
    flags = ["--max-steps", "120", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or not rows(tmp_path / "run"):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert "stopped and saved" in process.communicate(timeout=120)[0] and process.returncode == 0
    assert torch.load(tmp_path / "run" / "latest.pth")["progress"][4] < 120
    main(Args(**TINY | dict(max_steps=120), run_dir=str(tmp_path / "run"), resume=True))
    steps = [row["global_step"] for row in rows(tmp_path / "run")]
    assert steps == sorted(steps) and steps.count(120) == 2  # none twice, but for the report
    with pytest.raises(FileExistsError):  # no run overwrites another
        main(Args(**TINY, run_dir=str(tmp_path / "run")))


# --- ranks ---
def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", *COMMAND[1:]]
    run = subprocess.run([*command, "--run-dir", "run"], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert run.returncode == 0, run.stderr
    last = rows(tmp_path / "run")[-2]
    assert last["global_step"] == 60 and last["charts/updates"] == 80 and last["buffer/online_size"] == 60
    assert last["charts/intervention_steps"] > 0  # the human's flag crossed the wire


# --- the command line ---
def test_create_data_and_full_test_use_both_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(Args(create_data=True)) == {}
    success, failure = (sac_hybrid.load_columns(f"test_data/{name}_demo.pkl") for name in ("success", "failure"))
    assert sum(success["rewards"]) == sum(success["dones"]) == 10 and sum(failure["rewards"]) == 0
    metrics = main(Args(**TINY | dict(num_demos=3), test="full", run_dir="run"))
    assert metrics["buffer/online_size"] == 60 + len(sac_hybrid.load_columns("test_data/failure_demo.pkl")["rewards"])


def test_the_command_line(capsys, run_script):
    main(Args(test="quick", device="cpu"))
    shown = capsys.readouterr().out
    for name in ("critic_loss", "grasp_critic_loss", "actor_loss", "alpha_loss", "alpha"):  # the manual: they are shown
        assert f" {name} " in shown or f"] {name} " in shown
    assert "without human: success_rate" in shown
    manual = "--demo_paths /path/to/demo1.pkl /path/to/demo2.pkl --image_keys image"
    manual += " --setup_mode single-arm-fixed-gripper --max_steps 100000 --batch_size 256 --lr 3e-4"
    manual += " --save_dir ./my_training_results"
    with pytest.raises(SystemExit, match="/path/to/demo1.pkl"):
        main(tyro.cli(Args, args=manual.split()))
    run = run_script("sac_hybrid.py", "--gamma", "2")
    assert run.returncode == 2 and "at most 1" in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize("options", [
    dict(lr=0.0), dict(max_steps=0), dict(tau=1.5), dict(seed=-1), dict(gamma=float("nan")), dict(num_critics=1),
    dict(resume=True), dict(algorithm="bc", num_demos=0), dict(env_id="Pendulum-v1", num_demos=3),
    dict(env_id="Pendulum-v1", human="expert"),
])  # fmt: skip
def test_values_that_make_no_sense(options):
    with pytest.raises(ValueError):
        Args(**options)


def test_a_buffer_that_memory_cannot_hold_and_one_that_cannot_hold_the_demos(tmp_path):
    for size, words in ((10**9, "GB of frames do not fit"), (20, "less than")):
        with pytest.raises(SystemExit, match=words):
            main(Args(**TINY, buffer_size=size, run_dir=str(tmp_path / "run")))


def test_the_sentence_of_the_page_is_the_raw_data():
    sys.path.insert(0, str(ROOT / "benchmark"))
    import sac_results as study

    page, rows = (ROOT / "docs" / "sac_hybrid.md").read_text(), study.read(study.RESULTS)
    arms = ("demos + interventions", "human")
    robot, human = (np.mean([row["steps_to_success"] for row in rows if row["arm"] == arm]) for arm in arms)
    assert f"{robot:.1f} steps where he takes {human:.1f}" in page
