"""The application: every route of a server behind its guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.planner.common.outside.installed import installed_version
from penstock.runtime.asked.prompts import LongText
from penstock.runtime.serve.dialects.wrong_request import WrongRequest
from penstock.runtime.serve.front.api_errors import UNKNOWN, ApiError, fault
from penstock.runtime.serve.front.front_desk import Front
from penstock.runtime.serve.front.guard import Guard, error_response
from penstock.runtime.serve.routes import chat_route, completions_route, machine_routes, messages_route, responses_route
from penstock.runtime.serve.routes.openapi_page import describe

ROUTERS = (machine_routes.router, chat_route.router, completions_route.router, responses_route.router, messages_route.router)


def serve_app(front: Front, local_only: bool, origins: Sequence[str], tell: Callable[[str], None]) -> ASGIApp:
    """All that a server answers. ``origins``: of web pages that may ask it, none by default."""
    app = FastAPI(title="Penstock", version=installed_version("penstock") or "source tree", docs_url=None, redoc_url=None)
    for make in ROUTERS:
        app.include_router(make(front))
    describe(app, front.model)

    async def of_api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(request.url.path, error)

    async def of_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        answer = error_response(request.url.path, _wrong_body(error.errors(), error.body))
        error.__traceback__ = error.__cause__ = error.__context__ = None  # its frames hold it, and the whole request
        return answer

    async def of_dialect(request: Request, error: Exception) -> Response:
        assert isinstance(error, WrongRequest)
        return error_response(request.url.path, ApiError(400, error.message, param=error.param, code=error.code))

    async def of_length(request: Request, error: Exception) -> Response:
        assert isinstance(error, LongText)
        return error_response(request.url.path, front.too_long(error.tokens))

    async def of_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: "no such path; see /openapi.json", 405: f"{request.method} is not for this path; see /openapi.json"}
        unread = None if error.status_code in words else "invalid_json"
        message = words.get(error.status_code) or _unread_body(error.__cause__)
        answer = error_response(request.url.path, ApiError(error.status_code, message, code=unread))
        error.__cause__ = None  # its frames hold the body
        answer.headers.update(error.headers or {})
        return answer

    async def of_fault(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, fault())

    handlers = {
        Exception: of_fault, ApiError: of_api, RequestValidationError: of_body, WrongRequest: of_dialect, LongText: of_length,
        HTTPException: of_path,
    }  # fmt: skip
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    guarded: ASGIApp = Guard(app, front, local_only, tell)
    if origins:
        guarded = CORSMiddleware(guarded, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"])
    return guarded


def _unread_body(cause: BaseException | None) -> str:
    """What is wrong with a body of which Python's reader made neither a value nor a place where JSON ends."""
    if isinstance(cause, RecursionError):
        return "the body has too many brackets within brackets; send fewer"
    if isinstance(cause, ValueError) and not isinstance(cause, UnicodeError):
        return "the body has a number of thousands of digits; send a smaller one"
    return "the body is no text in UTF-8; send JSON in UTF-8"


def _wrong_body(found: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The first key of ``body`` that is wrong, an unknown one before all else; of the forms that it may have, what fits furthest."""
    if not isinstance(body, dict):
        return ApiError(400, "the body is no JSON object; send one, with Content-Type: application/json", code="invalid_json")
    placed = [(_place(each["loc"][1:], body), each) for each in found]
    first = next((one for one in placed if one[1]["type"] == "extra_forbidden"), placed[0])
    same_key = [one for one in placed if one[0].partition(".")[0] == first[0].partition(".")[0]]
    param, error = first if first[1]["type"] == "extra_forbidden" else max(same_key, key=lambda one: one[0].count("."))
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: this server knows no such key; leave it out", param=param, code=UNKNOWN)
    if error["type"] == "missing":
        return ApiError(400, f"{param}: it is required", param=param, code="missing_required_parameter")
    said = dict.fromkeys(each["msg"] for place, each in placed if place == param)
    return ApiError(400, f"{param}: {'; or: '.join(said)}", param=param, code="invalid_value")


def _place(path: Sequence[Any], body: Any) -> str:
    """Where in ``body`` an error is: ``path`` without the names of types that were tried there. A key that is missing comes last."""
    kept: list[str] = []
    within = body
    for number, part in enumerate(path):
        if isinstance(within, dict):
            if part in within:
                kept, within = [*kept, str(part)], within[part]
            elif number == len(path) - 1:
                kept.append(str(part))
        elif isinstance(within, list) and isinstance(part, int) and part < len(within):
            kept, within = [*kept, str(part)], within[part]
    return ".".join(kept)
