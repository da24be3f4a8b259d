"""The Kubernetes manifests, without a cluster: schemas, references, and what the issue's words promise."""

from __future__ import annotations

import copy
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.pod_security import BREACHES, breaches
from tests.deploy.references import problems
from tests.deploy.tools import OVERLAYS, Tree, containers, manifests, pod_templates

CUSTOM = {"RayJob", "ScaledObject", "ServiceMonitor"}  # their schemas live with their operators
VERSION = "1.33"
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@every_overlay
def test_every_object_is_valid_against_the_strict_schema_of_its_kind(overlay: str) -> None:
    seen = set()
    for item in manifests(overlay):
        seen.add(item["kind"])
        if item["kind"] not in CUSTOM:
            kubernetes_validate.validate(item, VERSION, strict=True)
    assert {"StatefulSet", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"} <= seen


def test_a_misspelt_field_and_an_api_that_was_removed_are_refused() -> None:
    deployment: dict[str, Any] = copy.deepcopy(next(m for m in manifests("cpu-small") if m["kind"] == "Deployment"))
    deployment["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSION, strict=True)
    del deployment["spec"]["replica"]
    deployment["apiVersion"] = "apps/v1beta1"
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        kubernetes_validate.validate(deployment, VERSION, strict=True)


@every_overlay
def test_every_reference_names_something_that_exists(overlay: str) -> None:
    assert problems(manifests(overlay)) == []


def _break(overlay: str, kind: str, name: str) -> tuple[tuple[Tree, ...], Tree]:
    objects = copy.deepcopy(manifests(overlay))
    return objects, next(m for m in objects if m["kind"] == kind and m["metadata"]["name"] == name)


def test_the_reference_check_sees_dangling_names_selectors_and_ports() -> None:
    objects, engine = _break("cpu-small", "Deployment", "engine")
    engine["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] = "nowhere"
    assert any("ConfigMap nowhere" in p for p in problems(objects))
    objects, service = _break("cpu-small", "Service", "monitor")
    service["spec"]["ports"][0]["port"] = 8021
    assert any("port 8021" in p for p in problems(objects))
    objects, service = _break("cpu-small", "Service", "monitor")
    service["spec"]["selector"] = {"app.kubernetes.io/component": "moniter"}
    assert any("selects no pod" in p for p in problems(objects))
    objects, policy = _break("cpu-small", "NetworkPolicy", "redis")
    policy["spec"]["ingress"] = []
    assert any("does not let it in" in p for p in problems(objects))
    objects, trainer = _break("cpu-small", "Job", "trainer")
    trainer["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "X_FILE", "value": "/nowhere/x"})
    assert any("not mounted" in p for p in problems(objects))


@every_overlay
def test_every_pod_satisfies_the_restricted_standard_and_writes_only_to_its_volumes(overlay: str) -> None:
    assert {name: found for name, t in pod_templates(manifests(overlay)) if (found := breaches(t["spec"]))} == {}


@pytest.mark.parametrize("what", BREACHES)
def test_the_check_of_the_restricted_standard_sees_every_breach(what: str) -> None:
    for _, template in pod_templates(copy.deepcopy(manifests("kuberay"))):
        BREACHES[what](template["spec"])
        assert breaches(template["spec"])


@every_overlay
def test_only_the_trainer_can_write_weights(overlay: str) -> None:
    for name, template in pod_templates(manifests(overlay)):
        for container in containers(template):
            for mount in container["volumeMounts"]:
                if mount["name"] == "runs" and name != "trainer":
                    assert mount.get("readOnly") is True, f"{name}/{container['name']}"


@every_overlay
def test_no_secret_is_a_variable_or_an_argument(overlay: str) -> None:
    assert not [m for m in manifests(overlay) if m["kind"] == "Secret"]
    for name, template in pod_templates(manifests(overlay)):
        for container in containers(template):
            assert "envFrom" not in container, name
            for variable in container.get("env", []):
                assert "secretKeyRef" not in variable.get("valueFrom", {}), f"{name}: {variable['name']}"


@every_overlay
def test_nobody_but_the_listed_roles_reaches_redis_and_all_else_is_refused(overlay: str) -> None:
    policies = {m["metadata"]["name"]: m["spec"] for m in manifests(overlay) if m["kind"] == "NetworkPolicy"}
    assert policies["nothing-by-default"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    callers = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for rule in policies["redis"]["ingress"]
        for peer in rule["from"]
    }
    assert callers == {"trainer", "engine", "weight-sync", "rollout", "monitor"}
    assert policies["redis"]["egress"] == []


@every_overlay
def test_a_process_has_longer_to_end_than_it_needs_to_drain(overlay: str) -> None:
    drains = {}
    for name, template in pod_templates(manifests(overlay)):
        for container in template["spec"]["containers"]:
            variables = {e["name"]: e.get("value") for e in container.get("env", [])}
            drain = drains[name] = float(variables.get("LAGRANGE_DRAIN_S") or 0.0)
            assert template["spec"]["terminationGracePeriodSeconds"] >= drain + 10, name
            if "torch.distributed.run" in container.get("command", []):  # which else kills its ranks after 30 s
                assert float(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] or 0.0) == drain
    assert drains["engine"] > 0
    assert drains["trainer"] > 0 or overlay == "kuberay"  # Ray ends the driver as it likes


@every_overlay
def test_no_pod_of_redis_or_the_trainer_may_be_evicted_and_a_budget_can_be_counted(overlay: str) -> None:
    budgets = {m["metadata"]["name"]: m["spec"] for m in manifests(overlay) if m["kind"] == "PodDisruptionBudget"}
    assert budgets["redis"]["maxUnavailable"] == 0
    scaled = {m["metadata"]["name"] for m in manifests(overlay) if m["kind"] in ("Deployment", "StatefulSet")}
    assert set(budgets) - scaled == {"trainer"}
    (trainer,) = (m for m in manifests(overlay) if m["kind"] in ("Job", "RayJob"))
    groups = trainer["spec"].get("rayClusterSpec", {}).get("workerGroupSpecs", [])
    pods = 1 + sum(group["replicas"] for group in groups) if groups else trainer["spec"]["parallelism"]
    # Pods of what has no scale, as a Job, can be counted by a whole number that has to be there, and by nothing else.
    assert budgets["trainer"] == {"minAvailable": pods, "selector": budgets["trainer"]["selector"]}


@every_overlay
def test_redis_has_room_on_disk_for_an_append_only_file_that_is_written_anew(overlay: str) -> None:
    (redis,) = (m["spec"] for m in manifests(overlay) if m["kind"] == "StatefulSet")
    (container,), (claim,) = redis["template"]["spec"]["containers"], redis["volumeClaimTemplates"]
    most = next(v["value"] for v in container["env"] if v["name"] == "REDIS_MAXMEMORY")
    assert int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) >= 3 * int(most.removesuffix("gb"))


@pytest.mark.parametrize(
    ("overlay", "trainer_gpus", "engine_gpus"),
    [("gpu-qwen3-30b-a3b", 8, 8), ("gpu-qwen3-30b-a3b-4-nodes", 16, 16)],
)
def test_the_papers_setting_asks_for_the_gpus_that_its_configuration_uses(
    overlay: str, trainer_gpus: int, engine_gpus: int
) -> None:
    objects = {(m["kind"], m["metadata"]["name"]): m for m in manifests(overlay)}
    trainer, engine = objects["Job", "trainer"]["spec"], objects["Deployment", "engine"]["spec"]

    def gpus(spec: Tree) -> int:
        return int(spec["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])

    assert trainer["parallelism"] * gpus(trainer) == trainer_gpus
    assert engine["replicas"] * gpus(engine) == engine_gpus
    assert trainer["completions"] == trainer["parallelism"]


def test_ray_replaces_the_trainers_job() -> None:
    kinds = {(m["kind"], m["metadata"]["name"]) for m in manifests("kuberay")}
    assert ("RayJob", "trainer") in kinds
    assert ("Job", "trainer") not in kinds
    assert ("Service", "trainer") not in kinds
