"""Self-distillation for het_grpo.py: the start policy with advice teaches the policy without it.

On failures the advantage of a token gets log pi_start(y | advice, question) - log pi(y | question),
the gradient of the KL divergence to the teacher on sampled tokens (SDPO, arXiv:2601.20802). The teacher
is the frozen start policy: a policy that teaches itself forgets advice together with its student.
`install(het, coefficient)` patches the script; the run is one of --method baseline.
"""

import copy

import torch


def install(het, coefficient: float = 1.0):
    state = {}
    start_game, samples_to_dataproto = het.Player.start_game, het.samples_to_dataproto
    grpo_update = het.grpo_update

    def start_and_look_up(self, t, env, retrieve):
        """What the advice would be, for the teacher."""
        start_game(self, t, env, retrieve)
        advice = retrieve(t.question)
        text = het.inject_experience(t.question, advice, self.args.experience_template)
        t.told_ids = self.dialogue.prompt(text)

    def remember(trajectories, device):
        state["trajectories"] = trajectories
        return samples_to_dataproto(trajectories, device)

    def update(policy, optimizer, batch, args, generator):
        if "teacher" not in state:
            state["teacher"] = copy.deepcopy(policy).requires_grad_(False)
        trajectories = state["trajectories"]
        told = [het.replace(t, advised_ids=t.told_ids, keep=True) for t in trajectories]
        taught = [[not t.success and t.told_ids != t.prompt_ids] for t in trajectories]
        device = batch["ids"].device
        view = samples_to_dataproto(told, device)
        teacher_logprobs, _ = het.compute_log_prob(state["teacher"], view, args)
        gap = (teacher_logprobs - batch["old_logprobs"]) * torch.tensor(taught).to(device)
        batch["advantages"] = batch["advantages"] + coefficient * gap
        return grpo_update(policy, optimizer, batch, args, generator)

    het.Player.start_game = start_and_look_up
    het.samples_to_dataproto = remember
    het.grpo_update = update
