"""Commands, ports, health paths and variables: `lagrange up`, compose and Kubernetes say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
import yaml

from broker.access import CHECK
from configs import load_config, secrets
from configs.drain import DRAIN
from rollout import engine as supervisor
from services.commands import app
from services.local.layout import roles
from services.monitor.app import create_app as monitor_app
from tests.deploy.test_compose import NEEDS, OURS, USERS
from tests.deploy.tools import DEPLOY, OVERLAYS, Tree, compose, manifests, pod_templates

FILE = "/etc/lagrange/config.yaml"
CONFIG = load_config(DEPLOY / "configs/tiny/config.yaml")
PORTS = {
    "redis": 6379,
    "engine": CONFIG.engine.port,
    "weight-sync": CONFIG.weight_sync.port,
    "monitor": CONFIG.monitor.port,
    "trainer": CONFIG.trainer.port,
}


def local_commands() -> dict[str, tuple[str, ...]]:
    """What `lagrange up` runs, by command, without the index that tells equal local processes apart."""
    found = {}
    for role in roles(CONFIG, Path(FILE)):
        words = role.command[: role.command.index("--index")] if "--index" in role.command else role.command
        found[words[0]] = words
    return found


def job_pods(overlay: str) -> dict[str, Tree]:
    """Component -> its main container."""
    return {
        t["metadata"]["labels"]["app.kubernetes.io/component"]: t["spec"]["containers"][0]
        for _, t in pod_templates(manifests(overlay))
    }


def test_compose_runs_the_commands_of_lagrange_up() -> None:
    ours = {name: tuple(compose()["services"][name]["command"]) for name in OURS if name != "init"}
    assert {words[0]: words for words in ours.values()} == local_commands()


def test_kubernetes_runs_the_commands_of_lagrange_up() -> None:
    pods = job_pods("cpu-small")
    assert {c["args"][0]: tuple(c["args"]) for name, c in pods.items() if name != "redis"} == local_commands()
    assert not [c for name, c in pods.items() if name != "redis" and "command" in c]


def test_every_command_exists_in_the_command_line() -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(local_commands()) | {"init"} <= known


def test_the_trainer_on_two_nodes_runs_what_its_launcher_runs() -> None:
    container = job_pods("gpu-qwen3-30b-a3b-4-nodes")["trainer"]
    config = load_config(DEPLOY / "configs/qwen3-30b-a3b-4-nodes/config.yaml")
    words = container["args"]
    assert words[words.index("--module") :] == ["--module", "trainer.main", "--config", FILE]
    assert f"--master-port={config.trainer.port}" in words
    nodes = int(next(w for w in words if w.startswith("--nnodes=")).split("=")[1])
    each = int(next(w for w in words if w.startswith("--nproc-per-node=")).split("=")[1])
    assert nodes * each == config.trainer.layout.ranks


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_those_of_the_configuration(overlay: str) -> None:
    pods = job_pods(overlay)
    for name, port in PORTS.items():
        if (overlay, name) != ("kuberay", "trainer"):
            assert [p["containerPort"] for p in pods[name]["ports"]] == [port], name
    services = {
        m["metadata"]["name"]: m["spec"]["ports"][0]["port"] for m in manifests(overlay) if m["kind"] == "Service"
    }
    assert services == {name: PORTS[name] for name in services}
    assert {"redis", "engine", "weight-sync", "monitor"} <= set(services)
    policies = {
        (m["metadata"]["name"], p["port"])
        for m in manifests(overlay)
        if m["kind"] == "NetworkPolicy"
        for rule in m["spec"].get("ingress", [])
        for p in rule.get("ports", [])
    }
    assert {(name, port) for name, port in policies if name in PORTS} == {
        (name, port) for name, port in PORTS.items() if name != "trainer"
    }


def test_all_configurations_agree_on_addresses() -> None:
    for file in sorted(DEPLOY.glob("configs/*/config.yaml")):
        config = load_config(file)
        assert config.redis.url == f"redis://redis:{PORTS['redis']}/0"
        assert (config.engine.host, config.weight_sync.host, config.monitor.host) == ("0.0.0.0",) * 3
        ports = (config.engine.port, config.weight_sync.port, config.monitor.port, config.trainer.port)
        assert ports == (PORTS["engine"], PORTS["weight-sync"], PORTS["monitor"], PORTS["trainer"])


def test_prometheus_scrapes_what_serves_metrics() -> None:
    tree = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    found = {}
    for job in tree["scrape_configs"]:
        if "static_configs" in job:
            host, port = job["static_configs"][0]["targets"][0].split(":")
        else:
            host, port = job["dns_sd_configs"][0]["names"][0], job["dns_sd_configs"][0]["port"]
        found[job["job_name"]] = (host, int(port))
    assert found == {name: (name, PORTS[name]) for name in ("monitor", "weight-sync", "engine")}
    port = compose()["services"]["monitor"]["ports"][0]
    assert port["target"] == PORTS["monitor"]


def _served(folder: Path) -> set[str]:
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    return set(re.findall(r'@\w+\.get\(\s*"(/[a-z]+)"', text))


def test_health_paths_are_served_and_the_same_everywhere() -> None:
    probe = (DEPLOY / "docker/probe.py").read_text(encoding="utf-8")
    paths = dict(re.findall(r'"(engine|weight-sync|monitor)": "(/[a-z]+)"', probe))
    assert callable(monitor_app)
    root = DEPLOY.parent / "services"
    for name, folder in (("monitor", root / "monitor"), ("weight-sync", root / "weight_sync")):
        assert {"/healthz", "/readyz", "/metrics"} <= _served(folder)
        container = job_pods("cpu-small")[name]
        assert container["readinessProbe"]["httpGet"]["path"] == paths[name] == "/readyz"
        assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert job_pods("cpu-small")["engine"]["readinessProbe"]["httpGet"]["path"] == paths["engine"] == "/health"
    for name in ("engine", "weight-sync", "monitor", "trainer", "rollout"):
        assert compose()["services"][name]["healthcheck"]["test"] == ["CMD", "lagrange-probe", name]


def test_variables_are_the_ones_that_the_processes_read() -> None:
    names = {secrets.REDIS_PASSWORD, secrets.API_TOKEN, secrets.ENGINE_API_KEY}
    known = (
        {f"{name}_FILE" for name in names}
        | {secrets.REDIS_USER}
        | {supervisor.ADVERTISED_HOST, supervisor.SCRATCH, DRAIN}
    )
    pods = job_pods("cpu-small")
    for name in OURS:
        in_compose = set(compose()["services"][name]["environment"])
        assert in_compose <= known, name
        if name != "init":
            in_kubernetes = {variable["name"] for variable in pods[name]["env"]}
            assert in_kubernetes - {supervisor.ADVERTISED_HOST} == in_compose, name
            assert {v for v in in_kubernetes if v.endswith("_FILE")} == set(NEEDS[name])
            assert {v["value"] for v in pods[name]["env"] if v["name"] == secrets.REDIS_USER} == {USERS[name]}


def test_compose_and_kubernetes_make_redis_users_alike() -> None:
    (users,) = (
        init
        for name, template in pod_templates(manifests("cpu-small"))
        if name == "redis"
        for init in template["spec"]["initContainers"]
    )
    assert users["args"] == compose()["services"]["users"]["command"]
    variable = {v["name"]: v["value"] for v in job_pods("cpu-small")["redis"]["env"]}["REDIS_USERS_FILE"]
    assert variable == compose()["services"]["redis"]["environment"]["REDIS_USERS_FILE"]
    assert f"--user {CHECK}" in (DEPLOY / "redis/healthy.sh").read_text(encoding="utf-8")


def test_compose_and_kubernetes_use_the_same_images_and_redis_files() -> None:
    ours = {s["image"].split(":")[0] for name, s in compose()["services"].items() if name in OURS}
    pods = job_pods("cpu-small")
    assert {c["image"].split(":")[0] for name, c in pods.items() if name != "redis"} == ours
    assert pods["redis"]["image"] == compose()["services"]["redis"]["image"]
    assert pods["redis"]["command"] == compose()["services"]["redis"]["entrypoint"]
    maps = {m["metadata"]["name"]: m["data"] for m in manifests("cpu-small") if m["kind"] == "ConfigMap"}
    files = next(data for name, data in maps.items() if name.startswith("lagrange-redis"))
    mounted = {c["target"].rsplit("/", 1)[1] for c in compose()["services"]["redis"]["configs"]}
    assert set(files) == mounted


def test_no_file_names_a_package_registrys_host() -> None:
    hosts = re.compile(
        r"pypi\.org|files\.pythonhosted|docker\.io/|nvcr\.io|ghcr\.io|quay\.io|deb\.debian\.org|registry\.npmjs"
    )
    for file in DEPLOY.rglob("*"):
        if file.is_file() and file.suffix not in (".whl",) and "secrets" not in file.parts:
            assert not hosts.search(file.read_text(encoding="utf-8")), file
