"""Write deploy/configs/*/config.yaml: the files of configs/ with addresses filled in.   python deploy/configs/make.py

Invariant: pure but for the writing; a test holds what is committed against what this makes, so that a change of
configs/ is carried over or seen.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
Tree = dict[str, Any]

ADDRESSES: Tree = {
    "run.directory": "/var/lib/lagrange/runs",
    "redis.url": "redis://redis:6379/0",
    "engine.host": "0.0.0.0",
    "engine.port": 30000,
    "engine.python": "/opt/sglang/bin/python",
    "trainer.port": 29500,
    "weight_sync.host": "0.0.0.0",
    "weight_sync.port": 8010,
    "monitor.host": "0.0.0.0",
    "monitor.port": 8020,
}
ASSETS: Tree = {"model.path": "/assets/Qwen3-30B-A3B-Base", "task.parameters.path": "/assets/math.jsonl"}
SCRAPED: Tree = {"engine.metrics": True}  # there is a Prometheus, unlike on a laptop
MADE: dict[str, tuple[str, str, Tree]] = {
    "tiny": (
        "local.yaml",
        "The tiny system on a CPU, for compose and for the Kubernetes overlay cpu-small.",
        {"run.id": "tiny", "run.name": "tiny", **SCRAPED},
    ),
    "tiny-ray": (
        "local.yaml",
        "The tiny system with the trainer's ranks as Ray actors, for the Kubernetes overlay kuberay.",
        {"run.id": "tiny-ray", "run.name": "tiny-ray", "trainer.launcher": "ray", **SCRAPED},
    ),
    "qwen3-30b-a3b": (
        "qwen3-30b-a3b.yaml",
        "Two nodes of eight GPUs: one for the trainer, one for four engines of two. Lag 1.",
        {"run.id": "qwen3-30b-a3b", **ASSETS},
    ),
    "qwen3-30b-a3b-4-nodes": (
        "qwen3-30b-a3b-lag8.yaml",
        "Four nodes of eight GPUs: two for the trainer (16 ranks), two for eight engines of two. Lag 8.",
        {"run.id": "qwen3-30b-a3b-4-nodes", "trainer.layout.data": 8, "engine.replicas": 8, **ASSETS},
    ),
}


def made(name: str) -> str:
    """Text of deploy/configs/<name>/config.yaml."""
    source, says, changes = MADE[name]
    tree: Tree = copy.deepcopy(yaml.safe_load((CONFIGS / source).read_text(encoding="utf-8")))
    for dotted, value in {**ADDRESSES, **changes}.items():
        *parents, leaf = dotted.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    head = f"# {says}\n# Made by deploy/configs/make.py from configs/{source}: change it there.\n"
    return head + yaml.safe_dump(tree, sort_keys=False)


if __name__ == "__main__":
    for folder in MADE:
        (HERE / folder / "config.yaml").write_text(made(folder), encoding="utf-8")
