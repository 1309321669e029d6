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

from penstock.runtime.serve.dialects.wrong_request import WrongRequest
from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.front.front_desk import Front
from penstock.runtime.serve.front.guard import Guard, error_response, fault
from penstock.runtime.serve.routes import chat_route, completions_route, machine_routes, messages_route, responses_route
from penstock.runtime.serve.routes.openapi_page import describe

ROUTERS = (machine_routes.router, chat_route.router, completions_route.router, responses_route.router, messages_route.router)


def serve_app(front: Front, local_only: bool, origins: Sequence[str], tell: Callable[[str], None]) -> ASGIApp:
    """All that a server answers. ``origins``: of web pages that may ask it, none by default."""
    app = FastAPI(title="Penstock", docs_url=None, redoc_url=None)
    for make in ROUTERS:
        app.include_router(make(front))
    describe(app, front.model)

    async def of_api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(request.url.path, error)

    async def of_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(request.url.path, _wrong_body(error.errors()))

    async def of_dialect(request: Request, error: Exception) -> Response:
        assert isinstance(error, WrongRequest)
        return error_response(request.url.path, ApiError(400, error.message, param=error.param, code=error.code))

    async def of_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: "no such path; see /openapi.json", 405: f"{request.method} is not for this path; see /openapi.json"}
        answer = error_response(request.url.path, ApiError(error.status_code, words.get(error.status_code, "the body cannot be read")))
        answer.headers.update(error.headers or {})
        return answer

    async def of_fault(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, fault())

    handlers = {Exception: of_fault, ApiError: of_api, RequestValidationError: of_body, WrongRequest: of_dialect, HTTPException: of_path}
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    guarded: ASGIApp = Guard(app, front, local_only, tell)
    if origins:
        guarded = CORSMiddleware(guarded, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"])
    return guarded


def _wrong_body(found: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong with a body, an unknown key before all else."""
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    kind, place = first["type"], [str(part) for part in first["loc"] if part != "body"]
    if kind == "json_invalid" or (kind in ("model_attributes_type", "missing") and not place):
        return ApiError(400, "the body is no JSON object; send one, with Content-Type: application/json", code="invalid_json")
    param = ".".join(place)
    if kind == "extra_forbidden":
        return ApiError(400, f"{param}: this server knows no such key; leave it out", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param}: it is required", param=param, code="missing_required_parameter")
    return ApiError(400, f"{param}: {first['msg']}", param=param, code="invalid_value")
