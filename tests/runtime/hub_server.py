"""A small server that speaks the hub's protocol: a model's listing, and its files with ranges."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_BYTES = 10_000
"""From here on a file has a SHA-256, as large files of the hub have."""


@dataclass
class Hub:
    """What the server holds, and what it does wrong."""

    models: Mapping[str, Mapping[str, bytes]]
    break_after: dict[str, int] = field(default_factory=dict)
    """File -> bytes after which its connection breaks, once for each entry."""
    corrupt: set[str] = field(default_factory=set)
    """Files of which one bit is sent wrong."""
    gated: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(file, range) of every GET of a file."""
    url: str = ""

    def listing(self, name: str) -> dict[str, object]:
        siblings = []
        for path, data in self.models[name].items():
            entry: dict[str, object] = {"rfilename": path, "size": len(data)}
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if len(data) >= LARGE_BYTES:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 128}
            siblings.append(entry)
        return {"id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """``hub`` on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            parts = urlsplit(self.path).path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                name = "/".join(parts[2:4])
                if name not in hub.models:
                    return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
                if name in hub.gated:
                    return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
                return self._send(200, json.dumps(hub.listing(name)).encode(), {"Content-Type": "application/json"})
            name, path = "/".join(parts[:2]), "/".join(parts[4:])
            data = hub.models.get(name, {}).get(path)
            if data is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            asked = self.headers.get("Range", "")
            first = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            if body:
                hub.asked.append((path, asked))
            sent = bytes(b ^ (path in hub.corrupt and i == 1) for i, b in enumerate(data)) if path in hub.corrupt else data
            etag = hashlib.sha256(data).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if asked:
                headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            self._send(206 if asked else 200, sent[first:], headers, body, hub.break_after.pop(path, None) if body else None)

        def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool = True, cut: int | None = None) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data if cut is None else data[:cut])
            if cut is not None:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)  # closing alone leaves it open: reader and writer hold it, too

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
