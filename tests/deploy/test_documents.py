"""Every page: links lead somewhere, files that it names exist. docs/deploy: its tables agree with the system."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs import load_config
from configs.check import sizes_of
from configs.memory import estimate
from tests.deploy.tools import DEPLOY, OVERLAYS, PAGES, ROOT

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
FOLDERS = "benchmarks|broker|configs|deploy|docs|rollout|services|tests|trainer"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are made of them where repositories are shown."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@every_page
def test_its_links_and_the_files_that_it_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"
    for name, test in re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]*\w/?)(?:::(\w+))?", text):
        path = name.split("*")[0].rstrip("/")
        if not path.startswith("deploy/secrets/"):
            assert (ROOT / path).exists() or (page.parent / path).exists(), name
            assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{name}::{test}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page.suffix == ".md" and page not in seen:
            seen.add(page)
            links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
            ahead += [(page.parent / link).resolve() for link in links]
    assert set(PAGES) - seen == set()


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
    rollout, (bytes_a_token,) = config.rollout, set(re.findall(r"lag \d \| (\d{3}) \|", text))
    step = config.trainer.groups_per_step * rollout.samples_per_prompt * rollout.max_new_tokens * int(bytes_a_token)
    assert f"{step / 2**30:.0f} GiB at the limit" in text
    assert f"{step / 4 / 2**30:.0f} GiB at a quarter" in text
    assert f"is {step / 4 / 600e6:.0f} to {step / 600e6:.0f} MB/s" in text
