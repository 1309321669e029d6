"""How the server does: alive, ready, its models, its figures, and its page."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.front.front_desk import Front
from penstock.runtime.serve.page.page_files import HEADERS, INDEX, page_file


def router(front: Front) -> APIRouter:
    """The routes, for one server."""
    routes, created = APIRouter(), int(time.time())

    def model() -> dict[str, Any]:
        info = front.supervisor.info
        more = {} if info is None else {"max_model_len": info.capacity_tokens}
        anthropic = {
            "type": "model",
            "display_name": front.model,
            "created_at": f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        }
        return {"id": front.model, "object": "model", "created": created, "owned_by": "penstock"} | anthropic | more

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> dict[str, str]:
        """The front is alive."""
        return {"status": "alive"}

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready")
    async def ready() -> Response:
        """200 once requests are taken; before, 503 with how far loading is."""
        state = front.supervisor.state
        return JSONResponse({"status": state, "progress": _progress(front)}, 200 if state == "ready" else 503)

    @routes.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(front.meters.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/machine")
    async def machine() -> dict[str, Any]:
        """The machine at work, for the page."""
        motor = front.supervisor
        return {
            "state": motor.state,
            "progress": _progress(front),
            "info": None if motor.info is None else asdict(motor.info),
            "vital": motor.vital,
            "front": {
                "model": front.model,
                "requests": front.crowd.under_way,
                "connections": front.connections(),
                "uptime_s": time.monotonic() - front.started_at,
            },
        }

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        """A conversation, and the machine at work."""
        return _file(INDEX)

    @routes.get("/page/{name}", include_in_schema=False)
    async def file_of_page(name: str) -> Response:
        """What the page loads."""
        return _file(name)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served, with the keys of OpenAI's and of Anthropic's lists."""
        return {"object": "list", "data": [model()], "has_more": False, "first_id": front.model, "last_id": front.model}

    @routes.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """That one, by its name."""
        if name != front.model:
            raise ApiError(
                404, f"The model {name[:80]!r} does not exist here; ask for {front.model!r}", param="model", code="model_not_found"
            )
        return model()

    return routes


def _file(name: str) -> Response:
    found = page_file(name)
    if found is None:
        raise ApiError(404, "the page has no such file")
    content, kind = found
    return Response(content, headers=dict(HEADERS), media_type=kind)


def _progress(front: Front) -> dict[str, Any] | None:
    told = front.supervisor.progress
    return None if told is None else {"phase": told.phase, "done": told.done, "total": told.total}
