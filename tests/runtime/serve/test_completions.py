"""/v1/completions, and what each request passes, over a motor that the test plays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from penstock.runtime.serve.front.front_limits import FrontLimits
from penstock.runtime.serve.wire.messages import Failed, Over, Refused
from tests.runtime.serve.fake_motor import CAPACITY, EOS, KEY, Script, asked

Asks = Callable[[httpx.AsyncClient], Awaitable[Any]]


def play(script: Script, ask: Asks, **more: Any) -> Any:
    """What ``ask`` finds out of a server."""

    async def scenario() -> Any:
        async with asked(script, **more) as client:
            return await ask(client)

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def post(path: str = "/v1/completions", **body: Any) -> Asks:
    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json={"model": "model"} | body)

    return ask


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, its end left out."""
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_text_goes_on_and_its_usage_says_what_was_cached() -> None:
    script = Script()
    answer = play(script, post(prompt="ab", max_tokens=5)).json()
    assert answer["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]
    usage = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
    assert answer["usage"] == usage
    assert script.submitted[0].prompt == list(b"ab") and script.submitted[0].stop_ids == [EOS]


def test_what_a_request_says_reaches_the_engine() -> None:
    script = Script()
    asking = {"temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "seed": -1, "repetition_penalty": 1.5, "frequency_penalty": 1}
    play(script, post(prompt="a", max_tokens=3, min_tokens=9, ignore_eos=True, logit_bias={"7": -2}, cache_salt="s", n=2, **asking))
    submit = script.submitted[0]
    sampling = {key: value for key, value in vars(submit.sampling).items() if value is not None}
    assert sampling == asking | {"top_k": 0, "seed": 2**63 - 1, "logit_bias": {7: -2.0}}
    assert (submit.n, submit.new_tokens, submit.min_tokens, submit.ignore_eos, submit.salt) == (2, 3, 3, True, ":s")


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_replies_are_choices_in_order(stream: bool) -> None:
    script = Script(reply=lambda submit: [*submit.prompt, EOS])
    response = play(script, post(prompt=[[65], [66, 67]], n=2, stream=stream))
    choices = [choice for answer in (events(response) if stream else [response.json()]) for choice in answer["choices"]]
    texts = ["".join(c["text"] for c in choices if c["index"] == k) for k in range(4)]
    assert texts == ["A", "A", "BC", "BC"]
    assert {c["index"] for c in choices if c["finish_reason"] == "stop"} == {0, 1, 2, 3}


def test_a_stream_says_the_same_as_a_document_and_its_usage_where_that_is_asked() -> None:
    said = events(play(Script(), post(prompt="ab", stream=True, stream_options={"include_usage": True})))
    assert "".join(c["text"] for event in said for c in event["choices"]) == "hello"
    assert said[-1]["choices"] == [] and said[-1]["usage"]["completion_tokens"] == 5
    assert all(event["usage"] is None for event in said[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    said = events(play(Script(), post(prompt="ab", stream=True, stream_options=options)))
    told = [event["usage"]["completion_tokens"] for event in said]
    assert told == sorted(told) and told[0] < 5 == told[-1]
    assert [c["finish_reason"] for event in said for c in event["choices"]][-1] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_reply_at_the_engine_too(stream: bool) -> None:
    script = Script(reply=lambda submit: list(b"one STOP two"))

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        reply = await post(prompt="a", stop=["STOP"], stream=stream)(client)
        while not script.cancelled:
            await asyncio.sleep(0.001)
        return reply

    response = play(script, ask)
    choices = [c for event in events(response) for c in event["choices"]] if stream else response.json()["choices"]
    assert "".join(c["text"] for c in choices) == "one " and choices[-1]["finish_reason"] == "stop"
    assert script.cancelled[0].index == 0


@pytest.mark.parametrize("stream", [False, True])
def test_no_half_character_is_sent(stream: bool) -> None:
    script = Script(reply=lambda submit: list("日👍本".encode()))
    response = play(script, post(prompt="a", max_tokens=9, stream=stream))
    choices = [c for event in events(response) for c in event["choices"]] if stream else response.json()["choices"]
    assert "".join(c["text"] for c in choices) == "日👍"
    assert "\ufffd" not in response.text and "\\ufffd" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_prompt_and_its_logprobs(stream: bool) -> None:
    response = play(Script(), post(prompt=[65, 66, 0xE2], max_tokens=1, echo=True, logprobs=1, stream=stream))
    choices = [c for event in events(response) for c in event["choices"]] if stream else response.json()["choices"]
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        for key, values in (choice["logprobs"] or {}).items():
            told[key] += values
    assert told["tokens"] == ["A", "B", "bytes:\\xe2", "h"]
    assert told["token_logprobs"] == [None, -0.5, -0.5, -0.25]
    assert told["top_logprobs"] == [None, {"B": -0.5}, {"bytes:\\xe2": -0.5}, {"h": -0.25}]
    assert told["text_offset"][:2] == [0, 1]
    assert "".join(c["text"] for c in choices).startswith("AB")


WRONG = [
    ({"prompt": "a", "best_of": 2}, "best_of"),
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
    ({"prompt": "a", "max_tokens": CAPACITY}, "messages"),
    ({"prompt": "a" * CAPACITY}, "messages"),
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


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"authorization": f"Bearer {KEY}x"}, 401), ({"x-api-key": "ü"}, 401), ({"authorization": f"bearer {KEY}"}, 200),
     ({"x-api-key": KEY}, 200)],
)  # fmt: skip
def test_a_key_opens_and_no_other_does(headers: dict[str, str], status: int) -> None:
    async def ask(client: httpx.AsyncClient) -> tuple[int, ...]:
        raw = {name: value.encode() for name, value in headers.items()}
        paths = ("/v1/models", "/metrics", "/openapi.json", "/health")
        return tuple([(await client.get(path, headers=raw)).status_code for path in paths])

    assert play(Script(), ask, keys=(KEY, "another-of-many-letters")) == (status, status, status, 200)


def test_keys_share_no_prefix_with_each_other() -> None:
    script = Script()

    async def ask(client: httpx.AsyncClient) -> None:
        for key in (KEY, KEY + "2"):
            for salt in ("", "s"):
                body = {"model": "model", "prompt": "a", "cache_salt": salt}
                await client.post("/v1/completions", json=body, headers={"x-api-key": key})

    play(script, ask, keys=(KEY, KEY + "2"))
    assert len({submit.salt for submit in script.submitted}) == 4
    assert not any(KEY in submit.salt for submit in script.submitted)


def test_without_keys_only_names_of_this_machine_are_answered() -> None:
    async def ask(client: httpx.AsyncClient) -> list[int]:
        hosts = ("localhost:8000", "127.0.0.1", "[::1]:8000", "evil.example:8000")
        return [(await client.get("/v1/models", headers={"host": host})).status_code for host in hosts]

    assert play(Script(), ask) == [200, 200, 200, 403]


def test_a_key_has_so_many_requests_and_no_more_and_what_ends_makes_room() -> None:
    script = Script(begin=asyncio.Event())

    async def ask(client: httpx.AsyncClient) -> Any:
        first = [asyncio.create_task(post(prompt="a")(client)) for _ in range(2)]
        while len(script.submitted) < 2:
            await asyncio.sleep(0.001)
        refused = await post(prompt="a")(client)
        script.begin.set()  # type: ignore[union-attr]
        await asyncio.gather(*first)
        return refused, await post(prompt="a")(client), client.front.crowd.under_way  # type: ignore[attr-defined]

    refused, later, under_way = play(script, ask, limits=FrontLimits(requests_per_key=2))
    assert (refused.status_code, refused.headers["retry-after"], refused.json()["error"]["type"]) == (429, "1", "rate_limit_error")
    assert later.status_code == 200 and under_way == 0


def test_requests_that_have_begun_do_not_wait_any_more() -> None:
    script = Script(go_on=asyncio.Event())

    async def ask(client: httpx.AsyncClient) -> list[int]:
        begun = []
        for count in range(1, 4):
            begun.append(asyncio.create_task(post(prompt="a", stream=True)(client)))
            while len(script.submitted) < count or client.front.crowd._waiting:  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)
        script.begin = asyncio.Event()
        waits = asyncio.create_task(post(prompt="a")(client))
        while len(script.submitted) < 4:
            await asyncio.sleep(0.001)
        refused = await post(prompt="a")(client)
        script.begin.set()
        script.go_on.set()  # type: ignore[union-attr]
        return [(await task).status_code for task in [*begun, waits]] + [refused.status_code]

    assert play(script, ask, limits=FrontLimits(waiting_per_key=1)) == [200, 200, 200, 200, 429]


REFUSED = [
    ("queue_full", 429, "rate_limit_error"),
    ("too_long", 400, "invalid_request_error"),
    ("bad_grammar", 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("kind", "status", "error"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_has_a_status(kind: str, status: int, error: str, stream: bool) -> None:
    script = Script(instead=lambda submit: Refused(submit.id, kind, "no"))
    response = play(script, post(prompt="a", stream=stream))
    assert (response.status_code, response.json()["error"]["type"]) == (status, error)
    assert ("retry-after" in response.headers) is (status == 429)


def test_an_engine_that_fails_in_the_middle_ends_a_stream_with_an_error_event() -> None:
    script = Script(go_on=asyncio.Event())

    async def ask(client: httpx.AsyncClient) -> Any:
        streaming = asyncio.create_task(post(prompt="a", stream=True)(client))
        whole = asyncio.create_task(post(prompt="a")(client))
        while len(script.submitted) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        script.motors[0].kill()
        ended = await streaming, await whole
        meanwhile = await post(prompt="a")(client)
        script.go_on = None
        while client.front.supervisor.state != "ready":  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        return (*ended, meanwhile, await post(prompt="a")(client))

    streamed, whole, meanwhile, later = play(script, ask)
    last = events(streamed)[-1]
    assert streamed.status_code == 200 and last["error"]["code"] == "engine_ended"
    assert (whole.status_code, meanwhile.status_code, later.status_code) == (503, 503, 200)
    assert "retry-after" in meanwhile.headers and script.started == 2


def test_one_reply_that_fails_fails_alone() -> None:
    script = Script(instead=lambda submit: Over(submit.id, 0, "error", message="out of pages") if submit.prompt == [65] else None)

    async def ask(client: httpx.AsyncClient) -> Any:
        return [(await post(prompt=[token])(client)).status_code for token in (65, 66)]

    assert play(script, ask) == [500, 200]


def test_a_request_that_takes_too_long_ends() -> None:
    script = Script(begin=asyncio.Event())
    response = play(script, post(prompt="a"), limits=FrontLimits(request_s=0.05))
    assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"


def test_an_engine_that_only_the_user_can_help_is_not_started_again() -> None:
    script, told = Script(failed=Failed("no room", True)), []

    async def ask(client: httpx.AsyncClient) -> Any:
        supervisor = client.front.supervisor  # type: ignore[attr-defined]
        while supervisor.state != "stopped":
            await asyncio.sleep(0.001)
        return str(supervisor.refused), script.started

    assert play(script, ask, ready=False, told=told) == ("no room", 1)
    assert told == ["no room"]


def test_before_it_is_loaded_a_server_says_how_far_it_is() -> None:
    script = Script(load=asyncio.Event())

    async def ask(client: httpx.AsyncClient) -> Any:
        supervisor = client.front.supervisor  # type: ignore[attr-defined]
        while supervisor.progress is None:
            await asyncio.sleep(0.001)
        replies = [await client.get(path) for path in ("/health", "/ready")] + [await post(prompt="a")(client)]
        script.load.set()  # type: ignore[union-attr]
        return [reply.status_code for reply in replies], replies[1].json()

    statuses, ready = play(script, ask, ready=False)
    assert statuses == [200, 503, 503]
    assert ready == {"status": "loading", "progress": {"phase": "weights", "done": 1, "total": 2}}


def test_metrics_have_the_engine_s_figures_beside_the_front_s() -> None:
    async def ask(client: httpx.AsyncClient) -> str:
        await post(prompt="a")(client)
        return (await client.get("/metrics")).text

    lines = play(Script(), ask).splitlines()
    for line in (
        'penstock_requests_total{path="/v1/completions",status="200"} 1.0',
        "penstock_engine_busy_seconds_total 2.0",
        "penstock_engine_rows 1.0",
        'penstock_binds{resource="link"} 1.0',
        'penstock_tier_bytes{part="kv",tier="vram"} 7.0',
        'penstock_predicted{figure="tokens_per_s"} 3.5',
        "penstock_ttft_seconds_count 1.0",
        "penstock_open_requests 0.0",
        "penstock_ready 1.0",
    ):
        assert line in lines


def test_a_fault_is_a_500_and_neither_it_nor_the_log_holds_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def ask(client: httpx.AsyncClient) -> Any:
        def broken(text: str) -> tuple[int, ...]:
            raise RuntimeError(text)

        monkeypatch.setattr(client.front.talk, "plain_ids", broken)  # type: ignore[attr-defined]
        return await post(prompt="my secret")(client)

    response = play(Script(), ask, told=told)
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
    assert "RuntimeError" in told[-1] and "secret" not in response.text + "".join(told)


def test_no_other_origin_may_ask_unless_it_is_named() -> None:
    async def ask(client: httpx.AsyncClient) -> Any:
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        reply = await client.options("/v1/completions", headers=headers)
        return reply.headers.get("access-control-allow-origin")

    assert play(Script(), ask) is None
    assert play(Script(), ask, origins=("https://a.example",)) == "https://a.example"


def test_limits_that_nothing_keeps_to_are_refused() -> None:
    from penstock.planner.common.errors import UserError

    with pytest.raises(UserError, match="limits.body_s"):
        replace(FrontLimits(), body_s=0).check()


def test_the_logprobs_of_a_text_end_with_those_of_the_token_that_ended_it() -> None:
    """As lm-eval reads them: it leaves the last one out."""
    script = Script(reply=lambda submit: [EOS])
    choice = play(script, post(prompt="ab", max_tokens=1, echo=True, logprobs=1)).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a", "b", "<eos>"] and choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.125]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
