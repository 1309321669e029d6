"""The figures of bench/clients.py beside guidellm's and aiperf's: the same requests, in turns, at a server whose own pace is known.

    python bench/peers/guidellm_beside.py guidellm=/opt/guidellm/bin/guidellm out=serve_guidellm.json [aiperf=/opt/aiperf/bin/aiperf]
        [url=http://127.0.0.1:8000] [tokenizer=DIR] [clients=1,8,32] [new_tokens=64] [turns=3]

Both live in environments of their own: `python -m venv /opt/guidellm && /opt/guidellm/bin/pip install guidellm`. Without `url` the
server is bench/paced_server.py, in a process of its own. Each figure is the median over `turns`; its ratio is |ours / theirs - 1|.
aiperf wants a tokenizer, though it counts as the server does: `tokenizer`, a directory; without one it is left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from bench.cases import Row, run_cases  # noqa: E402
from bench.clients import CHAT, Figures, body_of, closed_loop, model_name  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.sse import Address  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.common.host_memory import usable_cores  # noqa: E402

KEYS = ("guidellm", "aiperf", "url", "tokenizer", "clients", "new_tokens", "requests", "turns", "out")
NEAR = "<= 0.02"
UNITS = {"TTFT": "s", "time between tokens": "s", "tokens/s": "tok/s"}
Told = Mapping[str, float]


@contextmanager
def paced() -> Iterator[str]:
    """The address of a paced server, which ends with this."""
    asked = [sys.executable, str(ROOT / "bench" / "paced_server.py"), "port=0", "first_s=0.2", "between_s=0.02"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1]
        finally:
            server.kill()


def ours(url: str, prompts: Sequence[str], clients: int, new_tokens: int) -> Told:
    address = Address.of(url)

    async def ask() -> Figures:
        model = await model_name(address)
        bodies = [body_of(CHAT, prompt, new_tokens, model) for prompt in prompts]
        return Figures.of(await closed_loop(address, CHAT, bodies, clients), clients)

    found = asyncio.run(ask())
    if found.failed:
        raise SystemExit(f"{url}: {found.failed} of {found.requests} requests failed: {', '.join(found.errors)}")
    return {"TTFT": found.ttft_s.mean, "time between tokens": found.between_s.mean, "tokens/s": found.tokens_s}


def call(program: Path, *arguments: str, **more: str) -> None:
    """SystemExit with its last lines where it fails. It asks nothing of any hub, and has its own environment's modules alone; ``more`` are
    variables."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"} | more
    done = subprocess.run([program, *arguments], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program}: {(done.stderr or done.stdout)[-1500:]}")


def guidellm(program: Path, url: str, prompts: Sequence[str], clients: int, new_tokens: int) -> Told:
    with tempfile.TemporaryDirectory() as work:
        data, out = Path(work, "prompts.jsonl"), Path(work, "found.json")
        data.write_text("".join(json.dumps({"prompt": one, "output_tokens_count": new_tokens}) + "\n" for one in prompts))
        call(
            program, "run", "--backend", f"kind=openai_http,target={url}", "--profile", f"kind=concurrent,streams={clients}",
            "--constraint", f"kind=max_requests,count={len(prompts)}", "--data", f"kind=json_file,path={data}",
            "--output", f"kind=json,path={out}", "--disable-console",
        )  # fmt: skip
        run = json.loads(out.read_text())["benchmarks"][0]
    each = run["requests"]["successful"]
    if len(each) != len(prompts):
        raise SystemExit(f"guidellm: {len(each)} of {len(prompts)} requests were answered")
    seconds = max(one["request_end_time"] for one in each) - min(one["request_start_time"] for one in each)
    found = {name: run["metrics"][key]["successful"]["mean"] / 1e3 for name, key in MEANS.items()}
    return found | {"tokens/s": sum(one["output_tokens"] for one in each) / seconds}


MEANS = {"TTFT": "time_to_first_token_ms", "time between tokens": "inter_token_latency_ms"}


def hub_of(tokenizer: Path, home: Path) -> str:
    """A cache of the hub with ``tokenizer`` alone -> its name there: without a network aiperf takes a name of the cache, no directory."""
    place = home / "hub" / "models--local--tokenizer"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    (place / "snapshots").mkdir()
    (place / "snapshots" / ("0" * 40)).symlink_to(tokenizer.expanduser().resolve())
    return "local/tokenizer"


def aiperf(program: Path, tokenizer: str, url: str, prompts: Sequence[str], clients: int, new_tokens: int) -> Told:
    model = asyncio.run(model_name(Address.of(url)))
    with tempfile.TemporaryDirectory() as work:
        data = Path(work, "prompts.jsonl")
        data.write_text("".join(json.dumps({"text": one}) + "\n" for one in prompts))
        name = hub_of(Path(tokenizer), Path(work, "home"))
        call(
            program, "profile", "-m", model, "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", name,
            "--input-file", str(data), "--custom-dataset-type", "single_turn", "--request-count", str(len(prompts)),
            "--concurrency", str(clients), "--extra-inputs", f"max_tokens:{new_tokens}", "--extra-inputs", "ignore_eos:true",
            "--extra-inputs", "temperature:0", "--use-server-token-count", "--ui-type", "none", "--artifact-dir", str(Path(work, "out")),
            HF_HOME=str(Path(work, "home")),
        )  # fmt: skip
        found = json.loads(next(Path(work, "out").rglob("profile_export_aiperf.json")).read_text())
    means = {"TTFT": "time_to_first_token", "time between tokens": "inter_token_latency"}
    return {name: found[key]["avg"] / 1e3 for name, key in means.items()} | {"tokens/s": found["output_token_throughput"]["avg"]}


def beside(name: str, theirs: Callable[..., Told], url: str, clients: int, given: Mapping[str, str]) -> Iterator[Row]:
    count, new_tokens = int(given.get("requests", "0")) or 6 * clients, int(given.get("new_tokens", "64"))
    prompts = [f"Prompt number {k}: tell me of whales, in one line." for k in range(count)]
    told: tuple[list[Told], list[Told]] = ([], [])
    for turn in range(int(given.get("turns", "3"))):
        pair = ((told[0], ours), (told[1], theirs))
        for kept, measure in pair if turn % 2 else reversed(pair):
            kept.append(measure(url, prompts, clients, new_tokens))
    for what, unit in UNITS.items():
        mine, other = (median(one[what] for one in each) for each in told)
        ratio = abs(mine / other - 1)
        where = f"{clients} clients, {count} requests of {new_tokens} tokens, beside {name}"
        yield Row(what, where, mine, other, unit, ratio, NEAR, None, 0, 0)


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
        Address.of(given.get("url", "http://127.0.0.1:1"))
    except UserError as error:
        raise SystemExit(str(error)) from None
    others: dict[str, Callable[..., Told]] = {"guidellm": partial(guidellm, Path(given.get("guidellm", "guidellm")))}
    if "aiperf" in given and "tokenizer" in given:
        others["aiperf"] = partial(aiperf, Path(given["aiperf"]), given["tokenizer"])
    where = {"gpu": None, "cores": usable_cores(), "dram_gb": psutil.virtual_memory().total / 1e9, "date": time.strftime("%Y-%m-%d")}
    where |= {"python": platform.python_version(), "torch": version("torch"), "transformers": version("transformers")}
    where |= {"server": given.get("url", "bench/paced_server.py")}
    with paced() if "url" not in given else _at(given["url"]) as url:
        cases = {
            f"{name} {clients}": partial(beside, name, theirs, url, clients, given)
            for name, theirs in others.items()
            for clients in map(int, given.get("clients", "1,8,32").split(","))
        }
        run_cases(cases, where, Path(given["out"]) if "out" in given else None)


@contextmanager
def _at(url: str) -> Iterator[str]:
    yield url


if __name__ == "__main__":
    main()
