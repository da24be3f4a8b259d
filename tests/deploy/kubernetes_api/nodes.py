"""The machines that docs/deploy/kubernetes.md asks for, as objects: they can be scheduled on, and run nothing. Pure."""

from __future__ import annotations

from tests.deploy.tools import Tree

# What a node of the paper's setting offers to Pods: eight GPUs, and of 2 TiB what the system leaves.
GPU_NODE = {"cpu": "128", "memory": "1900Gi", "nvidia.com/gpu": "8", "pods": "110"}
SMALL_NODE = {"cpu": "4", "memory": "15Gi", "pods": "110"}
OF_OVERLAY: dict[str, list[dict[str, str]]] = {
    "cpu-small": [SMALL_NODE],
    "kuberay": [SMALL_NODE],
    "gpu-qwen3-30b-a3b": [GPU_NODE] * 2,
    "gpu-qwen3-30b-a3b-4-nodes": [GPU_NODE] * 4,
}


def nodes(overlay: str) -> list[Tree]:
    """Nodes that say that they are ready."""
    made = []
    for number, offers in enumerate(OF_OVERLAY[overlay]):
        name = f"node-{number}"
        status = {"capacity": offers, "allocatable": offers, "conditions": [{"type": "Ready", "status": "True"}]}
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name}}
        made.append({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status})
    return made


def volumes() -> list[Tree]:
    """A volume for each claim that an installation may have."""
    spec = {
        "capacity": {"storage": "4Ti"},
        "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
        "hostPath": {"path": "/nowhere"},
    }
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"volume-{number}"}, "spec": spec}
        for number in range(3)
    ]
