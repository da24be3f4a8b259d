"""What Lagrange's trainer costs over a bare Megatron loop, and SAT over plain clipping: one process, one run.

    python -m benchmarks.trainer_speed [--hidden 256] [--layers 2] [--vocabulary 4096] [--tokens 2048] [--rounds 9]

All variants train the same model on the same micro-batches, interleaved round by round, so that a busy machine slows
all alike; times are CPU time of this process, and a figure is the median over rounds of a ratio within a round. One
JSON object is printed; about a minute on a quiet machine.

bare: Megatron's own forward-backward function, cross-entropy from whole logits, clip and AdamW: no RL, no replay, no
statistics. The others do what the training loop does with a batch: the loss from chunked log-probs and entropies,
routing replay, the check of loss and gradients, AdamW, and the step's record. SAT's scope `global` includes its
log-prob pass; with one micro-batch a rank, `global (one)`, there is none.

SAT's other scopes cost less than two steps of one kind differ, so what they add is measured on the loss alone (its
preparation, forward, backward and statistics; benchmarks/sat_overhead.py) for as many tokens, in percent of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from benchmarks import sat_overhead
from broker.types import Trajectory, VersionRun
from configs.schema import LossSection, RunConfig, TinyModel
from services.local.tiny_model import make_weights, model_config
from trainer.batch import MicroBatch, RouteShape, Sample, pack
from trainer.losses.catalogue import resolve
from trainer.losses.sat import Gate
from trainer.losses.step import StepLoss
from trainer.megatron.parallel import parallel
from trainer.megatron.policy import PolicyModel
from trainer.statistics import step_statistics

LENGTH, MICRO_BATCHES = 256, 2
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "sat-grpo lagged": {"name": "sat-grpo", "sat": {"scope": "lagged"}},
    "sat-grpo microbatch": {"name": "sat-grpo", "sat": {"scope": "microbatch"}},
    "sat-grpo global": {"name": "sat-grpo", "sat": {"scope": "global"}},
}


def write_model(tiny: TinyModel, vocabulary: int, folder: Path) -> None:
    """The tiny model with a vocabulary of another size: its own is too small to weigh the output layer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_config(tiny) | {"vocab_size": vocabulary}))
    tensors = make_weights(tiny, 0)
    random = np.random.default_rng(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = (0.02 * random.standard_normal((vocabulary, tiny.hidden))).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def micro_batches(tiny: TinyModel, vocabulary: int, tokens: int, parts: int) -> list[MicroBatch]:
    """Sequences of LENGTH random tokens with random routes, in so many micro-batches."""
    random = np.random.default_rng(0)
    shape = RouteShape(tiny.layers, tiny.experts_per_token, tiny.experts)
    samples = []
    for i in range(max(tokens // LENGTH, parts)):
        prompt, response = LENGTH // 4, LENGTH - LENGTH // 4
        order = random.random((LENGTH - 1, tiny.layers, tiny.experts)).argsort(-1)[..., : tiny.experts_per_token]
        trajectory = Trajectory(
            prompt_ids=random.integers(0, vocabulary, prompt).astype(np.int32),
            response_ids=random.integers(0, vocabulary, response).astype(np.int32),
            log_probs=(-np.log(vocabulary) + 0.05 * random.standard_normal(response)).astype(np.float32),
            loss_mask=np.ones(response, np.bool_),
            versions=(VersionRun(0, response, i % 3),),
            reward=0.0,
            finish="length",
            routes=order.astype(np.uint8),
        )
        samples.append(Sample(trajectory, np.full(response, float(random.standard_normal()), np.float32)))
    return [pack(samples[i::parts], route_shape=shape) for i in range(parts)]


def bare_step(policy: PolicyModel, batches: Sequence[MicroBatch]) -> None:
    """Forward, backward and update by Megatron alone."""
    from megatron.core.pipeline_parallel import get_forward_backward_func  # after compat.install

    from trainer.megatron import schedule

    parts, total = policy.parts, sum(int(b.loss_mask.sum()) for b in batches)
    items = [schedule.prepare(b, parts, "off", policy.parallel.device) for b in batches]

    rotary = parts.rotary
    assert rotary is not None

    def forward(iterator: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        item = next(iterator)
        rotary.positions = item.position_ids[0]
        losses = model(
            item.token_ids, item.position_ids, None, labels=item.labels[None], packed_seq_params=item.packing
        )

        def loss_of(values: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss = (values[0] * item.batch.loss_mask).sum() / total
            return loss, torch.zeros((), dtype=torch.int), {"loss": loss.detach().clone()}

        return losses, loss_of

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(items),
        model=[parts.wrapped],
        num_microbatches=len(items),
        seq_length=items[0].token_ids.shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    parts.optimizer.step()
    policy.zero_gradients()


def our_step(policy: PolicyModel, batches: Sequence[MicroBatch], loss: LossSection) -> None:
    """What trainer.loop does between a batch and its record."""
    settings = resolve(loss, LENGTH)
    step = StepLoss(settings, previous=Gate(0.08, 0.08))
    if not settings.needs_log_prob_pass:
        step.measure(batches, None)
    elif len(batches) > 1:
        step.measure(batches, [scores.log_probs for scores in policy.log_probs(batches)])
    reports = policy.forward_backward(batches, step)
    assert all(bool(torch.isfinite(r["loss"])) for r in reports)
    assert policy.gradients_finite()
    step_statistics(batches, reports, version=2, max_lag=2, settings=settings, gate=step.context.gate)
    policy.optimizer_step(1e-5)
    policy.replay_metrics()


def loss_seconds(tokens: int, repeats: int) -> dict[str, float]:
    """Median CPU seconds of each loss alone, interleaved."""
    batch, log_probs = sat_overhead.random_batch(tokens)
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    for number in range(repeats + 2):
        for name, values in LOSSES.items():
            took = sat_overhead.one_step(resolve(LossSection.model_validate(values), LENGTH), batch, log_probs)
            if number > 1:
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser()
    for name, value in (("hidden", 256), ("layers", 2), ("vocabulary", 4096), ("tokens", 2048), ("rounds", 9)):
        options.add_argument(f"--{name}", type=int, default=value)
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tiny = TinyModel(
        layers=chosen.layers,
        hidden=chosen.hidden,
        heads=chosen.hidden // 64,
        key_value_heads=chosen.hidden // 64,
        head_dim=64,
        expert_hidden=chosen.hidden // 2,
        context=2 * LENGTH,
    )
    config = RunConfig.model_validate(
        {
            "run": {"steps": 1},
            "lag": {"max": 2},
            "model": {"tiny": tiny.model_dump()},
            "task": {"name": "max-digit"},
            "rollout": {"max_new_tokens": 1},
            "trainer": {"optimizer": {"learning_rate": 1e-5}},
        }
    )
    with tempfile.TemporaryDirectory() as folder, parallel(config) as ranks:
        write_model(tiny, chosen.vocabulary, Path(folder) / "model")
        policy = PolicyModel.create(config, ranks, Path(folder) / "model")
        several = micro_batches(tiny, chosen.vocabulary, chosen.tokens, MICRO_BATCHES)
        one = micro_batches(tiny, chosen.vocabulary, chosen.tokens, 1)
        steps: dict[str, Callable[[], None]] = {
            "bare": lambda: bare_step(policy, several),
            "bare (one)": lambda: bare_step(policy, one),
            "sat-grpo global (one)": lambda: our_step(
                policy, one, LossSection.model_validate(LOSSES["sat-grpo global"])
            ),
        }
        for name, values in LOSSES.items():
            loss = LossSection.model_validate(values)
            steps[name] = lambda loss=loss: our_step(policy, several, loss)  # type: ignore[misc]
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(chosen.rounds + 1):
            for name, step in steps.items():
                began = time.process_time()
                step()
                if number:  # the first round warms up
                    seconds[name].append(time.process_time() - began)
        parameters = sum(p.numel() for p in policy.parts.gpt.parameters())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    over = {name: "bare (one)" if name.endswith("(one)") else "bare" for name in steps if not name.startswith("bare")}
    alone = loss_seconds(chosen.tokens, 30)
    found = {
        "parameters": parameters,
        "tokens_per_step": sum(b.tokens for b in several),
        "cpu_seconds_per_step": {name: round(value, 4) for name, value in median.items()},
        "tokens_per_second_over_bare": {
            name: round(statistics.median(b / own for b, own in zip(seconds[bare], seconds[name], strict=True)), 3)
            for name, bare in over.items()
        },
        "sat_loss_over_grpo_percent_of_a_step": {
            name: round(100 * (alone[name] - alone["grpo"]) / median["grpo"], 2) for name in LOSSES if name != "grpo"
        },
    }
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
