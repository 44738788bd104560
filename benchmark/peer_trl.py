"""CPU seconds per iteration of ppo.py and of TRL's GRPOTrainer for the same work, in one process, alternating.

    pip install -r requirements.txt trl==1.16.0 && python benchmark/peer_trl.py

Work: sample 32 responses of 6 tokens from the same tiny Llama, score them, one epoch of one minibatch; one CPU thread.
ppo.py also runs the value head, its loss and the no-grad pass for old log-probs, which GRPO does not.
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

RESPONSES, TOKENS, STEPS, WARM_UP, REPEATS = 32, 6, 40, 10, 5
torch.set_num_threads(1)


def reward(prompts, completions, **kwargs):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def ours(folder):
    """Median CPU seconds from one log to the next of ppo.py: everything an iteration does."""
    Path(folder, "reward.py").write_text(
        "def digits(prompts, responses, answers):\n    return [float(sum(c.isdigit() for c in r)) for r in responses]\n"
    )
    options = dict(batch_size=RESPONSES, max_response_length=TOKENS, update_epochs=1, num_minibatches=1, kl_coef=0.0)
    options |= dict(num_iterations=STEPS, eval_every=0, eval_size=8, sft_steps=0, device="cpu")
    args = ppo.Args(**options, reward_fn=f"{folder}/reward.py:digits", run_dir=f"{folder}/ours{time.time()}")
    stamps, lengths = [], []
    log = ppo.Writer.log

    def timed(self, metrics, global_step):
        log(self, metrics, global_step)
        stamps.append(time.process_time())
        lengths.append(metrics.get("charts/response_length", TOKENS))

    ppo.Writer.log = timed
    ppo.main(args)
    ppo.Writer.log = log
    assert statistics.mean(lengths) > TOKENS - 0.3, "almost all responses must have their full length"
    return median_gap(stamps)


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
        pairs = [(ours(folder), theirs(folder)) for _ in range(REPEATS)]
    print("responses per CPU second")
    for a, b in pairs:
        print(f"ppo.py {RESPONSES / a:.0f}, TRL {RESPONSES / b:.0f}, ratio of times {a / b:.2f}")
    ratios = [a / b for a, b in pairs]
    print(f"ppo.py takes {statistics.median(ratios):.2f} of TRL's time (from {min(ratios):.2f} to {max(ratios):.2f})")
