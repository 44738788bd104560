"""How much gradient does a replayed success get when its log-probs are the recorded ones?

    python benchmark/het_ratios.py      # one run of 7,000 rollouts, minutes

For every replayed trajectory, before the update: the ratio pi / pi_recorded of its tokens, apart for groups whose fresh
rollouts all failed (the ones replay is for) and for the others. The ratio is the weight of a token's gradient under the
clipped loss; under the shaped one it is beta w / (w + beta)^2, with beta 0.1.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import het_grpo

seen = []  # per iteration: (all failed, least ratio, mean weight under shaping) of each replayed trajectory
replace = het_grpo._replace_recorded_old_log_probs


def watched(data, old_log_probs):
    logprobs = replace(data, old_log_probs)
    replayed = data["replay_mask"].bool().any(1)
    rows = []
    for i in replayed.nonzero().flatten().tolist():
        fresh = (data["group_ids"] == data["group_ids"][i]) & ~replayed
        tokens = data["replay_mask"][i].bool()
        ratio = (old_log_probs[i] - logprobs[i])[tokens].exp()
        shaped = (0.1 * ratio / (ratio + 0.1) ** 2).mean().item()
        rows.append((bool((data["rewards"][fresh] < 1).all()), ratio.min().item(), shaped))
    seen.append(rows)
    return logprobs


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    het_grpo._replace_recorded_old_log_probs = watched
    with tempfile.TemporaryDirectory() as folder:
        options = dict(method="baseline", use_experience_replay=True, replay_old_logp="recorded", num_rollouts=7_000)
        options |= dict(seed=101, learning_rate=2e-3, eval_every=0, eval_size=12, save_every=0, device="cpu")
        het_grpo.main(het_grpo.Args(**options, run_dir=f"{folder}/run"))
    print("iterations | fresh rollouts | trajectories | least ratio, median | weight under shaping, mean")
    for start in range(0, len(seen), 30):
        for failed in (True, False):
            rows = [row for part in seen[start : start + 30] for row in part if row[0] == failed]
            if rows:
                least, shaped = statistics.median(r[1] for r in rows), statistics.mean(r[2] for r in rows)
                kind = "all failed" if failed else "some succeeded"
                print(f"{start + 1}-{start + 30} | {kind} | {len(rows)} | {least:.3f} | {shaped:.3f}")
