"""Files and numbers as they may be: refused in one line, at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.plain_files import open_plain, read_plain
from penstock.planner.common.outside.strict_yaml import MOST_NODES, YamlFlaw, load_strictly
from penstock.planner.contract.plan.planfile import check_plan, read_plan, write_plan
from tests.planner.test_planfile import LLAMA, plan_of, spec_from_geometry

BOMB = b"- &b0 [x, x]\n" + b"".join(b"- &b%d [%s]\n" % (i, b", ".join([b"*b%d" % (i - 1)] * 10)) for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (BOMB, "an alias, .b0"),
        (b"a: !!int abc", "a tag, "),
        (b"a: !!python/object/apply:os.system [ls]", "a tag, "),
        (b"a: " + b"9" * 6000, "no number"),
        (b"a: 0x" + b"f" * 5000, "no number"),
        (b"a: 0b_", "no number"),
        (b"[" * 900, "more than 24 levels"),
        (b"[" * 20000, "more than 24 levels|not readable as YAML"),
        (b"[" + b"1," * (MOST_NODES + 1) + b"]", "more than 200000 values"),
        (b"a: 1\na: 2", "the key a stands twice at|key a stands twice"),
        (b"{[1]: 2}", "a key that is no text"),
        (b"a: 1\n---\nb: 2", "a second document"),
        (b"\x80\x81", "not readable as YAML"),
        (b"a: \x00", "not readable as YAML"),
    ],
)
def test_what_no_plan_holds_is_refused(text: bytes, flaw: str) -> None:
    with pytest.raises(YamlFlaw, match=flaw) as refused:
        load_strictly(text)
    assert len(str(refused.value)) < 200 and "\n" not in str(refused.value)


def test_what_a_plan_holds_is_read_as_yaml_reads_it_and_dates_are_text() -> None:
    text = b"a: {b: [1, 2.5, 'x', null, true], c: 1.0e+300}\n2: 2024-13-45\n<<: '1'\n"
    assert load_strictly(text) == {"a": {"b": [1, 2.5, "x", None, True], "c": 1e300}, "2": "2024-13-45", "<<": "1"}
    assert load_strictly(b"") is None


def test_only_files_of_a_sensible_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 2000)
    for path, why in ((tmp_path / "pipe", "a pipe, not a file"), (Path("/dev/zero"), "a device"), (Path("a\0b"), "null byte")):
        with pytest.raises(OSError, match=why):
            open_plain(path)
    with pytest.raises(OSError, match="too large"):
        read_plain(tmp_path / "large", 1000)
    assert read_plain(tmp_path / "large") == b"x" * 2000


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("  layer_launch_s: ", "  # ", "hardware.layer_launch_s: missing"),
        ("  ssd:\n    read:", "  ssx:\n    read:", "hardware.ssx: no such key"),
        ("    write_gbps: ", "    # ", "hardware.ssd.write_gbps: missing"),
        ("  dram: {copy_gbps", "  # dram: {copy_gbps", "hardware.dram.copy_gbps: missing"),
        ("  pass_s: 0.0", "  pass_s: 1.0e+300", "hardware.pass_s=1e.300: must be at most"),
        ("  layer_launch_s: ", "  layer_launch_s: .inf #", "hardware.layer_launch_s=inf: must be a finite number"),
        ("  requests: ", "  requests: 1000000000000000000 #", "workload.requests=10+: must be at most"),
        ("\n  layers: ", "\n  layers: 1000000000 #", "model.layers=10+: must be 1 or more, at most"),
        ("hidden: ", "hidden: 0 #", "model.hidden=0: must be 1 or more"),
        ("layers: 0-5, stored_bytes: ", "layers: 0-5, stored_bytes: 1000000000000000000000", "model.units.0.*at most"),
        ("kind: attn, layers: 0-5", f"kind: attn, layers: {'0-5 ' * 9999}", "must be numbers and spans within 0 to 5"),
        ("queue_depth: ", "queue_depth: 99999999999", "queue_depth=9+.; allowed: 1 to"),
    ],
)
def test_a_key_that_was_dropped_or_is_absurd_is_named(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(plan_of(spec_from_geometry(LLAMA)), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=complaint):
        check_plan(read_plan(path))
