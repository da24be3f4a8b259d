"""docs/how-the-guarantees-work.md names tests, metrics, counters, files and endpoints that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-the-guarantees-work.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")  # held by tests/monitor/test_metric_names.py


def sources(*folders: str) -> str:
    """All Python and Lua of the folders in one text."""
    files = (f for folder in folders for kind in ("*.py", "*.lua") for f in (ROOT / folder).rglob(kind))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_the_tests_and_files_that_it_names_exist() -> None:
    named = re.findall(r"`((?:tests|broker)/[\w/]+\.(?:py|lua))(?:::(\w+))?`", PAGE)
    assert len(named) > 20
    for file, test in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, f"{file}::{test}"


def test_the_metrics_and_endpoints_that_it_names_are_served() -> None:
    for name in re.findall(r"`(lagrange_\w+)`", PAGE):
        assert f"`{name}`" in METRICS, name
    served = sources("services")
    for path in re.findall(r"`GET (/\S+)`", PAGE):
        assert f'"{path}"' in served, path


def test_the_counters_and_fields_that_it_names_are_in_the_code() -> None:
    code = sources("broker", "rollout", "trainer", "services") + METRICS
    for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE):
        assert name in code, name
