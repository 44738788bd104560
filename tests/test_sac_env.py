"""sac_hybrid.py: the built-in environment, other environments, interventions, and one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import sac_hybrid
from sac_hybrid import (
    ActionLayout,
    Args,
    BarWorld,
    FrameBuffer,
    Link,
    Policy,
    Robot,
    RobotEnv,
    SACHybridAgent,
    load_checkpoint,
    main,
    parse_args,
)

MODES = list(ActionLayout.SIZES)
TINY = dict(max_steps=40, training_starts=20, eval_episodes=1, report_episodes=1, batch_size=8, num_demos=3)
TINY |= dict(hidden_size=16, log_interval=20, intervention_steps=100, device="cpu")


@pytest.mark.parametrize("mode", MODES)
def test_expert_succeeds_random_does_not(mode):
    env, rng = BarWorld(mode), np.random.default_rng(0)
    assert env.action_space.shape == (ActionLayout.SIZES[mode],)
    policies = (env.expert, 50, 50), (lambda: rng.uniform(-1, 1, env.action_space.shape), 100, 0)
    for policy, episodes, expected in policies:
        wins = 0
        for seed in range(episodes):
            obs, _ = env.reset(seed=seed)
            done = False
            while not done:
                obs, reward, terminated, truncated, info = env.step(policy())
                done = terminated or truncated
                assert reward == info["is_success"] == terminated and not (terminated and truncated)
            wins += terminated
            assert env.observation_space.contains(obs)
        assert wins == expected


@pytest.mark.parametrize("mode", MODES)
def test_every_continuous_dim_matters(mode):
    """The expert with one dim of the action frozen fails."""
    env = BarWorld(mode)
    for dim in ActionLayout.of_mode(mode).continuous:
        wins = 0
        for seed in range(20):
            env.reset(seed=seed)
            done = False
            while not done:
                action = env.expert()
                action[dim] = 0.0
                *_, terminated, truncated, _ = env.step(action)
                done = terminated or truncated
            wins += terminated
        assert wins <= 10, f"dim {dim} hardly matters: {wins} of 20"


def test_gripper_needs_pose_and_lift():
    env = BarWorld()
    env.reset(seed=1)
    env.step([0, 0, 0, 0, 0, 0, -1])
    assert env.width == 0 and not env.held  # closed on nothing
    for _ in range(12):  # the expert opens again, and recovers
        *_, terminated, _, _ = env.step(env.expert())
        if terminated:
            break
    assert terminated and env.held.all() and env.pose[0, 2] > 0.5


def test_object_is_in_the_picture_only():
    env = BarWorld()
    one, _ = env.reset(seed=1)
    env.object[0, :2] = -env.object[0, :2]
    two = env.observe()
    assert (one["state"] == two["state"]).all() and (one["image"] != two["image"]).any()
    env.object[0, 5] += 0.02  # anti-aliased: a turn of two degrees shows
    assert (env.observe()["image"] != two["image"]).any()


class ScriptedHuman:
    """Ten steps, the human acts on 3, 4 and 7; the gripper closes on every one of the human's."""

    def __init__(self, image_keys, action_dim):
        self.dim = action_dim

    def reset(self):
        self.t = 0
        return {"image": np.full((8, 8, 3), 100, np.uint8), "state": np.zeros(2, np.float32)}, {}

    def step(self, action):
        info = {}
        if self.t in (3, 4, 7):
            info["intervene_action"] = np.full(self.dim, -0.75)
            if self.t == 4:  # straight from a network
                info["intervene_action"] = torch.full((self.dim,), -2.0, requires_grad=True)
        self.t += 1
        obs = {"image": np.full((8, 8, 3), 100 + self.t, np.uint8), "state": np.full(2, self.t, np.float32)}
        return obs, 0.0, False, self.t == 10, info


def run_episode(tmp_path, **options):
    source = Path(__file__).read_text().split("class ScriptedHuman:")[1].split("\n\n\n")[0]
    (tmp_path / "own.py").write_text("import numpy as np\nimport torch\n\n\nclass ScriptedHuman:" + source)
    args = Args(env_id=f"{tmp_path}/own.py:ScriptedHuman", encoder="softmax", **options)
    env = RobotEnv(args)
    agent = SACHybridAgent(["image"], 6, 3, "cpu", image_shape=(8, 8, 3), state_dim=2, hidden_size=8)
    buffers = [FrameBuffer(50, env.obs_spec, 7) for _ in range(2)]
    link, robot = Link(args, *buffers), Robot(args, agent.policy, env=env)
    link.publish(agent.policy)
    rows = []
    for step in range(10):
        assert link.wait_turn(-1) is not None
        rows.append(robot.step(step))
        link.send(rows[-1])
        assert link.wait_step()
        link.step_handled()
    return link, rows


def test_interventions_go_into_both_buffers(tmp_path):
    link, rows = run_episode(tmp_path)
    assert (len(link.online_rb), len(link.demo_rb)) == (10, 3)
    assert (link.intervention_steps, link.intervention_count) == (3, 2)
    assert link.intervention_steps / link.env_steps == 0.3
    human = [i for i, row in enumerate(rows) if row["interventions"]]
    assert human == [3, 4, 7]
    assert (rows[3]["actions"] == -0.75).all() and (rows[4]["actions"] == -1).all()  # stored: the human's, clipped
    demo = link.demo_rb.sample(100, np.random.default_rng(0))
    assert set(demo["obs"]["state"][:, 0]) == {3, 4, 7} and set(demo["next_obs"]["state"][:, 0]) == {4, 5, 8}
    assert link.demo_rb.filled == 3 + 2 and link.num_episodes == 1


def test_a_time_limit_bootstraps(tmp_path):
    _, rows = run_episode(tmp_path)
    assert rows[-1]["dones"] and rows[-1]["masks"] == 1.0 and rows[-1]["next_obs"]["state"][0] == 10
    _, rows = run_episode(tmp_path, timeout_terminal=True)
    assert rows[-1]["dones"] and rows[-1]["masks"] == 0.0


def test_penalty_is_on_the_executed_toggle(tmp_path):
    _, rows = run_episode(tmp_path)
    closed = False
    for row in rows:
        command = round(float(row["actions"][6]))
        toggled = (command == -1 and not closed) or (command == 1 and closed)
        assert row["grasp_penalty"] == (-0.02 if toggled else 0.0)
        closed = command == -1 or (closed and command == 0)
    assert closed or any(row["grasp_penalty"] for row in rows)


def test_flipped_images_are_taken():
    env = RobotEnv(Args())
    obs = env.observe({"image": np.zeros((32, 32, 4), np.uint8)[::-1], "state": np.zeros(7)})
    assert torch.from_numpy(obs["image"]).shape == (32, 32, 3)


@pytest.mark.parametrize("bad", [np.zeros(3), np.full(7, np.nan)])
def test_bad_intervention_is_one_line(bad, capsys):
    env = RobotEnv(Args())
    env.env.step = lambda action: (env.env.observe(), 0.0, False, False, {"intervene_action": bad})
    with pytest.raises(SystemExit):
        env.step(np.zeros(7))
    err = capsys.readouterr().err
    assert "intervene_action" in err and err.count("\n") == 1


def test_stay_holds_the_last_command(tmp_path):
    (tmp_path / "own.py").write_text(
        "import numpy as np\nclass Env:\n    def __init__(self, *_): self.seen = []\n"
        "    def reset(self): return np.zeros(3), {}\n"
        "    def step(self, a):\n        self.seen.append(float(a[-1]))\n"
        "        return np.zeros(3), 0.0, False, False, {}\n"
    )
    env = RobotEnv(Args(env_id=f"{tmp_path}/own.py:Env"))
    for command in (0, -1, 0, 0, 1, 0):
        env.step(np.array([0, 0, 0, 0, 0, 0, command], np.float32))
    assert env.env.seen == [0, -1, -1, -1, 1, 1]
    act = lambda command: env.step(np.array([0, 0, 0, 0, 0, 0, command], np.float32))  # noqa: E731
    real = env.env.step
    env.env.step = lambda a: (*real(a)[:4], {"intervene_action": np.float32([0, 0, 0, 0, 0, 0, -1])})
    act(1)
    env.env.step = real
    act(0)
    assert env.env.seen[6:] == [1, -1], "the human closed it: stay keeps it closed"
    act(1)
    env.env.step = lambda a: (*real(a)[:4], {"intervene_action": np.zeros(7, np.float32)})
    act(-1)
    env.env.step = real
    act(0)
    assert env.env.seen[-1] == 1, "the human stayed: the policy's close was never executed"
    env.reset(0)
    act(0)
    assert env.env.seen[-1] == 0, "a new episode holds nothing"


def test_a_robot_that_exists_once(tmp_path):
    (tmp_path / "own.py").write_text(
        "import numpy as np\nclass Env:\n    made = 0\n    def __init__(self, *_):\n        Env.made += 1\n"
        "        assert Env.made == 1, 'there is one arm'\n        self.t = 0\n"
        "    def reset(self):\n        self.t = 0\n        return np.zeros(3), {}\n"
        "    def step(self, a):\n        self.t += 1\n        return np.zeros(3), 0.0, self.t == 5, False, {}\n"
    )
    own = dict(env_id=f"{tmp_path}/own.py:Env", num_demos=0, intervention_steps=0, eval_episodes=0, report_episodes=0)
    metrics = main(Args(**TINY | own, run_dir=str(tmp_path / "run")))
    assert "eval/success_rate" not in metrics and metrics["charts/episodes"] > 3
    assert (tmp_path / "run" / "checkpoints" / "final_model.pth").exists()


def test_a_gymnasium_environment_with_box_observations(tmp_path):
    options = dict(env_id="Pendulum-v1", setup_mode="single-arm-fixed-gripper", num_demos=0, intervention_steps=0)
    args = Args(**TINY | options, run_dir=str(tmp_path / "run"))
    env = RobotEnv(args)
    assert env.obs_spec == {"state": ((3,), np.float32)} and env.scale == 2.0
    metrics = main(args)
    assert np.isfinite(metrics["losses/critic_loss"]) and "losses/grasp_critic_loss" not in metrics


@pytest.mark.parametrize("mode", MODES)
def test_smoke(mode, tmp_path):
    metrics = main(Args(**TINY, setup_mode=mode, run_dir=str(tmp_path / "run")))
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["charts/updates"] == 40 and (metrics["buffer/online_rows"], metrics["buffer/demo_rows"]) == (4, 4)
    assert {"losses/critic_loss", "losses/actor_loss", "losses/alpha_loss", "losses/alpha"} <= set(metrics)
    assert ("losses/grasp_critic_loss" in metrics) == ("learned" in mode)
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"args.json", "metrics.jsonl", "summary.json", "curves.png", "checkpoints"}
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"final_model.pth", "checkpoint_40.pth", "buffers_40.pth"}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["global_step"] for row in rows] == [0, 20, 40, 40]


def test_augmentation_ten_critics_and_state_only(tmp_path):
    options = TINY | dict(augment_pad=2, num_critics=10, use_state=False, run_dir=str(tmp_path / "a"))
    assert np.isfinite(main(Args(**options))["losses/critic_loss"])
    options = TINY | dict(algorithm="bc", run_dir=str(tmp_path / "b"))
    assert main(Args(**options))["buffer/demo_rows"] == 8


def test_what_reaches_an_update(tmp_path, monkeypatch):
    """cta_ratio 3: two critic-only updates, then a full one, each on a fresh batch, both frames shifted."""
    monkeypatch.setattr(sac_hybrid, "plot_curves", lambda *_: None)
    seen, update = [], SACHybridAgent.update

    def watch(self, batch, full):
        seen.append((full, batch["rewards"].sum() + batch["actions"].sum(), batch["obs"], batch["next_obs"]))
        return update(self, batch, full)

    monkeypatch.setattr(SACHybridAgent, "update", watch)
    monkeypatch.setattr(sac_hybrid, "random_shift", lambda images, pad, rng: torch.full_like(images, pad))
    main(Args(**TINY | dict(max_steps=26, cta_ratio=3, augment_pad=2), run_dir=str(tmp_path / "run")))
    assert [full for full, *_ in seen] == [False, False, True] * 4
    assert len({float(batch) for _, batch, *_ in seen}) == 12
    for *_, obs, next_obs in seen:
        assert (obs["image"] == 2).all() and (next_obs["image"] == 2).all()


def test_the_human_withdraws(tmp_path, monkeypatch):
    monkeypatch.setattr(sac_hybrid, "plot_curves", lambda *_: None)
    seen, reset = [], Robot.reset
    monkeypatch.setattr(Robot, "reset", lambda self: (seen.append((steps[-1], self.probability)), reset(self))[1])
    steps, step = [], Robot.step
    monkeypatch.setattr(Robot, "step", lambda self, at: (steps.append(at), step(self, at))[1])
    main(Args(**TINY | dict(max_steps=70, intervention_steps=50), run_dir=str(tmp_path / "run")))
    assert seen[0] == (0, 1.0) and seen[-1][1] == 0.0 and len({p for _, p in seen}) > 2
    assert [p for _, p in seen] == pytest.approx([max(0.0, 1 - at / 50) for at, _ in seen])
    seen.clear()
    main(Args(**TINY | dict(intervention_steps=0), run_dir=str(tmp_path / "alone")))
    assert {p for _, p in seen} == {0.0}


def test_random_steps_come_before_the_policy(tmp_path, monkeypatch):
    monkeypatch.setattr(sac_hybrid, "plot_curves", lambda *_: None)
    calls, act = [], Policy.act
    monkeypatch.setattr(Policy, "act", lambda self, obs, rng=None: (calls.append(rng), act(self, obs, rng))[1])
    main(Args(**TINY | dict(random_steps=25), run_dir=str(tmp_path / "run")))
    assert sum(rng is not None for rng in calls) == 40 - 25  # without: evaluation


def test_every_episode_starts_with_open_grippers():
    args = Args()
    robot = Robot(args, SACHybridAgent(["image"], 6, 3, state_dim=7, hidden_size=8).policy, env=RobotEnv(args))
    robot.reset()
    assert robot.note_gripper(np.float32([0] * 6 + [-1])) == 1 and robot.closed.all()
    robot.reset()
    assert robot.note_gripper(np.float32([0] * 6 + [-1])) == 1


def test_the_best_policy_is_kept_and_judged_on_other_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr(sac_hybrid, "plot_curves", lambda *_: None)
    rates, asked = iter([0.5, 0.9, 0.1]), []

    def score(policy, env, first_seed, num_episodes):
        asked.append((first_seed, num_episodes))
        rate = next(rates) if first_seed == 10_000 else 0.3
        return {"eval/success_rate": rate, "eval/episodic_return": rate, "eval/episodic_length": 1.0}

    monkeypatch.setattr(sac_hybrid, "evaluate_policy", score)
    options = TINY | dict(eval_every=20, log_interval=10, eval_episodes=3, report_episodes=7)
    main(Args(**options | dict(max_steps=20), run_dir=str(tmp_path / "run")))
    asked.clear()
    metrics = main(Args(**options, run_dir=str(tmp_path / "run"), resume="auto"))  # the best so far is remembered
    assert asked == [(10_000, 3), (20_000, 7)] and metrics["eval/success_rate"] == 0.3
    files = [load_checkpoint(tmp_path / "run/checkpoints" / name) for name in ("checkpoint_20.pth", "final_model.pth")]
    best, final = (file["agent"]["networks"] for file in files)
    assert all(torch.equal(best[name], final[name]) for name in best)


def test_same_seed_same_numbers(tmp_path):
    runs = [main(Args(**TINY, seed=seed, run_dir=str(tmp_path / str(i)))) for i, seed in enumerate((3, 3, 4))]
    clocks = ("SPS", "UPS", "time/")
    runs = [{key: value for key, value in run.items() if not any(clock in key for clock in clocks)} for run in runs]
    assert runs[0] == runs[1] != runs[2]


def test_times_are_of_one_log_line(tmp_path, monkeypatch):
    """By a clock that only work moves: environment steps and updates count, evaluation and saving do not."""
    clock = [1000.0]
    monkeypatch.setattr(sac_hybrid.time, "time", lambda: clock[0])

    def takes(owner, name, seconds):
        work = getattr(owner, name)

        def slow(*args, **kwargs):
            clock[0] += seconds
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, slow)

    takes(Robot, "step", 0.25)
    takes(SACHybridAgent, "update", 1.0)
    takes(sac_hybrid, "evaluate_policy", 64.0)
    takes(sac_hybrid, "save_checkpoint", 4096.0)
    main(Args(**TINY | dict(max_steps=60, eval_every=10, save_every=10), run_dir=str(tmp_path / "run")))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [(row["time/rollout"], row["time/update"], row["charts/UPS"]) for row in lines if "time/update" in row]
    assert times == [(5, 0, 0), (5, 40, 1), (5, 40, 1)]


def full_disk(path, data):
    with open(path, "wb") as file:
        file.write(data[:100])
    raise OSError(28, "No space left on device")


def test_create_data_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(Path, "write_bytes", full_disk)
        main(Args(create_data=True, num_demos=4))
    assert end.value.code == 1 and not list(Path("test_data").iterdir())
    assert "test_data/success_demo.pkl: No space left" in capsys.readouterr().err
    assert main(Args(create_data=True, num_demos=4)) == {}
    assert {path.name for path in Path("test_data").iterdir()} == {"success_demo.pkl", "failure_demo.pkl"}
    paths = ("test_data/success_demo.pkl", "test_data/failure_demo.pkl")
    metrics = main(Args(**TINY, demo_paths=paths, image_keys=("image",), run_dir="run", save_dir="my_training_results"))
    assert metrics["buffer/demo_size"] > 100 and Path("my_training_results/final_model.pth").exists()
    with pytest.raises(SystemExit):  # seven numbers in a mode with six
        main(Args(**TINY, demo_paths=paths, setup_mode="single-arm-fixed-gripper", run_dir="other"))
    assert "lacks" in (err := capsys.readouterr().err) or "expected" in err
    assert not Path("other").exists()  # nothing is written by a run that fails its checks


def test_full_test_makes_its_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sac_hybrid, "plot_curves", lambda *_: None)
    metrics = main(Args(**TINY, test="full", run_dir="run"))
    assert {path.name for path in Path("test_data").iterdir()} == {"success_demo.pkl", "failure_demo.pkl"}
    assert json.loads(Path("run/args.json").read_text())["demo_paths"] == ["test_data/success_demo.pkl"]
    assert metrics["charts/updates"] == 40 and metrics["buffer/demo_size"] >= 12


def test_quick_test(capsys):
    main(Args(test="quick"))
    assert capsys.readouterr().out.count("ok  ") == 3


BAD = [
    (dict(lr=-1.0), "--lr -1.0"),
    (dict(lr=float("nan")), "--lr nan"),
    (dict(batch_size=0), "--batch-size 0"),
    (dict(gamma=1.5), "--gamma 1.5"),
    (dict(demo_ratio=-0.1), "--demo-ratio -0.1"),
    (dict(num_sampled_critics=3), "--num-sampled-critics 3"),
    (dict(grasp_penalty=0.1), "--grasp-penalty 0.1"),
    (dict(buffer_size=1), "--buffer-size 1"),
    (dict(env_id="Pendulum-v1", num_demos=5), "--num-demos 5"),
    (dict(algorithm="bc", num_demos=0), "--algorithm bc"),
    (dict(seed=2**32), "--seed 4294967296"),
    (dict(create_data=True, test="quick"), "--create-data True"),
]


@pytest.mark.parametrize(("options", "word"), BAD)
def test_bad_values_are_one_line(options, word, capsys):
    with pytest.raises(SystemExit) as end:
        Args(**options)
    err = capsys.readouterr().err
    assert end.value.code == 2 and word in err and "must be" in err and err.count("\n") == 1


LATE = [
    (dict(env_id="NoSuchEnv-v0"), "--env-id NoSuchEnv-v0"),
    (dict(env_id="CartPole-v1"), "--env-id CartPole-v1"),
    (dict(env_id="missing.py:Env"), "--env-id missing.py:Env"),
    (dict(image_keys=("wrist",)), "--image-keys wrist"),
    (dict(demo_paths=("missing.pkl",)), "missing.pkl"),
    (dict(resume="missing.pth"), "missing.pth"),
    (dict(demo_buffer_size=10), "--demo-buffer-size 10"),
    (dict(demo_buffer_size=10**11), "--demo-buffer-size 100000000000"),  # not --buffer-size, which is small
    (dict(env_id="Pendulum-v1", setup_mode="single-arm-fixed-gripper", render_size=64), "--render-size 64"),
    (dict(env_id=f"{__file__}:MODES"), "has no class 'MODES'"),
    (dict(env_id=f"{__file__}:Unfinished"), "Unfinished has no method step()"),
    (dict(run_dir=__file__), f"--run-dir {__file__}"),
    (dict(run_dir=f"{__file__}/below"), f"--run-dir {__file__}/below"),
    (dict(save_dir=__file__), f"--save-dir {__file__}"),  # found before training, not at the first save
]


class Unfinished:
    def __init__(self, image_keys, action_dim):
        pass

    def reset(self):
        return np.zeros(3), {}


@pytest.mark.parametrize(("options", "word"), LATE)
def test_bad_inputs_are_one_line(options, word, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(Args(**options, device="cpu"))
    err = capsys.readouterr().err
    assert end.value.code == 2 and word in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())  # nothing written


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sac_hybrid.py", "--setup-mode", "three-arms"])
    with pytest.raises(SystemExit) as end:
        parse_args(Args)
    assert end.value.code == 2 and "three-arms" in capsys.readouterr().err
    command = [sys.executable, str(ROOT / "sac_hybrid.py")]
    tiny = "--max_steps 30 --batch_size 8 --training_starts 10 --random_steps 5 --cta_ratio 3 --log_interval 10".split()
    tiny += "--lr 3e-4 --eval-episodes 1 --report-episodes 1 --image_keys image --save_dir out --run-dir run".split()
    good = subprocess.run([*command, *tiny], capture_output=True, text=True, cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert (tmp_path / "out" / "final_model.pth").exists() and "updates/s" in good.stdout
