"""wsrl_warmup.py: whole runs, two stages as two commands, resume after a kill, what off means, bad input."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, same, spy
from conftest import metrics_without_times as rows
from PIL import Image

import wsrl_warmup
from wsrl_warmup import PRESETS, Args, default_options, main

gym.register("ShortPendulum-v1", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=11)
TINY = dict(warmup_steps=20, online_steps=33, batch_size=8, hidden_size=16, eval_episodes=1)
TINY |= dict(eval_every=1_000, buffer_size=100, device="cpu", env_id="ShortPendulum-v1")
TINY |= dict(capture_video=False)
DRAW = wsrl_warmup.Run.finish


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Options that name a data file of each source, with 22 rows in two episodes"""
    folder = tmp_path_factory.mktemp("data")
    env = wsrl_warmup.make_gym_env("ShortPendulum-v1")
    options = {}
    for source in ("suboptimal", "random"):
        transitions = wsrl_warmup.make_source(env, wsrl_warmup.swing_up, source, 1, num_rows=220)
        (folder / f"{source}.pkl").write_bytes(pickle.dumps(transitions))
        options[f"{source}_data_path"] = [str(folder / f"{source}.pkl")]
    return options


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """Drawing takes longer than a tiny run. Metrics are logged every five steps."""
    monkeypatch.setattr(wsrl_warmup.Run, "finish", lambda *_: None)
    monkeypatch.setattr(Args, "log_interval", 5)


def make_args(folder, data, preset="design", **options):
    tiny = dict(TINY)
    if preset in ("rlpd", "scratch"):
        tiny |= dict(warmup_steps=0, warmup_rollout_steps=5)
    if preset == "scratch" or options.get("learner"):
        data = {}
    defaults = default_options(preset=preset) | tiny | data
    return Args(**defaults | dict(run_dir=str(folder)) | options)


def run(folder, data, **options):
    return main(make_args(folder, data, **options))


def state(folder, name="latest.pth"):
    return torch.load(Path(folder) / name, weights_only=True)


def assert_same_run(a, b):
    assert rows(a) == rows(b)
    one, other = state(a), state(b)
    for name in ("online_rb", "offline_rb"):
        assert same(one[name], other[name]), name
    assert same(one["agent"]["model"], other["agent"]["model"])
    for name in ("critic_optimizer", "actor_optimizer"):
        left, right = (x["agent"][name]["state"] for x in (one, other))
        assert left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)


TABLE = {  # of the page
    "design": ("sac", 50_000, 0, 0.2, 1.0, 0.5, 2, 1, True, "both"),
    "wsrl": ("calql", 50_000, 5000, 0.0, 0.0, 0.0, 10, 4, False, "none"),
    "rlpd": ("sac", 0, 200, 1.0, 0.5, 0.5, 10, 20, False, "none"),
    "bc": ("bc", 50_000, 0, 1.0, 0.5, 0.5, 2, 1, False, "none"),
    "scratch": ("sac", 0, 200, 0.0, 0.0, 0.0, 2, 1, False, "none"),
}
NAMES = "offline_objective warmup_steps warmup_rollout_steps retention_ratio initial_offline_ratio "
NAMES += "min_offline_ratio num_critics utd_ratio use_prioritized_replay weighted_loss"


@pytest.mark.parametrize("preset", TABLE)
def test_presets_are_those_of_the_table_and_run(preset, tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr(wsrl_warmup.Run, "finish", DRAW if preset == "design" else lambda *_: None)
    options = default_options("Own-v0", preset)
    args = Args(**options)
    assert tuple(getattr(args, name) for name in NAMES.split()) == TABLE[preset] and args.layer_norm
    assert args.offline_decay_rate == 0.999
    folder = tmp_path / "run"
    online = dict(
        warmup_rollout_steps=5,
        utd_ratio=2,
        retention_ratio=PRESETS[preset].get("retention_ratio", 0.5),
    )
    metrics = run(folder, data, preset=preset, **online)
    out, last = capsys.readouterr().out, rows(folder)[-1]
    assert metrics["charts/env_steps"] == 33
    assert ("after the warm-up of 20 updates the return" in out) == (args.warmup_steps > 0)
    kept = 440 * online["retention_ratio"]
    assert (last["buffer/offline_size"], last["buffer/online_size"]) == (kept, 33)
    updates = (33 - 5) * 2 + (20 if args.warmup_steps else 0)
    assert last["charts/updates"] == updates
    if preset == "design":
        saved = json.loads((folder / "args.json").read_text(encoding="utf-8"))
        assert saved["retention_ratio"] == 0.5
        assert (
            json.loads((folder / "summary.json").read_text(encoding="utf-8"))["global_step"] == 53
        )
        assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
        lines = out.splitlines()[-2:]
        first = rows(folder)[0]["eval/episodic_return"]
        change = f"{first:.1f} -> {last['eval/episodic_return']:.1f}"
        assert lines[0].startswith(f"eval/episodic_return {change}, 33 environment steps, ")
        assert str(folder) in lines[1] and "final_model.pth" in lines[1]


def test_a_run_names_what_differs_from_its_preset(tmp_path, data, capsys):
    """In Python, Args(preset="bc") alone sets no other option."""
    main(Args(**TINY | data, preset="bc", retention_ratio=1.0, run_dir=str(tmp_path / "python")))
    out = capsys.readouterr().out
    assert "preset bc has --offline-objective bc: this run has sac" in out
    assert "--retention-ratio" not in out
    run(tmp_path / "applied", data, preset="bc")
    assert "preset bc has" not in capsys.readouterr().out


def parse_args(words):
    """As the command line does"""
    with mock.patch.object(sys, "argv", ["wsrl_warmup.py", *words]):
        return wsrl_warmup.parse_args()


# --- two stages ---
@pytest.mark.parametrize(
    "own",
    [
        {},
        dict(preset="wsrl", warmup_rollout_steps=5),
        dict(preset="bc", bc_weight=1.0),
        dict(early_stop_patience=99, obs_noise=0.1),
    ],
)
def test_two_commands_are_one_run(own, tmp_path, data):
    """The second reads the agent and the rows that the first kept, and overwrites neither."""
    hand = own | dict(checkpoint_path=str(tmp_path / "warm.pth"))
    run(tmp_path / "both", data, **own)
    run(tmp_path / "first", data, **hand)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert sorted(before) == ["filtered_demos.pkl", "warm.pth"]
    if own.get("preset") != "wsrl":  # which keeps no rows
        hand["demo_path"] = str(tmp_path / "filtered_demos.pkl")
    run(tmp_path / "second", {}, **hand, learner=True)
    whole = rows(tmp_path / "both")
    assert rows(tmp_path / "first") == [row for row in whole if row["global_step"] <= 20]
    second = rows(tmp_path / "second")
    assert second[0]["eval/episodic_return"] == rows(tmp_path / "first")[-1]["eval/episodic_return"]
    assert second[1:] == [row for row in whole if row["global_step"] > 20]
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())
    both, learner = state(tmp_path / "both")["agent"], state(tmp_path / "second")["agent"]
    assert same(both["model"], learner["model"])


def command(text, folder, **kwargs):
    words = [sys.executable, str(ROOT / "wsrl_warmup.py"), *text.split()]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, **kwargs)


def test_the_commands_of_the_design_document(tmp_path):
    """As they stand, but for the script's name and fewer steps: stage one ends offline, stage two reads its files."""
    env = wsrl_warmup.make_gym_env("Pendulum-v1")
    demos = wsrl_warmup.make_source(env, wsrl_warmup.swing_up, "demos", 1, num_rows=400)
    (tmp_path / "demos.pkl").write_bytes(pickle.dumps(demos))
    short = "--eval-episodes=1 --batch-size=16"
    first = command(
        "--exp_name=hirol_fixed_gripper --offline_data_path=demos.pkl --warmup_steps=50 "
        f"--checkpoint_path=warmup_ckpt {short}",
        tmp_path,
    )
    assert first.returncode == 0, first.stderr
    assert "0 environment steps" in first.stdout
    assert len(pickle.loads((tmp_path / "filtered_demos.pkl").read_bytes())) == 200
    second = command(
        "--exp_name=hirol_fixed_gripper --checkpoint_path=warmup_ckpt "
        "--demo_path=filtered_demos.pkl --learner --online-steps=210",
        tmp_path,
    )
    assert second.returncode == 0, second.stderr
    assert "210 environment steps" in second.stdout
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2 and all(run.name.startswith("hirol_fixed_gripper__1__") for run in runs)
    args = json.loads((runs[1] / "args.json").read_text(encoding="utf-8"))
    assert args["batch_size"] == 16 and args["warmup_steps"] == 50, "options of stage one"
    assert rows(runs[1])[-1]["global_step"] == 260
    again = command("--warmup_steps=50 --checkpoint_path=warmup_ckpt", tmp_path)
    assert again.returncode == 1 and "warmup_ckpt already exists" in again.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_stage_two_takes_the_preset_of_stage_one(tmp_path, data, monkeypatch, capsys):
    run(tmp_path / "first", data, preset="bc", lr=5e-3, checkpoint_path=str(tmp_path / "warm"))
    typed = f"--learner --checkpoint-path {tmp_path}/warm --demo-path {tmp_path}/filtered_demos.pkl"
    args = parse_args([*typed.split(), "--run-dir", str(tmp_path / "second")])
    assert (args.preset, args.initial_offline_ratio, args.lr) == ("bc", 0.5, 5e-3)
    assert args.env_id == "ShortPendulum-v1"
    args = parse_args([*typed.split(), "--lr", "1e-3"])
    assert args.lr == 1e-3 and args.preset == "bc"
    assert "changed: --lr 0.005 -> 0.001" in capsys.readouterr().out


@pytest.mark.parametrize("own", [dict(preset="wsrl", warmup_rollout_steps=5), dict(resume=True)])
def test_the_command_that_stage_one_prints_is_accepted(own, tmp_path, data, capsys):
    run(tmp_path / "first", data, **own, checkpoint_path=str(tmp_path / "warm"))
    printed = capsys.readouterr().out.splitlines()[-1]
    args = parse_args(printed.split("wsrl_warmup.py ")[1].split())
    assert args.learner and not args.resume
    metrics = main(replace(args, run_dir=str(tmp_path / "second")))
    assert metrics["buffer/offline_size"] == (0 if args.preset == "wsrl" else 220)


def test_stage_two_reports_only_what_was_changed(tmp_path, data, capsys):
    """Not its new folder and its data file."""
    run(tmp_path / "first", data, checkpoint_path=str(tmp_path / "warm"))
    words = f"--learner --checkpoint-path {tmp_path}/warm --demo-path {tmp_path}/filtered_demos.pkl"
    words += f" --run-dir {tmp_path}/second --lr 0.002"
    capsys.readouterr()
    main(parse_args(words.split()))
    out = capsys.readouterr().out
    changed = [line for line in out.splitlines() if line.startswith("changed:")]
    assert changed == ["changed: --lr 0.001 -> 0.002"]


@pytest.mark.parametrize("preset", ["design", "bc"])
@pytest.mark.parametrize("policy_return, words", [(1.0, "the policy is"), (-1.0, "the data are")])
def test_the_line_after_the_warm_up_says_which_is_better(preset, policy_return, words, capsys):
    progress = wsrl_warmup.Progress(data_returns={"demos": 0.0, "random": -2.0})
    wsrl_warmup.print_switch(progress, policy_return)
    out = capsys.readouterr().out
    assert words in out and "--preset" not in out


def test_another_preset_over_saved_options_is_refused(tmp_path, data):
    """The saved options already have the values of a preset."""
    run(tmp_path / "first", data, preset="bc", lr=5e-3, checkpoint_path=str(tmp_path / "warm"))
    typed = f"--learner --checkpoint-path {tmp_path}/warm --demo-path {tmp_path}/filtered_demos.pkl"
    for words in (typed, f"--resume --run-dir {tmp_path}/first"):
        with pytest.raises(SystemExit, match="cannot change --preset from bc"):
            parse_args([*words.split(), "--preset", "rlpd"])
        args = parse_args([*words.split(), "--preset", "bc"])
        assert (args.lr, args.initial_offline_ratio) == (5e-3, 0.5)


def test_resume_reads_no_options_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "args.json").write_text(json.dumps(dict(lr=7.0)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        parse_args(["--resume"])


def test_a_trained_agent_that_had_no_warm_up_goes_on_with_its_policy(tmp_path, data, monkeypatch):
    """final_model.pth of scratch: no random actions, and the given rows are all used."""
    run(tmp_path / "first", {}, preset="scratch")
    model, demos = str(tmp_path / "first" / "final_model.pth"), data["suboptimal_data_path"][0]
    explored = spy(monkeypatch, wsrl_warmup, "explore")
    hand = dict(checkpoint_path=model, learner=True, demo_path=demos, initial_offline_ratio=0.5)
    own = dict(warmup_steps=0, retention_ratio=0.1, warmup_rollout_steps=5)
    run(tmp_path / "second", {}, **hand, **own)
    (agent, obs, step, _), action = explored[0]
    rng = wsrl_warmup.random_numbers(1, "step", 1)
    rng.integers(2**31)  # the seed of the episode
    trained = wsrl_warmup.WarmupAgent.load(model)
    noise = torch.from_numpy(rng.standard_normal(1, np.float32))
    assert action == pytest.approx(trained.act(obs, noise))
    last = rows(tmp_path / "second")[-1]
    assert last["buffer/offline_size"] == 220
    assert last["global_step"] == trained.updates + 33


def test_speed_counts_the_steps_of_this_command(tmp_path, data, monkeypatch):
    """The second command begins at step 20 with a new clock."""
    hand = dict(checkpoint_path=str(tmp_path / "warm.pth"))
    run(tmp_path / "first", data, **hand)
    hand |= dict(learner=True, demo_path=str(tmp_path / "filtered_demos.pkl"))
    steps = spy(monkeypatch, wsrl_warmup, "take_step")
    monkeypatch.setattr(wsrl_warmup.time, "time", lambda: 50.0 + len(steps))  # a second per step
    run(tmp_path / "second", {}, **hand)
    lines = (tmp_path / "second" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["charts/SPS"] for line in lines[1:]] == pytest.approx([1.0] * 7)


def test_a_demo_pickle_serves_as_demo_path(tmp_path, data):
    """--demo-path may name demonstrations that no warm-up has written: they are rated like demos."""
    run(tmp_path / "first", data, checkpoint_path=str(tmp_path / "warm"))
    hand = dict(checkpoint_path=str(tmp_path / "warm"), learner=True)
    run(tmp_path / "second", {}, **hand, demo_path=data["suboptimal_data_path"][0])
    assert rows(tmp_path / "second")[-1]["buffer/offline_size"] == 220
    for wrong in ("first/latest.pth", "first/final_model.pth"):
        with pytest.raises(SystemExit, match="data file"):
            run(tmp_path / "third", {}, **hand, demo_path=str(tmp_path / wrong))
    hand["checkpoint_path"] = data["random_data_path"][0]
    with pytest.raises(SystemExit, match="does not hold an agent"):
        run(tmp_path / "third", {}, **hand, demo_path=data["suboptimal_data_path"][0])
    assert not (tmp_path / "third").exists(), "an empty run folder stays behind"


@pytest.mark.parametrize(
    "changed",
    ["--hidden-size 8", "--init-alpha 0.5", "--reward-scale 0.3", "--random-data-path other.npz"],
)
def test_stage_two_keeps_what_stage_one_has_learned_with(changed, tmp_path, data):
    run(tmp_path / "first", data, checkpoint_path=str(tmp_path / "warm"))
    words = f"--learner --checkpoint-path {tmp_path}/warm {changed}"
    with pytest.raises(SystemExit, match=f"cannot change {changed.split()[0]} from "):
        parse_args(words.split())


def test_stage_two_may_have_another_environment_and_another_buffer(tmp_path, data, capsys):
    """Offline here, online on the robot"""
    run(tmp_path / "first", data, checkpoint_path=str(tmp_path / "warm"))
    words = f"--learner --checkpoint-path {tmp_path}/warm --run-dir {tmp_path}/second"
    own = "--env-id Pendulum-v1 --buffer-size 20 --no-use-prioritized-replay --priority-alpha 0.3"
    metrics = main(parse_args([*words.split(), *own.split()]))
    assert "changed: --env-id ShortPendulum-v1 -> Pendulum-v1" in capsys.readouterr().out
    assert metrics["buffer/online_size"] == 20
    assert metrics["eval/episodic_length"] == 200


def test_stage_two_can_switch_dropout_off(tmp_path, data):
    """Dropout has no weights, so it does not change the names of the others."""
    run(tmp_path / "first", data, dropout=0.2, checkpoint_path=f"{tmp_path}/new/warm.pth")
    typed = f"--learner --checkpoint-path {tmp_path}/new/warm.pth --dropout 0"
    typed += f" --demo-path {tmp_path}/new/filtered_demos.pkl --run-dir {tmp_path}/second"
    main(parse_args(typed.split()))
    assert state(tmp_path / "second")["agent"]["args"]["dropout"] == 0
    assert rows(tmp_path / "second")[-1]["charts/env_steps"] == 33


def test_the_folders_of_both_files_of_stage_one_are_made(tmp_path, data):
    paths = dict(checkpoint_path=f"{tmp_path}/a/warm.pth", demo_path=f"{tmp_path}/b/kept.pkl")
    run(tmp_path / "run", data, **paths)
    assert all(Path(path).exists() for path in paths.values())


def test_a_run_that_skips_updates_says_so(tmp_path, capsys):
    """The square of the error on one row overflows, and its priority makes it the most frequent."""
    env = wsrl_warmup.make_gym_env("ShortPendulum-v1")
    transitions = wsrl_warmup.make_source(env, wsrl_warmup.swing_up, "random", 1, num_rows=220)
    (tmp_path / "clean.pkl").write_bytes(pickle.dumps(transitions))
    transitions[5]["rewards"] = 1e25
    (tmp_path / "outlier.pkl").write_bytes(pickle.dumps(transitions))
    for name in ("clean", "outlier"):
        run(tmp_path / name, dict(random_data_path=[f"{tmp_path}/{name}.pkl"]), online_steps=0)
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if line.startswith("[20/")]
        assert ("skipped_steps 0 " in line) == (name == "clean")


# --- resume ---
class Killed(BaseException):
    pass


RUNS = [{}, dict(preset="wsrl", warmup_rollout_steps=12, num_critics=3)]
RUNS += [
    dict(dropout=0.1, obs_noise=0.1, early_stop_patience=3),
    dict(preset="scratch", online_steps=53),
]


@pytest.mark.parametrize("own", RUNS)
def test_resume_at_any_moment(own, tmp_path, data, monkeypatch):
    """Offline, at the switch, in the frozen rollouts, inside an episode: checkpoints everywhere, kills between."""
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


def test_a_damaged_checkpoint_leaves_the_metrics(tmp_path, data):
    run(tmp_path / "run", data)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "latest.pth").write_bytes(b"damaged")
    with pytest.raises(Exception):  # noqa: B017 - any type
        run(tmp_path / "run", data, resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("save_every", [7, 1_000])
def test_a_kill_at_the_switch_loses_nothing_that_is_handed_over(
    save_every, tmp_path, data, monkeypatch
):
    """Before and after each file is written; with save_every 1000 there is no earlier checkpoint."""
    whole = dict(checkpoint_path=f"{tmp_path}/whole.pth", demo_path=f"{tmp_path}/whole.pkl")
    run(tmp_path / "whole", data, save_every=save_every, **whole)
    names = ["latest.pth"] * (3 if save_every == 7 else 1) + ["kept.pkl", "warm.pth"]
    for kill_at in range(2 * len(names)):
        calls, folder = [], tmp_path / str(kill_at)
        folder.mkdir()

        def dying(write, kill_at, calls, path, *others):
            calls.append(Path(path).name)
            if len(calls) == kill_at // 2 + 1 and kill_at % 2 == 0:
                raise Killed
            write(path, *others)
            if len(calls) == kill_at // 2 + 1:
                raise Killed

        hand = dict(checkpoint_path=f"{folder}/warm.pth", demo_path=f"{folder}/kept.pkl")
        with monkeypatch.context() as patch, pytest.raises(Killed):
            for name in ("write_checkpoint", "write_transitions"):
                write = getattr(wsrl_warmup, name)
                patch.setattr(wsrl_warmup, name, partial(dying, write, kill_at, calls))
            run(folder / "run", data, **hand, save_every=save_every)
        assert calls == names[: len(calls)]
        run(folder / "run", data, **hand, save_every=save_every, resume=True)
        assert (folder / "kept.pkl").read_bytes() == (tmp_path / "whole.pkl").read_bytes()
        assert same(state(folder, "warm.pth")["model"], state(tmp_path, "whole.pth")["model"])
        assert (folder / "run" / "final_model.pth").exists()


def test_sigkill_then_resume_without_typing_the_options_again(tmp_path):
    flags = "--warmup-steps 60 --online-steps 450 --batch-size 16 --eval-episodes 1 --save-every 10"
    flags += " --no-capture-video --retention-ratio 0.3 --seed 3"
    assert command(f"{flags} --run-dir whole", tmp_path).returncode == 0
    words = [sys.executable, str(ROOT / "wsrl_warmup.py"), *flags.split(), "--run-dir", "killed"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "latest.pth").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "final_model.pth").exists()
    resumed = command("--run-dir killed --resume", tmp_path)
    assert resumed.returncode == 0 and "resuming after step" in resumed.stdout, resumed.stderr
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    saved = json.loads((tmp_path / "killed" / "args.json").read_text(encoding="utf-8"))
    assert (saved["retention_ratio"], saved["seed"], saved["batch_size"]) == (0.3, 3, 16)


@pytest.mark.parametrize(
    "changed",
    """--offline-data-path other.npz | --demo-weight 5 | --hidden-size 8 | --buffer-size 40
    --early-stop-patience 3 | --gamma 0.9 | --reward-scale 0.3 | --retention-ratio 0.9
    --retention-by reward | --offline-objective cql | --preset bc | --env-id Pendulum-v1
    --checkpoint-path w | --priority-alpha 0.3""".replace("\n", "|").split("|"),
)
def test_what_is_in_the_checkpoint_cannot_change_and_a_refused_resume_does_no_harm(
    changed, tmp_path, data
):
    """Data files and ratings were read before. A refused option is not the next default."""
    run(tmp_path / "run", data, online_steps=22)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    resume = ["--resume", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match=f"cannot change {changed.split()[0]} from "):
        parse_args([*resume, *changed.split()])
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    main(parse_args([*resume, "--online-steps", "33"]))
    assert rows(tmp_path / "run")[-1]["charts/env_steps"] == 33


@pytest.mark.parametrize("own", ["--demo-path x.pkl", "--checkpoint-path w", "--no-learner"])
def test_a_resumed_run_keeps_its_part_of_the_two_commands(own, tmp_path, data):
    run(tmp_path / "first", data, checkpoint_path=str(tmp_path / "warm"))
    paths = dict(checkpoint_path=str(tmp_path / "warm"), learner=True)
    run(tmp_path / "second", data, **paths, online_steps=22)
    resume = ["--resume", "--run-dir", str(tmp_path / "second")]
    with pytest.raises(SystemExit, match=f"cannot change {own.replace('no-', '').split()[0]} from"):
        parse_args([*resume, *own.split()])
    metrics = main(parse_args([*resume, "--online-steps", "33"]))
    assert metrics["charts/env_steps"] == 33


def test_options_that_an_older_run_did_not_have_are_the_defaults(tmp_path, data):
    run(tmp_path / "run", data, online_steps=22)
    path = tmp_path / "run" / "args.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    del saved["capture_video"], saved["gamma"]
    path.write_text(json.dumps(saved | dict(an_option_that_left=1)), encoding="utf-8")
    args = parse_args(["--resume", "--run-dir", str(tmp_path / "run")])
    assert (args.gamma, args.capture_video, args.hidden_size) == (0.99, True, 16)


@pytest.mark.parametrize("fault", ["signal", "raises", "nan"])
def test_a_signal_or_a_robot_that_fails_costs_nothing_learned(fault, tmp_path, data, monkeypatch):
    """A signal waits for the end of the episode. After an error the run is saved, and a new episode starts."""
    run(tmp_path / "whole", data)
    steps, step = [], gym.wrappers.RecordEpisodeStatistics.step

    def broken(self, action):
        steps.append(action)
        obs, *others = step(self, action)
        if (
            len(steps) == 24 and fault == "signal"
        ):  # 11 steps are the first evaluation, 11 the second
            os.kill(os.getpid(), signal.SIGTERM)
        elif len(steps) == 24 and fault == "raises":
            raise OSError("the arm is stuck")
        elif len(steps) == 24:
            obs = obs * np.nan
        return obs, *others

    error = contextlib.nullcontext()
    if fault != "signal":
        error = pytest.raises((OSError, ValueError), match="stuck|not finite")
    with monkeypatch.context() as patch, error:
        patch.setattr(gym.wrappers.RecordEpisodeStatistics, "step", broken)
        run(tmp_path / "run", data)
    saved = state(tmp_path / "run")["progress"]
    assert (saved["warmup_updates"], saved["env_steps"]) == (20, 11 if fault == "signal" else 1)
    with pytest.raises(SystemExit, match="already exists"):
        run(tmp_path / "run", data)  # no run overwrites another
    run(tmp_path / "run", data, resume=True)
    assert rows(tmp_path / "run")[-1]["global_step"] == 53
    if fault == "signal":
        assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_resumed_run_that_has_no_step_left_ends_with_an_evaluation(tmp_path, data, monkeypatch):
    """A signal stopped it after an episode, where no evaluation was due."""
    step = gym.wrappers.RecordEpisodeStatistics.step

    def stopping(self, action):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, action)

    take_step = wsrl_warmup.take_step

    def watch(*args):
        with monkeypatch.context() as patch:
            if args[3] == 3:
                patch.setattr(gym.wrappers.RecordEpisodeStatistics, "step", stopping)
            return take_step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(wsrl_warmup, "take_step", watch)
        run(tmp_path / "run", data)
    assert "eval/episodic_return" not in rows(tmp_path / "run")[-1]
    metrics = run(tmp_path / "run", data, online_steps=11, resume=True)
    assert metrics["charts/env_steps"] == 11 and "eval/episodic_return" in metrics
    assert (tmp_path / "run" / "final_model.pth").exists()


def test_a_second_ctrl_c_saves_nothing(tmp_path, data, monkeypatch):
    """It ends the run at once: writing large buffers takes a while."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(wsrl_warmup, "take_step", interrupted)
    saved = spy(monkeypatch, wsrl_warmup, "save_run")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", data)
    assert len(saved) == 1  # at the end of the warm-up


def test_a_run_outside_the_main_thread_gets_no_signals(tmp_path, data):
    """As in a notebook or a tool that starts runs in threads"""
    results = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path / "run", data)))
    thread.start()
    thread.join()
    assert results[0]["charts/env_steps"] == 33


def test_statistics_stay_on_the_device_until_a_line_is_logged(monkeypatch):
    """`float` of each value would wait for the GPU in each update."""
    monkeypatch.setattr(torch.Tensor, "__float__", None, raising=False)
    window = [{"losses/q_values": torch.tensor(float(i)), "charts/length": i} for i in range(4)]
    means = wsrl_warmup.mean_of_each([*window, {"eval/success_rate": True}])
    assert means == {"losses/q_values": 1.5, "charts/length": 1.5, "eval/success_rate": 1.0}


# --- what reaches an update ---
def test_frozen_rollouts_change_no_weight_and_act_by_the_policy(tmp_path, data):
    hand = dict(warmup_rollout_steps=33, online_steps=34, utd_ratio=1)
    hand["checkpoint_path"] = str(tmp_path / "warm.pth")
    run(tmp_path / "first", data, preset="wsrl", **hand)
    run(tmp_path / "run", {}, preset="wsrl", **hand, learner=True)
    before, after = state(tmp_path, "warm.pth"), state(tmp_path / "run")["agent"]
    assert before["updates"] == 20 and after["updates"] == 21  # the last step alone is not frozen
    stored = state(tmp_path / "run")["online_rb"]["rows"].numpy()
    env = wsrl_warmup.make_gym_env("ShortPendulum-v1")
    stored = stored.view(wsrl_warmup.make_row_dtype(env))
    agent = wsrl_warmup.WarmupAgent.load(tmp_path / "warm.pth")
    for step, row in enumerate(stored, 1):  # a sample of the policy, not its mean, not at random
        rng = wsrl_warmup.random_numbers(1, "step", step)
        if step % 11 == 1:
            rng.integers(2**31)  # the seed of an episode
        noise = torch.from_numpy(rng.standard_normal(1, np.float32))
        assert row["actions"] == pytest.approx(agent.act(row["obs"], noise), abs=1e-6)


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
    assert rows(tmp_path / "clean")[-1] == rows(tmp_path / "poisoned")[-1]


def test_what_reaches_an_update(tmp_path, data, monkeypatch):
    """Offline share and beta over the run, the objective of each stage, the actor once in a step."""
    drawn, updates = spy(monkeypatch, wsrl_warmup, "sample_mixed"), []
    update = wsrl_warmup.WarmupAgent.update

    def watch(self, batch, train_actor, method):
        updates.append((train_actor, method))
        return update(self, batch, train_actor, method)

    monkeypatch.setattr(wsrl_warmup.WarmupAgent, "update", watch)
    options = dict(offline_objective="cql", offline_decay_rate=0.9, batch_size=10, obs_noise=0.2)
    run(tmp_path / "run", data, utd_ratio=3, online_steps=30, **options)
    splits = [(len(result[1]), len(result[2])) for _, result in drawn]
    betas, noises = [args[4] for args, _ in drawn], [args[5] for args, _ in drawn]
    assert splits[:20] == [(10, 0)] * 20
    assert splits[20::3][:5] == [(10 - n, n) for n in range(1, 6)] and splits[-1] == (5, 5)
    assert [betas[0], betas[19], betas[20], betas[-1]] == pytest.approx([0.412, 0.64, 0.652, 1.0])
    assert noises == [0.2] * 20 + [0.0] * 90
    assert updates == [(True, "cql")] * 20 + [(False, "sac"), (False, "sac"), (True, "sac")] * 30


class Ends(gym.Env):
    """Ends at the third step: terminates, or is cut off."""

    observation_space = gym.spaces.Box(0, 9, (3,))
    action_space = gym.spaces.Box(-1, 1, (1,))
    terminates = True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.t += 1
        ended = self.t == 3
        obs = np.full(3, self.t, np.float32)
        return obs, 1.0, ended and self.terminates, ended and not self.terminates, {}


gym.register("Ends-v0", Ends)


@pytest.mark.parametrize("terminates", [True, False])
def test_only_a_termination_ends_the_value(terminates, tmp_path, monkeypatch):
    monkeypatch.setattr(Ends, "terminates", terminates)
    run(tmp_path / "run", {}, preset="scratch", env_id="Ends-v0", online_steps=6)
    stored = state(tmp_path / "run")["online_rb"]["rows"].numpy()
    stored = stored.view(wsrl_warmup.make_row_dtype(wsrl_warmup.make_gym_env("Ends-v0")))
    assert stored["masks"].tolist() == [1, 1, float(not terminates)] * 2
    # the true last observation, then a new episode
    assert stored["next_obs"][:, 0].tolist() == [1, 2, 3] * 2 and stored["obs"][3, 0] == 0
    last = rows(tmp_path / "run")[-1]
    assert last["charts/episodic_return"] == last["charts/episodic_length"] == 3


@pytest.mark.parametrize("name", ["is_success", "success", "succeed"])
def test_success_by_any_of_its_names(name):
    assert wsrl_warmup.has_succeeded([0.0], False, {name: True})
    assert not wsrl_warmup.has_succeeded([1.0], True, {name: False})


def test_success_without_a_name_is_the_only_positive_reward():
    """A walker that gets a reward in every step and falls has not succeeded."""
    assert wsrl_warmup.has_succeeded([-1.0, 0.0, 1.0], True)
    assert not wsrl_warmup.has_succeeded([-1.0, 0.0, 1.0], False)
    assert not wsrl_warmup.has_succeeded([1.0, 1.0, 1.0], True)
    assert not wsrl_warmup.has_succeeded([0.0, 0.0], True)
    env = wsrl_warmup.make_gym_env("Ends-v0")  # it terminates, with a reward of 1 in each step
    assert wsrl_warmup.play_episode(env, lambda obs: np.zeros(1, np.float32), 0)[1] is False


def watch_heldout(monkeypatch, errors):
    """Make these the errors of the checks.  -> list of checkpoints, one per check"""
    checked, row_errors = [], wsrl_warmup.WarmupAgent.row_errors

    def watch(self, batch):
        found = row_errors(self, batch)
        if len(batch["rewards"]) == 44:  # four of the forty episodes; retention has more rows
            checked.append(self.checkpoint())
            found["targets"] = torch.tensor([0.0, 1.0, 0.0, 1.0]) * 3**0.5  # their variance is 1
            found["td_errors"] = torch.full((2, 4), errors[len(checked) - 1] ** 0.5)
        return found

    monkeypatch.setattr(wsrl_warmup.WarmupAgent, "row_errors", watch)
    return checked


def test_early_stop_restores_the_best(tmp_path, data, monkeypatch, capsys):
    checked = watch_heldout(monkeypatch, [3.0, 2.0, 5.0, 4.0, 1.0])
    hand = dict(checkpoint_path=str(tmp_path / "warm.pth"))
    run(tmp_path / "run", data, early_stop_patience=2, **hand)
    out = capsys.readouterr().out
    assert len(checked) == 4 and "after the warm-up of 4 updates" in out
    warm, best = state(tmp_path, "warm.pth"), checked[1]
    assert same(best["model"], warm["model"]) and warm["updates"] == 4
    for name in ("critic_optimizer", "actor_optimizer"):
        left, right = (x[name]["state"] for x in (best, warm))
        assert left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    lines = rows(tmp_path / "run")
    errors = [row["losses/heldout_error"] for row in lines if "losses/heldout_error" in row]
    assert errors == pytest.approx([3, 2, 5, 4])
    assert [row["global_step"] for row in lines] == [0, 1, 2, 3, 4], "a step that was not made"


def test_skipped_steps_are_still_counted_when_the_best_weights_return(tmp_path, data, monkeypatch):
    def skip_all(loss, *optimizers):
        return torch.tensor(1.0)

    watch_heldout(monkeypatch, [1.0, 2.0])
    monkeypatch.setattr(wsrl_warmup, "gradient_step", skip_all)
    run(tmp_path / "run", data, early_stop_patience=1, online_steps=0)
    assert rows(tmp_path / "run")[-1]["losses/skipped_steps"] == 4  # two of each update


def test_a_first_check_that_is_nan_is_not_the_best(tmp_path, data, monkeypatch):
    checked = watch_heldout(monkeypatch, [float("nan"), 2.0, 5.0, 4.0])
    run(tmp_path / "run", data, early_stop_patience=2, checkpoint_path=str(tmp_path / "warm.pth"))
    assert len(checked) == 4
    assert same(checked[1]["model"], state(tmp_path, "warm.pth")["model"])


def test_after_an_early_stop_the_run_goes_online(tmp_path, data, monkeypatch):
    """In one command and in two, stopped and resumed: the same steps, and beta ends at 1."""
    own = dict(early_stop_patience=1)
    watch_heldout(monkeypatch, [1.0, 2.0] * 3)
    drawn = spy(monkeypatch, wsrl_warmup, "sample_mixed")
    run(tmp_path / "both", data, **own)
    assert rows(tmp_path / "both")[-1]["global_step"] == 2 + 33
    assert [args[4] for args, _ in drawn][-1] == 1.0
    hand = own | dict(checkpoint_path=str(tmp_path / "warm.pth"))
    watch_heldout(monkeypatch, [1.0, 2.0])
    run(tmp_path / "first", data, **hand)
    hand |= dict(learner=True, demo_path=str(tmp_path / "filtered_demos.pkl"))
    run(tmp_path / "second", {}, **hand)
    assert rows(tmp_path / "second")[1:] == rows(tmp_path / "both")[3:]


def test_the_last_weights_of_a_warm_up_are_checked(tmp_path, data, monkeypatch):
    """45 updates are checked at every second one, and at the last one."""
    checked = watch_heldout(monkeypatch, [9.0] * 22 + [1.0])
    hand = dict(checkpoint_path=str(tmp_path / "warm.pth"), warmup_steps=45)
    run(tmp_path / "run", data, early_stop_patience=99, **hand)
    assert len(checked) == 23 and checked[-1]["updates"] == 45
    assert same(checked[-1]["model"], state(tmp_path, "warm.pth")["model"])


def test_early_stopping_of_a_clone_checks_its_actions(tmp_path, data, monkeypatch):
    """On held-out episodes of those that it would imitate; an error of the critics says nothing."""
    calls = spy(monkeypatch, wsrl_warmup.WarmupAgent, "row_errors")
    run(tmp_path / "run", data, preset="bc", early_stop_patience=99)
    found = [(args[1], errors) for args, errors in calls if len(args[1]["rewards"]) < 100]
    error = [row["losses/heldout_error"] for row in rows(tmp_path / "run")[1:21]]
    for (batch, errors), value in zip(found, error, strict=True):
        assert (batch["is_cloned"] == 1).all() and len(batch["rewards"]) == 11
        assert errors["clone_errors"].mean().item() == pytest.approx(value)


def test_normalized_by_the_offline_statistics(tmp_path, data):
    run(tmp_path / "run", data)
    sources = [pickle.loads(Path(paths[0]).read_bytes()) for paths in data.values()]
    obs = np.stack([row["observations"] for source in sources for row in source])
    weights = state(tmp_path / "run")["agent"]["model"]
    assert weights["normalizer.mean"].numpy() == pytest.approx(obs.mean(0), abs=1e-4)
    floor = np.maximum(obs.std(0), [0.3, 0.3, 2.4])
    assert weights["normalizer.std"].numpy() == pytest.approx(floor, rel=1e-3)
    run(tmp_path / "scratch", {}, preset="scratch")  # the bounds of the space
    weights = state(tmp_path / "scratch")["agent"]["model"]
    assert weights["normalizer.std"].tolist() == [1, 1, 8]


# --- options ---
def test_the_built_in_task_has_its_own_defaults_and_help_shows_true_numbers(capsys):
    assert parse_args([]).warmup_steps == 1_500
    args = parse_args(["--preset", "wsrl", "--num-critics", "3"])
    assert (args.offline_objective, args.num_critics, args.utd_ratio) == ("calql", 3, 4)
    assert (args.warmup_rollout_steps, args.online_steps) == (500, 2_000)  # it learns online
    assert default_options(preset="wsrl")["warmup_rollout_steps"] == 500
    args = parse_args(["--env-id", "Reacher-v5", "--offline-data-path", "a.npz", "b.pkl"])
    assert (args.warmup_steps, args.hidden_size, args.retention_ratio) == (50_000, 256, 0.2)
    assert args.offline_data_path == ["a.npz", "b.pkl"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parse_args(["--preset", "rlpd", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: 20)" in shown.split("--utd-ratio")[1][:200]
    assert "(default: 1500)" not in shown.split("--warmup-steps")[1][:200]


def test_names_of_the_design_document():
    args = wsrl_warmup.WSRLConfig()
    assert (args.warmup_steps, args.initial_offline_ratio, args.offline_decay_rate) == (
        50_000,
        1.0,
        0.999,
    )
    assert (args.min_offline_ratio, args.demo_weight, args.success_weight_bonus) == (0.5, 2.0, 1.5)
    assert (args.retention_ratio, args.use_prioritized_replay, args.priority_alpha) == (
        0.2,
        True,
        0.6,
    )
    assert wsrl_warmup.priority_beta_schedule(0) == 0.4


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(env_id="MountainCarContinuous-v0"), "for MountainCar.* --offline-data-path"),
        (dict(offline_data_path=["absent.npz"]), "absent.npz"),
        (dict(checkpoint_path=__file__), "nothing is overwritten"),
        (dict(checkpoint_path="w", demo_path=__file__), "nothing is overwritten"),
        (dict(env_id="MountainCarContinuous-v0", warmup_steps=0, retention_ratio=1.0), "scratch"),
    ],
)
def test_paths_that_make_no_sense_end_in_one_line_and_write_nothing(options, words, tmp_path):
    args = Args(**default_options() | options | dict(run_dir=f"{tmp_path}/run"))
    with pytest.raises(SystemExit, match=words):
        main(args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        dict(retention_ratio=0.0),
        dict(min_offline_ratio=0.9, initial_offline_ratio=0.5),
        dict(warmup_steps=-1),
        dict(resume=True),
        dict(gamma=1.5),
        dict(seed=-1),
        dict(lr=float("nan")),
        dict(learner=True),
        dict(learner=True, checkpoint_path="w", online_steps=0),
        dict(demo_path="x.pkl"),
        dict(PRESETS["scratch"], offline_data_path=["a.npz"]),
        dict(warmup_steps=0),  # an untrained critic would choose the rows
        dict(PRESETS["wsrl"], learner=True, checkpoint_path="w", demo_path="x.pkl"),
        dict(warmup_steps=0, checkpoint_path="w", retention_ratio=1.0),
        dict(PRESETS["rlpd"], checkpoint_path="w"),
        dict(PRESETS["scratch"], bc_weight=1.0),
        dict(PRESETS["scratch"], warmup_rollout_steps=0, online_steps=0),
        dict(checkpoint_path="w", demo_path="./w"),
        dict(checkpoint_path="filtered_demos.pkl"),
        dict(expert_path="final_model.pth"),
        dict(cql_alpha=0.5),  # of an objective that is not used
        dict(demo_weight=-1.0),
        dict(success_weight_bonus=0.0),
        dict(bc_weight=-1.0),
        dict(obs_noise=-0.1),
        dict(obs_noise=float("nan")),
        dict(early_stop_patience=-1),
        dict(PRESETS["rlpd"], early_stop_patience=1),  # these would do nothing
    ],
)
def test_values_that_make_no_sense(options):
    with pytest.raises(ValueError):
        Args(**options)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(lr=0.0), "--lr 0.0: must be positive"),
        (dict(lr=-1.0), "--lr -1.0: must be finite and not negative"),
        (dict(tau=2.0), "--tau 2.0: must be at most 1"),
    ],
)
def test_a_refused_number_is_named_with_what_the_option_takes(options, words):
    with pytest.raises(ValueError, match=words):
        Args(**options)


def test_data_files_that_would_not_be_read_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="--warmup-steps or --retention-ratio"):
        Args(**PRESETS["scratch"], offline_data_path=["a.npz"])


def test_online_steps_without_an_update_are_refused_with_both_names():
    with pytest.raises(ValueError, match="--online-steps .* --warmup-rollout-steps"):
        Args(online_steps=200, warmup_rollout_steps=200)
    Args(online_steps=0, warmup_rollout_steps=200)


def test_every_environment_that_is_made_is_closed(tmp_path, data, monkeypatch):
    made, closed = spy(monkeypatch, gym, "make"), []
    close = gym.envs.classic_control.PendulumEnv.close
    watch = lambda self: (closed.append(self), close(self))  # noqa: E731
    monkeypatch.setattr(gym.envs.classic_control.PendulumEnv, "close", watch)
    run(tmp_path / "run", data)
    assert len(made) == len(closed) == 2


# --- something to look at ---
def test_policy_gif_shows_an_episode_before_and_after(tmp_path):
    run(
        tmp_path / "run",
        {},
        preset="scratch",
        env_id="Pendulum-v1",
        online_steps=10,
        capture_video=True,
    )
    for name in ("policy_before.gif", "policy.gif"):
        with Image.open(tmp_path / "run" / name) as image:
            assert image.size == (320, 320) and image.n_frames == 50  # every fourth of 200 steps
            frames = []
            for i in (0, 20):
                image.seek(i)
                frames.append(np.asarray(image.convert("RGB")))
        assert (frames[0] != frames[1]).any()


def test_an_environment_that_cannot_draw_itself_says_so_and_goes_on(tmp_path, capsys):
    run(
        tmp_path / "run", {}, preset="scratch", env_id="Ends-v0", online_steps=6, capture_video=True
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no policy")]
    assert [line.split(":")[0] for line in lines] == ["no policy_before.gif", "no policy.gif"]
    assert (tmp_path / "run" / "final_model.pth").exists()
    assert not list((tmp_path / "run").glob("*.gif"))


def test_an_error_in_the_filmed_episode_is_not_called_one_of_drawing(tmp_path, monkeypatch):
    """The policy is saved before it is filmed."""

    def broken(*_):
        raise OSError("the arm is stuck")

    options = dict(preset="scratch", env_id="Pendulum-v1", online_steps=6)
    run(tmp_path / "run", {}, **options)
    agent = wsrl_warmup.WarmupAgent.load(tmp_path / "run" / "final_model.pth")
    env = wsrl_warmup.make_gym_env("Pendulum-v1")
    monkeypatch.setattr(gym.envs.classic_control.PendulumEnv, "step", broken)
    with pytest.raises(OSError, match="the arm is stuck"):
        wsrl_warmup.write_video(tmp_path / "policy.gif", agent, env)


def test_videos_change_no_number(tmp_path, data):
    run(tmp_path / "without", data)
    run(tmp_path / "with", data, capture_video=True, env_id="ShortPendulum-v1")
    assert rows(tmp_path / "without") == rows(tmp_path / "with")
