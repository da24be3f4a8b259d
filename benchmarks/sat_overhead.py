"""What SAT costs over plain clipping, in milliseconds of CPU time a step.

    python -m benchmarks.sat_overhead [tokens] [repeats]

Times the loss function alone (forward, backward, statistics) for grpo and for the sat losses in each scope on random
packed tokens, interleaved, and prints medians as one JSON object. The log-prob pass of the scope `global` is not in it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from configs.schema import LossSection
from trainer.batch import MicroBatch
from trainer.losses.catalogue import LossSettings, resolve
from trainer.losses.sat import Gate
from trainer.losses.step import loss_function, prepare
from trainer.statistics import step_statistics

VARIANTS = {
    "grpo": {"name": "grpo"},
    "sat-grpo microbatch": {"name": "sat-grpo", "sat": {"scope": "microbatch"}},
    "sat-grpo lagged": {"name": "sat-grpo", "sat": {"scope": "lagged"}},
    "sat-grpo global": {"name": "sat-grpo", "sat": {"scope": "global"}},
    "sat-gspo global": {"name": "sat-gspo", "sat": {"scope": "global"}},
}


def random_batch(tokens: int, length: int = 256) -> tuple[MicroBatch, torch.Tensor]:
    """Sequences of `length` tokens, all trainable, with log-ratios of a few percent."""
    behaviour = -torch.rand(tokens) * 3
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32)
    position = torch.arange(tokens)
    batch = MicroBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        position_ids=position % length,
        sequence_starts=starts,
        labels=torch.zeros(tokens, dtype=torch.int64),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        behaviour_log_probs=behaviour,
        advantages=torch.randn(tokens),
        versions=(position // length % 2).to(torch.int32),
        sequence_index=position // length,
    )
    return batch, behaviour + 0.05 * torch.randn(tokens)


def one_step(settings: LossSettings, batch: MicroBatch, log_probs: torch.Tensor) -> float:
    """CPU seconds of one step's loss, backward and statistics."""
    leaf = log_probs.clone().requires_grad_()
    start = time.process_time()
    passed = [log_probs] if settings.needs_log_prob_pass else None
    context = prepare(settings, [batch], passed, previous=Gate(0.08, 0.08))
    loss, report = loss_function(settings, context)(batch, leaf, torch.zeros_like(log_probs))
    loss.backward()
    step_statistics([batch], [report], version=1, max_lag=1, settings=settings, gate=context.gate)
    return time.process_time() - start


def main(tokens: int, repeats: int) -> None:
    """Print the medians."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch, log_probs = random_batch(tokens)
    chosen = {name: resolve(LossSection.model_validate(v), 256) for name, v in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(repeats):
        for name, settings in chosen.items():
            seconds[name].append(one_step(settings, batch, log_probs))
    found = {name: round(1e3 * statistics.median(s), 3) for name, s in seconds.items()}
    sys.stdout.write(json.dumps({"tokens": tokens, "repeats": repeats, "milliseconds": found}) + "\n")


if __name__ == "__main__":
    main(*(int(a) for a in (sys.argv[1:] + ["16384", "15"][len(sys.argv) - 1 :])))
