"""What the parts of the schema are made of.

Invariant: a section is frozen, a key that it does not know is an error, and a number is finite and no true or false.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

ALLOWED = "x-allowed"  # in the JSON schema: what a pattern means, for people
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Processes = Annotated[int, Field(ge=1, le=4096)]
Seconds = Annotated[float, Field(gt=0, le=366 * 86400)]  # no clock or socket takes any number


def text(pattern: str, allowed: str, **more: Any) -> Any:
    """The constraint of a text. allowed: what the pattern lets through, in words that end "it may be: ..."."""
    return Field(pattern=pattern, json_schema_extra={ALLOWED: allowed}, **more)


class Section(BaseModel):
    """A part of the configuration: frozen; an unknown key, an infinity or a NaN is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_no_bool(cls, value: Any, info: ValidationInfo) -> Any:
        # Python takes True for 1, and YAML 1.1 reads `yes` and `on` as True.
        found = value.values() if isinstance(value, dict) else (value,)
        if any(isinstance(item, bool) for item in found) and _holds_numbers(
            cls.model_fields[info.field_name or ""].annotation
        ):
            raise ValueError(f"expected a number, not true or false (got {value!r})")
        return value


def _holds_numbers(annotation: Any) -> bool:
    return annotation in (int, float) or any(_holds_numbers(part) for part in get_args(annotation))
