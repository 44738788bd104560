"""wsrl_warmup.py: whole runs, two stages as two commands, resume after a kill, what off means, bad input."""

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from conftest import ROOT, same, spy
from conftest import metrics_without_times as rows

import wsrl_warmup
from wsrl_warmup import Args, main

TINY = dict(
    offline_steps=20, online_steps=30, batch_size=8, hidden_size=16, eval_episodes=1, eval_every=0
)
TINY |= dict(log_interval=5, buffer_size=100, device="cpu", data_size=200)
CLOSE = wsrl_warmup.Run.close
ENV = wsrl_warmup.make_env("Pendulum-v1")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    wsrl_warmup.make_sources(Args(**TINY), ("demos", "suboptimal", "random"), folder)
    return str(folder)


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr(
        wsrl_warmup.Run, "close", lambda *_: None
    )  # drawing takes longer than a tiny run


def run(folder, data, **options):
    return main(Args(**TINY | dict(run_dir=str(folder), data_dir=data) | options))


def state(folder):
    return torch.load(Path(folder) / "latest.pth", weights_only=True)


def assert_same_run(a, b):
    assert rows(a) == rows(b)
    one, other = state(a), state(b)
    for name in ("agent", "online_rb", "offline_rb"):
        assert (one[name] is None) == (other[name] is None) and same(
            one[name] or {}, other[name] or {}
        ), name
    for left, right in zip(
        *(x["agent"]["_extra_state"]["optimizers"] for x in (one, other)), strict=True
    ):
        assert torch.equal(left["state"][0]["exp_avg_sq"], right["state"][0]["exp_avg_sq"])


TABLE = {  # of the page
    "design": ("sac", 1_500, 0, 0.5, 1.0, 0.999, 0.5, 2, 1, True, "both"),
    "wsrl": ("calql", 1_500, 5000, 0.0, 0.0, 1.0, 0.0, 10, 4, False, "none"),
    "rlpd": ("sac", 0, 0, 1.0, 0.5, 1.0, 0.5, 10, 20, False, "none"),
    "scratch": ("sac", 0, 0, 0.0, 0.0, 1.0, 0.0, 2, 1, False, "none"),
    "bc": ("bc", 1_500, 0, 1.0, 0.5, 1.0, 0.5, 2, 1, False, "none"),
}
NAMES = "offline_objective offline_steps warmup_rollout_steps retention_ratio initial_offline_ratio offline_decay_rate"
NAMES += " min_offline_ratio num_critics utd_ratio use_prioritized_replay weighted_loss"


@pytest.mark.parametrize("preset", TABLE)
def test_presets_resolve_as_in_the_table_and_run(preset, tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr(wsrl_warmup.Run, "close", CLOSE if preset == "design" else lambda *_: None)
    args, folder, online_only = Args(preset=preset), tmp_path / "run", preset in ("rlpd", "scratch")
    assert tuple(getattr(args, name) for name in NAMES.split()) == TABLE[preset] and args.layer_norm
    assert (
        Args(preset=preset, num_critics=3, utd_ratio=7).num_critics == 3
    )  # an explicit option wins
    own = (
        dict(learning_starts=5, offline_steps=0)
        if online_only
        else dict(warmup_rollout_steps=5, online_steps=25)
    )
    metrics = run(folder, data, preset=preset, utd_ratio=2, **own)
    out, last = capsys.readouterr().out, rows(folder)[-1]
    assert metrics["charts/env_steps"] == 30 and f"preset {preset}: " in out
    assert ("switch: return of suboptimal -" in out) != online_only
    assert (
        last["buffer/offline_size"] == 400 * args.retention_ratio
        and last["buffer/online_size"] == 30
    )
    assert (folder / "final_model.pth").exists()
    if preset == "design":
        assert json.loads((folder / "args.json").read_text())["retention_ratio"] == 0.5
        assert json.loads((folder / "summary.json").read_text())["global_step"] == 50
        assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "own",
    [{}, dict(preset="wsrl", warmup_rollout_steps=5), dict(preset="bc", online_bc_weight=1.0)],
)
def test_two_commands_are_one_run(own, tmp_path, data):
    """The design document's pair: the second names checkpoint and kept rows, no --stage, and overwrites neither."""
    hand = own | dict(checkpoint_path=str(tmp_path / "warm.pth"))
    hand |= (
        {} if own.get("preset") == "wsrl" else dict(filtered_data_path=str(tmp_path / "kept.pth"))
    )
    run(tmp_path / "both", data, **own)
    run(tmp_path / "first", data, stage="offline", **hand)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    run(tmp_path / "second", "nowhere", **hand)  # needs no offline data any more
    whole = rows(tmp_path / "both")
    assert rows(tmp_path / "first") == [row for row in whole if row["global_step"] <= 20]
    assert rows(tmp_path / "second") == [row for row in whole if row["global_step"] > 20]
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())
    assert same(state(tmp_path / "both")["agent"], state(tmp_path / "second")["agent"])
    if "filtered_data_path" in hand:
        assert len(torch.load(hand["filtered_data_path"])["priorities"]) == (400 if own else 200)
    for wrong in ("checkpoint_path", "filtered_data_path"):
        with pytest.raises(SystemExit, match="final_model.pth does not hold what is needed"):
            run(tmp_path / "third", data, **hand | {wrong: str(tmp_path / "first/final_model.pth")})


class Killed(BaseException):
    pass


gym.register("ShortPendulum-v1", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=11)
RUNS = [{}, dict(preset="wsrl", warmup_rollout_steps=12, num_critics=3)]
RUNS += [dict(dropout=0.1, obs_noise=0.1, early_stop_patience=3)]
RUNS += [
    dict(
        preset="scratch",
        env_id="ShortPendulum-v1",
        offline_steps=0,
        online_steps=50,
        learning_starts=48,
    )
]


@pytest.mark.parametrize("own", RUNS)
def test_resume_at_any_moment(own, tmp_path, data, monkeypatch):
    """Offline, at the transition, in the frozen rollouts, inside an episode: checkpoints everywhere, kills between."""
    run(tmp_path / "whole", data, **own)
    log = wsrl_warmup.Run.log
    for kill_at in (5, 20, 45):  # 5: before the first checkpoint

        def dying(self, metrics, kill_at=kill_at):
            log(self, metrics)
            if metrics["global_step"] == kill_at:
                raise Killed

        folder = tmp_path / str(kill_at)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(wsrl_warmup.Run, "log", dying)
            run(folder, data, **own, save_every=7)
        run(folder, data, **own, save_every=7, resume=True)
        assert_same_run(folder, tmp_path / "whole")


def test_a_kill_at_the_switch_loses_nothing_that_is_handed_over(tmp_path, data, monkeypatch):
    write = wsrl_warmup.save_checkpoint
    for kill_at in (
        3,
        4,
        5,
    ):  # checkpoints after 7 and 14 updates, then kept rows, warm-up, checkpoint
        calls, folder = [], tmp_path / str(kill_at)

        def dying(path, state, calls=calls, kill_at=kill_at):
            write(path, state)
            calls.append(path.name)
            if len(calls) == kill_at:
                raise Killed

        hand = dict(stage="offline", filtered_data_path=f"{folder}/new/kept.pth", save_every=7)
        hand |= dict(checkpoint_path=f"{folder}/new/warm.pth")
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(wsrl_warmup, "save_checkpoint", dying)
            run(folder / "run", data, **hand)
        run(folder / "run", data, **hand, resume=True)
        assert sorted(path.name for path in (folder / "new").iterdir()) == ["kept.pth", "warm.pth"]
    assert calls == ["latest.pth", "latest.pth", "kept.pth", "warm.pth", "latest.pth"]


def test_sigkill_then_resume_from_the_command_line(tmp_path, data):
    options = dict(online_steps=60, save_every=10)
    run(tmp_path / "whole", data, **options)
    flags = TINY | options | dict(run_dir=tmp_path / "killed", data_dir=data)
    command = [
        word
        for name, value in flags.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "wsrl_warmup.py"), *command], stdout=subprocess.DEVNULL
    )
    while not (tmp_path / "killed" / "latest.pth").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(tmp_path / "killed", data, **options, resume=True)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("fault", ["signal", "raises", "nan"])
def test_a_signal_or_an_arm_that_fails_costs_nothing_learned(fault, tmp_path, data, monkeypatch):
    """Saved, then the end or the traceback; a NaN observation is never answered. Resumed: the run without it."""
    run(tmp_path / "whole", data)
    actions, step = [], wsrl_warmup.Collector.step

    def broken(self, action):
        actions.append(action)
        if len(actions) == 13 and fault == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif len(actions) == 13 and fault == "raises":
            raise OSError("the arm is stuck")
        elif len(actions) == 13:
            self.env = gym.wrappers.TransformObservation(self.env, lambda obs: obs * np.nan, None)
        return step(self, action)

    error = (
        contextlib.nullcontext()
        if fault == "signal"
        else pytest.raises((OSError, ValueError), match="stuck|gave")
    )
    with monkeypatch.context() as patch, error:
        patch.setattr(wsrl_warmup.Collector, "step", broken)
        run(tmp_path / "run", data)
    assert state(tmp_path / "run")["step"] == 32 + (fault == "signal")
    assert len(actions) == 13 and np.isfinite(actions).all()
    with pytest.raises(FileExistsError):
        run(tmp_path / "run", data)  # no run overwrites another
    run(tmp_path / "run", data, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_no_action_answers_a_nan_of_reset():
    collector = wsrl_warmup.Collector(
        Args(), gym.wrappers.TransformObservation(ENV, lambda obs: obs * np.nan, None)
    )
    with pytest.raises(ValueError, match="gave the observation"):
        collector.act(None, 1, random=True)


def test_an_episode_that_cannot_be_played_again_is_left(tmp_path, data, monkeypatch):
    run(tmp_path / "run", data)
    saved = state(tmp_path / "run")["collector"]
    collector = wsrl_warmup.Collector(Args(**TINY), ENV)
    collector.load_state_dict(saved)
    assert np.array_equal(collector.obs, saved["obs"].numpy()) and len(collector.actions) == 30
    collector.load_state_dict(saved | dict(obs=saved["obs"] + 1))
    assert collector.obs is None and collector.actions == []


def test_frozen_rollouts_change_no_weight_and_act_by_the_policy(tmp_path, data):
    hand = dict(warmup_rollout_steps=30, online_steps=0, checkpoint_path=str(tmp_path / "warm.pth"))
    run(tmp_path / "run", data, preset="wsrl", **hand)
    before, after = torch.load(tmp_path / "warm.pth", weights_only=True), state(tmp_path / "run")
    assert same(before["agent"], after["agent"])
    moments = [s["agent"]["_extra_state"]["optimizers"][0]["state"][0] for s in (before, after)]
    assert (
        torch.equal(moments[0]["exp_avg"], moments[1]["exp_avg"])
        and moments[0]["step"] == moments[1]["step"]
    )
    stored = after["online_rb"]["rows"].numpy().view(wsrl_warmup.row_dtype(ENV))
    agent = wsrl_warmup.WarmupAgent.load(tmp_path / "warm.pth")
    for step, row in zip(
        range(21, 51), stored, strict=True
    ):  # the policy's sample, not its mean, not a random action
        noise = np.random.default_rng([1, 3, step]).standard_normal(1, np.float32)
        assert row["actions"] == pytest.approx(agent.act(row["obs"], noise))


def test_rows_with_share_zero_may_hold_anything(tmp_path, data, monkeypatch):
    own = dict(initial_offline_ratio=0.0, min_offline_ratio=0.0)
    run(tmp_path / "clean", data, **own)

    def poisoned(*args):
        kept = keep(*args)
        for name in kept.rows.dtype.names:
            kept.rows[name] = np.nan
        return kept

    keep = wsrl_warmup.filter_offline_data
    monkeypatch.setattr(wsrl_warmup, "filter_offline_data", poisoned)
    run(tmp_path / "poisoned", data, **own)
    assert rows(tmp_path / "clean") == rows(tmp_path / "poisoned")


def test_a_weight_of_zero_is_the_plain_path(tmp_path, data):
    plain = dict(use_prioritized_replay=False, weighted_loss="none", offline_objective="sac")
    run(tmp_path / "plain", data, **plain)
    run(
        tmp_path / "zero",
        data,
        **plain | dict(offline_objective="cql", cql_alpha=0.0),
        priority_beta=0.9,
    )
    assert rows(tmp_path / "plain") == rows(tmp_path / "zero")


def test_what_reaches_an_update(tmp_path, data, monkeypatch):
    """Offline share and beta over the run, the conservative weight of each stage, the actor once in a step."""
    drawn, updates = spy(monkeypatch, wsrl_warmup, "sample_mixed"), []
    update = wsrl_warmup.WarmupAgent.update

    def watch(self, batch, full):
        updates.append((full, self.cql_alpha))
        return update(self, batch, full)

    monkeypatch.setattr(wsrl_warmup.WarmupAgent, "update", watch)
    options = dict(
        offline_objective="cql",
        cql_alpha=0.5,
        online_cql_alpha=0.25,
        offline_decay_rate=0.9,
        batch_size=10,
    )
    run(tmp_path / "run", data, utd_ratio=3, **options)
    splits, betas = [args[2] for args, _ in drawn], [args[3] for args, _ in drawn]
    assert splits[:20] == [(10, 0)] * 20 and splits[20::3][:5] == [(10 - n, n) for n in range(1, 6)]
    assert splits[-1] == (5, 5)
    assert [betas[0], betas[19], betas[20], betas[-1]] == pytest.approx([0.412, 0.64, 0.652, 1.0])
    assert updates == [(True, 0.5)] * 20 + [(False, 0.25), (False, 0.25), (True, 0.25)] * 30


class Ends(gym.Env):
    """Terminates at the third step, or is cut off there."""

    observation_space, action_space, scale = (
        gym.spaces.Box(0, 9, (3,)),
        gym.spaces.Box(-1, 1, (1,)),
        [1.0],
    )

    def __init__(self, terminated):
        self.terminated = terminated

    def reset(self, seed):
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.t += 1
        ended = self.t == 3
        return (
            np.full(3, self.t, np.float32),
            1.0,
            ended and self.terminated,
            ended and not self.terminated,
            {},
        )


@pytest.mark.parametrize("terminated", [True, False])
def test_only_a_termination_ends_the_value(terminated):
    collector = wsrl_warmup.Collector(Args(reward_scale=1.0), Ends(terminated))
    stored = [collector.step(collector.act(None, step, random=True))[0] for step in range(4)]
    assert [row["masks"] for row in stored] == [1, 1, float(not terminated), 1]
    assert (
        stored[2]["next_obs"][0] == 3 and stored[3]["obs"][0] == 0
    )  # the true last frame, then a new episode
    assert collector.episodes == [[3.0, 3]]


def test_early_stop_restores_the_best(tmp_path, data, monkeypatch, capsys):
    errors, kept, judge = iter([3.0, 2.0, 5.0, 4.0, 1.0]), [], wsrl_warmup.WarmupAgent.errors

    def watch(self, batch):
        if len(batch["rewards"]) == 400:  # retention, afterwards
            return judge(self, batch)
        assert len(batch["rewards"]) == 200  # one of the three episodes is held out
        kept.append(copy.deepcopy(self.state_dict()))
        return torch.full((2, 4), next(errors) ** 0.5), torch.tensor(
            [0.0, 1.0, 0.0, 1.0]
        ) * 3**0.5  # variance 1

    monkeypatch.setattr(wsrl_warmup.WarmupAgent, "errors", watch)
    hand = dict(
        checkpoint_path=str(tmp_path / "warm.pth"), sources=("demos", "suboptimal", "random")
    )
    run(tmp_path / "run", data, early_stop_patience=2, **hand)
    assert len(kept) == 4 and "early stop after 4 updates" in capsys.readouterr().out
    warm = torch.load(tmp_path / "warm.pth", weights_only=True)
    assert same(kept[1], warm["agent"]) and warm["step"] == 20
    judged = [
        row["losses/heldout_error"]
        for row in rows(tmp_path / "run")
        if "losses/heldout_error" in row
    ]
    assert judged == pytest.approx([3, 2, 5, 4])


def test_normalised_by_the_offline_statistics(tmp_path, data):
    run(tmp_path / "run", data)
    obs = np.concatenate(
        [np.load(f"{data}/{name}.npz")["obs"] for name in ("suboptimal", "random")]
    )
    weights = state(tmp_path / "run")["agent"]
    assert weights["critic.encoder.mean"].numpy() == pytest.approx(obs.mean(0), abs=1e-4)
    assert weights["critic_target.encoder.std"].numpy() == pytest.approx(obs.std(0), rel=1e-3)
    run(
        tmp_path / "scratch", data, preset="scratch", offline_steps=0, learning_starts=10
    )  # the space's own bounds
    assert state(tmp_path / "scratch")["agent"]["critic.encoder.std"].tolist() == [1, 1, 8]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "kept.pth").touch()
    (tmp_path / "warm.pth").touch()
    kept = dict(checkpoint_path="no.pth", filtered_data_path="kept.pth")
    for own in (dict(stage="both", checkpoint_path="warm.pth"), kept):
        with pytest.raises(ValueError, match="nothing is overwritten"):
            Args(**{k: str(tmp_path / v) if "path" in k else v for k, v in own.items()})
    with pytest.raises(SystemExit, match="absent.npz"):
        main(
            tyro.cli(
                Args,
                args=[
                    "--offline-data",
                    f"demos={tmp_path}/absent.npz",
                    "--run-dir",
                    f"{tmp_path}/run",
                ],
            )
        )
    assert not (tmp_path / "run").exists()


def test_names_of_the_design_work(tmp_path):
    flags = "--exp_name hirol --offline_data_path demos.pkl --warmup_steps 50 --checkpoint_path w"
    args = tyro.cli(wsrl_warmup.WSRLConfig, args=flags.split())
    assert args.offline_steps == 50 and args.offline_data == ("demos.pkl",)
    assert args.run_dir.startswith("runs/hirol__1__")
    (tmp_path / "w").touch()
    flags = f"--exp_name hirol --checkpoint_path {tmp_path}/w --demo_path f.pkl --learner"
    args = tyro.cli(Args, args=flags.split())
    assert args.stage == "online" and args.filtered_data_path == "f.pkl" and args.demo_weight == 2.0
    assert (args.success_weight_bonus, args.priority_alpha, args.priority_beta) == (1.5, 0.6, 0.4)
    args = tyro.cli(Args, args="--offline-data demos=a.npz:2.0 --offline-data random=b.pkl".split())
    assert args.offline_data == ("demos=a.npz:2.0", "random=b.pkl")


def test_demos_by_a_short_sac_run(tmp_path, monkeypatch):
    """No script for this environment: policies of the middle and of the end of a run play the episodes."""
    args = Args(**TINY | dict(env_id="ShortPendulum-v1", data_size=22))
    wsrl_warmup.make_sources(args, ("demos", "suboptimal"), tmp_path)
    assert all(
        len(np.load(tmp_path / f"{name}.npz")["rewards"]) == 22 for name in ("demos", "suboptimal")
    )
