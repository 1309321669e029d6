"""/v1/completions over a motor that the test plays: what a request passes to it, and what it says."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.runtime.serve.fake_motor import EOS, Script
from tests.runtime.serve.played import events, play, post, until


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
        await until(lambda: script.cancelled)
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


def test_the_logprobs_of_a_text_end_with_those_of_the_token_that_ended_it() -> None:
    """As lm-eval reads them: it leaves the last one out."""
    script = Script(reply=lambda submit: [EOS])
    choice = play(script, post(prompt="ab", max_tokens=1, echo=True, logprobs=1)).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a", "b", "<eos>"] and choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.125]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
