"""wsrl_warmup.py: presets, whole runs, two stages as two commands, resume after a kill, what off means, bad input."""

import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import wsrl_warmup
from wsrl_warmup import Args, UniformReplayBuffer, departures, load_checkpoint, main

TINY = dict(env_id="Pendulum-v1", offline_steps=20, online_steps=30, batch_size=8, hidden_size=16, eval_episodes=1)
TINY |= dict(eval_every=0, log_interval=5, buffer_size=100, device="cpu", save_every=0, data_size=200)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    wsrl_warmup.make_sources(Args(**TINY), wsrl_warmup.ControlEnv("Pendulum-v1"), folder)
    return str(folder)


@pytest.fixture(autouse=True)
def no_picture(request, monkeypatch):
    if "preset" not in request.fixturenames:  # drawing takes longer than a tiny run; test_every_preset_runs looks at it
        monkeypatch.setattr(wsrl_warmup, "plot_curves", lambda *_: None)


def run(folder, data, **options):
    return main(Args(**TINY | dict(run_dir=str(folder), data_dir=data) | options))


def rows(folder):
    """metrics.jsonl without what a clock says"""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not any(w in k for w in ("time", "SPS", "UPS"))} for line in lines]


def last_state(folder):
    return load_checkpoint(wsrl_warmup.newest_checkpoint(Args(resume=str(folder))))


def assert_same_state(a, b):
    for name in a["agent"]["networks"]:
        assert torch.equal(a["agent"]["networks"][name], b["agent"]["networks"][name]), name
    for one, other in zip(a["agent"]["optimizers"], b["agent"]["optimizers"], strict=True):
        assert torch.equal(one["state"][0]["exp_avg_sq"], other["state"][0]["exp_avg_sq"])
    for name in ("online_rb", "offline_rb"):
        assert (a[name] is None) == (b[name] is None)
        for column in a[name]["columns"] if a[name] else ():
            assert torch.equal(a[name]["columns"][column], b[name]["columns"][column]), (name, column)
        if a[name] and "priorities" in a[name]:
            assert torch.equal(a[name]["priorities"], b[name]["priorities"])
    assert a["sample_rng"] == b["sample_rng"] and a["step"] == b["step"]


TABLE = {  # of the README
    "design": ("sac", 0, 0.5, 1.0, 0.999, 0.5, 2, 2, 1, True, "both"),
    "wsrl": ("calql", 5000, 0.0, 0.0, 1.0, 0.0, 10, 2, 4, False, "none"),
    "rlpd": ("sac", 0, 1.0, 0.5, 1.0, 0.5, 10, 2, 20, False, "none"),
    "scratch": ("sac", 0, 0.0, 0.0, 1.0, 0.0, 2, 2, 1, False, "none"),
}
NAMES = "offline_objective warmup_rollout_steps retention_ratio initial_offline_ratio offline_decay_rate"
NAMES += " min_offline_ratio num_critics num_sampled_critics utd_ratio use_prioritized_replay weighted_loss"


@pytest.mark.parametrize("preset", TABLE)
def test_presets_resolve_as_in_the_table(preset):
    args = Args(preset=preset, env_id="Any-v0")
    assert tuple(getattr(args, name) for name in NAMES.split()) == TABLE[preset] and args.layer_norm
    assert args.offline_steps == (50_000 if preset in ("design", "wsrl") else 0)
    assert (args.demo_weight, args.success_weight_bonus, args.priority_alpha, args.priority_beta) == (2, 1.5, 0.6, 0.4)
    assert Args(preset=preset, num_critics=3, utd_ratio=7).num_critics == 3  # an explicit option wins
    assert Args(preset=preset, use_prioritized_replay=False).use_prioritized_replay is False
    assert args.online_steps == (105_000 if preset == "wsrl" else 100_000)
    assert Args(preset=preset, offline_steps=0, warmup_rollout_steps=0).offline_steps == 0  # 0 is a value


def test_departures_from_the_paper():
    paper = dict(hidden_size=256, batch_size=256, tau=0.005, lr=3e-4)
    assert departures(Args(preset="wsrl", **paper)) == []
    assert departures(Args(preset="rlpd", **paper)) == []
    assert departures(Args(preset="wsrl", **paper | dict(utd_ratio=1))) == ["utd_ratio 1 (paper 4)"]
    assert "retention_ratio 0.5 (paper 0.0)" in departures(Args())
    document = dict(env_id="Any-v0", retention_ratio=0.2, online_cql_alpha=0.0)
    for by in ("td_error", "reward", "quality"):  # the document leaves it open
        assert departures(Args(**document, retention_by=by), wsrl_warmup.DESIGN) == []
    assert departures(Args(env_id="Any-v0"), wsrl_warmup.DESIGN) == ["retention_ratio 0.5 (there 0.2)"]


def test_the_objective_does_not_change_at_the_transition():
    car = dict(env_id="MountainCarContinuous-v0")
    assert (Args(**car).offline_objective, Args(**car, cql_alpha=0.3).online_cql_alpha) == ("calql", 0.3)
    assert (Args(env_id="Pendulum-v1").offline_objective, Args(env_id="Pendulum-v1").online_cql_alpha) == ("sac", 0.0)
    assert Args(preset="wsrl", **car).online_cql_alpha == 0  # the paper's does


def test_pendulum_has_larger_batches_whatever_the_preset():
    sizes = [Args(env_id=env, preset=p).batch_size for p in ("design", "rlpd") for env in ("Pendulum-v1", "Reacher-v5")]
    assert sizes == [256, 128, 256, 128]


@pytest.mark.parametrize("preset", TABLE)
def test_every_preset_runs(preset, tmp_path, data, capsys):
    own = dict(warmup_rollout_steps=10) if preset == "wsrl" else {}
    own |= dict(offline_steps=None, learning_starts=10) if preset in ("rlpd", "scratch") else {}
    metrics = run(tmp_path / "run", data, preset=preset, **own)
    assert all(math.isfinite(value) for value in metrics.values())
    expected = {"design": 20 + 30, "wsrl": 20 + 4 * 20, "rlpd": 20 * 20, "scratch": 20}[preset]
    assert metrics["charts/updates"] == expected and metrics["charts/env_steps"] == 30
    sizes = {"design": 300, "wsrl": 0, "rlpd": 600, "scratch": 0}
    assert metrics["buffer/offline_size"] == sizes[preset] and metrics["buffer/online_size"] == 30
    assert ("losses/cql_loss" in rows(tmp_path / "run")[2]) == (preset == "wsrl")
    assert (tmp_path / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval/episodic_return"] == rows(tmp_path / "run")[-1]["eval/episodic_return"]
    out = capsys.readouterr().out
    assert ("departures from the design document: " in out) == (preset == "design")
    if preset == "design":
        assert summary["retained_bytes"] == 0.5 * summary["offline_bytes"]  # memory is released, as measured
    assert (
        f"preset {preset}: " in out and "departures from the paper, " in out and f"utd_ratio {TABLE[preset][8]}" in out
    )


def test_offline_share_over_a_run(tmp_path, data):
    run(tmp_path / "run", data, offline_decay_rate=0.9, batch_size=10, log_interval=1)
    shares = {
        row["charts/env_steps"]: row["buffer/offline_frac"]
        for row in rows(tmp_path / "run")
        if "buffer/offline_frac" in row
    }
    assert shares[0] == 1 and [shares[t] for t in (1, 2, 3, 7, 30)] == [0.9, 0.8, 0.7, 0.5, 0.5]


def test_one_seed_one_result(tmp_path, data):
    for name in "ab":
        torch.rand(3), np.random.rand(3)  # the global generators must not matter
        run(tmp_path / name, data)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    run(tmp_path / "c", data, seed=2)
    assert rows(tmp_path / "c") != rows(tmp_path / "a")


def test_a_run_folder_may_hold_an_equals_sign(tmp_path):
    """The data made in it, and the rows handed over to the second stage, are read from there."""
    hand = {name: str(tmp_path / f"seed=1.{name}") for name in ("checkpoint_path", "filtered_data_path")}
    run(tmp_path / "lr=0.1", None, stage="offline", **hand)
    assert (tmp_path / "lr=0.1" / "data" / "demos.npz").exists()
    run(
        tmp_path / "online",
        None,
        stage="online",
        **hand | dict(filtered_data_path=str(tmp_path / "lr=0.1/data/demos.npz")),
    )


def test_two_commands_are_one_run(tmp_path, data):
    for i, own in enumerate((dict(), dict(preset="wsrl", warmup_rollout_steps=5), dict(retention_by="quality"))):
        both, first, second = (tmp_path / f"{name}{i}" for name in ("both", "first", "second"))
        run(both, data, **own)
        hand = own | dict(checkpoint_path=str(tmp_path / f"{i}.pth"), filtered_data_path=str(tmp_path / f"{i}.npz"))
        run(first, data, stage="offline", **hand)
        run(second, "nowhere", stage="online", **hand)  # needs no offline data any more
        online = [row for row in rows(both) if row["global_step"] > 20]
        assert rows(first) == [row for row in rows(both) if row["global_step"] <= 20] and rows(second) == online
        assert_same_state(last_state(both), last_state(second))
        assert (tmp_path / f"{i}.npz").exists() == ("preset" not in own)
    filtered = np.load(tmp_path / "0.npz")
    assert len(filtered["rewards"]) == 300 and set(wsrl_warmup.DATA_COLUMNS) <= set(filtered)
    env = wsrl_warmup.ControlEnv("Pendulum-v1")
    again, _ = wsrl_warmup.load_offline_data(Args(**TINY), env, [str(tmp_path / "0.npz")])  # also a data file like any
    kept = last_state(tmp_path / "both0")["offline_rb"]["columns"]
    assert again["actions"] == pytest.approx(kept["actions"].numpy(), abs=1e-6)
    assert again["rewards"] == pytest.approx(kept["rewards"].numpy(), rel=1e-5)


def test_stage_two_checks_what_it_gets(tmp_path, data, capsys):
    hand = dict(checkpoint_path=str(tmp_path / "warm.pth"), filtered_data_path=str(tmp_path / "kept.npz"))
    run(tmp_path / "first", data, stage="offline", **hand)
    torch.save({"step": 3, "args": {"seed": 1}}, tmp_path / "foreign.pth")
    torch.save(torch.zeros(3), tmp_path / "tensor.pth")
    for own, words in (
        (dict(checkpoint_path=str(tmp_path / "foreign.pth")), "foreign.pth is not what"),
        (dict(checkpoint_path=str(tmp_path / "tensor.pth")), "tensor.pth is not what"),
        (dict(offline_data=("a.npz",)), "--offline-data"),
        (dict(hidden_size=32), "--hidden-size 32"),
        (dict(checkpoint_path="absent.pth"), "absent.pth"),
        (dict(filtered_data_path="absent.npz"), "absent.npz"),
        (dict(env_id="MountainCarContinuous-v0"), "--env-id"),
        (dict(dropout=0.1), "--dropout 0.1"),
        (dict(layer_norm=False), "--layer-norm False"),
        (dict(checkpoint_path=str(tmp_path / "first/checkpoints/final_model.pth")), "final_model.pth is not what"),
    ):
        with pytest.raises(SystemExit) as end:
            run(tmp_path / "second", data, stage="online", **hand | own)
        err = capsys.readouterr().err
        assert end.value.code == 2 and words in err and err.count("\n") == 1, err
    assert not (tmp_path / "second").exists()
    (tmp_path / "kept.pkl").write_bytes((tmp_path / "kept.npz").read_bytes())  # the name of the design's commands
    run(tmp_path / "third", data, stage="online", **hand | dict(filtered_data_path=str(tmp_path / "kept.pkl")))


class Killed(BaseException):
    pass


gym.register("ShortPendulum-v1", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=11)
RUNS = [{}, dict(preset="wsrl", warmup_rollout_steps=12), dict(dropout=0.1, obs_noise=0.1)]
RUNS += [dict(early_stop_patience=3, early_stop_every=4)]
RUNS += [dict(preset="scratch", env_id="ShortPendulum-v1", offline_steps=0, online_steps=50, learning_starts=48)]


@pytest.mark.parametrize("own", RUNS)
def test_resume_at_any_moment(own, tmp_path, data, monkeypatch):
    """Offline, at the transition, in the frozen rollouts, inside an episode: checkpoints everywhere, kills between."""
    run(tmp_path / "whole", data, **own)
    log = wsrl_warmup.Writer.log
    for number, kill_at in enumerate((5, 20, 45)):  # 5: before the first checkpoint

        def dying(self, metrics, step, kill_at=kill_at):
            log(self, metrics, step)
            if step == kill_at:
                raise Killed

        monkeypatch.setattr(wsrl_warmup.Writer, "log", dying)
        folder = tmp_path / str(number)
        with pytest.raises(Killed):
            run(folder, data, **own, save_every=7)
        monkeypatch.setattr(wsrl_warmup.Writer, "log", log)
        run(folder, data, **own, save_every=7, resume="auto")
        assert rows(folder) == rows(tmp_path / "whole")
        assert_same_state(last_state(folder), last_state(tmp_path / "whole"))


@pytest.mark.parametrize(("name", "late"), [("checkpoint_14", False), ("checkpoint_14", True), ("kept.npz", True)])
def test_a_kill_inside_a_save_leaves_the_last_checkpoint(name, late, tmp_path, data, monkeypatch):
    own = dict(save_every=7, filtered_data_path=str(tmp_path / "kept.npz"), checkpoint_path=str(tmp_path / "warm.pth"))
    replace = os.replace

    def dying(source, target):
        if not late and name in str(target):
            raise Killed
        replace(source, target)
        if name in str(target):
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", dying)
        run(tmp_path / "killed", data, **own)
    run(tmp_path / "killed", data, **own, resume="auto")
    left = load_checkpoint(tmp_path / "warm.pth"), dict(np.load(tmp_path / "kept.npz"))
    run(tmp_path / "whole", data, **own)
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert_same_state(last_state(tmp_path / "killed"), last_state(tmp_path / "whole"))
    assert_same_state(left[0], load_checkpoint(tmp_path / "warm.pth"))  # what is handed over is the same, too
    assert all((left[1][key] == column).all() for key, column in np.load(tmp_path / "kept.npz").items())


def command(*flags):
    tiny = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, str(ROOT / "wsrl_warmup.py"), *tiny, *map(str, flags)]


def test_sigkill_then_resume_from_the_command_line(tmp_path, data):
    run(tmp_path / "whole", data, online_steps=60)
    flags = ["--online-steps", 60, "--save-every", 10, "--run-dir", tmp_path / "killed", "--data-dir", data]
    process = subprocess.Popen(command(*flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.time() + 60
    while not (tmp_path / "killed" / "checkpoints" / "checkpoint_40.pth").exists():
        assert process.poll() is None and time.time() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(tmp_path / "killed", data, online_steps=60, save_every=10, resume="auto")
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert_same_state(last_state(tmp_path / "killed"), last_state(tmp_path / "whole"))


def torchrun(folder, data, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command.append(str(ROOT / "wsrl_warmup.py"))
    for name, value in (TINY | dict(run_dir=str(folder), data_dir=data) | options).items():
        command += ["--" + name.replace("_", "-"), str(value)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "own", [dict(offline_objective="calql", dropout=0.5), dict(preset="wsrl", warmup_rollout_steps=5)]
)
def test_two_processes_are_one(own, tmp_path, data):
    """Same global batch, same update: priorities, the conservative term's draws, dropout and logged means included."""
    run(tmp_path / "one", data, **own)
    ended = torchrun(tmp_path / "two", data, save_every=20, **own)
    assert ended.returncode == 0, ended.stderr[-2000:]
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row.keys() for row in one] == [row.keys() for row in two]
    for a, b in zip(one, two, strict=True):
        assert list(b.values()) == pytest.approx(list(a.values()), rel=1e-3, abs=1e-4)
    (tmp_path / "two" / "checkpoints" / "checkpoint_50.pth").unlink()  # killed after step 40, say
    ended = torchrun(tmp_path / "two", data, save_every=20, resume="auto", **own)
    assert ended.returncode == 0 and "step 40" in ended.stdout, ended.stderr[-2000:]
    assert rows(tmp_path / "two") == two


def test_two_processes_share_a_batch(tmp_path, data):
    ended = torchrun(tmp_path / "run", data, batch_size=7)
    assert "--batch-size 7 is not allowed: it must be a multiple of the 2 processes" in ended.stderr


def test_signal_saves_and_ends(tmp_path, data, monkeypatch, capsys):
    log = wsrl_warmup.Writer.log

    def interrupt(self, metrics, step):
        log(self, metrics, step)
        if step == 25:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(wsrl_warmup.Writer, "log", interrupt)
    run(tmp_path / "run", data)
    monkeypatch.setattr(wsrl_warmup.Writer, "log", log)
    assert last_state(tmp_path / "run")["step"] == 25
    assert f"--resume auto --run-dir {tmp_path / 'run'} continues it" in capsys.readouterr().out
    assert not (tmp_path / "run" / "summary.json").exists()
    run(tmp_path / "run", data, resume="auto")
    run(tmp_path / "whole", data)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_resume_checks_what_it_continues(tmp_path, data, capsys):
    done = run(tmp_path / "run", data)
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "run", data)
    assert end.value.code == 2 and "holds a run already" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "run", data, resume="auto", lr=0.5)
    assert end.value.code == 2 and "--lr 0.5 is not allowed: it must be 0.001" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:  # only auto may start anew
        run(tmp_path / "new", data, resume=str(tmp_path))
    assert end.value.code == 2 and f"--resume {tmp_path}: there is no checkpoint" in capsys.readouterr().err
    run(tmp_path / "other", data)
    with pytest.raises(SystemExit) as end:  # one run's checkpoint must not cut the metrics of another
        run(tmp_path / "other", data, resume=str(tmp_path / "run"))
    assert end.value.code == 2 and "holds a run already" in capsys.readouterr().err
    again = run(tmp_path / "run", data, resume="auto")  # nothing left to do
    assert again["eval/episodic_return"] == done["eval/episodic_return"]


def test_a_resumed_run_may_be_longer(tmp_path, data, monkeypatch):
    """What depends on its length is beta alone: without priorities it is the run that was long from the start."""
    betas, beta_at = [], wsrl_warmup.beta_at
    monkeypatch.setattr(wsrl_warmup, "beta_at", lambda *args: betas.append(beta_at(*args)) or betas[-1])
    for own in (dict(), dict(use_prioritized_replay=False)):
        folder = tmp_path / f"run{len(own)}"
        run(folder, data, **own)
        assert betas[-1] == 1.0
        metrics = run(folder, data, **own, online_steps=40, resume="auto")
        assert metrics["charts/env_steps"] == 40 and metrics["charts/updates"] == 60
        assert betas[-10:] == pytest.approx([0.4 + 0.6 * step / 60 for step in range(51, 61)])
    run(tmp_path / "whole", data, use_prioritized_replay=False, online_steps=40)
    assert_same_state(last_state(folder), last_state(tmp_path / "whole"))


def test_an_older_checkpoint_is_the_newest_once_resumed(tmp_path, data):
    folder = tmp_path / "run" / "checkpoints"
    run(tmp_path / "whole", data)
    run(tmp_path / "run", data, save_every=10)
    assert {path.name for path in folder.iterdir()} == {"checkpoint_40.pth", "checkpoint_50.pth", "final_model.pth"}
    (folder / "checkpoint_best.pth").touch()
    run(tmp_path / "run", data, save_every=1, resume=str(folder / "checkpoint_40.pth"))
    names = {path.name for path in folder.iterdir()}  # two are kept: they are of the branch that goes on
    assert names == {"checkpoint_49.pth", "checkpoint_50.pth", "checkpoint_best.pth", "final_model.pth"}
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    (folder / "checkpoint_60.pth").touch()
    run(tmp_path / "run", data, resume=str(folder / "checkpoint_49.pth"))
    assert wsrl_warmup.newest_checkpoint(Args(resume=str(folder))) == folder / "checkpoint_50.pth"
    assert not (folder / "checkpoint_60.pth").exists()


def test_frozen_rollouts_change_no_weight_and_act_by_the_policy(tmp_path, data, monkeypatch):
    actions, step = [], wsrl_warmup.Collector.step

    def watch(self, random):
        actions.append(random)
        return step(self, random)

    monkeypatch.setattr(wsrl_warmup.Collector, "step", watch)
    hand = dict(preset="wsrl", warmup_rollout_steps=30, checkpoint_path=str(tmp_path / "warm.pth"))
    run(tmp_path / "run", data, **hand)
    before, after = load_checkpoint(tmp_path / "warm.pth"), last_state(tmp_path / "run")
    assert all(torch.equal(w, after["agent"]["networks"][name]) for name, w in before["agent"]["networks"].items())
    for one, other in zip(before["agent"]["optimizers"], after["agent"]["optimizers"], strict=True):
        assert torch.equal(one["state"][0]["exp_avg"], other["state"][0]["exp_avg"])
        assert one["state"][0]["step"] == other["state"][0]["step"]
    assert len(after["online_rb"]["columns"]["rewards"]) == 30 and actions == [False] * 30
    assert after["online_rb"]["columns"]["actions"].std() > 0


def test_offline_arrays_are_released(tmp_path, data, monkeypatch):
    """Not by a number in the summary: nobody holds the buffer any more once the first online step is taken."""
    buffers, alive, make, step = [], [], wsrl_warmup.make_buffer, wsrl_warmup.Collector.step

    def watch_make(*args):
        rb = make(*args)
        buffers.append(weakref.ref(rb))
        return rb

    def watch_step(self, random):
        gc.collect()
        alive.append(sum(rb() is not None for rb in buffers))
        return step(self, random)

    monkeypatch.setattr(wsrl_warmup, "make_buffer", watch_make)
    monkeypatch.setattr(wsrl_warmup.Collector, "step", watch_step)
    run(tmp_path / "wsrl", data, preset="wsrl", warmup_rollout_steps=30)
    run(tmp_path / "design", data)
    assert len(buffers) == 4 and set(alive[:30]) == {1} and set(alive[30:]) == {1}  # the online buffer of that run


def test_rows_with_share_zero_may_hold_anything(tmp_path, data, monkeypatch):
    own = dict(initial_offline_ratio=0.0, min_offline_ratio=0.0)
    run(tmp_path / "clean", data, **own)

    def poisoned(buffer, *args):
        kept = keep(buffer, *args)
        for column in kept.columns.values():
            column.fill(np.nan)
        return kept

    keep = wsrl_warmup.filter_offline_data
    monkeypatch.setattr(wsrl_warmup, "filter_offline_data", poisoned)
    run(tmp_path / "poisoned", data, **own)
    assert rows(tmp_path / "clean") == rows(tmp_path / "poisoned")


def test_off_is_the_plain_path(tmp_path, data):
    """PER of alpha 0 and weights of 1 on top of plain SAC change nothing but the draws; off draws as plain does."""
    plain = dict(use_prioritized_replay=False, weighted_loss="none", offline_objective="sac")
    run(tmp_path / "plain", data, **plain)
    run(tmp_path / "cql0", data, **plain | dict(offline_objective="cql", cql_alpha=0.0))
    run(tmp_path / "zero", data, **plain, dropout=0.0, obs_noise=0.0, holdout_ratio=0.5, priority_beta=0.9)
    assert rows(tmp_path / "plain") == rows(tmp_path / "cql0") == rows(tmp_path / "zero")
    features = dict(cql=dict(offline_objective="cql"), noise=dict(obs_noise=0.1), drop=dict(dropout=0.2))
    features |= dict(per=dict(use_prioritized_replay=True), weights=dict(weighted_loss="critic"))
    for name, on in (features | dict(sampling=dict(source_weight_in="sampling"))).items():
        run(tmp_path / name, data, **plain | on)
        assert rows(tmp_path / name) != rows(tmp_path / "plain"), name


def test_weights_and_priorities_of_the_training_step(tmp_path, data, monkeypatch):
    """What reaches the update: importance times source weights for the critic, source weights alone for the actor."""
    seen, update = [], wsrl_warmup.WarmupAgent.weighted_update

    def watch(self, batch, weights, **options):
        seen.append((batch["weights"], *weights))
        return update(self, batch, weights, **options)

    monkeypatch.setattr(wsrl_warmup.WarmupAgent, "weighted_update", watch)
    run(tmp_path / "both", data, online_steps=1)
    for source, critic, actor in seen:
        assert critic.mean().item() == pytest.approx(1, abs=1e-5) and actor.mean().item() == pytest.approx(1, abs=1e-5)
        assert torch.allclose(actor, source / source.mean())
    assert any(not torch.allclose(critic, actor) for _, critic, actor in seen)  # priorities differ after a while
    seen.clear()
    run(tmp_path / "critic", data, online_steps=1, weighted_loss="critic", use_prioritized_replay=False)
    assert all(torch.allclose(critic, source / source.mean()) and actor is None for source, critic, actor in seen)
    seen.clear()
    run(tmp_path / "sampling", data, online_steps=1, source_weight_in="sampling", use_prioritized_replay=False)
    assert all(critic is None and actor is None for _, critic, actor in seen)  # in the sampling, so not in the loss
    run(tmp_path / "all", data, online_steps=1, source_weight_in="sampling", retention_ratio=1.0)
    weights = last_state(tmp_path / "all")["offline_rb"]["columns"]["weights"]
    assert weights.mean().item() == pytest.approx(1, abs=1e-5) and weights.std() > 0.1  # an online row's is 1


def test_what_reaches_an_update(tmp_path, data, monkeypatch):
    """Beta over the run, the conservative weight of each stage, the actor in the last update of a step."""
    betas, updates = [], []
    sample, update = wsrl_warmup.sample_mixed, wsrl_warmup.WarmupAgent.weighted_update

    def watch_sample(buffers, split, beta, *rest):
        betas.append(beta)
        return sample(buffers, split, beta, *rest)

    def watch_update(self, batch, weights, **options):
        updates.append((options["full"], options["cql_alpha"]))
        return update(self, batch, weights, **options)

    monkeypatch.setattr(wsrl_warmup, "sample_mixed", watch_sample)
    monkeypatch.setattr(wsrl_warmup.WarmupAgent, "weighted_update", watch_update)
    own = dict(utd_ratio=3, offline_objective="cql", cql_alpha=0.5, online_cql_alpha=0.25, obs_noise=0.1)
    run(tmp_path / "run", data, **own, checkpoint_path=str(tmp_path / "warm.pth"))
    assert [betas[0], betas[19], betas[20], betas[-1]] == pytest.approx([0.412, 0.64, 0.652, 1.0])
    assert updates == [(True, 0.5)] * 20 + [(False, 0.25), (False, 0.25), (True, 0.25)] * 30
    noise = [state["augment_rng"] for state in (load_checkpoint(tmp_path / "warm.pth"), last_state(tmp_path / "run"))]
    assert torch.equal(*noise)  # observations are noisy offline only


def test_times_are_of_one_log_line(tmp_path, data, monkeypatch):
    """By a clock that only work moves: environment steps and updates count, evaluation and saving do not."""
    clock = [1000.0]
    monkeypatch.setattr(wsrl_warmup.time, "time", lambda: clock[0])

    def takes(owner, name, seconds):
        work = getattr(owner, name)

        def slow(*args, **kwargs):
            clock[0] += seconds
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, slow)

    takes(wsrl_warmup.Collector, "step", 0.25)
    takes(wsrl_warmup.WarmupAgent, "weighted_update", 1.0)
    takes(wsrl_warmup, "evaluate_frozen", 64.0)
    takes(wsrl_warmup, "save_checkpoint", 4096.0)
    run(tmp_path / "run", data, eval_every=5, save_every=5, log_interval=10, utd_ratio=2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [(row["time/rollout"], row["time/update"], row["charts/UPS"]) for row in lines if "time/update" in row]
    assert times == [(0, 10, 1), (0, 10, 1)] + [(2.5, 20, 1)] * 3


def test_rows_of_the_environment(tmp_path, data):
    """A time limit keeps the value of its state; the learner's rewards are scaled; no return is known."""
    own = dict(preset="scratch", env_id="ShortPendulum-v1", offline_steps=0, learning_starts=25)
    for scale in (1.0, 0.1):
        metrics = run(tmp_path / str(scale), data, **own, reward_scale=scale)
        assert metrics["charts/episodes"] == 2 and metrics["charts/episodic_length"] == 11
    one, tenth = (last_state(tmp_path / str(scale))["online_rb"]["columns"] for scale in (1.0, 0.1))
    assert torch.allclose(tenth["rewards"][:25], 0.1 * one["rewards"][:25]) and one["rewards"].abs().min() > 0
    assert (one["masks"] == 1).all() and (one["returns"] == -math.inf).all()
    assert torch.equal(one["actions"][:25], tenth["actions"][:25]) and not torch.equal(one["actions"], tenth["actions"])
    uniform = np.random.default_rng([1, 3]).uniform(-1, 1, 25).astype(np.float32)
    assert one["actions"][:25, 0].tolist() == uniform.tolist()  # 25 at random, the 26th by the policy
    assert one["actions"][25, 0] != np.random.default_rng([1, 3]).uniform(-1, 1, 26).astype(np.float32)[25]


class Ends:
    """Terminates at the third step, or is cut off there."""

    action_dim, center, scale = 1, 0.0, 1.0

    def __init__(self, terminated):
        self.terminated = terminated

    def reset(self, seed):
        self.t = 0
        return np.zeros(3, np.float32)

    def step(self, action):
        self.t += 1
        ended = self.t == 3
        return np.full(3, self.t, np.float32), 1.0, ended and self.terminated, ended and not self.terminated, False


@pytest.mark.parametrize("terminated", [True, False])
def test_only_a_termination_ends_the_value(terminated):
    collector = wsrl_warmup.Collector(Ends(terminated), None, seed=1)
    stored = [collector.step(random=True) for _ in range(4)]
    assert [row["masks"] for row, _ in stored] == [1, 1, float(not terminated), 1]
    assert stored[2][0]["next_obs"][0] == 3 and stored[3][0]["obs"][0] == 0  # the true last frame, then a new episode
    assert [episode for _, episode in stored] == [None, None, (3.0, 3, False), None]


def test_early_stop_restores_the_best(tmp_path, data, monkeypatch, capsys):
    errors, kept = iter([3.0, 2.0, 5.0, 4.0, 1.0]), []

    def judge(self, batch):
        assert len(batch["rewards"]) == 200  # one of the three episodes is held out
        for name in ("obs", "next_obs"):  # normalised: undone, cosine and sine lie on the unit circle
            circle = (batch[name] * self.policy.obs_std + self.policy.obs_mean)[:, :2]
            assert torch.allclose(circle.norm(dim=1), torch.ones(200), atol=1e-3)
        kept.append(self.networks())
        return next(errors)

    monkeypatch.setattr(wsrl_warmup.WarmupAgent, "heldout_error", judge)
    hand = dict(checkpoint_path=str(tmp_path / "warm.pth"), retention_ratio=1.0)
    run(tmp_path / "run", data, early_stop_patience=2, early_stop_every=3, **hand)
    assert len(kept) == 4 and "early stop after 12 offline updates" in capsys.readouterr().out
    warm = load_checkpoint(tmp_path / "warm.pth")
    assert all(torch.equal(weight, kept[1][name]) for name, weight in warm["agent"]["networks"].items())
    assert warm["step"] == 20 and len(warm["offline_rb"]["columns"]["rewards"]) == 400


def test_heldout_error_is_relative():
    agent = wsrl_warmup.WarmupAgent(3, 1, hidden_size=16)
    batch = dict(obs=torch.zeros(4, 3), next_obs=torch.zeros(4, 3), actions=torch.zeros(4, 1), masks=torch.zeros(4))
    batch["rewards"] = torch.tensor([0.0, 2.0, 0.0, 2.0])  # variance 4/3
    with torch.no_grad():
        expected = (agent.qf(batch["obs"], batch["actions"]) - batch["rewards"]).square().mean() / (4 / 3)
    assert agent.heldout_error(batch) == pytest.approx(expected.item())


def test_gradients_that_stay_nan_end_the_run(tmp_path, data, monkeypatch, capsys):
    sample = wsrl_warmup.sample_mixed

    def broken(*args):
        batch, *rest = sample(*args)
        return batch | {"rewards": torch.full_like(batch["rewards"], math.nan)}, *rest

    monkeypatch.setattr(wsrl_warmup, "sample_mixed", broken)
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "run", data)
    assert end.value.code == 1 and "10 gradients in a row were not finite" in capsys.readouterr().err


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, data, monkeypatch, capsys):
    save, count = torch.save, []

    def full_disk(state, file):
        count.append(1)
        if len(count) > 2:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        save(state, file)

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "run", data, save_every=10)
    assert end.value.code == 1 and "No space left" in capsys.readouterr().err
    monkeypatch.undo()
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"checkpoint_10.pth", "checkpoint_20.pth"} and last_state(tmp_path / "run")["step"] == 20


def test_normalised_by_the_offline_statistics(tmp_path, data):
    run(tmp_path / "run", data)
    networks = last_state(tmp_path / "run")["agent"]["networks"]
    obs = np.concatenate([np.load(f"{data}/{name}.npz")["obs"] for name in ("demos", "suboptimal", "random")])
    assert networks["policy.obs_mean"].numpy() == pytest.approx(obs.mean(0), abs=1e-4)
    assert networks["policy.obs_std"].numpy() == pytest.approx(obs.std(0), rel=1e-3)
    run(tmp_path / "scratch", data, preset="scratch", offline_steps=None, learning_starts=10)  # the space's own bounds
    assert last_state(tmp_path / "scratch")["agent"]["networks"]["policy.obs_std"].tolist() == [1, 1, 8]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--retention-ratio", "0"], ["--retention-ratio 0.0", "--min-offline-ratio 0.5"]),
        (["--offline-decay-rate", "1.5"], ["--offline-decay-rate 1.5", "between 0 and 1"]),
        (["--min-offline-ratio", "0.9", "--initial-offline-ratio", "0.5"], ["--min-offline-ratio 0.9"]),
        (["--batch-size", "0"], ["--batch-size 0", "positive"]),
        (["--num-critics", "1", "--num-sampled-critics", "2"], ["--num-sampled-critics 2", "at most"]),
        (["--preset", "nonsense"], ["nonsense"]),
        (["--stage", "offline"], ["--checkpoint-path None"]),
        (
            ["--stage", "online", "--preset", "rlpd", "--checkpoint-path", "a", "--filtered-data-path", "b"],
            ["--stage online"],
        ),
        (["--env-id", "Nope-v0"], ["--env-id Nope-v0"]),
        (["--env-id", "CartPole-v1"], ["--env-id CartPole-v1", "actions"]),
        (["--offline-data", "demos=absent.npz"], ["absent.npz"]),
        (["--offline-data", "demos="], ["--offline-data demos=", "[name=]path[:weight]"]),
        (["--preset", "scratch", "--offline-data", "a.npz"], ["--offline-data", "a.npz", "left out"]),
        (["--buffer-size", str(10**12)], ["--buffer-size 1000000000000", "at most"]),
        (["--seed", str(2**32)], ["--seed 4294967296", "less than"]),
        (["--run-dir", f"{__file__}/below"], [f"--run-dir {__file__}/below"]),
        (["--save-dir", __file__], [f"--save-dir {__file__}"]),
        (["--data-dir", __file__], [f"--data-dir {__file__}"]),
        (["--checkpoint-path", str(ROOT)], [f"--checkpoint-path {ROOT}", "a file"]),
        (["--filtered-data-path", f"{__file__}/kept.npz"], [f"--filtered-data-path {__file__}"]),
    ],
)
def test_bad_input_ends_in_one_line(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["wsrl_warmup.py", *flags])
    with pytest.raises(SystemExit) as end:
        main(wsrl_warmup.parse_args(Args))
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and all(word in err for word in words), err
    assert not list(tmp_path.iterdir())


def test_names_of_the_design_work(monkeypatch):
    flags = "--exp_name hirol --offline_data_path demos.pkl --warmup_steps 50 --checkpoint_path w --demo_path f.pkl"
    monkeypatch.setattr(sys, "argv", ["wsrl_warmup.py", *flags.split()])
    args = wsrl_warmup.parse_args(Args)
    assert args.offline_steps == 50 and args.offline_data == ("demos.pkl",) and args.filtered_data_path == "f.pkl"
    flags = "--offline-data demos=a.npz:2.0 --offline-data random=b.pkl --offline-steps 7"
    monkeypatch.setattr(sys, "argv", ["wsrl_warmup.py", *flags.split()])
    args = wsrl_warmup.parse_args(Args)
    assert args.offline_data == ("demos=a.npz:2.0", "random=b.pkl") and args.offline_steps == 7


def test_make_data_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(Args(**TINY | dict(make_data=True)))
    names = {path.name for path in (tmp_path / "data" / "Pendulum-v1").iterdir()}
    assert names == {"demos.npz", "suboptimal.npz", "random.npz"} and not (tmp_path / "runs").exists()
    assert capsys.readouterr().out.count("\n") == 3


def test_demos_by_a_short_sac_run(tmp_path, monkeypatch):
    """No script for this environment: policies of the end and of the middle of a run play the episodes."""
    monkeypatch.setattr(wsrl_warmup, "swing_up", None)
    own = {"Pendulum-v1": wsrl_warmup.SMALL | dict(learning_starts=5, eval_every=0)}
    monkeypatch.setattr(wsrl_warmup, "TASKS", own)
    env = wsrl_warmup.ControlEnv("Pendulum-v1")
    args = Args(env_id="Pendulum-v1", data_steps=20, data_size=200, hidden_size=64, device="cpu")
    wsrl_warmup.make_sources(args, env, tmp_path)
    assert all(len(np.load(tmp_path / f"{name}.npz")["rewards"]) == 200 for name in ("demos", "suboptimal", "random"))


def test_online_rows_wrap_around(tmp_path, data):
    metrics = run(tmp_path / "run", data, buffer_size=12)
    assert metrics["buffer/online_size"] == 12
    rb = UniformReplayBuffer(4, 1, 1)
    names = ("rewards", "masks", "weights", "quality", "returns")
    for i in range(6):
        row = {name: np.full(1, i) for name in names} | {
            name: np.full((1, 1), i) for name in ("obs", "next_obs", "actions")
        }
        rb.insert(row)
    assert rb.columns["rewards"].tolist() == [4, 5, 2, 3] and len(rb) == 4
