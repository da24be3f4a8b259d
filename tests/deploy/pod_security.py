"""The Pod Security Standard `restricted`, and our stricter rules, as a pure function: a pod's spec in, breaches out.

BREACHES holds one way to break each rule. The static tests demand that `breaches` sees it, and the drills with a real
API server that Kubernetes refuses it too, so the two cannot drift apart unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.deploy.tools import Tree, containers

VOLUMES = {"configMap", "secret", "persistentVolumeClaim", "emptyDir"}
CONTEXT = {  # of every container, to the letter: a further field could only take something back
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def breaches(spec: Tree) -> list[str]:
    """One sentence for each rule that a pod with this spec would break."""
    return [*_of_pod(spec), *(sentence for one in containers({"spec": spec}) for sentence in _of_container(one))]


def _of_pod(spec: Tree) -> Iterator[str]:
    context = spec.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
        yield "it may run as root"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "it has not the runtime's seccomp profile"
    yield from (f"it sets {key}" for key in ("sysctls", "seLinuxOptions", "windowsOptions") if key in context)
    yield from (f"it sets {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key))
    if spec.get("automountServiceAccountToken") is not False:
        yield "it gets a token of its account"
    for volume in spec.get("volumes", []):
        yield from (f"its volume {volume['name']} is a {kind}" for kind in set(volume) - {"name"} - VOLUMES)


def _of_container(container: Tree) -> Iterator[str]:
    name = container["name"]
    if container.get("securityContext") != CONTEXT:
        yield f"{name}: its securityContext is not {CONTEXT}"
    yield from (f"{name}: it takes a port of the host" for port in container.get("ports", []) if "hostPort" in port)
    resources = container.get("resources", {})
    if not set(resources.get("requests", {})) >= {"cpu", "memory"} or "memory" not in resources.get("limits", {}):
        yield f"{name}: it has no requests of CPU and memory, or no limit of memory"


def _pod(**fields: Any) -> Callable[[Tree], None]:
    return lambda spec: spec.update(fields)


def _context(**fields: Any) -> Callable[[Tree], None]:
    return lambda spec: spec["securityContext"].update(fields)


def _container(**fields: Any) -> Callable[[Tree], None]:
    return lambda spec: spec["containers"][0]["securityContext"].update(fields)


# Each breaks a pod's spec in place.
BREACHES: dict[str, Callable[[Tree], None]] = {
    "host network": _pod(hostNetwork=True),
    "host processes": _pod(hostPID=True),
    "host memory": _pod(hostIPC=True),
    "root": _context(runAsUser=0, runAsNonRoot=False),
    "root in one container": _container(runAsUser=0, runAsNonRoot=False),
    "no seccomp profile": _context(seccompProfile={"type": "Unconfined"}),
    "privileged": _container(privileged=True, allowPrivilegeEscalation=True),
    "privilege escalation": _container(allowPrivilegeEscalation=True),
    "a capability": _container(capabilities={"drop": ["ALL"], "add": ["NET_RAW"]}),
    "a writable root": _container(readOnlyRootFilesystem=False),
    "a folder of the host": lambda spec: spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
    "a port of the host": lambda spec: spec["containers"][0].update(ports=[{"containerPort": 80, "hostPort": 80}]),
}
