"""Plain GRPO against TRL: its GRPOTrainer gets our rollouts through rollout_func and must make the same update.

Skipped where TRL is missing: pip install trl==1.16.0
"""

import pytest
import torch
from conftest import spy, weights
from test_het_train import (
    TINY,
    batches,
    easy_locks,  # noqa: F401
    gradients_of_steps,
    models_before_updates,
    short_practice,  # noqa: F401
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import het_grpo as het

trl = pytest.importorskip("trl", reason="pip install trl==1.16.0")


def test_trl_makes_the_same_update(tmp_path, monkeypatch):
    """Losses, gradients and weights of two optimizer steps on one batch: ratio 1, then ratios that are clipped."""
    from datasets import Dataset

    starts, gradients = models_before_updates(monkeypatch), gradients_of_steps(monkeypatch)
    samples, losses = (
        spy(monkeypatch, het, name) for name in ("samples_to_dataproto", "minibatch_loss")
    )
    rate = dict(learning_rate=0.03)
    sizes = dict(num_iterations=1, num_minibatches=1, update_epochs=2)
    metrics = het.main(
        het.Args(**TINY | rate | sizes, method="baseline", run_dir=str(tmp_path / "ours"))
    )
    (trajectories, _), lm = batches(samples)[0], starts[0]
    lm.save_pretrained(tmp_path / "start")  # TRL makes its reference from the folder
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    ours, finals = list(gradients), weights(tmp_path / "ours")
    assert len(ours) == 2 and metrics["losses/clipfrac_on"] > 0.02, "the clip must have work to do"
    gradients.clear()
    samples = [het.tokenize_steps(t.steps) for t in trajectories]
    rows = [
        (t.prompt_ids, sample["response_ids"], sample["response_mask"])
        for t, sample in zip(trajectories, samples, strict=True)
    ]

    def played(prompts, trainer):
        assert prompts == [str(i // 4) for i in range(16)], "groups in our order"
        names = ("prompt_ids", "completion_ids", "env_mask")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)} | {"logprobs": None}

    config = trl.GRPOConfig(
        output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=16, num_generations=4, num_iterations=2, max_steps=2, shuffle_dataset=False,
        loss_type="bnpo", epsilon=0.2, epsilon_high=0.28, delta=3.0, beta=0.0,
        temperature=1.0, logging_steps=1, adam_epsilon=1e-5, max_grad_norm=1.0, warmup_steps=0,
        gradient_checkpointing=False, lr_scheduler_type="constant", **rate,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        lm,
        reward_funcs=lambda prompts, **_: [t.reward for t in trajectories],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(4)]),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "ours" / "final_model"),
        rollout_func=played,
    )
    trainer.train()
    # TRL divides by std + 1e-4, we by std + 1e-6: advantages differ by 2e-4 of themselves
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert logged == pytest.approx([result[0].item() for _, result in losses], rel=1e-3, abs=1e-5)
    assert len(gradients) == 2
    for step in range(2):
        norm = torch.cat([g.flatten() for g in ours[step]]).norm()
        for a, b in zip(ours[step], gradients[step], strict=True):
            assert (a - b).norm() <= 1e-3 * norm
    for key, value in lm.state_dict().items():
        torch.testing.assert_close(finals[key], value, atol=1e-3, rtol=1e-2)
