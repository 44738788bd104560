"""ppo.py against TRL's GRPOTrainer: same model, same batch, one process, iteration by iteration in turn.

    python benchmark/peers.py                        # tiny Llama; without TRL it makes runs/peers_venv first
    python benchmark/peers.py --real-model FOLDER    # and a pretrained model of yours
    python benchmark/peers.py --tables               # the table from benchmark/peers.csv

GRPO has no critic; ppo.py also trains one. Each side is a thread that waits while the other has its turn, so that other
load on the machine hits both; times are CPU seconds of the thread. `matrix products` are the floor of both: those of
the model's layers on as many tokens, and nothing else. Rows of round 0 hold the peak memory of one side alone.
SAC against stable-baselines3 and SBX: sac_speed.py, and control.py for how long it takes to learn.
"""

import argparse
import csv
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT, PATH = HERE.parent, HERE / "peers.csv"
VENV = ROOT / "runs" / "peers_venv"
PEERS = ("trl==1.16.0",)
HAS_TRL = importlib.util.find_spec("trl") is not None
WARM_UP = 3
COLUMNS = ["work", "side", "round", "responses_per_second", "tokens_per_second", "peak_mb"]
WORK = {  # iterations, epochs, responses, tokens of a response
    "tiny, 1 epoch": (60, 1, 32, 6),
    "tiny, 4 epochs": (40, 4, 32, 6),
    "real, 1 epoch": (7, 1, 8, 24),
}


def digits(prompts, responses, answers=None):
    return [float(sum(c.isdigit() for c in response)) for response in responses]


def gap(stamps):
    return statistics.median(
        b - a for a, b in zip(stamps[WARM_UP:], stamps[WARM_UP + 1 :], strict=False)
    )


def ours(work, model, folder, turn):
    """-> CPU seconds of an iteration of ppo.py, from one line of its log to the next; tokens of a response"""
    import ppo

    iterations, epochs, responses, tokens = WORK[work]
    options = dict(
        batch_size=responses, max_response_length=tokens, update_epochs=epochs, num_minibatches=1
    )
    options |= dict(
        num_iterations=iterations,
        eval_every=10**6,
        eval_size=8,
        sft_steps=0,
        device="cpu",
        kl_coef=0.0,
    )
    options |= dict(learning_rate=1e-6, model_name=model, reward_fn=f"{__file__}:digits")
    stamps, lengths, log = [], [], ppo.Run.log

    def timed(self, metrics, samples):
        log(self, metrics, samples)
        stamps.append(time.thread_time())
        turn()
        lengths.append(metrics.get("charts/response_length", tokens))

    ppo.Run.log = timed
    ppo.main(ppo.Args(**options, run_dir=f"{folder}/ours"))
    return gap(stamps), statistics.mean(lengths[WARM_UP:])


def theirs(work, model, folder, turn):
    """-> CPU seconds from one generation of GRPOTrainer to the next; tokens of a response"""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import ppo

    iterations, epochs, responses, tokens = WORK[work]
    args = ppo.Args(model_name=model, max_response_length=tokens)
    lm, tokenizer, _ = ppo.load_lm(args)
    tokenizer.padding_side = "left"
    train, _, _ = ppo.make_task(args)
    data = Dataset.from_list([{"prompt": prompt} for prompt, _ in train[: responses * iterations]])
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
        logging_steps=10 * epochs,  # its default
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    stamps, lengths = [], []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, *rest, **kwargs):
            if state.global_step % epochs == 0:
                stamps.append(time.thread_time())
                turn()

    def reward(completions, completion_ids, **_):
        lengths.append(statistics.mean(map(len, completion_ids)))
        return digits(None, completions)

    trainer = GRPOTrainer(
        lm.float(),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return gap(stamps), statistics.mean(lengths[WARM_UP:])


def floor(work, model, *_):
    """-> CPU seconds of the products of an iteration: prompts, tokens one by one, forward and backward; tokens"""
    import torch

    import ppo

    _, epochs, responses, tokens = WORK[work]
    args = ppo.Args(model_name=model, max_response_length=tokens)
    lm, tokenizer, _ = ppo.load_lm(args)
    train, _, _ = ppo.make_task(args)
    prompts = responses * max(
        len(tokenizer(prompt)["input_ids"]) for prompt, _ in train[:responses]
    )
    head = lm.get_output_embeddings().weight.detach().float()
    layers = [
        x.weight.detach().float() for x in lm.model.modules() if isinstance(x, torch.nn.Linear)
    ]

    def products(weights, rows, backward):
        for weight in weights:
            x = torch.ones(rows, weight.shape[1])
            y = x @ weight.T
            if backward:
                y @ weight, y.T @ x

    stamps = []
    for _ in range(WARM_UP + 6):
        products(layers, prompts, False)
        for i in range(tokens):
            products([*layers[: len(layers) * (i > 0)], head], responses, False)
        for _ in range(epochs):
            products(layers, prompts + responses * tokens, True)
            products([head], responses * tokens, True)
        stamps.append(time.thread_time())
    return gap(stamps), tokens


SIDES = {"ppo.py": ours, "TRL GRPOTrainer": theirs, "matrix products": floor}


def in_turn(work, model, folder):
    """Both sides, an iteration each -> {side: what it found}"""
    gates, found = {name: threading.Semaphore(0) for name in SIDES}, {}

    def go(name, other, side):
        def turn():
            gates[other].release()
            gates[name].acquire()

        gates[name].acquire()
        try:
            found[name] = side(work, model, folder, turn)
        finally:
            gates[other].release(10**6)  # whoever is left goes on alone

    (mine, one), (yours, two), (least, bare) = SIDES.items()
    gates[mine].release()
    thread = threading.Thread(target=go, args=(yours, mine, two))
    thread.start()
    go(mine, yours, one)
    thread.join()
    return found | {least: bare(work, model)}


def worker(work, model, alone=None):
    """Runs in the peers' environment. The last line of its output: rates of all sides, or the memory of one."""
    import resource

    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        if alone:
            SIDES[alone](work, model, folder, lambda: None)
            print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
        else:
            found, size = in_turn(work, model, folder), WORK[work][2]
            print(
                json.dumps(
                    {
                        name: [size / seconds, size * length / seconds]
                        for name, (seconds, length) in found.items()
                    }
                )
            )


def python(*command):
    """Run the peers' interpreter; its output, or an end with its last words."""
    quiet = {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command = [sys.executable if HAS_TRL else VENV / "bin" / "python", *command]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=os.environ | quiet)
    if done.returncode:
        raise SystemExit(
            f"benchmark/peers.py: {' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}"
        )
    return done.stdout


def make_venv():
    if not HAS_TRL and not (VENV / "done").exists():
        print(f"making {VENV.relative_to(ROOT)}: {', '.join(PEERS)}", flush=True)
        venv.create(VENV, with_pip=True, clear=True)
        python("-m", "pip", "install", "-q", "-r", ROOT / "requirements.txt", *PEERS)
        (VENV / "done").touch()


def spread(values, form=".2f"):
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def tables(rows):
    """Markdown: median over the rounds, smallest and largest in brackets; the floor is the fastest round."""
    heads = "work | ours: responses/s | TRL: responses/s | ratio | matrix products alone | memory, ours / TRL"
    lines = [f"| {heads} |", "|---" * 6 + "|"]
    for work in WORK:
        mine = [
            [row for row in rows if (row["work"], row["side"]) == (work, side)] for side in SIDES
        ]
        if all(mine):
            rates = (
                [float(row[COLUMNS[3]]) for row in side if row["round"] != "0"] for side in mine
            )
            ours, theirs, least = rates
            cells = [spread(ours, ".1f"), spread(theirs, ".1f")]
            cells += [
                spread([x / y for x, y in zip(ours, theirs, strict=True)]),
                f"{max(least):.1f}",
            ]
            sizes = [row[COLUMNS[5]] for side in mine for row in side if row["round"] == "0"]
            cells.append(" / ".join(f"{float(size):.0f} MB" for size in sizes))
            lines.append(f"| {work} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real-model", help="folder of a causal LM")
    parser.add_argument("--only", choices=list(WORK), help="one kind of work; the other rows stay")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tables", action="store_true", help="no runs")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work, *alone = options.worker
        worker(work, options.real_model, *alone)
    else:
        if not options.tables:
            make_venv()
            works = [work for work in WORK if options.real_model or work.startswith("tiny")]
            works = [options.only] if options.only else works
            found = (
                [
                    row
                    for row in csv.reader(open(PATH, encoding="utf-8"))
                    if row[0] not in (*works, "work")
                ]
                if PATH.exists()
                else []
            )
            for work in works:
                model = ["--real-model", options.real_model] if work.startswith("real") else []
                for name in list(SIDES)[:2]:
                    *_, last = python(Path(__file__), "--worker", work, name, *model).splitlines()
                    found.append([work, name, 0, "", "", round(json.loads(last), 2)])
                for i in range(options.rounds):
                    *_, last = python(Path(__file__), "--worker", work, *model).splitlines()
                    for name, rates in json.loads(last).items():
                        found.append([work, name, i + 1, *(round(x, 2) for x in rates), ""])
                        print(*found[-1], flush=True)
            with open(PATH, "w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *found])
        if PATH.exists():
            print(tables(list(csv.DictReader(open(PATH, encoding="utf-8")))))
