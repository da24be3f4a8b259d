"""The command line and environment of one SGLang server, from the configuration.

Invariant: pure; the API key is never on the command line (any user of the machine can read those), it is in a file that
only its owner can read. The server starts under a version that is not an integer, so that nothing it samples before
weight-sync has loaded and confirmed a published version can pass for a sample of some version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import EngineSection
from rollout.checkpoint import Checkpoint

UNCONFIRMED_VERSION = "unconfirmed"
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "TZ", "XDG_CACHE_HOME", "CC", "CXX")
INHERITED_PREFIXES = ("SGLANG_", "CUDA_", "NCCL_", "GLOO_", "HF_", "NVIDIA_", "TRITON_", "TORCH", "FLASHINFER_")
# As SGLang sets them for its own ranks, unless they are set (0.5.23, srt/entrypoints/engine.py): ranks of one NCCL
# group that disagree cannot open each other's memory.
NCCL_AS_SGLANG = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server. environment: all of it, not additions."""

    argv: tuple[str, ...]
    environment: dict[str, str]


def engine_launch(
    engine: EngineSection,
    checkpoint: Checkpoint,
    port: int,
    *,
    environment: Mapping[str, str],
    key_file: Path | None,
    index: int = 0,
    seed: int = 0,
    cores: Sequence[int] = (),
) -> Launch:
    """Command line and environment of the server on `port`.

    environment: the supervisor's own, of which only what the server needs is passed on (no secrets of ours).
    key_file: the file of `key_file_text`, or None for an open server. index: of the engine on this machine, which
    chooses its share of the GPUs. seed: of the server's random numbers. cores: those of the machine, which the ranks
    of a tensor-parallel engine on a CPU share.
    """
    module = "lagrange_sglang_cpu.serve" if engine.device == "cpu" else "sglang.launch_server"
    argv = [str(engine.python), "-m", module, "--model-path", str(checkpoint.folder)]
    argv += ["--host", engine.host, "--port", str(port), "--dtype", engine.dtype]
    argv += ["--mem-fraction-static", f"{engine.memory_fraction:g}", "--tp-size", str(engine.tensor_parallel)]
    argv += ["--weight-version", UNCONFIRMED_VERSION, "--random-seed", str(seed)]
    argv += ["--skip-tokenizer-init", "--sleep-on-idle", "--log-level-http", "warning"]
    argv += ["--incremental-streaming-output"]  # else each message of a stream repeats all those before
    if engine.metrics:
        argv += ["--enable-metrics"]
    if engine.device == "cpu":
        argv += ["--device", "cpu", "--attention-backend", "torch_native"]
    if engine.max_total_tokens is not None:
        argv += ["--max-total-tokens", str(engine.max_total_tokens)]
    if checkpoint.routed:
        argv += ["--enable-return-routed-experts"]
        if engine.device == "cuda":  # the default of newer GPUs chooses experts inside its kernel, and records none
            argv += ["--moe-runner-backend", "triton"]
    if engine.device == "cuda" and index and "CUDA_VISIBLE_DEVICES" not in environment:
        argv += ["--base-gpu-id", str(index * engine.tensor_parallel)]
    if key_file is not None:
        argv += ["--config", str(key_file)]
    return Launch((*argv, *engine.extra_arguments), engine_environment(engine, environment, index, cores))


def key_file_text(key: str) -> str:
    """Content of SGLang's --config file that holds the API key (YAML; a JSON string is one)."""
    return f"api-key: {json.dumps(key)}\n"


def engine_environment(
    engine: EngineSection, ours: Mapping[str, str], index: int = 0, cores: Sequence[int] = ()
) -> dict[str, str]:
    """What a process that runs in SGLang's environment needs of our own variables, and what we set for it."""
    kept = {k: v for k, v in ours.items() if k in INHERITED or k.startswith(INHERITED_PREFIXES)}
    # One thread: two OpenMP threads on busy cores make a token 5 to 10 times slower. Offline: the checkpoint is local.
    kept |= {"OMP_NUM_THREADS": ours.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    kept["PYTHONUNBUFFERED"] = "1"
    kept["PYTHONSAFEPATH"] = "1"  # no file of the current folder takes the place of a module; Python 3.10 has no -P
    # The environment is not activated, and kernels that are compiled at their first use want its `ninja`.
    kept["PATH"] = os.pathsep.join(filter(None, (str(engine.python.parent), kept.get("PATH"))))
    if engine.device == "cpu":
        kept["SGLANG_USE_CPU_ENGINE"] = "1"
        if engine.tensor_parallel > 1 and cores:  # left to itself, SGLang refuses more ranks than there are NUMA nodes
            kept.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores_of_ranks(cores, engine.tensor_parallel))
    else:
        kept |= _devices(kept.get("CUDA_VISIBLE_DEVICES", ""), index, engine.tensor_parallel)
    return kept


def _cores_of_ranks(cores: Sequence[int], ranks: int) -> str:
    """Cores as SGLang wants them for each rank, neighbours together: "0,1|2,3". Fewer cores than ranks are shared."""
    each = max(1, len(cores) // ranks)
    shares = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _devices(visible: str, index: int, each: int) -> dict[str, str]:
    """The engine's own share of the visible GPUs; nothing if they do not reach so far (as in a pod)."""
    mine = [name for name in visible.split(",") if name][index * each : (index + 1) * each]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if len(mine) == each else {}
