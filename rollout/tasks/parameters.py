"""Whether the parameters of a task are those that its signature names, and of its kinds.

Invariant: the signature is the only place that says what a parameter may be, for built-in tasks and for those of
installed packages alike; limits stand there as `Annotated[int, Field(ge=1)]`. A signature without types checks nothing.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError

from configs.sections.section import Positive, Seconds

__all__ = ["Positive", "Seconds", "Share", "check_parameters"]

Share = Annotated[float, Field(ge=0, le=1)]


def check_parameters(factory: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
    """Raise ValueError for names that are unknown or missing, else for the first value of another kind. Strict as JSON
    is: a list will do for a tuple and 2 for 2.0, but "2" and true are no numbers."""
    _check_names(factory, parameters)
    try:
        call = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]  # a class, no instance
        hints = get_type_hints(call, include_extras=True)
    except (NameError, TypeError, AttributeError):  # annotations that do not resolve are not ours to mend
        return
    for name in parameters.keys() & hints.keys():
        value = parameters[name]
        try:
            adapter = TypeAdapter(hints[name])
        except PydanticUserError:  # a kind that only the task knows
            continue
        try:
            adapter.validate_json(json.dumps(value, allow_nan=False), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, (name, *first["loc"])))
            raise ValueError(f"{where} is {value!r}: {first['msg'].lower()}") from error
        except (TypeError, ValueError) as error:  # a date, a NaN
            raise ValueError(f"{name} is {value!r}: {error}") from error


def _check_names(factory: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
    """Raise ValueError that lists what the factory takes; one that takes any name has to look itself."""
    try:
        taken = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a callable without one
        return
    named = {name: one for name, one in taken.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    there = f". There are {', '.join(name for name in named if name != 'seed') or 'none'}"
    if named.keys() < taken.keys():
        there = ""
    elif unknown := sorted(parameters.keys() - named.keys()):
        raise ValueError(f"unknown: {', '.join(unknown)}{there}")
    needed = (name for name, one in named.items() if one.default is one.empty and name != "seed")
    if missing := [name for name in needed if name not in parameters]:
        raise ValueError(f"missing: {', '.join(missing)}{there}")
