"""Bodies that no engine gets: each is a status and one line that names what is wrong."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from penstock.planner.common.outside.installed import installed_version
from penstock.runtime.serve.dialects.bodies import Body
from penstock.runtime.serve.front.front_limits import FrontLimits
from penstock.runtime.serve.routes.chat_route import ChatBody
from penstock.runtime.serve.routes.completions_route import CompletionBody
from penstock.runtime.serve.routes.messages_route import AnthropicBody
from penstock.runtime.serve.routes.responses_route import ResponsesBody
from tests.runtime.serve.fake_motor import CAPACITY, Script
from tests.runtime.serve.played import play, post

WRONG = [
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 1}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt.0"),
    ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": "1"}, "temperature"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 17}, "n"),
    ({"prompt": "a", "n": True}, "n"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "logit_bias": {"257": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": CAPACITY}, "prompt"),
    ({"prompt": "a" * CAPACITY}, "prompt"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "seed": 2**63}, "seed"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=[f"{param}-{k}" for k, (_, param) in enumerate(WRONG)])
def test_a_wrong_body_is_a_400_that_names_its_key(body: dict[str, Any], param: str) -> None:
    script = Script()
    response = play(script, post(**body))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"] == param and "\n" not in error["message"]
    assert not script.submitted


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"a"', b'{"model": "model", "prompt": "\\ud800"}', b"\xff", b"[" * 100_000,
     b'{"model": "model", "prompt": "a", "temperature": NaN}', b'{"model": "model", "prompt": "a", "seed": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut", "list", "null", "text", "surrogate", "no-utf8", "deep", "nan", "digits"],
)  # fmt: skip
def test_what_is_no_json_object_is_a_400(raw: bytes) -> None:
    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})

    response = play(Script(), ask)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("raw, word", [
    (b'{"prompt": "\xff"}', "no text in UTF-8"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "thousands of digits"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "brackets within brackets"),
], ids=["no-utf8", "digits", "deep"])  # fmt: skip
def test_a_body_that_cannot_be_read_is_told_what_is_wrong_with_it(raw: bytes, word: str) -> None:
    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})

    error = play(Script(), ask).json()["error"]
    assert word in error["message"] and error["code"] == "invalid_json"


MANY: tuple[Any, ...] = ([{}] * 2000, [1, "a", None] * 700, [[1]] * 2000 + [{}], [[{}] * 2000], {str(k): {} for k in range(2000)})
HELLO = [{"role": "user", "content": "a"}]
NAMED = {"name": "a", "schema": {"type": "alien"}}
ALIEN = {"type": "json_schema", "schema": NAMED["schema"]}
TALK = [{"role": "user", "content": [{}] * 2000}, {"role": "assistant", "content": "a", "tool_calls": [{}] * 2000}]


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, ResponsesBody, AnthropicBody])
def test_little_is_found_wrong_with_a_body_however_much_is(kind: type[Body]) -> None:
    """Each finding takes a kilobyte and microseconds, of the loop that all requests share."""
    bodies = [{key: value} for key in kind.model_fields for value in (*MANY, TALK, TALK[1:])]
    bodies += [
        {f"key {k}": k for k in range(2000)},
        {"messages": "a", "input": [{"type": "message", "role": "user", "content": [{}] * 2000}]},
    ]
    for body in bodies:
        with pytest.raises(ValidationError) as found:
            kind.model_validate(body)
        assert found.value.error_count() < 64, next(iter(body))


def test_long_texts_are_read_beside_the_loop_also_where_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    names: set[str] = set()

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        read = client.front.talk.plain_ids  # type: ignore[attr-defined]
        seen = lambda text, most: (names.add(threading.current_thread().name), read(text, most))[1]  # noqa: E731
        monkeypatch.setattr(client.front.talk, "plain_ids", seen)  # type: ignore[attr-defined]
        return await post(prompt=["a" * 1000] * 30)(client)

    play(Script(), ask)
    assert len(names) == 1 and next(iter(names)).startswith("texts")


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", {"prompt": "a" * 4000}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 4000}]}),
    ("/v1/responses", {"input": "a" * 4000}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a" * 4000}], "max_tokens": 4}),
])  # fmt: skip
def test_a_text_that_is_too_long_is_refused_with_its_tokens_whatever_asks(path: str, body: dict[str, Any]) -> None:
    response = play(Script(), post(path, **body))
    message = response.json()["error"]["message"]
    assert response.json()["error"].get("param", next(iter(body))) == next(iter(body))
    assert response.status_code == 400 and f"maximum context length is {CAPACITY} tokens; the prompt has 4" in message, message
    assert message.endswith(". Shorten the prompt.")
    own = play(Script(), post(path, **body), limits=FrontLimits(prompt_tokens=100))
    assert own.status_code == 400 and "this server takes 100 at most" in own.json()["error"]["message"]
    assert own.json()["error"].get("param", next(iter(body))) == next(iter(body))
    short = play(Script(), post("/v1/completions", prompt="a" * (CAPACITY - 2), max_tokens=9))
    assert "the prompt has 510 and 9 were asked for" in short.json()["error"]["message"]


@pytest.mark.parametrize("path, key, body", [
    ("/v1/chat/completions", "response_format", {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": NAMED}}),
    ("/v1/responses", "text.format", {"input": "a", "text": {"format": {"name": "a"} | ALIEN}}),
    ("/v1/messages", "output_config.format", {"messages": HELLO, "max_tokens": 4, "output_config": {"format": ALIEN}}),
])  # fmt: skip
def test_a_schema_that_cannot_be_kept_to_is_named_by_its_own_key(path: str, key: str, body: dict[str, Any]) -> None:
    error = play(Script(), post(path, **body)).json()["error"]
    assert error["message"] == f"{key}: Invalid type: alien" and error.get("param", key) == key


def test_the_description_has_the_program_s_version() -> None:
    async def ask(client: httpx.AsyncClient) -> Any:
        return (await client.get("/openapi.json")).json()["info"]["version"]

    assert play(Script(), ask) == (installed_version("penstock") or "source tree")


def test_another_model_and_another_path_are_404() -> None:
    for ask in (post(model="gpt-4", prompt="a"), post("/v1/embeddings")):
        response = play(Script(), ask)
        assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"


def test_a_body_beyond_its_limit_is_a_413_whatever_its_length_says() -> None:
    async def ask(client: httpx.AsyncClient) -> list[int]:
        async def parts() -> Any:
            for _ in range(20):
                yield b"x" * 100

        return [(await client.post("/v1/completions", content=content)).status_code for content in (b"x" * 2000, parts())]

    assert play(Script(), ask, limits=FrontLimits(body_bytes=1000)) == [413, 413]
