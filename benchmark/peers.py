"""Our scripts against their peers from PyPI: same model, same batch, same machine, one thread, alternating.

    python benchmark/peers.py                        # makes runs/peers_venv on first use; tiny Llama and SAC
    python benchmark/peers.py --real-model FOLDER    # and a pretrained model of yours
    python benchmark/peers.py --table                # the tables from benchmark/peers.csv

Language models: ppo.py against TRL's GRPOTrainer, with one update per batch and with four epochs. GRPO has no critic:
ppo.py also runs a value head, its loss and, for old log-probs and values, one pass that GRPO with one update does not
need. SAC: sac_hybrid.py and wsrl_warmup.py against stable-baselines3, by sac_speed.py and wsrl_speed.py. Each side runs
in a process of its own, so its peak memory is its own; times are CPU seconds of that process.
"""

import argparse
import ast
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT, PATH = HERE.parent, HERE / "peers.csv"
VENV = ROOT / "runs" / "peers_venv"
PEERS = ("trl==1.16.0", "stable-baselines3==2.9.2")
WARM_UP, SIDES = 3, {"ppo.py": "ours", "TRL GRPOTrainer": "theirs"}
COLUMNS = [
    "work",
    "side",
    "round",
    "responses_per_second",
    "tokens_per_second",
    "without_the_pass",
    "peak_mb",
    "update_gflops",
    "peak_gflops",
]
WORK = {  # iterations, epochs, responses, tokens of a response
    "tiny, 1 epoch": (60, 1, 32, 6),
    "tiny, 4 epochs": (40, 4, 32, 6),
    "real, 1 epoch": (7, 1, 8, 24),
}
READ = {  # what one reads to know what a run does; the model and torch itself count for nobody
    "ppo.py": ["ppo.py"],
    "het_grpo.py": ["het_grpo.py"],
    "TRL GRPOTrainer": [
        *(f"trl/trainer/{name}.py" for name in ("grpo_trainer", "grpo_config", "base_trainer", "base_config", "utils")),
        "transformers/trainer.py",
        "transformers/training_args.py",
        "transformers/generation/utils.py",
    ],
    "sac_hybrid.py": ["sac_hybrid.py"],
    "wsrl_warmup.py": ["wsrl_warmup.py"],
    "stable-baselines3 SAC": [
        *(f"stable_baselines3/sac/{name}.py" for name in ("sac", "policies")),
        *(
            f"stable_baselines3/common/{name}.py"
            for name in (
                "off_policy_algorithm",
                "base_class",
                "buffers",
                "policies",
                "distributions",
                "torch_layers",
                "utils",
                "logger",
            )
        ),
    ],
}


def digits(texts):
    return [float(sum(c.isdigit() for c in text)) for text in texts]


def gap(stamps):
    return statistics.median(b - a for a, b in zip(stamps[WARM_UP:], stamps[WARM_UP + 1 :], strict=False))


def ours(work, model, folder):
    """-> CPU seconds of an iteration of ppo.py, from one line of its log to the next; tokens of a response; CPU seconds
    of its no-grad pass for old log-probs and values"""
    import torch

    import ppo

    iterations, epochs, responses, tokens = WORK[work]
    Path(folder, "reward.py").write_text(
        "def digits(prompts, responses, answers):\n    return [float(sum(c.isdigit() for c in r)) for r in responses]\n"
    )
    options = dict(batch_size=responses, max_response_length=tokens, update_epochs=epochs, num_minibatches=1)
    options |= dict(num_iterations=iterations, eval_every=0, eval_size=8, sft_steps=0, device="cpu", kl_coef=0.0)
    options |= dict(learning_rate=1e-6, model_name=model, reward_fn=f"{folder}/reward.py:digits")
    stamps, lengths, extra, log, forward = [], [], [], ppo.Writer.log, ppo.PolicyWithValue.forward

    def watched(self, *args, **kwargs):
        start = time.process_time()
        output = forward(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            extra.append(time.process_time() - start)
        return output

    def timed(self, metrics, global_step):
        log(self, metrics, global_step)
        stamps.append(time.process_time())
        lengths.append(metrics.get("charts/response_length", tokens))

    ppo.Writer.log, ppo.PolicyWithValue.forward = timed, watched
    ppo.main(ppo.Args(**options, run_dir=f"{folder}/ours"))
    return gap(stamps), statistics.mean(lengths[WARM_UP:]), statistics.median(extra[WARM_UP:])


def theirs(work, model, folder):
    """-> CPU seconds from one generation of GRPOTrainer to the next; tokens of a response"""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import ppo

    iterations, epochs, responses, tokens = WORK[work]
    args = ppo.Args(model_name=model, max_response_length=tokens)
    policy, tokenizer, _, _ = ppo.load_policy(args)
    tokenizer.padding_side = "left"
    task = ppo.make_task(args, lambda text: len(tokenizer(text)["input_ids"]))
    data = Dataset.from_list([{"prompt": task.train(i)[0]} for i in range(responses * iterations)])
    config = GRPOConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=responses,
        num_generations=8,
        max_completion_length=tokens,
        num_iterations=epochs,
        beta=0.0,
        temperature=1.0,
        learning_rate=1e-6,
        max_steps=iterations * epochs,
        report_to=[],
        save_strategy="no",
        logging_steps=epochs,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    stamps = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, *rest, **kwargs):
            if state.global_step % epochs == 0:
                stamps.append(time.process_time())

    trainer = GRPOTrainer(
        policy.lm.float(),
        reward_funcs=lambda completions, **_: digits(completions),
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    return gap(stamps), statistics.mean(lengths[WARM_UP:]), 0.0


def matmul_peak():
    """GFLOP/s of one thread on a large product of matrices: the best of a few."""
    import torch

    x, best = torch.randn(1536, 1536), float("inf")
    for _ in range(6):
        start = time.process_time()
        x @ x
        best = min(best, time.process_time() - start)
    return 2 * 1536**3 / best / 1e9


def worker(work, side, model):
    """Runs in the peers' environment. The last line of its output is what it found."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        seconds, length, extra = {"ours": ours, "theirs": theirs}[side](work, model, folder)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    responses = WORK[work][2]
    print(json.dumps([responses / seconds, responses * length / seconds, responses / (seconds - extra), peak_mb]))


def fraction():
    """One SAC update, 256x256, batch 256: its floating-point operations by torch's counter, over the peak."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    from sac_hybrid import SACHybridAgent, keep_memory

    keep_memory()
    agent = SACHybridAgent([], 6, 0, "cpu", state_dim=17, hidden_size=256, layer_norm=False, backup_entropy=True)
    rows = dict(obs={"state": torch.randn(256, 17)}, next_obs={"state": torch.randn(256, 17)})
    rows |= dict(actions=torch.rand(256, 6) * 2 - 1, rewards=torch.randn(256), masks=torch.ones(256))
    rows |= dict(grasp_penalty=torch.zeros(256), is_demo=torch.zeros(256, dtype=torch.bool))
    with FlopCounterMode(display=False) as counter:
        agent.update(rows)
    found = []
    for _ in range(9):
        peak, start = matmul_peak(), time.process_time()
        for _ in range(30):
            agent.update(rows)
        found.append((30 * counter.get_total_flops() / (time.process_time() - start) / 1e9, peak))
    print(json.dumps(sorted(found, key=lambda pair: pair[0] / pair[1])[len(found) // 2]))


def code_lines(path):
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    source = path.read_text()
    kept = {i for i, line in enumerate(source.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kept -= set(range(node.lineno, node.end_lineno + 1))
    return len(kept)


def python(*command):
    """Run the peers' interpreter; its output, or an end with its last words."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    done = subprocess.run([VENV / "bin" / "python", *command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"benchmark/peers.py: {' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def make_venv():
    if not (VENV / "done").exists():
        print(f"making {VENV.relative_to(ROOT)}: {', '.join(PEERS)}", flush=True)
        venv.create(VENV, with_pip=True, clear=True)
        python("-m", "pip", "install", "-q", "-r", ROOT / "requirements.txt", *PEERS)
        (VENV / "done").touch()


def spread(values, form=".2f"):
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def tables(rows):
    """Markdown: median over the rounds, smallest and largest in brackets."""
    head = "work | ours: responses/s | TRL: responses/s | ratio | of tokens/s | without that pass | memory, ours / TRL"
    lines = [f"| {head} |", "|---|---|---|---|---|---|---|"]
    for work in WORK:
        mine = {side: [row for row in rows if (row["work"], row["side"]) == (work, side)] for side in SIDES}
        if not all(mine.values()):
            continue
        rate, token, lean, memory = (
            {side: [float(row[name]) for row in mine[side]] for side in SIDES} for name in COLUMNS[3:7]
        )
        a, b = SIDES
        ratios = [spread([x / y for x, y in zip(v[a], v[b], strict=True)]) for v in (rate, token, lean)]
        sizes = " / ".join(f"{statistics.median(memory[side]):.0f} MB" for side in SIDES)
        rates = " | ".join(spread(rate[side], ".1f") for side in SIDES)
        lines.append(f"| {work} | {rates} | {' | '.join(ratios)} | {sizes} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real-model", help="folder of a causal LM")
    parser.add_argument("--only", choices=list(WORK), help="one kind of work; the other rows stay")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--table", action="store_true", help="no runs")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker == ["fraction"]:
        fraction()
    elif options.worker:
        worker(*options.worker, options.real_model)
    else:
        if not options.table:
            make_venv()
            works = [work for work in WORK if options.real_model or work.startswith("tiny")]
            works = [options.only] if options.only else works
            kept = list(csv.reader(open(PATH)))[1:] if PATH.exists() else []
            found = [row for row in kept if row[0] not in (*works, "SAC update")]
            for work in works:
                model = ["--real-model", options.real_model] if work.startswith("real") else []
                for i in range(options.rounds):
                    for name, side in SIDES.items():
                        *_, last = python(Path(__file__), "--worker", work, side, *model).splitlines()
                        found.append([work, name, i + 1, *(round(x, 2) for x in json.loads(last)), "", ""])
                        print(*found[-1], flush=True)
            *_, last = python(Path(__file__), "--worker", "fraction").splitlines()
            found.append(["SAC update", "sac_hybrid.py", 1, "", "", "", "", *(round(x, 2) for x in json.loads(last))])
            with open(PATH, "w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *found])
            for name in ("sac_speed.py", "wsrl_speed.py"):
                print(f"\n{name}\n{python(HERE / name)}")
        rows = list(csv.DictReader(open(PATH)))
        print(f"\n{tables(rows)}\n")
        for row in rows:
            if row["update_gflops"]:
                ours_, peak = float(row["update_gflops"]), float(row["peak_gflops"])
                print(
                    f"a SAC update runs at {ours_:.0f} of {peak:.0f} GFLOP/s: {ours_ / peak:.0%} of the machine's peak"
                )
        packages = next(iter((VENV / "lib").glob("python*/site-packages")), None)
        for name, files in READ.items():
            roots = (ROOT, packages) if packages else (ROOT,)
            paths = [root / file for file in files for root in roots if (root / file).exists()]
            if len(paths) == len(files):
                print(f"{name:24s} {sum(map(code_lines, paths)):6d} lines of code in {len(files)} files")
