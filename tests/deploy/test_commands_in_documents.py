"""Every command, service, address, variable and metric that a page names is one of the system's."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, cast

import click
import pytest
import typer.main
import yaml

from services.commands import app
from services.monitor.app import create_app
from tests.deploy.tools import DEPLOY, OVERLAYS, PAGES, ROOT, compose, manifests

COMPOSE_FILES = tuple(sorted(DEPLOY.glob("*compose*.y*ml")))
FOLDERS = ("configs", "broker", "rollout", "trainer", "services", "deploy")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    """A page with its shell lines joined where a backslash ends them."""
    return page.read_text(encoding="utf-8").replace("\\\n", " ")


def written(*patterns: str) -> str:
    """All of the system's files that match, in one text."""
    files = (f for folder in FOLDERS for pattern in patterns for f in (ROOT / folder).rglob(pattern) if f.is_file())
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def code(text: str) -> list[str]:
    """What stands in a page as code: between backticks, indented, or fenced."""
    fenced = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    indented = [line.strip() for line in rest.splitlines() if line.startswith("    ")]
    return [*fenced, *indented, *re.findall(r"`([^`]+)`", rest)]


@every_page
def test_its_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {name for words in code(text_of(page)) for name in re.findall(r"(?:^|\s)make ([a-z-]+)", words)}
    assert named <= targets


@every_page
def test_its_lagrange_commands_and_their_options_exist(page: Path) -> None:
    group = typer.main.get_command(app)
    for words in code(text_of(page)):
        for line in re.findall(r"(?:^|(?<!-n)\s)lagrange ([a-z][^\n|;&#]*)", words):
            known: Any = group
            for word in line.split():
                if isinstance(known, click.Group) or hasattr(known, "commands"):
                    assert word in known.commands, line
                    known = known.commands[word]
                elif word.startswith("--"):
                    assert word in {name for p in known.params for name in (*p.opts, *p.secondary_opts)}, line


@every_page
def test_its_compose_commands_name_services_and_files_that_exist(page: Path) -> None:
    services = set(compose()["services"])
    for words in code(text_of(page)):
        if "docker compose" not in words and not words.startswith("... "):
            continue
        for file in re.findall(r"-f (\S+)", words):
            assert (ROOT / file).is_file(), words
        assert set(re.findall(r"--scale ([a-z-]+)=", words)) <= services
        assert set(re.findall(r"--profile ([a-z-]+)", words)) <= {"observe"}
        for name in re.findall(r"(?:stop|logs|ps|restart|--scale \S+|--build) ([a-z][a-z-]*)", words):
            assert name in services, words


@every_page
def test_its_kubectl_commands_name_objects_that_exist(page: Path) -> None:
    kinds = {"deployment": "Deployment", "job": "Job", "svc": "Service", "statefulset": "StatefulSet"}
    there = {(m["kind"], m["metadata"]["name"]) for overlay in OVERLAYS for m in manifests(overlay)}
    for words in code(text_of(page)):
        if "kubectl" in words:
            for kind, name in re.findall(rf"\b({'|'.join(kinds)})[ /]([a-z][a-z-]*)", words):
                assert (kinds[kind], name) in there, words
            assert set(re.findall(r"-n ([a-z]\S*)", words)) <= {"lagrange"}


@every_page
def test_the_variables_that_it_names_are_read_somewhere(page: Path) -> None:
    sources = written("*.py", "*.yml", "*.yaml", "*.sh", "*Dockerfile")
    for name in set(re.findall(r"\b(?:LAGRANGE|REDIS|ROLLOUT|ENGINE|TRAINER)_[A-Z_]+\b", text_of(page))):
        assert re.search(rf"\b({name}|{name.removesuffix('_FILE')})\b", sources), name


@every_page
def test_the_metrics_that_it_names_are_exported(page: Path) -> None:
    sources = written("*.py", "*.yml")
    for name in set(re.findall(r"`(lagrange[_:][a-z_:]+)`", text_of(page))):
        of_a_service = re.sub(r"^lagrange_(weight_sync_)?(\w+?)(_total)?$", r'"\2"', name)
        assert name in sources or of_a_service in sources, name


@cache
def served() -> frozenset[tuple[str, str]]:
    """(method, address) of what answers over HTTP; what is filled in is *. Of SGLang: what is asked for."""
    monitor = create_app(cast(Any, None), steer=cast(Any, object()))
    found = {(method.upper(), path) for path, item in monitor.openapi()["paths"].items() for method in item}
    sources = written("*.py")
    found |= {(m.upper(), path) for m, path in re.findall(r'@\w+\.(get|post|delete)\(\s*"(/[^"]*)"', sources)}
    found |= {(m, path) for path, m in re.findall(r'Route\("(/[^"]*)", .*methods=\["(\w+)"\]', sources)}
    found |= set(re.findall(r'_call\("(\w+)", "(/[^"]*)"', sources))
    return frozenset((method, re.sub(r"\{\w+\}", "*", path)) for method, path in found)


@every_page
def test_the_addresses_that_it_names_are_served_by_that_method(page: Path) -> None:
    methods = {path: {m for m, p in served() if p == path} for _, path in served()}
    for words in code(text_of(page)):
        asked = re.search(r"curl.* -X (\w+)", words)
        for named, path in re.findall(
            r"(GET |POST |PATCH |DELETE )?[\w>]*(/v1/[\w/<>-]+|/metrics|/healthz|/readyz)", words
        ):
            there = methods.get(re.sub(r"<\w+>|\b[A-Z]+\b", "*", path), set())
            method = named.strip() or (asked[1] if asked else "GET" if "curl" in words else "")
            assert method in there if method else there, f"{method} {path}"


def test_the_pages_that_files_under_deploy_name_exist() -> None:
    for file in DEPLOY.rglob("*"):
        if file.is_file() and file.suffix in (".yml", ".yaml", ".sh", ".conf", ".py", ".Dockerfile"):
            for name in re.findall(r"\b((?:docs/[\w/-]+|[A-Z]{3,})\.md)\b", file.read_text(encoding="utf-8")):
                assert (ROOT / name).exists(), f"{file.name}: {name}"


def test_every_compose_file_and_component_is_described() -> None:
    pages = "".join(map(text_of, PAGES))
    for file in COMPOSE_FILES:
        assert f"deploy/{file.name}" in pages
    for folder in (DEPLOY / "kubernetes/components").iterdir():
        assert f"components/{folder.name}" in pages or any(
            f"components/{folder.name}"
            in (DEPLOY / "kubernetes/overlays" / o / "kustomization.yaml").read_text("utf-8")
            for o in OVERLAYS
        ), folder.name


def test_the_command_for_the_prometheus_operators_rules_makes_rules() -> None:
    text = (ROOT / "docs/deploy/kubernetes.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`(\(echo [^`]*)\| kubectl apply[^`]*`", text)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    made = yaml.safe_load(done.stdout)
    assert made["kind"] == "PrometheusRule"
    rules = yaml.safe_load((DEPLOY / "prometheus/rules/alerts.yml").read_text(encoding="utf-8"))
    assert made["spec"] == rules


def test_what_was_never_run_is_said() -> None:
    """No GPU, no Ray cluster under KubeRay: pages that tell people to use them say so."""
    for name in ("compose", "images", "kubernetes", "ray", "sizing"):
        text = " ".join((ROOT / f"docs/deploy/{name}.md").read_text(encoding="utf-8").split())
        assert re.search(r"not (run|built)( under KubeRay)? here|never (run|started)|no GPU cluster", text), name
