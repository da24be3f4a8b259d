"""The Dockerfiles, without building them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.tools import DEPLOY, ROOT, program, run

FILES = tuple(sorted((DEPLOY / "docker").glob("*.Dockerfile")))
every_file = pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)


def instructions(file: Path) -> list[str]:
    """Logical lines without comments."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_there_is_one_image_for_the_services_one_for_the_trainer_one_for_the_engine() -> None:
    assert [f.name for f in FILES] == ["engine.Dockerfile", "service.Dockerfile", "trainer.Dockerfile"]


@every_file
def test_hadolint_finds_nothing(file: Path) -> None:
    assert run(program("hadolint"), "--failure-threshold", "style", file) == ""


@every_file
def test_the_classic_builder_can_build_it(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert "# syntax" not in text
    assert "<<" not in text
    assert not [line for line in instructions(file) if line.startswith("RUN --")]


@every_file
def test_it_ends_as_another_user_than_root_with_a_health_check_and_labels(file: Path) -> None:
    lines = instructions(file)
    last = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM")) :]
    assert "USER 10001:10001" in last
    assert any(line.startswith("HEALTHCHECK") and "lagrange-probe" in line for line in last)
    assert any(line.startswith("LABEL org.opencontainers.image.title") for line in last)
    assert 'ENTRYPOINT ["lagrange"]' in last
    assert not any(re.search(r"(?i)(password|token|api_key)\s*=", line) for line in lines)


@every_file
def test_everything_that_it_copies_exists(file: Path) -> None:
    sources = []
    for line in instructions(file):
        if line.startswith("COPY ") and "--from" not in line:
            sources += line.split()[1:-1]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source


@every_file
def test_the_build_context_leaves_out_environments_runs_and_secrets(file: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".venv", ".venv-sglang", "runs", ".git", "deploy/secrets", "deploy/tls"} <= set(ignored)


def test_versions_that_an_image_names_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pinned = re.compile(r"\b(torch|torchvision|sglang|megatron-core)==([0-9.]+)")
    known = dict(pinned.findall(makefile))
    for file in FILES:
        for name, version in pinned.findall(file.read_text(encoding="utf-8")):
            assert known.get(name) == version, f"{file.name}: {name}=={version}"


def test_where_traces_are_written_an_image_has_what_they_take() -> None:
    for name in ("service", "trainer"):
        lines = instructions(DEPLOY / f"docker/{name}.Dockerfile")
        (installs,) = (line for line in lines if line.startswith("RUN") and "requirements/base.txt" in line)
        assert installs.count("requirements/traces") >= installs.count("requirements/base.txt")
