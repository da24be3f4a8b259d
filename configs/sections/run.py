"""The run itself: its name and length, its Redis, its bound on policy lag, its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from configs.sections.section import Port, Positive, Seconds, Section, text

NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"  # of a folder and of keys: never . or .., and no option
NAME_IN_WORDS = "text of at most {} letters (A to Z), digits, dots, _ and -, beginning with a letter, a digit or _"
PAYLOAD_SHARE = 0.6  # of Redis' memory limit: a payload costs up to 1.24 times its bytes, and staging needs room
REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")


class RunSection(Section):
    """Which run this is."""

    id: Annotated[str, text(rf"^({NAME})?$", NAME_IN_WORDS.format(80), max_length=80)] = Field(
        "", description="Names the run's keys in Redis and its folder; empty: `lagrange up` makes one."
    )
    name: Annotated[str, text(rf"^{NAME}$", NAME_IN_WORDS.format(48), max_length=48)] = Field(
        "local", description="Prefix of a generated run id."
    )
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
        1024,
        description="Memory of the server (policy noeviction), in MiB: the embedded one gets it, another one's is to "
        "be said here; trajectories may take 60 % of it.",
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

    @property
    def payload_bytes(self) -> int:
        """Bytes that trajectories may take: of a folder its limit, of Redis a share of its memory."""
        if self.payloads == "folder" and self.payload_limit_mb is not None:
            return self.payload_limit_mb * 2**20
        return int(self.max_memory_mb * 2**20 * PAYLOAD_SHARE)

    @field_validator("url")
    @classmethod
    def _address_is_one_without_secrets(cls, url: str | None) -> str | None:
        if url is None:
            return url
        parts = urlsplit(url)
        if "@" in parts.netloc or "password=" in parts.query:
            raise ValueError(
                "it holds a user or a password, which files and logs would show. Set LAGRANGE_REDIS_USER and "
                "LAGRANGE_REDIS_PASSWORD instead."
            )
        if parts.scheme not in REDIS_SCHEMES:
            raise ValueError(
                f"{url!r} is no address of a Redis: expected redis://host:port/0, or "
                f"{', '.join(f'{scheme}://' for scheme in REDIS_SCHEMES[1:])}."
            )
        return url


class LagSection(Section):
    """The bound on policy lag (docs/lag-bound.md)."""

    max: int = Field(
        ..., ge=0, le=1024, description="Largest lag, in versions, at which a token may be trained; 0 is synchronous."
    )
    straggler_wait_s: Seconds = Field(
        120.0,
        description="Longest time, in seconds, that the trainer holds a step for groups that would go stale by it, and "
        "that a worker waits for an engine before it hands a group back.",
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
    head_dim: Positive = Field(32, multiple_of=2, description="Width of one head; even, as rotary embeddings need.")
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
        None,
        description="Folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer); a relative one is "
        "below the folder from which lagrange is called.",
    )
    tiny: TinyModel | None = Field(None, description="Make a tiny random model instead.")
