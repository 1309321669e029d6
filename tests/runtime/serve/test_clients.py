"""The real clients, ``openai`` and ``anthropic``, over a socket: conversations, streams, tools, schemas, logprobs, errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from llguidance import LLMatcher, hf
from pydantic import BaseModel

from penstock.runtime.serve.front.callers import Keys
from penstock.runtime.serve.front.listen_address import bound
from penstock.runtime.serve.front.served_as import Served, tell
from penstock.runtime.serve.front.supervise import Supervisor
from penstock.runtime.serve.routes.serving import serve_on
from penstock.runtime.serve.wire.messages import Open, Over, Submit
from tests.cli import lazily
from tests.runtime.serve.fake_motor import EOS, FakeMotor, Script
from tests.runtime.serve.talkers import vocabulary

anthropic, openai = lazily("anthropic"), lazily("openai")
WORDS = vocabulary()
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
HELLO: Any = [{"role": "user", "content": "Hello"}]


def replies(text: str, script: Script | None = None) -> Script:
    """A motor that says ``text`` and ends."""
    assert WORDS.tokenizer is not None
    tokens = [*WORDS.tokenizer(text, add_special_tokens=False)["input_ids"], EOS]
    script = script or Script()
    script.reply = lambda submit: tokens
    return script


def kept(submit: Submit, text: str) -> bool:
    """Whether the engine would have let ``text`` pass."""
    assert submit.grammar is not None and WORDS.tokenizer is not None
    matcher = LLMatcher(hf.from_tokenizer(WORDS.tokenizer), submit.grammar)
    ids = WORDS.tokenizer(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@contextlib.asynccontextmanager
async def listening(script: Script) -> AsyncIterator[str]:
    """The address of a server whose motors play ``script``."""

    async def start() -> FakeMotor:
        return FakeMotor(script)

    sock = bound("127.0.0.1", 0)
    served = asyncio.create_task(serve_on(sock, Served("model"), WORDS, Keys(()), Supervisor(start, Open("plan.yaml"), tell)))
    try:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", api_key="none", max_retries=0) as client:
            while (await client.get("/ready", cast_to=object, options={"timeout": 5}) if script.started else None) is None:
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        served.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await served
        sock.close()


def with_openai(script: Script, ask: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    """What ``ask`` finds out."""

    async def scenario() -> Any:
        async with listening(script) as address, openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            return await ask(client)

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def with_anthropic(script: Script, ask: Callable[[anthropic.AsyncAnthropic], Awaitable[Any]]) -> Any:
    """The same of the other client."""

    async def scenario() -> Any:
        async with listening(script) as address, anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client:
            return await ask(client)

    return asyncio.run(asyncio.wait_for(scenario(), 60))


TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
FLAT: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
ITS: Any = [{"name": "weather", "input_schema": SCHEMA}]


class City(BaseModel):
    city: str


def test_openai_chats() -> None:
    script = replies(f"<think>\nhm\n</think>\nYes.{CALL}")

    async def ask(client: openai.AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(model="model", messages=HELLO, tools=TOOLS, logprobs=True, top_logprobs=2)
        message = whole.choices[0].message
        assert message.content == "Yes." and message.tool_calls is not None and whole.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls[0].function.arguments == '{"city": "Köln"}'  # type: ignore[union-attr]
        assert message.reasoning_content == "hm"  # type: ignore[attr-defined]
        assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
        assert len(whole.choices[0].logprobs.content) == len(script.reply(script.submitted[0])) - 1
        again = [*HELLO, message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
        async with client.chat.completions.stream(model="model", messages=again, tools=TOOLS) as stream:
            streamed = await stream.get_final_completion()
        assert streamed.choices[0].message.content == message.content
        assert streamed.choices[0].message.tool_calls[0].function.arguments == '{"city": "Köln"}'  # type: ignore[index]
        prompt = WORDS.marked_text(script.submitted[1].prompt)
        assert f"<think>hm</think>Yes.\n{CALL}" not in prompt and f"Yes.\n{CALL}<|im_end|>\n<|im_start|>tool\nrain<|im_end|>" in prompt
        replies('{"city": "Ulm"}', script)
        parsed = await client.chat.completions.parse(model="model", messages=HELLO, response_format=City)
        assert parsed.choices[0].message.parsed == City(city="Ulm")
        assert kept(script.submitted[2], '{"city": "Ulm"}') and not kept(script.submitted[2], '{"town": "Ulm"}')
        named: Any = {"type": "function", "function": {"name": "weather"}}
        await client.chat.completions.create(model="model", messages=HELLO, tools=TOOLS, tool_choice=named)
        assert kept(script.submitted[3], CALL) and not kept(script.submitted[3], "Yes.")

    with_openai(script, ask)


def test_openai_responses() -> None:
    script = replies(f"<think>\nhm\n</think>\nYes.{CALL}")

    async def ask(client: openai.AsyncOpenAI) -> None:
        asked: Any = {"model": "model", "instructions": "Be brief", "tools": FLAT, "extra_body": {"seed": 3}}
        whole = await client.responses.create(input="Hello", include=["message.output_text.logprobs"], **asked)
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"] and whole.status == "completed"
        assert whole.output_text == "Yes." and whole.usage is not None and whole.usage.input_tokens_details.cached_tokens == 2
        assert [one.token for one in whole.output[1].content[0].logprobs][-4:] == ["Y", "e", "s", "."]  # type: ignore[union-attr,index]
        kinds = []
        async with client.responses.stream(input="Hello", **asked) as stream:
            async for event in stream:
                kinds.append(event.type)
            streamed = await stream.get_final_response()
        assert [item.type for item in streamed.output] == [item.type for item in whole.output] and streamed.output_text == "Yes."
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"] and kinds[-1] == "response.completed"
        call = whole.output[2]
        again: Any = [*HELLO, *(item.model_dump() for item in whole.output)]
        again.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})  # type: ignore[union-attr]
        await client.responses.create(input=again, **asked)
        prompt = WORDS.marked_text(script.submitted[2].prompt)
        assert f"system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nYes.\n{CALL}<|im_end|>" in prompt
        short = await client.responses.create(input="Hello", model="model", max_output_tokens=20)
        assert short.status == "incomplete" and short.incomplete_details is not None
        replies('{"city": "Ulm"}', script)
        parsed = await client.responses.parse(model="model", input="Hello", text_format=City)
        assert parsed.output_parsed == City(city="Ulm") and kept(script.submitted[-1], '{"city":"Ulm"}')
        for wrong in ({"store": True}, {"previous_response_id": "resp_1"}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await client.responses.create(model="model", input="Hello", **wrong)  # type: ignore[arg-type]
        script.instead = lambda submit: Over(submit.id, 0, "error", None, "no memory")
        async with client.responses.stream(model="model", input="Hello") as stream:
            failed = [event async for event in stream][-1]
        assert failed.type == "response.failed" and failed.response.error is not None and failed.response.error.message == "no memory"

    with_openai(script, ask)


def test_anthropic_messages() -> None:
    script = replies(f"<think>\nhm\n</think>\nYes.{CALL}")

    async def ask(client: anthropic.AsyncAnthropic) -> None:
        asked: Any = {"model": "model", "max_tokens": 300, "system": [{"type": "text", "text": "Be brief"}], "tools": ITS}
        whole = await client.messages.create(messages=HELLO, thinking={"type": "enabled", "budget_tokens": 1024}, **asked)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"] and whole.stop_reason == "tool_use"
        assert whole.content[2].input == {"city": "Köln"} and whole.usage.cache_read_input_tokens == 2  # type: ignore[union-attr]
        assert WORDS.marked_text(script.submitted[0].prompt).endswith("assistant\n<think>\n")
        result: Any = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "rain"}  # type: ignore[union-attr]
        again: Any = [*HELLO, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(messages=again, **asked) as stream:
            said = "".join([text async for text in stream.text_stream])
            streamed = await stream.get_final_message()
        assert said == "Yes." and streamed.content[2].input == {"city": "Köln"}  # type: ignore[union-attr]
        assert f"Yes.\n{CALL}<|im_end|>\n<|im_start|>tool\nrain<|im_end|>" in WORDS.marked_text(script.submitted[1].prompt)
        counted = await client.messages.count_tokens(model="model", messages=again, system=asked["system"], tools=ITS)
        assert counted.input_tokens == len(script.submitted[1].prompt)
        await client.messages.create(messages=HELLO, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **asked)
        assert kept(script.submitted[2], CALL) and not kept(script.submitted[2], f"{CALL}\n{CALL}")
        replies("one STOP two", script)
        stopped = await client.messages.create(model="model", max_tokens=99, messages=HELLO, stop_sequences=["STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "STOP", "one ")  # type: ignore[union-attr]
        begun: Any = [*HELLO, {"role": "assistant", "content": "I say"}]
        cut = await client.messages.create(model="model", max_tokens=2, messages=begun)
        assert cut.stop_reason == "max_tokens" and WORDS.marked_text(script.submitted[-1].prompt).endswith("assistant\nI say")
        beyond = await client.messages.create(model="model", max_tokens=9999, messages=HELLO)
        assert beyond.stop_reason == "end_turn"
        image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        with pytest.raises(anthropic.BadRequestError, match="image") as refused:
            await client.messages.create(model="model", max_tokens=2, messages=[{"role": "user", "content": [image]}])
        assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="another", max_tokens=2, messages=HELLO)
        script.instead = lambda submit: Over(submit.id, 0, "error", None, "no memory")
        with pytest.raises(anthropic.APIStatusError, match="no memory"):
            async with client.messages.stream(model="model", max_tokens=2, messages=HELLO) as stream:
                await stream.get_final_message()

    with_anthropic(script, ask)


def test_each_client_finds_the_model_with_what_it_knows_of_one() -> None:
    async def openais(client: openai.AsyncOpenAI) -> Any:
        return (await client.models.list()).data, await client.models.retrieve("model")

    async def anthropics(client: anthropic.AsyncAnthropic) -> Any:
        return (await client.models.list()).data, await client.models.retrieve("model")

    (one,), same = with_openai(Script(), openais)
    assert one == same and (one.id, one.object, one.owned_by) == ("model", "model", "penstock")
    (one,), same = with_anthropic(Script(), anthropics)
    assert one == same and (one.id, one.type, one.display_name) == ("model", "model", "model") and one.created_at.year > 2000
