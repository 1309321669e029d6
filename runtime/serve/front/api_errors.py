"""What a client is told that asked for something wrong, too much or too soon: the documented error objects."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

OPENAI_TYPES: Mapping[int, str] = MappingProxyType({
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 405: "invalid_request_error",
    429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error",
})  # fmt: skip
"""By status; any other is ``invalid_request_error``."""
ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType({
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error", 504: "timeout_error",
})  # fmt: skip

SAID = "messages"
"""As ``param``: what is to be answered, whatever the path calls it."""
SAID_KEYS: Mapping[str, str] = MappingProxyType({"/v1/completions": "prompt", "/v1/responses": "input"})
"""What a path calls it where it is not ``SAID``."""
UNKNOWN = "unknown_parameter"
"""As ``code``: the path has no such key."""


class ApiError(Exception):
    """Ends a request with ``status``, or its stream with an error event. ``param`` is the key of the body that is wrong, ``code`` a word
    that a program can look for, ``retry_after_s`` when to come again."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after_s = status, message, param, code, retry_after_s

    def openai(self, path: str = "") -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``, with the keys of ``path``."""
        kind = OPENAI_TYPES.get(self.status, "invalid_request_error")
        said = self.param == SAID and self.code != UNKNOWN  # whoever sends another path's key is told of that key
        param = SAID_KEYS.get(path, SAID) if said else self.param
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """``{"type": "error", "error": {"type", "message"}}``"""
        return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(self.status, "invalid_request_error"), "message": self.message}}


def wrong(param: str, message: str, code: str | None = None) -> ApiError:
    """400: ``param`` of the body cannot be obeyed."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def fault() -> ApiError:
    """Of the server's own."""
    return ApiError(500, "the server has a fault; its log says where")
