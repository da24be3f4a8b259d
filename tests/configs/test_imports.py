"""Imports run one way: a package knows those before it, never those beside or after it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "broker": {"configs"},
    "rollout": {"configs", "broker"},
    "trainer": {"configs", "broker"},
    "services": {"configs", "broker", "rollout", "trainer"},
}


def imported(path: Path) -> Iterator[str]:
    """Packages that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name.split(".")[0] for name in names)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_those_before_it(package: str) -> None:
    others = {*MAY_IMPORT, "tests", "benchmarks", "deploy"} - {package} - MAY_IMPORT[package]
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / package).rglob("*.py")
        for name in set(imported(path)) & others
    }
    assert not wrong
