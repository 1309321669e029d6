"""The page at `/`, in a headless Chromium, at a server that says what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from penstock.runtime.serve.page.page_files import HEADERS, page_file
from tests.browser import PROGRAM, Browser, browsing

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed: the page is not looked at")
KEY = "sesame"
VITAL = {
    "rows": 5, "rows_limit": 32, "waiting": 2, "queue_limit": 64, "pass_tokens": 515, "pass_tokens_limit": 1024, "prompt_tokens": 512,
    "decode_rows": 3, "pages": 640, "pages_used": 120, "pages_kept": 300, "passes": 4321, "generated_tokens": 12345,
    "restored_tokens": 4096, "preempted": 0, "tokens_per_s": 12.34, "predicted_tokens_per_s": 12.9,
    "pass_s": 0.402, "predicted_pass_s": 0.395, "idle_share": 0.004,
    "binds": "link",
    "tiers": {"vram": {"capacity": 6_442_450_944, "weights": 3.6e9, "kv": 2.1e9, "staging": 4e8},
              "dram": {"capacity": 64e9, "weights": 16.1e9, "kept": 6e9}, "ssd": {"weights": 16.1e9}},
}  # fmt: skip
READY = {"state": "ready", "progress": None, "info": {"model": "tiny-llama"}, "vital": VITAL}
PIECES = ["Gut", "en Tag, ", "鯨", " **and**\n```\ncode <b>\n```\nend"]


class Canned:
    """What the server says, and what it was asked."""

    def __init__(self) -> None:
        self.machine: dict[str, Any] = READY
        self.key: str | None = None
        self.asked: list[dict[str, Any]] = []
        self.refuse: tuple[int, dict[str, Any]] | None = None
        self.hold = threading.Event()
        self.hold.set()


@contextmanager
def serving(canned: Canned) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def say(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/machine":
                locked = canned.key and self.headers["Authorization"] != f"Bearer {canned.key}"
                return self.say(401 if locked else 200, json.dumps(canned.machine).encode())
            found = page_file() if self.path == "/" else page_file(self.path.removeprefix("/page/"))
            self.say(404, b"") if found is None else self.say(200, *found, **HEADERS)

        def do_POST(self) -> None:
            canned.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))) | {"path": self.path})
            if canned.refuse:
                status, said = canned.refuse
                return self.say(status, json.dumps({"error": said}).encode())
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            usage = {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
            events: list[Any] = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in PIECES]
            events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
            whole = b": quiet\n\n" + b"".join(b"data: " + json.dumps(one, ensure_ascii=False).encode() + b"\n\n" for one in events)
            cut = whole.index("鯨".encode()) + 1
            try:
                for part in (whole[:cut], whole[cut:], b"data: [DONE]\n\n"):
                    self.wfile.write(part)
                    self.wfile.flush()
                    canned.hold.wait(20)
            except OSError:
                pass
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        canned.hold.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as one:
        yield one


def said(browser: Browser, what: str) -> None:
    browser.evaluate("document.getElementById('words').focus()")
    browser.type(what)
    browser.press("Enter")


def test_the_page_names_no_outside_resource() -> None:
    for name in ("index.html", "page.css", "main.js", "talk.js", "machine.js", "stream.js", "words.js", "mark.svg"):
        found = page_file(name)
        assert found is not None
        text = found[0].decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "://" not in text and "//cdn" not in text and "style=" not in text and "innerHTML" not in text
    assert page_file("../page_files.py") is None and page_file("page_files.py") is None


@needs_chromium
def test_a_conversation_comes_token_by_token_and_the_machine_is_seen_at_work(browser: Browser) -> None:
    canned = Canned()
    canned.hold.clear()
    with serving(canned) as url:
        browser.open(url)
        browser.wait("document.getElementById('rows-now').textContent === '5'")
        said(browser, "Hello <i>there</i>")
        browser.wait("document.querySelector('.turn.model.live .text')?.textContent === 'Guten Tag, '")
        canned.hold.set()
        told = browser.wait("document.querySelector('.turn.model:not(.live) .told')?.textContent")
        assert "7 tokens" in told and "prompt 9, 4 of it restored" in told and "cut at" in told
        assert browser.evaluate("document.querySelector('.turn.model pre').textContent") == "code <b>"
        assert browser.evaluate("document.querySelector('.turn.user .text').textContent") == "Hello <i>there</i>"
        assert browser.evaluate("document.querySelector('.turn.model b').textContent") == "and"
        assert browser.evaluate("document.querySelectorAll('#rows .decode').length") == 3
        assert browser.evaluate("document.querySelectorAll('#rows .prompt').length") == 2
        assert browser.evaluate("document.getElementById('rate').textContent") == "12.3"
        assert browser.evaluate("document.querySelectorAll('#tiers .track').length") == 3
        said(browser, "Again")
        browser.wait("document.querySelectorAll('.turn.model:not(.live) .told').length === 2")
    assert [one["role"] for one in canned.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert canned.asked[1]["messages"][1]["content"] == "".join(PIECES)
    assert canned.asked[0]["path"] == "/v1/chat/completions" and canned.asked[0]["model"] == "tiny-llama"
    assert browser.errors == []


@needs_chromium
def test_what_is_refused_is_said_and_the_words_stay(browser: Browser) -> None:
    canned = Canned()
    canned.refuse = (429, {"message": "64 requests wait already", "type": "queue_full", "param": None, "code": None})
    with serving(canned) as url:
        browser.open(url)
        browser.wait("document.getElementById('state').dataset.state === 'ready'")
        said(browser, "Hello")
        browser.wait("document.querySelector('.wrong')?.textContent === '64 requests wait already'")
        assert browser.evaluate("document.getElementById('words').value") == "Hello"
        assert browser.evaluate("document.querySelectorAll('.turn').length") == 0


@needs_chromium
def test_escape_stops_a_reply_and_keeps_what_came(browser: Browser) -> None:
    canned = Canned()
    canned.hold.clear()
    with serving(canned) as url:
        browser.open(url)
        browser.wait("document.getElementById('state').dataset.state === 'ready'")
        said(browser, "Hello")
        browser.wait("document.querySelector('.turn.model.live .text')?.textContent === 'Guten Tag, '")
        browser.press("Escape")
        browser.wait("document.querySelector('.turn.model:not(.live) .text')?.textContent.trim() === 'Guten Tag,'")
        assert browser.evaluate("document.getElementById('send').textContent") == "Send"


@needs_chromium
def test_a_key_is_asked_for_and_loading_is_shown(browser: Browser) -> None:
    canned = Canned()
    canned.key = KEY
    canned.machine = {"state": "loading", "progress": {"phase": "reading", "done": 3, "total": 12}, "info": None, "vital": None}
    with serving(canned) as url:
        browser.open(url)
        browser.wait("document.getElementById('state').textContent === 'wants a key'")
        browser.evaluate(f"(k => {{ k.value = '{KEY}'; k.dispatchEvent(new Event('change')); }})(document.getElementById('key'))")
        browser.wait("document.getElementById('loaded-words').textContent === '25 %'")
        assert browser.evaluate("document.getElementById('loading').hidden") is False
