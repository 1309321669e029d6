"""A model is downloaded whole or not at all: from a server that speaks the hub's protocol, and sometimes badly."""

from __future__ import annotations

import json
import random
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.published.model_source import spec_from_source
from penstock.runtime.asked.run_schema import FetchConfig
from penstock.runtime.tools.fetch_verb import FETCHED, fetch_verb
from tests.cli import process
from tests.runtime.hub_server import COMMIT, Hub, serve
from tests.support import save_tiny

NAME = "some/tiny"
SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny checkpoint's, with what a repository has besides."""
    tiny = save_tiny(tmp_path_factory.mktemp("hub") / "tiny", layers=2)
    found = {path.name: path.read_bytes() for path in tiny.iterdir()}
    other = {"README.md": b"# tiny", "original/consolidated.00.pth": b"x" * 100, "pytorch_model.bin": b"y" * 100, ".gitattributes": b""}
    return found | other | {"consolidated.safetensors": b"twice the same"}


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    with serve(Hub({NAME: files, "some/gguf": {"model.Q4.gguf": b"x"}, "some/gated": files}, gated={"some/gated"})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
        monkeypatch.chdir(tmp_path)
        yield hub


def fetch(**keys: str) -> dict[str, bytes]:
    """What lies in ``tiny`` afterwards."""
    fetch_verb(FetchConfig(name=NAME, out="tiny", **keys))
    return {path.name: path.read_bytes() for path in Path("tiny").iterdir() if path.name != FETCHED}


def wanted(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name in (SHARD, "config.json", "generation_config.json")}


def test_what_a_run_needs_comes_and_can_be_planned(hub: Hub, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch() == wanted(files)
    said = capsys.readouterr().out
    assert "some/tiny: 3 files, " in said and " free in " in said and "planner solve model.checkpoint=tiny" in said
    assert json.loads(said.splitlines()[-1])["fetched_bytes"] == sum(map(len, wanted(files).values()))
    assert spec_from_source("tiny").digest
    hub.asked.clear()
    assert fetch() == wanted(files) and hub.asked == [], "what is there and was checked is kept"


def test_a_connection_that_breaks_goes_on_where_it_was(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.break_after[SHARD] = 5000
    assert fetch() == wanted(files)
    assert [asked for path, asked in hub.asked if path == SHARD] == ["", "bytes=5000-"]


def test_a_download_that_was_ended_goes_on_in_the_next(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as ended:
        ended.setattr("huggingface_hub.file_download.time.sleep", killed)
        hub.break_after[SHARD] = 7000
        with pytest.raises(KeyboardInterrupt):
            fetch()
    assert not Path("tiny", SHARD).exists()
    assert fetch() == wanted(files)
    assert [asked for path, asked in hub.asked if path == SHARD] == ["", "bytes=7000-"]


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_file_that_came_damaged_is_removed_and_named(hub: Hub, files: dict[str, bytes], name: str) -> None:
    hub.corrupt.add(name)
    with pytest.raises(UserError, match=f"{name}: damaged on the way"):
        fetch()
    assert not [path for path in Path("tiny").iterdir() if name in path.name]
    hub.corrupt.clear()
    assert fetch() == wanted(files)


def test_a_file_of_another_content_is_fetched_anew(hub: Hub, files: dict[str, bytes]) -> None:
    Path("tiny").mkdir()
    Path("tiny", SHARD).write_bytes(random.Random(0).randbytes(len(files[SHARD])))
    assert fetch() == wanted(files)


def test_a_disk_without_the_room_is_told_beforehand(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(UserError, match=r"out=tiny: .* are needed and 5 kB free; free space, or set out= on another disk"):
        fetch()
    assert not Path("tiny").exists() and hub.asked == []


@pytest.mark.parametrize(
    "name, says",
    [
        ("some/gguf", r"no safetensors weights at the top of the repository; it has \.gguf files"),
        ("some/other", "no such model on the hub"),
        ("some/gated", "its owner lets in whom they know"),
        ("tiny", "must be a model on the hub, ORG/NAME"),
    ],
)
def test_what_cannot_be_fetched_is_told_in_a_line(hub: Hub, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        fetch_verb(FetchConfig(name=name))


def test_a_name_is_planned_by_its_config_alone_and_then_from_the_cache(hub: Hub, files: dict[str, bytes]) -> None:
    spec = spec_from_source(NAME)
    assert (spec.name, spec.checkpoint, spec.layers) == (NAME, None, 2)
    assert {path for path, _ in hub.asked} == {"config.json", "generation_config.json"}
    hub.asked.clear()
    assert spec_from_source(f"https://huggingface.co/{NAME}") == spec and hub.asked == []
    snapshot = next(Path("cache").glob(f"models--some--tiny/snapshots/{COMMIT}"))
    (snapshot / SHARD).write_bytes(files[SHARD])
    whole = spec_from_source(NAME)
    assert (whole.name, whole.checkpoint, whole.units) == (NAME, str(snapshot.absolute()), spec.units)


def test_the_programs_take_the_hub_of_the_environment(hub: Hub, tmp_path: Path) -> None:
    done = process("runtime", "fetch", NAME, cwd=tmp_path, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tiny" / SHARD).stat().st_size
    offline = process("runtime", "fetch", NAME, cwd=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert (offline.returncode, offline.stderr.count("\n")) == (2, 1) and "the hub cannot be reached" in offline.stderr
