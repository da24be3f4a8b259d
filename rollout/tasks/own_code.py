"""A function of the user's own by its dotted name: of an installed package, or of a module in the current folder.

Invariant: the current folder comes after everything that is installed, and only once a function that is found nowhere
else was asked for there: no file of it takes the place of another module. Every process that asks for a function looks
there by itself; those that `lagrange up` starts have its folder.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class FolderFinder:
    """Finds top-level modules of one folder; at the end of sys.meta_path, as the end of sys.path is no last place:
    the packages of an editable installation come after it."""

    folder: str

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As of every finder of sys.meta_path."""
        return PathFinder.find_spec(name, [self.folder], target) if path is None else None


def load_function(dotted: str) -> Callable[..., Any]:
    """The function "package.module:name" or "package.module.name". Raises ValueError if there is none."""
    module, colon, name = dotted.partition(":")
    if not colon:
        module, _, name = dotted.rpartition(".")
    try:
        holds = _imported(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"function: {dotted!r} cannot be imported: {error}, neither installed nor in {Path.cwd()}, the folder from "
            "which lagrange is called"
        ) from error
    except Exception as error:  # a module's own code may fail in any way
        raise ValueError(f"function: {dotted!r} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(holds, name, None)
    if found is None:
        raise ValueError(f"function: {dotted!r} cannot be imported: {holds!r} has no {name!r}")
    if not callable(found):
        raise ValueError(f"function: {dotted!r} is no function")
    return found  # type: ignore[no-any-return]


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        finder = FolderFinder(str(Path.cwd()))
        if error.name != name.partition(".")[0] or finder in sys.meta_path:
            raise
        sys.meta_path.append(finder)
        return importlib.import_module(name)
