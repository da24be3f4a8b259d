"""How weights reach the engines, where the services listen, and where traces go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configs.sections.section import Port, Positive, Seconds, Section, text

COLLECTOR = "address such as http://collector:4318, without a user, a password or anything from ? or # on"


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


def base_url(scheme: str, host: str, port: int) -> str:
    """Address of a service, as a browser on its machine would write it."""
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class ServiceSection(Section):
    """Where an HTTP service listens."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(0, description="Port to listen on; 0: a free one, written to the run's folder by `lagrange up`.")
    cert_file: Path | None = Field(
        None, description="Certificate chain (PEM): the service then speaks HTTPS alone; null: HTTP."
    )
    key_file: Path | None = Field(None, description="Private key (PEM) of cert_file.")

    @property
    def scheme(self) -> Literal["http", "https"]:
        """Of the service's address."""
        return "http" if self.cert_file is None else "https"

    @property
    def url(self) -> str:
        """Of the service, once its port is chosen."""
        return base_url(self.scheme, self.host, self.port)


class TracesSection(Section):
    """Traces from a prompt to the optimizer step that trains it (docs/watch-a-run.md); off by default."""

    endpoint: Annotated[str, text(r"^https?://[^/\s@]+(/[^\s?#]*)?$", COLLECTOR)] | None = Field(
        None,
        description="Address of a collector that takes OTLP over HTTP, such as http://collector:4318, without a "
        "password; null: no traces.",
    )
    ratio: float = Field(0.01, ge=0, le=1, description="Share of the groups that is traced, drawn at admission.")
    timeout_s: Seconds = Field(5.0, description="Longest time for one message to the collector, in seconds.")
    interval_s: Seconds = Field(2.0, description="Longest time that a span waits to be sent, in seconds.")
    waiting_spans: Positive = Field(4096, description="Most spans that wait in one process; more are dropped, counted.")
