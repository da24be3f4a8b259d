"""The schema of a run's configuration.

Invariant: a `RunConfig` that exists is complete and free of contradictions that can be seen without starting
anything: unknown keys are refused, every field has a unit and a sentence, and every rule of configs/rules.py names the
field to change. Secrets are not part of it: they come from the environment (`LAGRANGE_REDIS_PASSWORD`,
`LAGRANGE_API_TOKEN`, `LAGRANGE_ENGINE_API_KEY`) or from the files that `*_FILE` variants of those name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from configs.rules import CROSS_FIELD_RULES

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A part of the configuration: frozen, and a key that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """Which run this is."""

    id: str = Field(
        "",
        description="Names the run's keys in Redis and its folder; empty: `lagrange up` makes one.",
        pattern=r"^[A-Za-z0-9._-]*$",
        max_length=80,
    )
    name: str = Field("local", description="Prefix of a generated run id.", pattern=r"^[A-Za-z0-9._-]+$", max_length=48)
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seeds the model, the prompts and the trainer.")
    steps: Positive = Field(..., description="Optimizer steps after which the run ends.")
    directory: Path = Field(Path("runs"), description="Folder that holds one folder per run.")

    @property
    def folder(self) -> Path:
        """The run's own folder: configuration, logs, metrics, weights and checkpoints."""
        return self.directory / self.id


class RedisSection(Section):
    """The server that holds queue, ledger, versions and registry."""

    url: str | None = Field(
        None,
        description="redis://, rediss:// (TLS), unix:// or redis+sentinel://host:port,.../service address without a "
        "password; null: `lagrange up` embeds a server.",
    )
    ca_file: Path | None = Field(
        None,
        description="Certificates (PEM) of who may have signed the server's, for a rediss:// address; null: the "
        "system's.",
    )
    port: Port = Field(0, description="Port of the embedded server; 0: a free one.")
    timeout_s: Seconds = Field(10.0, description="Longest wait for one answer of the server, in seconds.")
    max_memory_mb: Positive = Field(
        1024, description="Memory limit of the embedded server, in MiB (policy noeviction)."
    )
    payloads: Literal["redis", "folder"] = Field(
        "redis", description="Where trajectories lie: in Redis, or as files in payload_folder."
    )
    payload_folder: Path | None = Field(
        None, description="Folder that every host of the run sees under this path; /dev/shm/... on one host."
    )
    payload_limit_mb: Positive | None = Field(
        None, description="Most that trajectories may take in payload_folder, in MiB; null: 60 % of max_memory_mb."
    )
    compression: Literal["none", "zstd"] = Field(
        "none", description="Compress trajectories: fewer bytes for more CPU time (docs/queue.md)."
    )

    @model_validator(mode="after")
    def _certificates_are_of_use(self) -> RedisSection:
        if self.ca_file is not None and not (self.url or "").startswith("rediss"):
            raise ValueError("redis.ca_file is set, but redis.url does not begin with rediss://: nothing is encrypted.")
        return self

    @model_validator(mode="after")
    def _folder_is_named(self) -> RedisSection:
        if self.payloads == "folder" and (self.payload_folder is None or not self.payload_folder.is_absolute()):
            raise ValueError(
                "redis.payloads is folder, but redis.payload_folder is not an absolute path. Name a folder that all "
                "hosts share, or one in /dev/shm on a single host."
            )
        return self


class LagSection(Section):
    """The bound on policy lag (docs/lag-bound.md)."""

    max: int = Field(
        ..., ge=0, le=1024, description="Largest lag, in versions, at which a token may be trained; 0 is synchronous."
    )
    straggler_wait_s: Seconds = Field(
        120.0,
        description="Longest time, in seconds, that the trainer holds a step for groups that would go stale by it.",
    )
    adaptive: AdaptiveLagSection | None = Field(
        None, description="Moves the bound between two limits while the run goes on; null: it stays."
    )


class AdaptiveLagSection(Section):
    """A controller that moves lag.max while the run goes on (docs/steer-a-run.md); the monitor runs it."""

    min: int = Field(1, ge=0, le=1024, description="Smallest bound that it sets, in versions.")
    max: int = Field(8, ge=0, le=1024, description="Largest bound that it sets, in versions.")
    figure: Literal["log_ratio_abs_mean", "gate_rate", "ess"] = Field(
        "log_ratio_abs_mean", description="What it holds inside a budget: a figure of the trainer's step records."
    )
    budget: float = Field(
        0.1, gt=0, lt=1, description="Limit of the figure: an upper one, for ess (a share) a lower one."
    )
    hysteresis: float = Field(
        0.3, gt=0, lt=1, description="Share of the budget below its edge within which nothing is changed."
    )
    stale_budget: float = Field(
        0.02, gt=0, lt=1, description="Share of the tokens that may go stale before the bound is raised."
    )
    wait_budget: float = Field(
        0.1, gt=0, lt=1, description="Share of its time that the trainer may wait before the bound is raised."
    )
    window_steps: Positive = Field(20, description="Steps that are looked at; as many pass between two changes.")
    interval_s: Seconds = Field(5.0, description="Time between two looks, in seconds.")


class TinyModel(Section):
    """A Qwen3-MoE small enough for a CPU, made with random weights at the start of a run."""

    layers: Positive = Field(2, description="Transformer layers.")
    hidden: Positive = Field(64, description="Width of the residual stream.")
    heads: Positive = Field(4, description="Attention heads.")
    key_value_heads: Positive = Field(2, description="Key-value heads.")
    head_dim: Positive = Field(32, description="Width of one head.")
    experts: Positive = Field(8, description="Experts in each layer.")
    experts_per_token: Positive = Field(2, description="Experts that a token is routed to.")
    expert_hidden: Positive = Field(64, description="Width of one expert's inner layer.")
    rope_theta: float = Field(100.0, gt=1, description="Base of the rotary embedding.")
    init_std: float = Field(0.1, gt=0, description="Standard deviation of linear weights.")
    embedding_std: float = Field(0.5, gt=0, description="Standard deviation of token embeddings.")
    head_std: float = Field(
        0.02, gt=0, description="Standard deviation of the output layer: small means a near-uniform first policy."
    )
    context: Positive = Field(512, description="Longest sequence, in tokens.")


class ModelSection(Section):
    """The policy that is trained: a checkpoint in Hugging Face layout, or a tiny one made on the spot."""

    path: Path | None = Field(
        None, description="Folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer)."
    )
    tiny: TinyModel | None = Field(None, description="Make a tiny random model instead.")

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("set exactly one of model.path and model.tiny")
        return self


class ShapingSection(Section):
    """What is added to a task's reward (docs/rewards.md); the defaults add nothing."""

    length_limit: int = Field(0, ge=0, description="Length at which a response is too long; 0: rollout.max_new_tokens.")
    overlong_buffer: int = Field(
        0, ge=0, description="DAPO's soft overlong penalty grows over so many tokens below the limit; 0: none."
    )
    overlong_penalty: float = Field(1.0, ge=0, description="What a response at the limit loses.")
    truncated_reward: float | None = Field(
        None, description="Reward of a response that was cut at rollout.max_new_tokens; null: as the task judges it."
    )
    format_pattern: str | None = Field(None, description="Regular expression that a well-formed response matches.")
    format_reward: float = Field(0.0, description="Added to the reward of a response that matches format_pattern.")


class CurriculumSection(Section):
    """Passes over prompts that are too easy or too hard by now (docs/rewards.md); all workers share what is known."""

    low: float = Field(0.05, ge=0, le=1, description="A prompt whose samples pass less often is passed over.")
    high: float = Field(0.95, ge=0, le=1, description="A prompt whose samples pass more often is passed over.")
    again: float = Field(0.1, gt=0, le=1, description="Share of those prompts that is drawn all the same.")
    pass_reward: float = Field(1.0, description="Reward from which on a sample has passed.")
    memory: float = Field(0.5, ge=0, lt=1, description="How much of what was known counts on after a new group.")


class TaskSection(Section):
    """What is trained on: a name in the task registry and its parameters."""

    name: str = Field(..., description="Name in the task registry (docs/add-a-task.md).")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Passed to the task as keyword arguments.")
    shaping: ShapingSection = Field(default_factory=ShapingSection, description="Added to the task's reward.")
    curriculum: CurriculumSection | None = Field(None, description="By pass rate, while the run goes on; null: none.")
    drop_equal_groups: bool = Field(
        False,
        description="Workers drop groups whose rewards are all equal, counted as filtered, and draw others instead.",
    )


class RolloutSection(Section):
    """Rollout workers: how samples are drawn."""

    workers: Positive = Field(2, description="Worker processes that `lagrange up` starts.")
    concurrent_groups: Positive = Field(8, description="Groups that one worker generates at the same time.")
    samples_per_prompt: Positive = Field(16, description="Samples in a group.")
    temperature: float = Field(
        1.0, gt=0, le=10, description="Sampling temperature; the trainer divides its logits by the same number."
    )
    max_new_tokens: Positive = Field(..., description="Longest response, in tokens.")
    generation_timeout_s: Seconds = Field(60.0, description="Longest wait for one answer of an engine, in seconds.")
    interrupted: Literal["continue", "restart", "drop"] = Field(
        "continue",
        description="What becomes of a sample that an update interrupted: it goes on where it was, is drawn again, or "
        "is left out of its group.",
    )
    max_versions: Positive = Field(
        16, description="Most versions that one sample may span; one that would need more is drawn again."
    )
    generation_tries: Positive = Field(4, description="Tries for one sample before it is given up.")
    min_samples: Positive = Field(2, description="A group that ends with fewer samples than this fails.")
    group_tries: Positive = Field(
        3,
        description="Times that a prompt is issued again after a failure or staleness before it is a dead letter.",
    )
    lease_s: Seconds = Field(
        30.0, description="A worker that does not renew a group's lease for this long, in seconds, loses it."
    )
    reward_timeout_s: Seconds = Field(10.0, description="Longest time for the reward of one sample, in seconds.")
    reward_processes: Positive = Field(2, description="Processes of one worker in which rewards that may hang run.")
    reward_memory_mb: Positive = Field(2048, description="Address space of one such process, in MiB.")


class EngineSection(Section):
    """SGLang servers and how `lagrange engine` starts them."""

    replicas: Positive = Field(1, description="Engines that `lagrange up` starts.")
    urls: tuple[str, ...] = Field(
        (), description="Engines that run elsewhere, by base URL; not empty: `lagrange up` starts none."
    )
    host: str = Field("127.0.0.1", description="Address that an engine listens on.")
    port: Port = Field(0, description="Port of the first engine, the others follow; 0: free ones.")
    python: Path = Field(
        Path(".venv-sglang/bin/python"), description="Interpreter of the environment in which SGLang is installed."
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the engine computes.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Number format of the engine's weights.")
    tensor_parallel: Positive = Field(1, description="Devices that one engine is spread over.")
    memory_fraction: float = Field(
        0.3, gt=0, lt=1, description="Share of the device's memory for weights and KV cache."
    )
    max_total_tokens: Positive | None = Field(
        20000, description="Size of the KV cache in tokens; null: as much as memory_fraction admits."
    )
    start_timeout_s: Seconds = Field(300.0, description="Longest time from start to the first answer, in seconds.")
    metrics: bool = Field(
        True,
        description="Whether SGLang keeps metrics of its own at /metrics; on a CPU they cost a fifth of its time.",
    )
    extra_arguments: tuple[str, ...] = Field((), description="Further arguments of sglang.launch_server.")


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


class WeightsSection(Section):
    """How new versions reach the engines."""

    publish_interval: Positive = Field(1, description="Every how many optimizer steps the weights go to the engines.")
    keep: Positive = Field(3, description="Published versions kept on disk besides those in use.")
    transport: Literal["disk", "delta", "distributed"] = Field(
        "disk",
        description="How weights travel: engines read the published files; or a copy on their own host, made from what "
        "changed; or receive them in a broadcast (docs/weight-sync.md).",
    )
    local_folder: Path = Field(
        Path("/dev/shm/lagrange"),
        description="delta: folder on each engine's host for two versions of the weights, best in memory.",
    )
    local_wait_s: Seconds = Field(
        60.0,
        description="delta: longest wait for a host's copy, in seconds; then its engine reads the published files.",
    )
    bucket_mb: Positive = Field(512, description="distributed: weights in one broadcast, in MiB.")
    pause: Literal["drain", "abort"] = Field(
        "drain",
        description="Before an update, let running requests end, or abort them and let the workers continue them.",
    )
    strategy: Literal["all-at-once", "rolling", "on-idle"] = Field(
        "all-at-once",
        description="Engines are updated as soon as a version is there, a few at a time, or when nothing runs there.",
    )
    rolling_engines: Positive = Field(1, description="Most engines that `rolling` updates at the same time.")
    update_timeout_s: Seconds = Field(120.0, description="Longest time for one engine's update, in seconds.")
    update_tries: Positive = Field(3, description="Tries for one engine and version before it is quarantined.")
    probe_interval_s: Seconds = Field(0.5, description="Time between two looks at an engine, in seconds.")


class ServiceSection(Section):
    """Where an HTTP service listens."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(0, description="Port to listen on; 0: a free one, written to the run's folder by `lagrange up`.")
    cert_file: Path | None = Field(
        None, description="Certificate chain (PEM): the service then speaks HTTPS alone; null: HTTP."
    )
    key_file: Path | None = Field(None, description="Private key (PEM) of cert_file.")

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> ServiceSection:
        if (self.cert_file is None) is not (self.key_file is None):
            raise ValueError("cert_file and key_file belong together: set both for HTTPS, or none for HTTP.")
        return self

    @property
    def scheme(self) -> Literal["http", "https"]:
        """Of the service's address."""
        return "http" if self.cert_file is None else "https"


class EvaluationTask(Section):
    """One task of an evaluation."""

    name: str = Field(..., description="Name in the task registry.")
    label: str = Field("", description="Name in the results; empty: the task's.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Passed to the task as keyword arguments.")
    prompts: Positive = Field(100, description="Prompts 0 to N - 1 of the task.")
    samples: Positive = Field(8, description="Samples of each prompt: k of avg@k.")
    seed: int = Field(1, ge=0, description="Of the task's prompts; another than run.seed keeps them apart.")


class EvaluationSection(Section):
    """What `lagrange evaluator` scores while the run trains (docs/evaluate.md)."""

    tasks: tuple[EvaluationTask, ...] = Field((), description="Tasks; none: nothing is evaluated.")
    every_steps: Positive = Field(20, description="Optimizer steps between two evaluated versions, at least.")
    engines: Literal["own", "shared"] = Field(
        "own", description="Where it samples: an engine of its own, or the run's while they serve the version."
    )
    priority: int = Field(
        1, description="Of its requests on shared engines; those of rollouts have 0, larger goes first."
    )
    best: str | None = Field(None, description="Score by which the best checkpoint is kept, such as aime24/avg@8.")


class RunConfig(Section):
    """One run, complete. `lagrange check FILE` builds it and prints what it means."""

    run: RunSection
    redis: RedisSection = Field(default_factory=RedisSection)
    lag: LagSection
    model: ModelSection
    task: TaskSection
    rollout: RolloutSection
    engine: EngineSection = Field(default_factory=EngineSection)
    trainer: TrainerSection
    weights: WeightsSection = Field(default_factory=WeightsSection)
    weight_sync: ServiceSection = Field(default_factory=ServiceSection)
    monitor: ServiceSection = Field(default_factory=ServiceSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        for rule in CROSS_FIELD_RULES:
            problem = rule(self)
            if problem:
                raise ValueError(problem)
        return self
