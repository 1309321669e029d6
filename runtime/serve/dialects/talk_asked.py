"""What any dialect asks of a conversation's next reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Tool:
    """A function that the client has."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments, an object."""

    @property
    def arguments(self) -> dict[str, Any]:
        """That schema, which says of what type it is."""
        return {"type": "object", **self.parameters}

    def rendered(self) -> dict[str, Any]:
        """As chat templates take it."""
        said = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **said, "parameters": dict(self.parameters)}}


@dataclass(frozen=True)
class TalkAsked:
    """A conversation whose next message is the reply."""

    messages: Sequence[Mapping[str, Any]]
    """As chat templates take them: ``role``, ``content`` as text, ``tool_calls`` whose arguments are objects, ``reasoning_content``."""
    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    """Whether the reply may call, may not, or must."""
    named: frozenset[str] | None = None
    """Of ``tools``, those that the reply may call; None: all."""
    parallel: bool = True
    """Whether a reply may call several times."""
    schema: Mapping[str, Any] | bool | None = None
    """JSON schema that the reply's text keeps to; None: any text."""
    schema_key: str = "response_format"
    """Under which key of the body it came."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the template, such as ``enable_thinking``."""
    continued: bool = False
    """Whether the reply goes on with the last message, which is the model's own."""
