"""What of our manifests a server of Kubernetes 1.20, without operators, knows. Pure: objects in, objects out.

Invariant: what is taken away is named, so that a test can demand that it is nothing else.
"""

from __future__ import annotations

import copy

from tests.deploy.tools import Tree

# Kinds that came later (since) or with an operator.
LATER = {"PodDisruptionBudget": "policy/v1"}  # 1.21
OPERATED = {"ScaledObject": "keda.sh/v1alpha1", "ServiceMonitor": "monitoring.coreos.com/v1", "RayJob": "ray.io/v1"}


def known(objects: tuple[Tree, ...]) -> tuple[list[Tree], list[str]]:
    """(objects without what 1.20 does not know, what was taken away: "Kind group/version" or "Kind name: field")."""
    kept, left = [], []
    for item in copy.deepcopy(objects):
        kind, version = item["kind"], item["apiVersion"]
        if version in (LATER.get(kind), OPERATED.get(kind)):
            left.append(f"{kind} {version}")
            continue
        kept.append(item)
        name = f"{kind} {item['metadata']['name']}"
        if kind == "Job" and item["spec"].pop("completionMode", None):  # 1.24; before it, every Job was NonIndexed
            left.append(f"{name}: completionMode")
        for container in item.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            if "sleep" in container.get("lifecycle", {}).get("preStop", {}):  # 1.30
                del container["lifecycle"]
                left.append(f"{name}: preStop.sleep")
    return kept, left


def pods_of_ray(objects: tuple[Tree, ...]) -> list[Tree]:
    """A Pod from each template of a RayJob, as its operator would make them, to have them admitted."""
    made = []
    for item in objects:
        if item["kind"] == "RayJob":
            cluster = item["spec"]["rayClusterSpec"]
            for number, group in enumerate((cluster["headGroupSpec"], *cluster["workerGroupSpecs"])):
                metadata = {"name": f"ray-{number}", "namespace": "lagrange", **group["template"]["metadata"]}
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": group["template"]["spec"]}
                made.append(copy.deepcopy(pod))
    return made
