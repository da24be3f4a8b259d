"""What the parts of the schema are made of.

Invariant: a section is frozen, and a key that it does not know is an error."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A part of the configuration: frozen, and a key that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
