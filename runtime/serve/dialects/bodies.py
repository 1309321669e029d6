"""What bodies of requests have in common."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

MOST_KEYS = 256


def counted(said: Any, most: int = MOST_KEYS) -> Any:
    """``said``; refused where it is an object of more than ``most`` keys, before any of them is looked at."""
    if isinstance(said, dict) and len(said) > most:
        raise PydanticCustomError("too_many_keys", f"{len(said)} keys; {most} are allowed")
    return said


def at_most(keys: int) -> BeforeValidator:
    """Of an object that has any keys."""
    return BeforeValidator(partial(counted, most=keys))


def _read_to_the_first_error(schema: Any) -> None:
    """All lists within ``schema``."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _read_to_the_first_error(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _read_to_the_first_error(part)


class Body(BaseModel):
    """An object of JSON whose keys are these and no others, of these types and no others.

    Few things are found wrong with it, whatever it holds: a list is read up to its first wrong item. Findings without end, which a body of
    some megabytes may have, would take minutes and gigabytes.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, said: Any) -> Any:
        return counted(said)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _read_to_the_first_error(schema)
        return schema


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
