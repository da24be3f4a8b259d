"""Whether the parameters of a task are of the kinds that its signature names.

Invariant: the signature is the only place that says what a parameter may be, for built-in tasks and for those of
installed packages alike; limits stand there as `Annotated[int, Field(ge=1)]`. A signature without types checks nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError

from configs.sections.section import Positive, Seconds

__all__ = ["Positive", "Seconds", "Share", "check_parameters"]

Share = Annotated[float, Field(ge=0, le=1)]


def check_parameters(factory: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
    """Raise ValueError for the first value of another kind. Strict as JSON is: a list will do for a tuple and 2 for
    2.0, but "2" and true are no numbers."""
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
