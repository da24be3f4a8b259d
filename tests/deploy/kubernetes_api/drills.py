"""The manifests on a real Kubernetes control plane: admitted, turned into Pods, placed on the nodes that docs promise.

    make test-kubernetes      or      python -m pytest tests/deploy/kubernetes_api/drills.py -s

Not part of `make test`: it needs Debian's golang-go and etcd-server, and servers that are built once, in about ten
minutes (build.py; KUBERNETES_BUILD=1 asks for it). KUBERNETES_FOLDER keeps them (default /tmp/lagrange-kubernetes).
They are of version 1.20; what later versions and operators brought is left out, and WITHOUT says what that is.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.kubernetes_api import build
from tests.deploy.kubernetes_api.cluster import Cluster, Refused, cluster
from tests.deploy.kubernetes_api.known import known, pods_of_ray
from tests.deploy.kubernetes_api.nodes import nodes, volumes
from tests.deploy.pod_security import BREACHES
from tests.deploy.tools import DEPLOY, OVERLAYS, Tree, containers, manifests, run

pytestmark = pytest.mark.timeout(3600)
FOLDER = Path(os.environ.get("KUBERNETES_FOLDER", "/tmp/lagrange-kubernetes"))
PATIENCE_S = 60.0
NAMESPACE: Tree = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "lagrange"}}
# What each overlay loses on a server of version 1.20: objects by kind, and fields.
COMMON = {"PodDisruptionBudget policy/v1": 6, "Deployment rollout: preStop.sleep": 1}
OPERATED = {"ScaledObject keda.sh/v1alpha1": 1, "ServiceMonitor monitoring.coreos.com/v1": 1}
WITHOUT: dict[str, dict[str, int]] = {
    "cpu-small": {**COMMON, "Job trainer: completionMode": 1},
    "gpu-qwen3-30b-a3b": {**COMMON, **OPERATED, "Job trainer: completionMode": 1},
    "gpu-qwen3-30b-a3b-4-nodes": {**COMMON, **OPERATED, "Job trainer: completionMode": 1},
    "kuberay": {**COMMON, "RayJob ray.io/v1": 1},
}
# Kubernetes' own judge of the standard `restricted` before 1.25, and its setting for it; ours is stricter by one rule.
RESTRICTED: Tree = {
    "apiVersion": "policy/v1beta1",
    "kind": "PodSecurityPolicy",
    "metadata": {
        "name": "restricted",
        "annotations": {"seccomp.security.alpha.kubernetes.io/allowedProfileNames": "runtime/default"},
    },
    "spec": {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "volumes": ["configMap", "emptyDir", "secret", "persistentVolumeClaim"],
        "runAsUser": {"rule": "MustRunAsNonRoot"},
        "seLinux": {"rule": "RunAsAny"},
        "supplementalGroups": {"rule": "MustRunAs", "ranges": [{"min": 1, "max": 65535}]},
        "fsGroup": {"rule": "MustRunAs", "ranges": [{"min": 1, "max": 65535}]},
    },
}


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {text}\n")


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder with the servers, built if that is asked for."""
    if lacking := build.missing():
        pytest.skip(f"apt-get install --no-install-recommends {' '.join(lacking)}")
    if not build.built(FOLDER):
        if os.environ.get("KUBERNETES_BUILD") != "1":
            pytest.skip(f"{FOLDER}/bin holds no Kubernetes servers: KUBERNETES_BUILD=1 builds them (ten minutes)")
        began = time.monotonic()
        build.build(FOLDER)
        say(f"built Kubernetes' servers: {time.monotonic() - began:.0f} s")
    return FOLDER / "bin"


@pytest.fixture(scope="module", params=OVERLAYS)
def installed(request: pytest.FixtureRequest, programs: Path) -> Iterator[tuple[str, Cluster]]:
    """An overlay, applied to an empty cluster as docs/deploy/kubernetes.md says, secrets included."""
    overlay: str = request.param
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, cluster(programs, Path(folder)) as made:
        made.apply(RESTRICTED, *nodes(overlay), *volumes())
        made.kubectl("create", "namespace", "lagrange")
        shutil.copytree(DEPLOY / "secrets", Path(folder) / "secrets", ignore=shutil.ignore_patterns("*_*"))
        run(Path(folder) / "secrets/make.sh")
        made.kubectl("apply", "-n", "lagrange", "-k", f"{folder}/secrets")
        say(f"{overlay}: an empty cluster after {time.monotonic() - began:.0f} s")
        yield overlay, made


def until(what: str, condition: Callable[[], Any]) -> None:
    """Fails unless `condition` becomes true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def contains(whole: Any, part: Any) -> bool:
    """Whether `whole`, as a server completed it, still says all that `part` says."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and all(any(contains(one, item) for one in whole) for item in part)
    return bool(whole == part)


def makers(overlay: str) -> list[Tree]:
    """What makes Pods."""
    return [m for m in known(manifests(overlay))[0] if m["kind"] in ("Deployment", "StatefulSet", "Job")]


def wanted(maker: Tree) -> int:
    """How many Pods."""
    return int(maker["spec"].get("parallelism", maker["spec"].get("replicas", 1)))


def pods(made: Cluster, maker: Tree) -> list[Tree]:
    """The Pods of a maker that are there and stay: without a kubelet nobody takes away those that have to go."""
    label = "app.kubernetes.io/component"
    found = made.get("pods", "-l", f"{label}={maker['spec']['template']['metadata']['labels'][label]}")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def test_the_server_takes_every_object_that_it_knows_and_the_rest_is_listed(installed: tuple[str, Cluster]) -> None:
    overlay, made = installed
    objects, left = known(manifests(overlay))
    say(f"{overlay}: {len(objects)} objects; left out for 1.20: {dict(Counter(left))}")
    assert Counter(left) == WITHOUT[overlay]
    assert len(made.apply(*objects, dry=True)) == len(objects)
    assert made.get("deployments") == []
    assert len(made.apply(*objects)) == len(objects)


def test_what_is_left_out_is_what_this_server_does_not_know(installed: tuple[str, Cluster]) -> None:
    overlay, made = installed
    whole = {(m["kind"], m["metadata"]["name"]): m for m in manifests(overlay)}
    taken = {(m["kind"], m["metadata"]["name"]): m for m in known(manifests(overlay))[0]}
    for key, item in whole.items():
        if taken.get(key) != item:
            assert re.search("no matches for kind|unknown field", made.refusal(item)), key


def test_controllers_make_pods_that_say_what_their_templates_say(installed: tuple[str, Cluster]) -> None:
    overlay, made = installed
    for maker in makers(overlay):
        name, template = maker["metadata"]["name"], maker["spec"]["template"]
        until(f"{wanted(maker)} pods of {name}", lambda: len(pods(made, maker)) == wanted(maker))  # noqa: B023
        for pod in pods(made, maker):
            assert contains(pod["metadata"]["labels"], template["metadata"]["labels"]), name
            assert contains(pod["spec"], template["spec"]), name
            contexts = {c["name"]: c["securityContext"] for c in containers(template)}
            assert {c["name"]: c["securityContext"] for c in containers(pod)} == contexts, name
            assert pod["metadata"]["annotations"]["kubernetes.io/psp"] == "restricted"
            assert pod["spec"]["priority"] > 0
    assert {claim["metadata"]["name"] for claim in made.get("persistentvolumeclaims")} >= {"runs", "data-redis-0"}
    assert [e["message"] for e in made.get("events") if e["reason"].startswith("FailedCreate")] == []


def test_every_pod_has_a_place_on_the_nodes_that_the_documentation_asks_for(installed: tuple[str, Cluster]) -> None:
    overlay, made = installed
    asked = sum(wanted(maker) for maker in makers(overlay))

    def placed() -> bool:
        return len([pod for pod in made.get("pods") if pod["spec"].get("nodeName")]) == asked

    until("a node for every pod", placed)
    at: dict[str, list[str]] = {}
    for pod in made.get("pods"):
        at.setdefault(pod["metadata"]["labels"]["app.kubernetes.io/component"], []).append(pod["spec"]["nodeName"])
    say(f"{overlay}: {at}")
    assert [e["message"] for e in made.get("events") if e["reason"] == "Preempted"] == []
    if overlay.startswith("gpu-"):
        assert len(set(at["trainer"])) == len(at["trainer"])
        assert not set(at["trainer"]) & set(at["engine"])


def test_services_have_the_pods_that_they_are_for(installed: tuple[str, Cluster]) -> None:
    overlay, made = installed
    services = {m["metadata"]["name"]: m["spec"] for m in manifests(overlay) if m["kind"] == "Service"}
    assert {s["metadata"]["name"] for s in made.get("services")} == set(services)
    for name, spec in services.items():
        selector = ",".join(f"{key}={value}" for key, value in spec["selector"].items())
        assert made.get("pods", "-l", selector), name


def test_the_pods_of_the_ray_cluster_are_admitted(installed: tuple[str, Cluster]) -> None:
    overlay, made = installed
    ray = pods_of_ray(manifests(overlay))
    assert bool(ray) is (overlay == "kuberay")
    if ray:
        assert len(made.apply(*ray, dry=True)) == len(ray) == 2


def _pod(overlay: str) -> Tree:
    """A Pod of the overlay's engine, by itself."""
    (engine,) = (m for m in makers(overlay) if m["metadata"]["name"] == "engine")
    template = copy.deepcopy(engine["spec"]["template"])
    named = {**template["metadata"], "name": "by-itself", "namespace": "lagrange"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": template["spec"]}


def test_a_pod_that_breaks_the_restricted_standard_or_names_what_is_not_there_is_refused(
    installed: tuple[str, Cluster],
) -> None:
    overlay, made = installed
    assert made.refusal(_pod(overlay)) == ""
    for what, break_it in BREACHES.items():
        broken = _pod(overlay)
        break_it(broken["spec"])
        assert re.search("unable to admit pod|is invalid", made.refusal(broken)), what
    for field, says in (("serviceAccountName", "serviceaccount"), ("priorityClassName", "PriorityClass")):
        broken = _pod(overlay)
        broken["spec"][field] = "nobody"
        assert re.search(f"no {says}|{says}.*not found", made.refusal(broken)), field


def _set(*path: str | int, value: Any) -> Callable[[Tree], None]:
    def change(item: Tree) -> None:
        at: Any = item
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


CONTAINER = ("spec", "template", "spec", "containers", 0)
MISTAKES: dict[str, tuple[str, str, Callable[[Tree], None], str]] = {
    "no such value": ("Job", "trainer", _set("spec", "template", "spec", "restartPolicy", value="Allways"), "Allways"),
    "selects others": (
        "Deployment",
        "engine",
        _set("spec", "selector", "matchLabels", value={"app": "x"}),
        "does not match template `labels`",
    ),
    "no quantity": (
        "Deployment",
        "engine",
        _set(*CONTAINER, "resources", "limits", "memory", value="512Mx"),
        "quantities must match",
    ),
    "less than asked": (
        "Deployment",
        "engine",
        _set(*CONTAINER, "resources", "limits", "memory", value="1Mi"),
        "must be less than or equal to memory limit",
    ),
    "misspelt": ("Deployment", "engine", _set("spec", "replica", value=3), 'unknown field "replica"'),
    "wrong type": ("Deployment", "engine", _set("spec", "replicas", value="three"), "(?i)invalid|ValidationError"),
    "gone since 1.16": ("Deployment", "engine", _set("apiVersion", value="apps/v1beta1"), "no matches for kind"),
    "no name": ("Service", "monitor", _set("metadata", "name", value="Monitor_1"), "metadata.name: Invalid value"),
    "no port": ("Service", "monitor", _set("spec", "ports", 0, "port", value=99999), "between 1 and 65535"),
    "no volume": ("Deployment", "engine", _set(*CONTAINER, "volumeMounts", 0, "name", value="nowhere"), "Not found"),
    "no policy": ("NetworkPolicy", "redis", _set("spec", "policyTypes", value=["Inward"]), "Unsupported value"),
}


def test_mistakes_are_refused(installed: tuple[str, Cluster]) -> None:
    overlay, made = installed
    objects = {(m["kind"], m["metadata"]["name"]): m for m in known(manifests(overlay))[0]}
    for what, (kind, name, change, says) in MISTAKES.items():
        if (kind, name) in objects:
            broken = copy.deepcopy(objects[kind, name])
            change(broken)
            assert re.search(says, made.refusal(broken)), what
        else:
            assert (overlay, name) == ("kuberay", "trainer")


def test_a_running_job_is_changed_by_deleting_it_first(installed: tuple[str, Cluster]) -> None:
    """As docs/deploy/kubernetes.md says of a new configuration, whose ConfigMap has another name."""
    overlay, made = installed
    jobs = [copy.deepcopy(m) for m in makers(overlay) if m["kind"] == "Job"]
    if not jobs:
        assert overlay == "kuberay"
        return
    (job,) = jobs
    (volume,) = (v for v in job["spec"]["template"]["spec"]["volumes"] if "configMap" in v)
    assert re.fullmatch(r"lagrange-config-\w+", volume["configMap"]["name"])
    volume["configMap"]["name"] = "lagrange-config-another"
    with pytest.raises(Refused, match="field is immutable"):
        made.apply(job)
    made.kubectl("-n", "lagrange", "delete", "job", "trainer")
    assert made.apply(job) == ["job.batch/trainer"]
    until("its pods", lambda: len(pods(made, job)) == wanted(job))
