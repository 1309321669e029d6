"""What /openapi.json says beside what FastAPI finds out: which model there is, and every answer that is no success."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from penstock.runtime.serve.front.guard import ANTHROPIC

_WORDS = {
    400: "The request cannot be answered as it stands",
    401: "No key, or a wrong one",
    403: "Not by this name of the machine",
    404: "There is no such model",
    408: "The body came too slowly",
    413: "The body is too large",
    429: "Too much is under way; Retry-After says when to come again",
    500: "The engine gave the request up",
    503: "Not ready; Retry-After says when to come again",
    504: "Not answered in time",
}
_OPENAI = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}


def describe(app: FastAPI, model: str) -> None:
    """From now on ``app``'s page says that ``model`` is the one to ask for, and how what fails is answered."""
    found = app.openapi

    def page() -> dict[str, Any]:
        if app.openapi_schema is None:
            said = found()
            for schema in said["components"]["schemas"].values():
                if "model" in (known := schema.get("properties", {})):
                    known["model"] = {"type": "string", "enum": [model]}
            for path, ways in said["paths"].items():
                for way in ways.values():
                    _answers(path, way)
                    for each in way.get("parameters", ()):
                        each["schema"] = {"type": "string", "enum": [model]}
        return app.openapi_schema or {}

    app.openapi = page  # type: ignore[method-assign]


def _answers(path: str, way: dict[str, Any]) -> None:
    schema = _ANTHROPIC if path.startswith(ANTHROPIC) else _OPENAI
    answers = way["responses"]
    answers.pop("422", None)
    for status, words in _WORDS.items():
        answers.setdefault(str(status), {"description": words, "content": {"application/json": {"schema": schema}}})
    if path == "/metrics":
        answers["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif path == "/ready":
        answers["503"]["content"] = answers["200"]["content"]
    elif "requestBody" in way:
        answers["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
