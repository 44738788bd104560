"""Peak memory and seconds of an iteration of ppo_v1.py, by the options that save memory; and an estimate for GPUs.

    python benchmark/memory.py FOLDER      # what memory.csv lacks; SmolLM2-135M-Instruct: three CPU minutes
    python benchmark/memory.py --tables    # the tables of docs/ppo.md; no training

A run is one iteration of 8 prompts and 16 response tokens, and saves nothing. Each run is a process of its own. The
peak is its largest resident set, which includes Python and torch (the row "imports only"). Seconds are CPU time on one
thread. There is no GPU here: the estimate is a formula.
"""

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATH = HERE / "memory.csv"
COLUMNS = ["setting", "peak_mb", "rollout_seconds", "update_seconds", "logprob_mismatch"]
FLAGS = "--device cpu --batch-size 8 --max-response-length 16 --update-epochs 1 --num-iterations 1"
FLAGS += " --eval-size 1 --eval-every 100 --save-every 100 --learning-rate 1e-5"
LORA = "--lora-rank 16"
BF16 = "--bf16 --weights-dtype bfloat16"
SETTINGS = {
    "imports only": None,
    "float32": "",
    "gradient checkpointing": "--gradient-checkpointing",
    "4 micro-batches": "--gradient-accumulation-steps 4",
    "bf16": "--bf16",
    "LoRA": LORA,
    "LoRA, bfloat16": f"{LORA} {BF16}",
    "LoRA, bfloat16, 4 micro-batches": f"{LORA} {BF16} --gradient-accumulation-steps 4",
}
# parameters, layers, hidden size, vocabulary: from the config.json of the Qwen2.5 models
MODELS = {
    "0.5 B": (0.49e9, 24, 896, 151_936),
    "1.5 B": (1.54e9, 28, 1536, 151_936),
    "7 B": (7.62e9, 28, 3584, 152_064),
}
ROWS, PROMPT, RESPONSE = 4, 256, 256  # of a micro-batch, for the estimate


def run(model, setting):
    """One process -> a row for the CSV"""
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps(dict(prompt=f"Count from {i} to 90:", answer="90")) for i in range(80)]
        (Path(folder) / "task.jsonl").write_text("\n".join(lines), encoding="utf-8")
        argv = ["ppo_v1.py", "--model-name", model, "--task", f"jsonl:{folder}/task.jsonl"]
        argv += ["--run-dir", f"{folder}/run", *FLAGS.split(), *(SETTINGS[setting] or "").split()]
        code = f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); sys.argv = {argv}\n"
        code += "import time; time.time = time.process_time\nimport ppo_v1\n"
        code += "ppo_v1.save_model = ppo_v1.save_checkpoint = lambda *inputs: None\n"
        code += "ppo_v1.main(ppo_v1.parse_args())" if SETTINGS[setting] is not None else ""
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3  # Linux: in KB
        if SETTINGS[setting] is None:
            return [setting, round(peak), "", "", ""]
        metrics = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8")
        row = json.loads(metrics.splitlines()[-1])
    seconds = [round(row[f"time/{name}"], 1) for name in ("rollout", "update")]
    return [setting, round(peak), *seconds, f"{row['rollout/logprob_mismatch']:.1e}"]


def read():
    if not PATH.exists():
        return {}
    return {row["setting"]: row for row in csv.DictReader(open(PATH, encoding="utf-8"))}


def measured():
    if not read():
        return "nothing measured yet"
    lines = ["| | peak, MB | sampling, CPU s | update, CPU s | `rollout/logprob_mismatch` |"]
    lines.append("|---" * 5 + "|")
    for setting, row in read().items():
        flags = f" `{SETTINGS[setting]}`" if SETTINGS[setting] else ""
        cells = [row[name] or "–" for name in COLUMNS[1:]]
        lines.append(f"| {setting}{flags} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gigabytes(model, kind):
    """Weights, reference, gradients and Adam; activations of a micro-batch with checkpointed layers."""
    parameters, layers, hidden, vocabulary = MODELS[model]
    tokens = ROWS * (PROMPT + RESPONSE)
    logits = 4 * ROWS * RESPONSE * vocabulary * 4  # float32: logits, log-softmax, two gradients
    if kind == "full":
        state = (4 + 4 + 4 + 8 + 2) * parameters  # the last: bfloat16 copies for the products
        layer_inputs = 4 * tokens * hidden * layers
    else:  # rank 16: about 1 % of the parameters, with gradients and Adam; a float32 LM head
        state = 2 * parameters + 0.01 * parameters * (4 + 4 + 8 + 2) + 4 * vocabulary * hidden
        layer_inputs = 2 * tokens * hidden * layers
    return state / 1e9, (logits + layer_inputs) / 1e9


def estimated():
    lines = ["| parameters | training | state | activations | total | 24 GB | 80 GB |"]
    lines.append("|---" * 7 + "|")
    for model in MODELS:
        for kind, name in (("full", "all weights, `--bf16`"), ("lora", f"`{LORA} {BF16}`")):
            state, activations = gigabytes(model, kind)
            total = state + activations + 1.5  # CUDA context, cache of the sampler, fragments
            cells = [model, name, *(f"{x:.1f}" for x in (state, activations, total))]
            cells += ["yes" if total < size else "no" for size in (24, 80)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="folder or hub name of a causal LM")
    parser.add_argument(
        "--setting", choices=SETTINGS, help="this one only (the peak is that of all children)"
    )
    parser.add_argument("--tables", action="store_true", help="no training")
    options = parser.parse_args()
    if options.setting:
        is_new = not PATH.exists()
        row = run(options.model, options.setting)
        with open(PATH, "a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS] * is_new + [row])
    elif not options.tables:
        for setting in SETTINGS:
            if setting not in read():  # ru_maxrss is the largest of all children: one process each
                command = [sys.executable, __file__, options.model, "--setting", setting]
                subprocess.run(command, check=True)
    print(f"{measured()}\n\n{estimated()}")
