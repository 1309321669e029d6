"""Routings as files: both forms, plain or packed, and what is wrong with a line."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts import routing_files
from penstock.planner.contract.experts.policies import AheadScores, make_expert_policy
from penstock.planner.contract.experts.routing import Phase
from penstock.planner.contract.experts.routing_files import read_routings, routing_line

EXPERTS = [[[0, 1], [2, 3]], [[1, 0], [3, 2]], [[2, 0], [1, 3]]]


def token(**change: object) -> str:
    return json.dumps({"prompt": 0, "phase": "decode", "pos": 0, "experts": EXPERTS[0], "probs": [[0.5, 0.2]] * 2} | change)


def of_layer(token_idx: int, layer: int, **change: object) -> str:
    return json.dumps({"problem_id": "a", "token_idx": token_idx, "layer": layer, "experts": [0, 1], "gating_probs": [0.5, 0.2]} | change)


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    lines = [
        routing_line(
            7, Phase.prefill if pos < 1 else Phase.decode, pos, experts, [[0.61234, 0.2]] * 2, [[0.5, 1, 2, pos]], [[0, 0, 1, -1.5]]
        )
        for pos, experts in enumerate(EXPERTS)
    ]
    routings = read_routings(written(tmp_path / "routings.jsonl", lines))
    assert routings.experts.tolist() == EXPERTS
    assert routings.decode.tolist() == [False, True, True] and routings.count == 4
    assert routings.scores[AheadScores.router][2].tolist() == [[0.5, 1, 2, 2]]
    assert routings.scores[AheadScores.centroids][0].tolist() == [[0, 0, 1, -1.5]]
    assert json.loads(lines[0])["probs"][0] == [0.6123, 0.2]


@pytest.mark.parametrize("opener", [gzip.open, lzma.open])
def test_packed_routings_are_read_whatever_the_name(opener: object, tmp_path: Path) -> None:
    with opener(tmp_path / "routings", "wt") as file:
        file.write(token() + "\n")
    assert read_routings(tmp_path / "routings").experts.tolist() == EXPERTS[:1]


def test_prompts_that_were_recorded_together_come_one_after_another(tmp_path: Path) -> None:
    lines = [token(prompt=p, experts=e) for p, e in (("x", EXPERTS[0]), ("y", EXPERTS[1]), ("x", EXPERTS[2]))]
    routings = read_routings(written(tmp_path / "routings", lines))
    assert routings.prompt.tolist() == [0, 0, 1]
    assert routings.experts.tolist() == [EXPERTS[0], EXPERTS[2], EXPERTS[1]]


def test_lines_of_layers_are_put_together_in_any_order(tmp_path: Path) -> None:
    lines = [of_layer(t, layer, experts=[t, layer]) for layer in (9, 4) for t in (2, 3)]
    routings = read_routings(written(tmp_path / "routings", lines))
    assert routings.experts.tolist() == [[[2, 4], [2, 9]], [[3, 4], [3, 9]]]
    assert routings.decode.all() and routings.count == 10


def test_what_a_recording_was_broken_off_in_is_dropped_and_counted(tmp_path: Path) -> None:
    of_one = [of_layer(t, layer, experts=[t, layer]) for t in (0, 1, 2, 3) for layer in (4, 9)]
    of_other = [line.replace('"problem_id": "a"', '"problem_id": "b"') for line in of_one]
    assert of_other != of_one
    whole = read_routings(written(tmp_path / "whole", of_one + of_other))
    cut = read_routings(written(tmp_path / "cut", of_one[:-1] + of_other[:3]))
    assert (whole.dropped, cut.dropped) == (0, 2) and whole.experts.shape[0] == 8
    assert cut.experts.tolist() == [[[t, 4], [t, 9]] for t in (0, 1, 2, 0)] and cut.prompt.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([token(), "{"], ["line 2", "no JSON"]),
        ([token(), "", "[1]"], ["line 3", "no JSON object"]),
        ([token(), token(experts=[[0, 1], [2, 4]])], ["line 2", "expert 4", "0 to 3"]),
        ([token(experts=[[0, -1], [2, 3]])], ["line 1", "expert -1"]),
        ([token(experts=[[0, True], [2, 3]])], ["line 1", "True"]),
        ([token(experts=[[0, 0], [2, 3]])], ["line 1", "twice"]),
        ([token(), token(experts=[[0], [2]])], ["line 2", "1 experts", "the first one has 2"]),
        ([token(), token(experts=[[0, 1]])], ["line 2", "1 layers"]),
        ([token(experts=3)], ["line 1", "list of lists"]),
        ([token(phase="encode")], ["line 1", "encode", "prefill, decode"]),
        (['{"prompt": 0}'], ["line 1", 'lacks "experts"']),
        ([token(ahead=[[0, 1, 2, 3]]), token()], ["line 2", 'lacks "ahead"']),
        ([token(ahead=[[0, 1, 2]])], ["line 1", '"ahead"', "4 of them"]),
        ([token(ahead=[[0, 1, 2, float("nan")]])], ["line 1", '"ahead"']),
        ([of_layer(0, 0), of_layer(0, 1), of_layer(1, 0), of_layer(2, 0), of_layer(2, 1)], ["token 1", "each of the 2 layers"]),
        ([of_layer(0, 0), of_layer(0, 1), of_layer(1, 0), of_layer(1, 0)], ["token 1", "each of the 2 layers"]),
        ([of_layer(0, 0), of_layer(0, 0), of_layer(1, 1), of_layer(1, 0)], ["token 0", "each of the 2 layers"]),
        ([of_layer(0, 0), of_layer(0, 1, experts=[0])], ["line 2", "1 experts"]),
        ([of_layer(-1, 0)], ["line 1", '"token_idx": -1']),
        ([], ["holds no line"]),
    ],
)
def test_bad_routings_are_refused_by_the_line(lines: list[str], words: list[str], tmp_path: Path) -> None:
    path = written(tmp_path / "routings", lines)
    with pytest.raises(UserError) as refused:
        read_routings(path, count=4)
    assert all(word in str(refused.value) for word in [str(path), *words]), refused.value


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.xz").write_bytes(lzma.compress(b"x" * 1000 + np.random.default_rng(0).bytes(5000))[:900])
    (tmp_path / "raw").write_bytes(bytes(range(256)))
    for name in ("absent", ".", "cut.xz", "raw"):
        with pytest.raises(UserError, match="routings="):
            read_routings(tmp_path / name)


LINE = json.dumps({"prompt": 0, "phase": "decode", "pos": 0, "experts": [[0, 1], [1, 2]]}).encode() + b"\n"


def _flipped() -> bytes:
    packed = bytearray(gzip.compress(LINE * 50))
    packed[40] ^= 255
    return bytes(packed)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_flipped(), "is damaged or of another kind"),
        (lzma.compress(LINE + b"\n" * 20_000), "empty lines in a row"),
        (lzma.compress(b"1" * 70_000), "has a line of more than"),
        (lzma.compress(LINE * 5000), "unpacks to more than"),
        (LINE[:-2] + b', "ahead": [[1' + b"0" * 400 + b", 0, 0]]}", "one number for each expert"),
        (LINE[:-2] + b', "pos": ' + b"1" * 5000 + b"}", "is damaged or of another kind"),
        (b'{"prompt": 0, "experts": ' + b"[" * 100_000, "is no JSON|has a line of more than"),
    ],
    ids=["a bit flipped", "newlines alone", "one long line", "gigabytes", "a great score", "a great number", "nested"],
)
def test_hostile_routings_are_refused_without_being_unpacked(
    content: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_files, "LONGEST_LINE", 64 << 10)
    monkeypatch.setattr(routing_files, "MOST_CHARACTERS", 300_000)
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError, match=words) as refused:
        read_routings(tmp_path / "t")
    assert len(str(refused.value)) < 300 + len(str(tmp_path))


def test_a_device_is_no_file_of_routings_and_no_model_has_so_many_experts() -> None:
    with pytest.raises(UserError, match="a device, not a file"):
        read_routings(Path("/dev/zero"))
    with pytest.raises(UserError, match="pairs to count"):
        make_expert_policy(ExpertPolicyName.mix, 1, 32768, 2)
