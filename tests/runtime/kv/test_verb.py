"""`runtime kv` from the outside: list, verify, clear."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.common.measures import ALIGN
from penstock.runtime.cli import PROGRAM
from penstock.runtime.kv.disk.model_names import record_name
from penstock.runtime.kv.disk.page_index import INDEX
from penstock.runtime.kv.disk.writer_lock import LOCK
from tests.cli import command, process, refusal
from tests.runtime.kv.nursery import Nursery
from tests.runtime.kv.pages import OTHER, SHAPE, flip, open_writer, put

FIRST, SECOND = SHAPE.namespace.hex(), OTHER.namespace.hex()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Six pages of a model that has a name, then two of one that has none."""
    directory = tmp_path / "kv=pages, two"
    with open_writer(directory) as writer:
        put(writer, *range(6))
        record_name(directory, SHAPE.namespace, "tiny-[llama]\nx")
    with open_writer(directory, OTHER) as writer:
        put(writer, 0, 1)
    return directory


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`runtime kv WORDS`, in this process: exit status, what was said, and the JSON document at the end of it."""

    def run(*words: str) -> tuple[int, list[str], dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["runtime", "kv", *words])
        with pytest.raises(SystemExit) as left:
            PROGRAM.main()
        out, err = capsys.readouterr()
        assert err == ""
        *said, document = out.splitlines()
        return left.value.code, said, json.loads(document)

    return run


def test_list_shows_a_row_for_each_namespace(store: Path, kv) -> None:
    status, (head, *rows, _), document = kv("list", f"dir={store}")
    assert status == 0
    assert head.split() == ["namespace", "model", "pages", "tokens", "bytes", "last", "use"]
    assert [row.split()[:5] for row in rows] == [[SECOND, "-", "2", "32", "24.6"], [FIRST, "tiny-[llama]", "x", "6", "96"]]
    assert len({len(line) for line in (head, *rows)}) == 1
    assert (document["pages"], document["nbytes"]) == (8, 6 * SHAPE.record_bytes + 2 * OTHER.record_bytes)
    assert [(use["namespace"], use["model"]) for use in document["namespaces"]] == [(SECOND, None), (FIRST, "tiny-[llama] x")]


def test_an_empty_directory_is_an_empty_table(tmp_path: Path, kv) -> None:
    status, said, document = kv("list", f"dir={tmp_path}")
    assert (status, len(said), document["namespaces"]) == (0, 2, [])
    assert kv("verify", f"dir={tmp_path}")[0] == 0
    assert kv("clear", f"dir={tmp_path}")[2]["freed_bytes"] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_sound_directory_verifies(store: Path, kv) -> None:
    status, said, document = kv("verify", f"dir={store}")
    assert (status, len(said)) == (0, 1)
    assert (document["pages"], document["segments"], document["damaged"], document["index_problem"]) == (8, 3, [], None)


def test_verify_says_per_segment_what_is_damaged_and_ends_with_status_1(store: Path, kv) -> None:
    flip(store / "segment-00000000.kv", SHAPE.record_bytes + ALIGN + SHAPE.layer_bytes)
    flip(store / "segment-00000002.kv", 40)
    status, said, document = kv("verify", f"dir={store}")
    assert status == 1
    assert said[:4] == [
        f"segment-00000000.kv: namespace {FIRST}, 3 pages are sound",
        f"  page at {SHAPE.record_bytes}: its checksum is wrong",
        f"segment-00000002.kv: namespace {SECOND}, 1 pages are sound",
        "  page at 0: its header is damaged",
    ]
    assert [(s["file"], s["namespace"], s["pages"]) for s in document["damaged"]] == [
        ("segment-00000000.kv", FIRST, 3),
        ("segment-00000002.kv", SECOND, 1),
    ]


def test_a_damaged_index_is_told_of(store: Path, kv) -> None:
    flip(store / INDEX, 30)
    status, said, document = kv("verify", f"dir={store}")
    assert status == 1 and "checksum" in said[0] and "checksum" in document["index_problem"]


def test_clear_takes_one_namespace_or_all(store: Path, kv) -> None:
    status, _, document = kv("clear", f"dir={store}", f"namespace={FIRST}")
    assert (status, document["freed_bytes"]) == (0, 6 * SHAPE.record_bytes)
    assert [use["namespace"] for use in kv("list", f"dir={store}")[2]["namespaces"]] == [SECOND]
    assert kv("clear", f"dir={store}")[2]["freed_bytes"] == 2 * OTHER.record_bytes
    assert sorted(path.name for path in store.iterdir()) == sorted([INDEX, LOCK])


def test_clear_leaves_the_other_namespaces_name(store: Path, kv) -> None:
    kv("clear", f"dir={store}", f"namespace={SECOND}")
    assert [use["model"] for use in kv("list", f"dir={store}")[2]["namespaces"]] == ["tiny-[llama] x"]


def test_what_ranks_keep_in_their_folders_is_listed_verified_and_cleared(store: Path, tmp_path: Path, kv) -> None:
    """`verify` called a directory of two ranks sound without a look at it, and `clear` freed nothing."""
    (tmp_path / "pages" / "rank-notes").mkdir(parents=True)
    whole, other = store.rename(tmp_path / "pages" / "rank-10-of-11"), tmp_path / "pages" / "rank-2-of-11"
    with open_writer(other, OTHER) as writer:
        put(writer, 0)
    place = f"dir={tmp_path / 'pages'}"
    _, (_, *rows, _), document = kv("list", place)
    assert [row.split()[:4] for row in rows] == [
        [SECOND, "-,", "rank-2-of-11", "1"],
        [SECOND, "-,", "rank-10-of-11", "2"],
        [FIRST, "tiny-[llama]", "x,", "rank-10-of-11"],
    ]
    assert document["pages"] == 9 and [use["folder"] for use in document["namespaces"]] == [other.name, whole.name, whole.name]
    assert kv("verify", place)[0] == 0
    flip(whole / "segment-00000000.kv", 40)
    flip(other / INDEX, 30)
    status, said, document = kv("verify", place)
    assert status == 1 and said[0].startswith("rank-2-of-11: the index cannot be used, ")
    assert [segment["file"] for segment in document["damaged"]] == ["rank-10-of-11/segment-00000000.kv"]
    assert kv("clear", place, f"namespace={FIRST}")[2]["freed_bytes"] == 6 * SHAPE.record_bytes
    assert kv("clear", place)[2]["freed_bytes"] == 3 * OTHER.record_bytes
    assert kv("list", place)[2]["pages"] == 0


def test_clear_is_refused_while_another_process_writes(store: Path, tmp_path: Path, nursery: Nursery) -> None:
    pid = nursery.hold(store)
    try:
        assert f"process {pid} of host" in refusal("runtime", "kv", "clear", f"dir={store}", cwd=tmp_path)
        assert f"process {pid} of host" in refusal("runtime", "kv", "clear", f"dir={store}", f"namespace={FIRST}", cwd=tmp_path)
    finally:
        nursery.kill(pid)
    assert len(list(store.glob("segment-*"))) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["dir=kv"], "action=... is required, one of list, verify, clear"),
        (["lst", "dir=kv"], "action=lst: must be one of list, verify, clear; did you mean list?"),
        (["list", "dir="], "dir=: is empty; give text"),
        (["list", "kv"], "kv: expected key=value"),
        (["list", "dir=absent"], "absent: cannot be read"),
        (["verify", "dir=absent"], "absent: cannot be read"),
        (["clear", "dir=absent"], "absent: cannot be read"),
        (["list", "dir=.", f"namespace={FIRST}"], "leave it out, or use `kv clear`"),
        (["clear", "dir=.", "namespace="], "namespace=: is empty; give text"),
        (["clear", "dir=.", f"namespace={FIRST[:-1]}"], "must be 32 hexadecimal digits"),
        (["clear", "dir=.", f"namespace={FIRST}"], "not in ., which has none"),
    ],
)
def test_mistakes_are_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    assert told in refusal("runtime", "kv", *words, cwd=tmp_path)


def test_a_sweep_ends_with_the_status_of_its_worst_point(store: Path, tmp_path: Path) -> None:
    flip(store / "segment-00000000.kv", 40)
    (tmp_path / "empty").mkdir()
    result = command("runtime", "kv", "verify", "-m", "dir='kv=pages, two',empty", cwd=tmp_path)
    assert result.returncode == 1, result.stderr


def test_completion_offers_the_actions(tmp_path: Path) -> None:
    line = "runtime kv l"
    result = command("runtime", "-sc", "query=bash", cwd=tmp_path, COMP_LINE=line, COMP_POINT=str(len(line)))
    assert result.stdout.strip() == "list"


def test_no_action_imports_torch(store: Path, tmp_path: Path) -> None:
    for action in ("list", "verify", "clear"):
        result = process("runtime", "kv", action, f"dir={store}", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
        assert result.returncode == 0
        imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
        assert "penstock.runtime.kv.disk.upkeep" in imported and "torch" not in imported
