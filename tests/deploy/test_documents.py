"""docs/deploy: links lead somewhere, files and overlays that it names exist, the tables agree with the system."""

from __future__ import annotations

import re

import pytest

from configs import load_config
from configs.check import sizes_of
from configs.memory import estimate
from tests.deploy.tools import DEPLOY, OVERLAYS, ROOT

PAGES = tuple(sorted((ROOT / "docs/deploy").glob("*.md")))
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


@every_page
def test_its_links_and_the_files_that_it_names_exist(page: object) -> None:
    assert hasattr(page, "read_text")
    text: str = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (ROOT / "docs/deploy" / link).exists(), link
    for name in re.findall(r"(?<![\w./])((?:deploy|docs|tests|configs)/[\w./*-]+)", text):
        path = name.rstrip("./").split("*")[0].rstrip("/")
        if not path.startswith("deploy/secrets/"):
            assert (ROOT / path).exists(), name


def test_every_overlay_is_described() -> None:
    text = (ROOT / "docs/deploy/kubernetes.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, flags=re.MULTILINE)) == set(OVERLAYS)


@pytest.mark.parametrize(("name", "says"), [("qwen3-30b-a3b", "95 GiB"), ("qwen3-30b-a3b-4-nodes", "428 GiB")])
def test_the_sizes_are_those_that_lagrange_check_computes(name: str, says: str) -> None:
    text = (ROOT / "docs/deploy/sizing.md").read_text(encoding="utf-8")
    config = load_config(DEPLOY / "configs" / name / "config.yaml")
    sizes = sizes_of(config)
    assert sizes is not None
    found = estimate(config, sizes)
    assert f"{found.queue_bytes / 2**30:.0f} GiB" == says
    assert f"| {says} |" in text
    assert f"| {found.trainer_rank / 2**30:.1f} GiB |" in text
