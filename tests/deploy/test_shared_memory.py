"""Shared memory and shared folders: the delta transport and payloads in files need no more than a field of the run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from configs import load_config
from configs.check import sizes_of
from configs.memory import estimate
from tests.deploy.references import problems
from tests.deploy.tools import (
    DEPLOY,
    GPU_ENVIRONMENT,
    ROOT,
    Tree,
    compose,
    containers,
    manifests,
    pod_templates,
    program,
    run,
)

PAYLOADS = "/var/lib/lagrange-payloads"
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Of what SGLang's ranks share, beside the weights; and of an engine's process, beside what lies in shared memory.
ROOM, PROCESS = 2**29, 4 * 2**30


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity."""
    found = re.fullmatch(r"(\d+)([KMGT]i)", text)
    assert found, text
    return int(found[1]) * UNITS[found[2]]


def two_versions(name: str) -> int:
    """Bytes that weights.transport: delta keeps for each engine."""
    config = load_config(DEPLOY / "configs" / name / "config.yaml")
    sizes = sizes_of(config)
    assert sizes is not None
    return 2 * estimate(config, sizes).weights


@pytest.mark.parametrize(
    ("overlay", "name"),
    [
        ("cpu-small", "tiny"),
        ("kuberay", "tiny-ray"),
        ("gpu-qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("gpu-qwen3-30b-a3b-4-nodes", "qwen3-30b-a3b-4-nodes"),
    ],
)
def test_an_engines_shared_memory_in_kubernetes_holds_two_versions_and_counts_as_its_memory(
    overlay: str, name: str
) -> None:
    (engine,) = (template["spec"] for who, template in pod_templates(manifests(overlay)) if who == "engine")
    (shm,) = (v["emptyDir"] for v in engine["volumes"] if v["name"] == "shm")
    (mounted,) = (m for c in engine["containers"] for m in c["volumeMounts"] if m["name"] == "shm")
    assert shm["medium"] == "Memory"
    assert mounted["mountPath"] == "/dev/shm"
    assert load_config(DEPLOY / "configs" / name / "config.yaml").weights.local_folder.is_relative_to("/dev/shm")
    assert quantity(shm["sizeLimit"]) >= two_versions(name) + ROOM
    assert quantity(engine["containers"][0]["resources"]["limits"]["memory"]) >= quantity(shm["sizeLimit"]) + PROCESS


@pytest.mark.parametrize(("gpu", "name"), [(False, "tiny"), (True, "qwen3-30b-a3b")])
def test_an_engines_shared_memory_in_compose_holds_two_versions_and_counts_as_its_memory(gpu: bool, name: str) -> None:
    engine = compose(gpu)["services"]["engine"]
    assert int(engine["shm_size"]) >= two_versions(name) + ROOM
    assert int(engine["mem_limit"]) >= int(engine["shm_size"]) + PROCESS


def test_ranks_of_a_trainer_have_shared_memory_everywhere() -> None:
    for gpu in (False, True):
        assert int(compose(gpu)["services"]["trainer"]["shm_size"]) >= 2**30
    for name, template in pod_templates(manifests("kuberay")) + pod_templates(manifests("gpu-qwen3-30b-a3b")):
        if name == "trainer":
            assert "/dev/shm" in {m["mountPath"] for m in template["spec"]["containers"][0]["volumeMounts"]}


def test_compose_keeps_payloads_in_memory_that_workers_and_trainer_share() -> None:
    files = ("-f", "deploy/docker-compose.yml", "-f", "deploy/compose.payloads.yaml")
    command = (program("docker-compose"), *files, "config", "--format", "json")
    tree: Tree = json.loads(run(*command, environment={"LAGRANGE_CONFIG": GPU_ENVIRONMENT["LAGRANGE_CONFIG"]}))
    for name, service in tree["services"].items():
        mounted = {v["target"]: v for v in service.get("volumes", [])}
        assert (PAYLOADS in mounted) is (name in ("rollout", "trainer")), name
        if PAYLOADS in mounted:
            assert not mounted[PAYLOADS].get("read_only")
            assert "/var/lib/lagrange" in mounted
    options = tree["volumes"]["payloads"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert "uid=10001" in options["o"].split(",")


def test_kubernetes_keeps_payloads_in_a_folder_that_workers_and_trainer_share(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy", ignore=shutil.ignore_patterns("wheels", "*_*"))
    overlay = tmp_path / "deploy/kubernetes/overlays/with-folder"
    overlay.mkdir()
    parts = {"resources": ["../cpu-small"], "components": ["../../components/payload-folder"]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump({"namespace": "lagrange", **parts}), encoding="utf-8")
    made: tuple[Tree, ...] = tuple(yaml.safe_load_all(run(program("kubectl"), "kustomize", overlay)))
    assert problems(made) == []
    (claim,) = (m for m in made if m["kind"] == "PersistentVolumeClaim" and m["metadata"]["name"] == "payloads")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name, template in pod_templates(made):
        mounts = {m["mountPath"]: m for c in containers(template) for m in c["volumeMounts"]}
        assert (PAYLOADS in mounts) is (name in ("rollout", "trainer")), name
        assert "/var/lib/lagrange" in mounts or name == "redis"


def test_the_folder_is_the_one_that_the_documentation_names() -> None:
    text = (ROOT / "docs/deploy/sizing.md").read_text(encoding="utf-8")
    assert f"payload_folder: {PAYLOADS}" in text
    for file in ("deploy/compose.payloads.yaml", "deploy/kubernetes/components/payload-folder"):
        assert file in text
