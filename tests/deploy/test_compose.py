"""The compose file: what it resolves to, and that it keeps what docs/deploy promises."""

from __future__ import annotations

import pytest

from broker.access import ROLES
from tests.deploy.tools import DEPLOY, ROOT, Tree, compose, program, run, seconds

OURS = ("init", "weight-sync", "monitor", "trainer", "engine", "rollout")


def service(name: str, gpu: bool = False) -> Tree:
    tree: Tree = compose(gpu)["services"][name]
    return tree


def test_it_starts_the_processes_of_a_run_and_more_only_by_profile() -> None:
    everything = compose()["services"]
    assert {name for name, s in everything.items() if not s.get("profiles")} == {"redis", "users", *OURS}
    assert {name for name, s in everything.items() if s.get("profiles") == ["observe"]} == {"prometheus", "grafana"}


@pytest.mark.parametrize("name", ["redis", "users", *OURS, "prometheus", "grafana"])
def test_every_container_is_read_only_without_privileges_and_within_limits(name: str) -> None:
    tree = service(name)
    assert tree["read_only"] is True
    assert tree["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in tree["security_opt"]
    assert int(tree["mem_limit"]) > 0
    assert tree["pids_limit"] > 0
    assert tree["cpus"] > 0
    assert not tree.get("privileged")


def test_secrets_are_files_and_never_values() -> None:
    for name, tree in compose()["services"].items():
        for variable, value in (tree.get("environment") or {}).items():
            secret = any(word in variable for word in ("PASSWORD", "TOKEN", "KEY"))
            assert not secret or str(value).startswith("/run/secrets/"), f"{name}: {variable}"
            if str(value).startswith("/run/secrets/") and name in OURS:
                mounted = files(tree["secrets"])
                needed = str(value).rsplit("/", 1)[1]
                assert needed in mounted or variable not in NEEDS.get(name, ()), f"{name} does not get {needed}"
        assert "--requirepass" not in str(tree.get("command"))


NEEDS = {
    "weight-sync": ("LAGRANGE_REDIS_PASSWORD_FILE", "LAGRANGE_API_TOKEN_FILE", "LAGRANGE_ENGINE_API_KEY_FILE"),
    "monitor": ("LAGRANGE_REDIS_PASSWORD_FILE", "LAGRANGE_API_TOKEN_FILE"),
    "trainer": ("LAGRANGE_REDIS_PASSWORD_FILE",),
    "engine": ("LAGRANGE_REDIS_PASSWORD_FILE", "LAGRANGE_ENGINE_API_KEY_FILE"),
    "rollout": ("LAGRANGE_REDIS_PASSWORD_FILE", "LAGRANGE_ENGINE_API_KEY_FILE"),
    "init": ("LAGRANGE_REDIS_PASSWORD_FILE",),
}


@pytest.mark.parametrize("name", OURS)
def test_a_process_is_told_of_exactly_the_secrets_that_it_gets(name: str) -> None:
    tree = service(name)
    told = {variable for variable in tree["environment"] if variable.endswith("_FILE")}
    assert told == set(NEEDS[name])
    paths = {str(tree["environment"][v]).rsplit("/", 1)[1] for v in told}
    assert files(tree["secrets"]) == paths
    assert {s["source"] for s in tree["secrets"]} == paths - {"redis_password"} | {password_of(USERS[name])}


def files(mounted: list[Tree]) -> set[str]:
    """Names of secrets in /run/secrets; compose resolves a short form to a path and leaves a long one as it is."""
    return {secret["target"].rsplit("/", 1)[-1] for secret in mounted}


def password_of(role: str) -> str:
    """The secret with the password of a user of Redis."""
    return f"redis_{role.replace('-', '_')}_password"


# As whom each process signs in to Redis. `init` does what the trainer does at each start.
USERS = {
    "init": "trainer",
    "weight-sync": "weight-sync",
    "monitor": "monitor",
    "trainer": "trainer",
    "engine": "engine",
    "rollout": "worker",
}


@pytest.mark.parametrize("name", OURS)
def test_a_process_signs_in_to_redis_as_its_role(name: str) -> None:
    assert service(name)["environment"]["LAGRANGE_REDIS_USER"] == USERS[name]


def test_redis_has_a_user_for_each_role_and_gets_no_password() -> None:
    assert {s["source"] for s in service("users")["secrets"]} == {password_of(role) for role in ROLES}
    assert not service("redis").get("secrets")
    (volume,) = (v for v in service("users")["volumes"])
    out = service("redis")["environment"]["REDIS_USERS_FILE"]
    assert service("users")["command"] == ["redis-users", "/run/secrets", "--out", out]
    assert out.startswith(volume["target"] + "/")
    assert {"source": volume["source"], "target": volume["target"], "read_only": True}.items() <= next(
        v for v in service("redis")["volumes"] if v["source"] == volume["source"]
    ).items()
    assert service("redis")["depends_on"]["users"]["condition"] == "service_completed_successfully"


def test_the_order_of_the_start_is_gated_by_health() -> None:
    def waits(name: str) -> dict[str, str]:
        return {other: how["condition"] for other, how in service(name)["depends_on"].items()}

    assert waits("init") == {"redis": "service_healthy"}
    for name in ("weight-sync", "monitor", "trainer", "engine"):
        assert waits(name) == {"redis": "service_healthy", "init": "service_completed_successfully"}
    assert waits("rollout") == {
        "redis": "service_healthy",
        "init": "service_completed_successfully",
        "weight-sync": "service_healthy",
        "engine": "service_healthy",
    }


def test_only_init_and_the_trainer_write_to_the_shared_volume() -> None:
    for name in OURS:
        (volume,) = (v for v in service(name)["volumes"] if v["target"] == "/var/lib/lagrange")
        assert volume["type"] == "volume"
        assert bool(volume.get("read_only")) is (name not in ("init", "trainer")), name


def test_what_listens_is_published_on_this_machine_alone() -> None:
    for name, tree in compose()["services"].items():
        for port in tree.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name
    assert compose()["networks"]["run"]["internal"] is True


def test_redis_is_durable_bounded_and_never_evicts() -> None:
    text = (DEPLOY / "redis/redis.conf").read_text(encoding="utf-8")
    settings = dict(line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#"))
    assert settings["appendonly"] == "yes"
    assert settings["maxmemory-policy"] == "noeviction"
    assert service("redis")["environment"]["REDIS_MAXMEMORY"] == "1gb"
    assert [v["target"] for v in service("redis")["volumes"] if not v.get("read_only")] == ["/data"]


def test_engines_and_workers_can_be_scaled() -> None:
    for name in ("engine", "rollout"):
        assert "container_name" not in service(name)
        assert not service(name).get("ports")
        assert service(name)["scale"] >= 1


@pytest.mark.parametrize("gpu", [False, True])
def test_what_needs_time_to_end_has_longer_than_it_takes(gpu: bool) -> None:
    for name in ("engine", "trainer"):
        drain = float(service(name, gpu)["environment"]["LAGRANGE_DRAIN_S"])
        assert seconds(service(name, gpu)["stop_grace_period"]) >= drain + 10 > 10, name


def test_gpus_pinned_memory_and_their_images_are_in_the_override_alone() -> None:
    for name in ("trainer", "engine"):
        assert "ulimits" not in service(name)
        assert "deploy" not in service(name) or "reservations" not in service(name)["deploy"].get("resources", {})
        gpu = service(name, gpu=True)
        assert gpu["ulimits"]["memlock"] == -1
        (scratch,) = gpu["tmpfs"]
        assert scratch.startswith("/tmp:")
        assert "exec" in scratch.split(",")  # compiled kernels are loaded from there
        (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert gpu["build"]["args"]["VARIANT"] == "gpu"
        assert service(name)["build"]["args"]["VARIANT"] == "cpu"
    both = [
        set(service(n, gpu=True)["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"])
        for n in ("trainer", "engine")
    ]
    assert not both[0] & both[1]


def test_every_file_that_it_mounts_exists() -> None:
    tree = compose()
    for name, config in tree["configs"].items():
        assert (ROOT / config["file"]).is_file(), name
    for name, one in tree["services"].items():
        for volume in one.get("volumes", []):
            if volume["type"] == "bind":
                assert (ROOT / volume["source"]).exists(), name


def test_secrets_are_made_once_each_another(tmp_path: object) -> None:
    import shutil
    from pathlib import Path

    folder = Path(str(tmp_path)) / "secrets"
    folder.mkdir()
    shutil.copy(DEPLOY / "secrets/make.sh", folder)
    run(folder / "make.sh")
    first = {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir() if p.name != "make.sh"}
    run(folder / "make.sh")
    assert first == {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir() if p.name != "make.sh"}
    assert set(first) == {*map(password_of, ROLES), "api_token", "engine_api_key", "grafana_password"}
    assert len(set(first.values())) == len(first)
    assert all(len(value) >= 32 for value in first.values())
    assert folder.stat().st_mode & 0o077 == 0


def test_the_shell_scripts_are_sound() -> None:
    for script in DEPLOY.glob("*/*.sh"):
        run("/bin/sh", "-n", script)
        assert "set -eu" in script.read_text(encoding="utf-8")
    assert program("docker-compose")
