"""What bodies of requests have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema, model_validator


class Body(BaseModel):
    """An object of JSON whose keys are these and no others, of these types and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Refused = Annotated[Any, WithJsonSchema({"type": "null"})]
"""A key that servers elsewhere know, and this one refuses in words, where it is not null."""
RefusedTrue = Annotated[bool | None, WithJsonSchema({"enum": [False, None]})]
"""The same, where it is not false."""


class Repeated(Body):
    """What a client sends back as it got it: keys that it does not know may be null."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, said: Any) -> Any:
        if not isinstance(said, dict):
            return said
        return {key: value for key, value in said.items() if value is not None or key in cls.model_fields}


def lines(texts: Iterable[str]) -> str:
    """Parts of one message's text as one text."""
    return "\n".join(texts)
