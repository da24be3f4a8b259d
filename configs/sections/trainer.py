"""How it is trained: layout, loss, optimizer, checkpoints, launcher."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.sections.section import Port, Positive, Seconds, Section


class LayoutSection(Section):
    """How the trainer's ranks are laid out; their product is the number of ranks."""

    data: Positive = Field(1, description="Data-parallel size.")
    tensor: Positive = Field(1, description="Tensor-parallel size (with sequence parallelism).")
    pipeline: Positive = Field(1, description="Pipeline-parallel size.")
    expert: Positive = Field(1, description="Expert-parallel size, taken out of the data-parallel ranks.")
    expert_tensor: Positive | None = Field(
        None, description="Tensor-parallel size inside an expert; null: as `tensor`."
    )

    @property
    def ranks(self) -> int:
        """Number of trainer processes."""
        return self.data * self.tensor * self.pipeline

    @property
    def inside_expert(self) -> tuple[str, int]:
        """The tensor-parallel size inside an expert, after the name of the field that sets it."""
        return ("tensor", self.tensor) if self.expert_tensor is None else ("expert_tensor", self.expert_tensor)


class SatSection(Section):
    """Staleness-adaptive trust region (docs/losses.md, arXiv 2607.18722)."""

    alpha: float = Field(
        0.90, gt=0, lt=1, description="Quantile of |log-ratio| above which a token's trust region shrinks."
    )
    kernel: Literal["hill", "hill_shift", "gauss", "laplace"] = Field(
        "hill", description="How the radius falls with |log-ratio|."
    )
    exponent: float = Field(2.0, gt=0, description="n of the Hill kernels.")
    width: float = Field(1.0, gt=0, description="w, the width of the kernel in units of its scale.")
    scale: Literal["quantile", "mad"] = Field(
        "quantile", description="Scale s: the quantile itself, or 1.4826 times the median of |log-ratio|."
    )
    floor: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Smallest share of the radius that a token keeps; above 0 most of SAT is switched off.",
    )
    scope: Literal["global", "lagged", "microbatch"] = Field(
        "global", description="Tokens over which the quantile is taken."
    )
    quantile_weight: Literal["token", "sequence"] = Field(
        "token", description="Sequence level only: the quantile counts tokens or sequences."
    )


class LossSection(Section):
    """The policy loss: one name of the loss registry and its parameters."""

    name: str = Field(
        "sat-grpo", description="Name in the loss registry (docs/losses.md): sat-grpo, sat-gspo, grpo, gspo, ..."
    )
    clip_low: float | None = Field(
        None, gt=0, lt=1, description="Lower clip radius: the ratio is clipped at 1 - clip_low; null: the loss's own."
    )
    clip_high: float | None = Field(
        None, gt=0, description="Upper clip radius: the ratio is clipped at 1 + clip_high; null: the loss's own."
    )
    aggregation: Literal["token-mean", "sequence-mean", "constant"] | None = Field(
        None, description="Denominator of the loss over one optimizer step; null: the loss's own."
    )
    constant_length: Positive | None = Field(
        None, description="K of the aggregation `constant`; null: rollout.max_new_tokens."
    )
    advantage: Literal["grpo", "dr-grpo", "rloo", "reinforce++"] | None = Field(
        None, description="How rewards of a group become advantages; null: the loss's own."
    )
    parameters: dict[str, float] = Field(
        default_factory=dict, description="Further parameters of the loss, by the names in docs/losses.md."
    )
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of an entropy bonus.")
    reference_kl: float = Field(
        0.0, ge=0, description="Weight of a KL penalty towards the weights of model.path; costs one more forward pass."
    )
    sat: SatSection = Field(default_factory=SatSection, description="Used by the sat-* losses.")


class OptimizerSection(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(..., gt=0, description="Peak learning rate.")
    schedule: Literal["constant", "cosine"] = Field(
        "constant", description="Shape of the learning rate after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    min_learning_rate: float = Field(0.0, ge=0, description="End of the cosine schedule.")
    staleness: Literal["none", "lag", "ess"] = Field(
        "none",
        description="Scale each step's learning rate by 1 / max(1, mean lag of its tokens), by the effective sample "
        "size of its ratios as a share of its tokens, or not at all.",
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    beta1: float = Field(0.9, gt=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, gt=0, lt=1, description="Decay of the second moment.")
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    clip_norm: float = Field(1.0, gt=0, description="Global gradient norm above which gradients are scaled down.")


class CheckpointSection(Section):
    """What a restart begins from."""

    interval_steps: Positive = Field(20, description="Optimizer steps between two checkpoints.")
    keep: Positive = Field(2, description="Checkpoints kept on disk.")


class RaySection(Section):
    """Used by trainer.launcher: ray (docs/trainer.md)."""

    address: str | None = Field(None, description="Address of the cluster, or auto; null: RAY_ADDRESS, or a local one.")
    restarts: int = Field(3, ge=0, description="Times that the ranks are started again after one was lost.")
    start_timeout_s: Seconds = Field(300.0, description="Longest wait for room on the cluster, in seconds.")


class TrainerSection(Section):
    """The Megatron-core trainer."""

    groups_per_step: Positive = Field(16, description="Groups trained in one step: one batch, one version.")
    steps_per_batch: Positive = Field(
        1,
        description="Optimizer updates on one batch, each on its own part of the samples; versions, and so lag.max, "
        "count batches.",
    )
    layout: LayoutSection = Field(default_factory=LayoutSection, description="Ranks and how they share the model.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the trainer computes: gloo on cpu, NCCL on cuda.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number format of the trainer's weights; gradients are float32."
    )
    micro_batch_tokens: Positive = Field(8192, description="Budget of one micro-batch on one rank, in tokens.")
    recompute: bool = Field(False, description="Recompute activations in the backward pass to save memory.")
    distributed_optimizer: bool = Field(False, description="Spread the optimizer's state over the data-parallel ranks.")
    routing_replay: Literal["required", "available", "off"] = Field(
        "required", description="Replay the engine's routing: always, where a trajectory has it, or never."
    )
    launcher: Literal["local", "torchrun", "ray"] = Field("local", description="Who starts the ranks.")
    port: Port = Field(0, description="Rendezvous port of the local launcher; 0: a free one.")
    ray: RaySection = Field(default_factory=RaySection, description="The launcher ray.")
    loss: LossSection = Field(default_factory=LossSection, description="The policy loss.")
    optimizer: OptimizerSection = Field(..., description="The optimizer.")
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="Checkpoints.")
    retention: Literal["payload", "prompt"] = Field(
        "payload",
        description="What is kept of a trained group until its checkpoint is durable: all of it, or its prompt alone.",
    )
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        (),
        description="Where the record of each step goes besides metrics.jsonl and Prometheus; the package must be "
        "installed. wandb: offline, in the run's folder.",
    )
    lease_s: Seconds = Field(
        60.0, description="A trainer that does not renew its lease for this long, in seconds, counts as gone."
    )
    collective_timeout_s: Seconds = Field(300.0, description="Longest wait of one rank for another, in seconds.")
