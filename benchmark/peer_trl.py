"""CPU seconds per iteration of ppo.py and of TRL's GRPOTrainer for the same work, in one process, alternating.

    pip install -r requirements.txt trl==1.16.0 && python benchmark/peer_trl.py

Work: sample 32 responses of 6 tokens from the same tiny Llama, score them, one epoch of one minibatch; one CPU thread.
ppo.py also runs the value head, its loss and a no-grad pass for old log-probs and values. GRPO with one update a batch
needs no such pass, so the ratio is printed with it and without it.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import ppo

RESPONSES, TOKENS, STEPS, WARM_UP, REPEATS = 32, 6, 60, 10, 7
torch.set_num_threads(1)


def reward(prompts, completions, **kwargs):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def ours(folder):
    """Median CPU seconds from one log of ppo.py to the next, all an iteration does, and those of its no-grad pass."""
    Path(folder, "reward.py").write_text(
        "def digits(prompts, responses, answers):\n    return [float(sum(c.isdigit() for c in r)) for r in responses]\n"
    )
    options = dict(batch_size=RESPONSES, max_response_length=TOKENS, update_epochs=1, num_minibatches=1, kl_coef=0.0)
    options |= dict(num_iterations=STEPS, eval_every=0, eval_size=8, sft_steps=0, device="cpu")
    args = ppo.Args(**options, reward_fn=f"{folder}/reward.py:digits", run_dir=f"{folder}/ours{time.time()}")
    stamps, lengths, extra = [], [], []
    log, forward = ppo.Writer.log, ppo.PolicyWithValue.forward

    def watched(self, *args, **kwargs):
        start = time.process_time()
        output = forward(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            extra.append(time.process_time() - start)
        return output

    def timed(self, metrics, global_step):
        log(self, metrics, global_step)
        stamps.append(time.process_time())
        lengths.append(metrics.get("charts/response_length", TOKENS))

    ppo.Writer.log, ppo.PolicyWithValue.forward = timed, watched
    ppo.main(args)
    ppo.Writer.log, ppo.PolicyWithValue.forward = log, forward
    assert statistics.mean(lengths) > TOKENS - 0.3, "almost all responses must have their full length"
    return median_gap(stamps), statistics.median(extra[WARM_UP:])


class Clock(TrainerCallback):
    def __init__(self):
        self.stamps = []

    def on_step_end(self, *args, **kwargs):
        self.stamps.append(time.process_time())


def median_gap(stamps):
    return statistics.median(b - a for a, b in zip(stamps[WARM_UP:], stamps[WARM_UP + 1 :], strict=False))


def theirs(folder):
    """Median CPU seconds from the end of one step of GRPOTrainer to the end of the next."""
    policy, tokenizer, _, _ = ppo.load_policy(ppo.Args())
    tokenizer.padding_side = "left"
    task = ppo.make_task(ppo.Args(), len)
    data = Dataset.from_list([{"prompt": task.train(i)[0]} for i in range(RESPONSES * STEPS)])
    config = GRPOConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=RESPONSES,
        num_generations=8,
        max_completion_length=TOKENS,
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        learning_rate=3e-4,
        max_steps=STEPS,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = GRPOTrainer(
        policy.lm, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[clock]
    )
    trainer.train()
    return median_gap(clock.stamps)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rounds = [(*ours(folder), theirs(folder)) for _ in range(REPEATS)]
    print("responses per CPU second")
    for a, extra, b in rounds:
        ratios = f"ratio of times {a / b:.2f}, without the no-grad pass {(a - extra) / b:.2f}"
        print(f"ppo.py {RESPONSES / a:.0f}, TRL {RESPONSES / b:.0f}, {ratios}")
    whole, same = [a / b for a, _, b in rounds], [(a - extra) / b for a, extra, b in rounds]
    print(f"ppo.py takes {statistics.median(whole):.2f} of TRL's time (from {min(whole):.2f} to {max(whole):.2f}),")
    print(f"without the no-grad pass {statistics.median(same):.2f} (from {min(same):.2f} to {max(same):.2f})")
