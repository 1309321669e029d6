"""`runtime serve` as a user starts it: mistakes are one line, and a server answers, survives its engine, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from penstock.planner.common.interrupt import DEAF_S
from penstock.runtime.serve import serve_verb
from tests.cli import HANGS_S, ROOT, lazily, refusal
from tests.runtime.serve.fake_motor import KEY

openai = lazily("openai")
CODE = "import sys; sys.argv[0] = 'runtime'; from penstock.runtime.cli import main; main()"
"""`runtime`, as a process of this tree."""
WRONG = [
    (("host=0.0.0.0",), "host=0.0.0.0: others reach this address; set keys=FILE"),
    (("host=::",), "others reach this address"),
    (("auth=keys",), "auth=keys: no keys are given; set keys=FILE"),
    (("auth=none", "keys=keys.txt"), "one of them says that keys are wanted"),
    (("auth=open",), "auth=open"),
    (("keys=none.txt",), "keys=none.txt: cannot be read"),
    (("keys=short.txt",), "short.txt, line 2: an API key has 16 ASCII characters or more"),
    (("keys=empty.txt",), "empty.txt: no API key in it"),
    (("port=65536",), "port=65536: must be 0 (any) to 65535"),
    (("port=http",), "port=http"),
    ((f"host={'a' * 64}", "auth=none"), "aaa: no such address"),
    (("drain_s=-1",), "drain_s=-1.0: must be 0 or more"),
    (("origins=example.org",), "origins=example.org: must be scheme, host and port of a page"),
    (("name=",), "name=: is empty; give text"),
    (("kv.flush_s=-1",), "kv.flush_s=-1.0: must be 0 or more seconds"),
    (("kv.dir=/proc/pages",), "kv.dir=/proc/pages: /proc is not a directory that can be written to"),
    (("template=false",), "template=false: must be options, as template.enable_thinking=false; leave it out"),
    (("hang_s=1",), "hang_s=1.0: must be above 2, less than a day"),
    (("limits.body_bytes=0",), "limits.body_bytes=0: must be above 0"),
    (("limits.bodies=1",), "limits.bodies"),
    (("checkpoint=none",), "none"),
    (("model=llama8b",), "the plan holds the whole problem"),
]


@pytest.mark.parametrize(("typed", "line"), WRONG, ids=[" ".join(typed) for typed, _ in WRONG])
def test_a_mistake_is_one_line(typed: tuple[str, ...], line: str, desk: Path) -> None:
    any_port = () if typed[0].startswith("port=") else ("port=0",)
    assert line in refusal("runtime", "serve", "plan=plan.yaml", *any_port, *typed, cwd=desk)


def test_without_a_plan_a_machine_and_a_model_are_asked_for(desk: Path) -> None:
    assert "or set plan=" in refusal("runtime", "serve", cwd=desk)


def test_without_the_extra_the_command_that_installs_it_is_named(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_verb, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert refusal("runtime", "serve", "plan=plan.yaml", cwd=desk).endswith("needs uvicorn, which is not installed; pip install uvicorn")
    monkeypatch.setattr(serve_verb, "find_spec", lambda name: None if name in ("uvicorn", "h11") else name)
    assert refusal("runtime", "serve", "plan=plan.yaml", cwd=desk).endswith("which are not installed; pip install uvicorn h11")


def test_an_option_that_the_template_does_not_have_ends_the_start(desk: Path) -> None:
    command = [sys.executable, "-c", CODE, "serve", "plan=plan.yaml", "port=0", "template.enable_thinkng=false"]
    ended = subprocess.run(command, cwd=desk, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=HANGS_S)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "template.enable_thinkng: the model's chat template has no such option; leave it out" in ended.stderr.splitlines()[-1]


@contextmanager
def serving(desk: Path, *typed: str, plan: str = "plan.yaml") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`runtime serve` in ``desk``, and its address once it is ready."""
    command = [sys.executable, "-c", CODE, "serve", f"plan={plan}", "port=0", *typed]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=desk, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)  # type: ignore[call-overload]
    try:
        line = process.stderr.readline()
        assert "listening on " in line, line
        url = line.partition("listening on ")[2].partition(";")[0]
        wait_ready(url)
        yield process, url
    finally:
        process.kill()
        process.communicate()


def wait_ready(url: str) -> None:
    until = time.monotonic() + HANGS_S
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"{url}/ready").close()
            return
        except urllib.error.HTTPError as error:
            assert error.code == 503 and json.load(error)["status"] in ("loading", "restarting")
        time.sleep(0.05)
    raise AssertionError("never ready")


def test_a_server_answers_survives_its_engine_and_leaves_nothing_behind(desk: Path) -> None:
    with serving(desk, "keys=keys.txt") as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="another", max_retries=0).models.list()
        (model,) = [each.id for each in client.models.list()]

        def said(**more: object) -> str:
            messages = [{"role": "user", "content": "hello"}]
            reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=20, **more)  # type: ignore[call-overload]
            return reply.choices[0].message.content if not more else "".join(c.choices[0].delta.content or "" for c in reply)

        before = said()
        assert before and said(stream=True) == before
        echoed = client.completions.create(model=model, prompt=list(b"hello"), max_tokens=1, echo=True, logprobs=2)
        logprobs = echoed.choices[0].logprobs
        assert (
            logprobs.tokens[:5] == list("hello") and logprobs.token_logprobs[0] is None and all(p < 0 for p in logprobs.token_logprobs[1:])
        )

        (motor,) = psutil.Process(process.pid).children()
        stream = client.completions.create(model=model, prompt="a", max_tokens=60, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        motor.kill()
        with pytest.raises(openai.APIError, match="the engine has ended"):
            list(stream)
        wait_ready(url)
        assert said() == before

        (motor,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANGS_S)
        assert process.returncode == 0, err
        assert json.loads(out)["totals"]["requests"] == 1 and "served 1 request, " in err and "hello" not in err
        assert err.count("is loaded") == 2, "at its start, and behind the engine's end"
        assert not motor.is_running()


def test_another_signal_ends_what_a_first_one_lets_end_unless_both_come_at_once(desk: Path) -> None:
    """As of a terminal and a supervisor. The engine stands still, so that it would never end by itself."""
    with serving(desk) as (process, _):
        (motor,) = psutil.Process(process.pid).children()
        motor.suspend()
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(DEAF_S + 0.5)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=HANGS_S)
        assert process.returncode == 143 and "Traceback" not in err
        assert not motor.is_running()
