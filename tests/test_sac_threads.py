"""sac_hybrid.py: pacing, whole snapshots, faults in either thread, signals, resume after SIGKILL, torchrun."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import sac_hybrid
import wsrl_warmup
from sac_hybrid import Args, FrameBuffer, Link, RobotEnv, SACHybridAgent, load_checkpoint, main

TINY = dict(max_steps=60, training_starts=20, eval_episodes=1, report_episodes=1, batch_size=8, num_demos=3)
TINY |= dict(hidden_size=16, log_interval=15, intervention_steps=100, device="cpu", eval_every=30)
FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
COMMAND = [sys.executable, str(ROOT / "sac_hybrid.py"), *FLAGS]


def rows(run_dir):
    """metrics.jsonl without what a clock says"""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    clocks = ("time", "SPS", "UPS")
    return [{k: v for k, v in json.loads(line).items() if not any(w in k for w in clocks)} for line in lines]


def watch(monkeypatch):
    """(updates, steps handled) at each of the actor's turns, and how far it was ahead"""
    seen, agents = [], []
    init, turn = SACHybridAgent.__init__, Link.wait_turn

    def remember(self, *args, **kwargs):
        init(self, *args, **kwargs)
        agents.append(self)

    def look(self, version):
        result = turn(self, version)
        if result is not None:
            seen.append((agents[-1].updates, self.env_steps, self.handled))
        return result

    monkeypatch.setattr(SACHybridAgent, "__init__", remember)
    monkeypatch.setattr(Link, "wait_turn", look)
    return seen


@pytest.mark.parametrize("utd", [0.5, 3.0])
def test_taking_turns(utd, tmp_path, monkeypatch):
    seen = watch(monkeypatch)
    metrics = main(Args(**TINY | dict(max_steps=40, utd=utd), run_dir=str(tmp_path / "run")))
    assert [steps for _, steps, _ in seen] == list(range(40))
    assert all(updates == int(utd * max(0, steps - 20)) for updates, steps, _ in seen)  # not one more, not one less
    assert metrics["charts/updates"] == int(utd * 20)


def test_lead_is_bounded(tmp_path, monkeypatch):
    seen = watch(monkeypatch)
    metrics = main(Args(**TINY | dict(max_lead=4, max_steps=80), run_dir=str(tmp_path / "run")))
    leads = [steps - handled for _, steps, handled in seen]
    assert max(leads) <= 4 and any(lead > 0 for lead in leads)  # ahead, but not by more
    # |updates - utd * steps| stays within the lead, counted in updates, plus the step under way
    assert all(abs(updates - 2 * max(0, steps - 20)) <= 2 * (4 + 1) for updates, steps, _ in seen)
    assert metrics["charts/updates"] == 2 * 60


def test_snapshots_are_never_half_updated():
    env = RobotEnv(Args())
    agent = SACHybridAgent(["image"], 6, 3, "cpu", state_dim=7, hidden_size=64)
    link = Link(Args(), *(FrameBuffer(9, env.obs_spec, 7) for _ in range(2)))
    stop = threading.Event()

    def learn():
        value = 0.0
        while not stop.is_set():
            value += 1
            with torch.no_grad():
                for param in agent.policy.parameters():  # one after the other, as an optimizer without a lock would
                    param.fill_(value)
            link.publish(agent.policy)

    link.publish(agent.policy)
    learner = threading.Thread(target=learn)
    learner.start()
    versions = []
    try:
        while len(versions) < 50:
            with link.condition:
                link.acting = 0
            _, version, weights = link.wait_turn(versions[-1] if versions else -1)
            if weights is not None and version > 1:
                assert (weights == weights[0]).all()
                time.sleep(0.001)
                assert (weights == weights[0]).all()  # a copy: later updates do not reach it
                versions.append(version)
    finally:
        stop.set()
        learner.join()
    assert versions == sorted(set(versions))


def test_an_exception_in_the_actor_ends_the_run(tmp_path, monkeypatch):
    def broken(self, action):
        raise ZeroDivisionError("the arm fell off")

    monkeypatch.setattr(sac_hybrid.SimulatedHuman, "step", broken)
    start, threads = time.time(), threading.active_count()
    with pytest.raises(ZeroDivisionError, match="the arm fell off") as info:
        main(Args(**TINY, run_dir=str(tmp_path / "run")))
    assert time.time() - start < 10 and threading.active_count() == threads
    assert any(entry.name == "broken" for entry in info.traceback)  # the traceback of the thread


def test_an_exception_in_the_learner_ends_the_run(tmp_path, monkeypatch):
    def broken(self, batch, full):
        raise ZeroDivisionError("no gradient")

    monkeypatch.setattr(SACHybridAgent, "update", broken)
    start, threads = time.time(), threading.active_count()
    with pytest.raises(ZeroDivisionError, match="no gradient"):
        main(Args(**TINY, run_dir=str(tmp_path / "run")))
    assert time.time() - start < 10 and threading.active_count() == threads


def test_gradients_that_stay_nan_end_the_run(tmp_path, monkeypatch, capsys):
    sample = sac_hybrid.sample_batch
    monkeypatch.setattr(sac_hybrid, "sample_batch", lambda *args: sample(*args) | {"rewards": torch.full((8,), np.nan)})
    with pytest.raises(SystemExit) as end:
        main(Args(**TINY, run_dir=str(tmp_path / "run")))
    assert end.value.code == 1 and "10 gradients in a row were not finite" in capsys.readouterr().err


def test_an_exception_is_a_traceback_and_an_exit_code(tmp_path):
    (tmp_path / "own.py").write_text(
        "import numpy as np\nclass Env:\n    def __init__(self, *_): self.t = 0\n"
        "    def reset(self): return np.zeros(3), {}\n"
        "    def step(self, a):\n        self.t += 1\n        assert self.t < 9, 'motor 3 is hot'\n"
        "        return np.zeros(3), 0.0, False, False, {}\n"
    )
    command = [sys.executable, str(ROOT / "sac_hybrid.py"), "--env-id", "own.py:Env", "--eval-episodes", "1"]
    # evaluation comes first, and would never end: this environment has no time limit
    code = "import sac_hybrid, sys; sac_hybrid.evaluate_policy = lambda *a: {'eval/success_rate': 0.0};"
    code += "sac_hybrid.main(sac_hybrid.parse_args(sac_hybrid.Args))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *command[2:]]
    start = time.time()
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert run.returncode == 1 and "Traceback" in run.stderr and "motor 3 is hot" in run.stderr
    assert time.time() - start < 40


def wait_for(path: Path, process, seconds=60):
    end = time.time() + seconds
    while not path.exists():
        assert process.poll() is None and time.time() < end, process.stderr.read() if process.poll() else "too slow"
        time.sleep(0.005)


def test_resume_after_sigkill_is_the_uninterrupted_run(tmp_path, monkeypatch):
    options = TINY | dict(max_steps=90, save_every=25)
    expected = main(Args(**options, run_dir=str(tmp_path / "whole")))
    killed = tmp_path / "killed"
    flags = ["--max-steps", "90", "--save-every", "25", "--run-dir", str(killed)]
    process = subprocess.Popen([*COMMAND, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(killed / "checkpoints" / "checkpoint_50.pth", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    (killed / "checkpoints" / "checkpoint_99.pth.tmp").write_bytes(b"half a file")  # as if killed while saving
    metrics = main(Args(**options, run_dir=str(killed), resume="auto"))
    clocks = ("time/", "SPS", "UPS")
    assert {k: v for k, v in metrics.items() if not any(w in k for w in clocks)} == {
        k: v for k, v in expected.items() if not any(w in k for w in clocks)
    }
    assert rows(killed) == rows(tmp_path / "whole")
    states = [load_checkpoint(run / "checkpoints" / "checkpoint_90.pth") for run in (killed, tmp_path / "whole")]
    weights = [state["agent"]["networks"] for state in states]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    moments = [[optimizer["state"][0]["exp_avg_sq"] for optimizer in state["agent"]["optimizers"]] for state in states]
    assert all(torch.equal(a, b) for a, b in zip(*moments, strict=True))


@pytest.mark.parametrize("own", [dict(augment_pad=2, random_steps=45), dict(publish_every=7)])
def test_resume_continues_every_random_number(own, tmp_path, monkeypatch):
    """Stopped while it acts at random and shifts images, or while the actor has older weights than the learner."""
    monkeypatch.setattr(sac_hybrid, "plot_curves", lambda *_: None)
    options = TINY | own
    main(Args(**options, run_dir=str(tmp_path / "whole")))
    main(Args(**options | dict(max_steps=30), run_dir=str(tmp_path / "run")))
    main(Args(**options, run_dir=str(tmp_path / "run"), resume="auto"))
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    states = [load_checkpoint(tmp_path / name / "checkpoints" / "checkpoint_60.pth") for name in ("run", "whole")]
    weights = [state["agent"]["networks"] for state in states]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("name", "late"), [("buffers_40", False), ("checkpoint_40", False), ("checkpoint_40", True)])
def test_a_kill_inside_a_save_leaves_the_last_checkpoint(name, late, tmp_path, monkeypatch):
    """Before the rename of either file, and between that of the checkpoint and the end of the old buffers."""
    monkeypatch.setattr(sac_hybrid, "plot_curves", lambda *_: None)
    options, replace = TINY | dict(save_every=20, eval_episodes=0, report_episodes=0), os.replace

    def dying(source, target):
        if not late and name in str(target):
            raise Killed
        replace(source, target)
        if name in str(target):
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", dying)
        main(Args(**options, run_dir=str(tmp_path / "killed")))
    main(Args(**options, run_dir=str(tmp_path / "killed"), resume="auto"))
    main(Args(**options, run_dir=str(tmp_path / "whole")))
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")


def test_resume_of_a_run_killed_before_its_first_checkpoint(tmp_path, capsys):
    main(Args(**TINY, run_dir=str(tmp_path / "whole")))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"global_step": 0, "time": 0.1}\n{"global_st')
    main(Args(**TINY, run_dir=str(tmp_path / "run"), resume="auto"))
    steps = [json.loads(line)["global_step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line)["global_step"] for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert steps == whole
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(Args(**TINY, resume=str(tmp_path / "run/checkpoints/final_model.pth")))
    assert "final_model.pth holds a policy, not a run" in capsys.readouterr().err
    foreign = {"tensor": torch.zeros(3), "other": dict(run_dir="x", args=dict(seed=1))}
    for name, words in (("tensor", "not a run"), ("other", "is not a checkpoint of this script")):
        torch.save(foreign[name], tmp_path / f"{name}.pth")
        with pytest.raises(SystemExit) as end:
            main(Args(**TINY, resume=str(tmp_path / f"{name}.pth")))
        err = capsys.readouterr().err
        assert end.value.code == 2 and words in err and err.count("\n") == 1, err


@pytest.mark.parametrize("script", [sac_hybrid, wsrl_warmup])
def test_auto_takes_the_newest_run_that_has_a_checkpoint(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = script.Args(exp_name="mine", seed=3, resume="auto")
    for age, name in enumerate(("mine__3__30", "mine__3__20", "mine__3__10", "mine__4__40")):
        folder = tmp_path / "runs" / name / "checkpoints"
        folder.mkdir(parents=True)
        if age > 0:  # the newest was killed before its first one
            (folder / "checkpoint_9.pth").touch()
            (folder / "checkpoint_10.pth").touch()
        os.utime(folder.parent, (1000 - age, 1000 - age))
    assert script.newest_checkpoint(args) == Path("runs/mine__3__20/checkpoints/checkpoint_10.pth")
    assert script.newest_checkpoint(script.Args(exp_name="mine", seed=5, resume="auto")) is None
    assert "nothing to resume in runs/: starting fresh" in capsys.readouterr().out


def test_resume_checks_what_it_continues(tmp_path, capsys):
    main(Args(**TINY, run_dir=str(tmp_path / "run")))
    with pytest.raises(SystemExit) as end:
        main(Args(**TINY | dict(lr=0.5), run_dir=str(tmp_path / "run"), resume="auto"))
    assert end.value.code == 2 and "--lr 0.5 is not allowed: it must be 0.001" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:  # only auto may start anew
        main(Args(**TINY, run_dir=str(tmp_path / "new"), resume=str(tmp_path)))
    assert end.value.code == 2 and f"--resume {tmp_path}: there is no checkpoint" in capsys.readouterr().err
    again = main(Args(**TINY, run_dir=str(tmp_path / "run"), resume=str(tmp_path / "run")))  # nothing left to do
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert again["eval/success_rate"] == summary["eval/success_rate"]
    longer = main(Args(**TINY | dict(max_steps=70), run_dir=str(tmp_path / "run"), resume="auto"))
    assert longer["charts/updates"] == 100
    older = tmp_path / "run" / "checkpoints" / "checkpoint_60.pth"  # its buffers are gone: only the newest are kept
    assert main(Args(**TINY | dict(max_steps=65), resume=str(older)))["charts/updates"] == 90
    path = tmp_path / "run" / "checkpoints" / "checkpoint_65.pth"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(SystemExit) as end:
        main(Args(**TINY, run_dir=str(tmp_path / "run"), resume=str(path)))
    assert end.value.code == 2 and "damaged" in capsys.readouterr().err


def test_an_older_checkpoint_is_the_newest_once_resumed(tmp_path, monkeypatch):
    """The branch it leaves is deleted, and nothing else; killed anywhere on the way, one of the two can be resumed."""
    monkeypatch.setattr(sac_hybrid, "plot_curves", lambda *_: None)
    options = TINY | dict(save_every=20, max_steps=40, eval_episodes=0, report_episodes=0)
    folder = tmp_path / "run" / "checkpoints"
    main(Args(**options, run_dir=str(tmp_path / "run")))
    main(Args(**options | dict(max_steps=90), run_dir=str(tmp_path / "run"), resume="auto"))
    whole, others = rows(tmp_path / "run"), {"checkpoint_best.pth", "checkpoint_99.pth.tmp", "final_model.pth"}
    for name in others:
        (folder / name).touch()
    names = lambda: {path.name for path in folder.iterdir()} - others  # noqa: E731
    assert names() == {f"checkpoint_{step}.pth" for step in (20, 40, 60, 80, 90)} | {"buffers_90.pth"}
    older, unlink = dict(resume=str(folder / "checkpoint_40.pth"), max_steps=50), Path.unlink
    main(Args(**options | older | dict(max_steps=45), run_dir=str(tmp_path / "elsewhere")))  # not into its own folder
    assert "checkpoint_90.pth" in names() and len(names()) == 6

    def dying(self, **kwargs):
        unlink(self, **kwargs)
        raise Killed

    for left in ({20, 40, 80, 90}, {20, 40, 90}, {20, 40}):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Path, "unlink", dying)
            main(Args(**options | older))
        assert names() == {f"checkpoint_{step}.pth" for step in left} | {"buffers_90.pth"}
        assert rows(tmp_path / "run") == whole  # those of the branch that auto would go on with
    assert sac_hybrid.newest_checkpoint(Args(resume=str(folder))) == folder / "checkpoint_40.pth"
    main(Args(**options | older))
    assert names() == {"checkpoint_20.pth", "checkpoint_40.pth", "checkpoint_50.pth", "buffers_50.pth"}
    assert max(row["global_step"] for row in rows(tmp_path / "run")) == 50
    assert all((folder / name).exists() for name in others)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    save, count = torch.save, []

    def full_disk(state, file):
        count.append(1)
        if len(count) > 2:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(SystemExit) as end:
        main(Args(**TINY, save_every=25, run_dir=str(tmp_path / "run")))
    assert end.value.code == 1 and "No space left" in capsys.readouterr().err
    monkeypatch.undo()
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"checkpoint_25.pth", "buffers_25.pth"}
    metrics = main(Args(**TINY, run_dir=str(tmp_path / "run"), resume="auto"))
    assert metrics["charts/updates"] == 80


def test_ctrl_c_saves_and_resumes(tmp_path):
    run_dir = tmp_path / "run"
    process = subprocess.Popen([*COMMAND, "--max-steps", "100000", "--run-dir", str(run_dir)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    wait_for(run_dir / "metrics.jsonl", process)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in err
    assert f"--resume auto --run-dir {run_dir} continues it" in out
    (path,) = (run_dir / "checkpoints").glob("checkpoint_*.pth")
    step = int(path.stem[11:])
    state = load_checkpoint(path)
    assert state["link"]["handled"] == step and state["agent"]["counters"][0] == 2 * max(0, step - 20)
    metrics = main(Args(**TINY | dict(max_steps=step + 5), run_dir=str(run_dir), resume="auto"))
    assert metrics["charts/updates"] == 2 * max(0, step + 5 - 20)


def signal_at(monkeypatch, step):
    """SIGTERM arrives just before this step counts as handled, after its checkpoint was due"""
    handled = Link.step_handled

    def interrupt(self):
        if self.handled + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)  # the handler runs here, in the main thread
        handled(self)

    monkeypatch.setattr(Link, "step_handled", interrupt)


def test_a_signal_after_the_save_is_for_the_next_step(tmp_path, monkeypatch, capsys):
    signal_at(monkeypatch, 30)
    main(Args(**TINY, run_dir=str(tmp_path / "run")))
    (path,) = (tmp_path / "run" / "checkpoints").glob("checkpoint_*.pth")
    assert path.name == "checkpoint_31.pth" and f"saved {path};" in capsys.readouterr().out
    assert load_checkpoint(path)["link"]["handled"] == 31


def test_a_signal_before_the_first_log_line(tmp_path, monkeypatch, capsys):
    options = TINY | dict(eval_episodes=0, report_episodes=0)
    main(Args(**options, run_dir=str(tmp_path / "whole")))
    own = dict(run_dir=str(tmp_path / "run"), save_dir=str(tmp_path / "saved"))
    with monkeypatch.context() as patch:
        signal_at(patch, 3)
        main(Args(**options, **own))
    hint = capsys.readouterr().out.splitlines()[-1]
    words = [f"--{name.replace('_', '-')} {value}" for name, value in own.items()]
    assert hint == f"saved {own['save_dir']}/checkpoint_4.pth; --resume auto {' '.join(words)} continues it"
    assert not (tmp_path / "run").exists()  # no summary and no curves of a run that has not ended
    main(Args(**options, **own, resume="auto"))
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_wire_carries_a_transition_unchanged():
    env = RobotEnv(Args())
    obs, rng = env.reset(3), np.random.default_rng(0)
    wire = sac_hybrid.WireLink(env.obs_spec, 7, 10, rank=1, group=None)
    row = dict(obs=obs, next_obs=env.step(np.ones(7))[0], actions=rng.uniform(-1, 1, 7).astype(np.float32))
    row |= dict(rewards=0.25, masks=1.0, grasp_penalty=-0.02, interventions=True, dones=False, success=False)
    wire.send(row)
    assert wire.message.dtype == torch.uint8
    back = wire.unpack()
    for name in ("obs", "next_obs"):
        assert all((back[name][key] == row[name][key]).all() for key in env.obs_spec)
    assert (back["actions"] == row["actions"]).all() and back["grasp_penalty"] == np.float32(-0.02)
    assert [float(back[name]) for name in ("rewards", "masks", "interventions", "dones")] == [0.25, 1, 1, 0]


def test_torchrun_three_ranks(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", *COMMAND[1:]]
    run = subprocess.run([*command, "--run-dir", "run"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "eval/success_rate" in run.stdout and rows(tmp_path / "run")[-1]["global_step"] == 60
    state = load_checkpoint(tmp_path / "run" / "checkpoints" / "checkpoint_60.pth")
    assert state["agent"]["counters"][0] == 80 and state["link"]["handled"] == 60


def test_an_actor_that_dies_does_not_corrupt_the_learner(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    flags = ["--max-steps", "140", "--run-dir", "run"]
    ranks = [subprocess.Popen([*COMMAND, *flags], cwd=tmp_path, env=environment | {"RANK": str(rank)}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(3)]  # fmt: skip
    try:
        wait_for(tmp_path / "run" / "metrics.jsonl", ranks[0])
        while len(rows(tmp_path / "run")) < 3:  # both act
            time.sleep(0.02)
        ranks[2].send_signal(signal.SIGKILL)
        out, err = ranks[0].communicate(timeout=90)
        assert ranks[0].returncode == 0 and "actor 2 is gone" in err and "1 left" in err, err
        assert ranks[1].wait(timeout=30) == 0
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    state = load_checkpoint(tmp_path / "run" / "checkpoints" / "checkpoint_140.pth")
    assert state["link"]["handled"] == 140 and state["agent"]["counters"][0] == 2 * 120
    assert all(torch.isfinite(weight).all() for weight in state["agent"]["networks"].values())
