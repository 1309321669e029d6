"""What bodies of requests have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

from penstock.runtime.serve.dialects.wrong_request import WrongRequest


class Body(BaseModel):
    """An object of JSON whose keys are these and no others, of these types and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def refuse(said: dict[str, Any], reasons: dict[str, str]) -> None:
    """WrongRequest for the first of ``said`` that is neither null nor false, in the words of ``reasons``."""
    for name, value in said.items():
        if value is not None and value is not False:
            raise WrongRequest(f"{name}: {reasons[name]}; leave it out", name, "unsupported")


def lines(texts: Iterable[str]) -> str:
    """Parts of one message's text as one text."""
    return "\n".join(texts)
