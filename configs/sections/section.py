"""What the parts of the schema are made of.

Invariant: a section is frozen, a key that it does not know is an error, and a number is finite."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Processes = Annotated[int, Field(ge=1, le=4096)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A part of the configuration: frozen; an unknown key, an infinity or a NaN is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
