"""Scales that lie between the weights are looked at as they come: the tensor of one that is no number is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import TensorEntry, read_checkpoint
from penstock.planner.contract.gguf.gguf_types import CODED, BlockType
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.moving.arriving_scales import ArrivingScales, SoundReads
from penstock.runtime.reading.layout import Extent
from penstock.runtime.store.scales import _HALVES, Scale
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.formats.coded_checkpoints import logits_of
from tests.runtime.formats.gguf_made import COMMITTED
from tests.runtime.formats.test_coded_experts import gpt_oss
from tests.runtime.sessions import opened
from tests.support import HostCopier, decisions, plan_for

BATCH = Batch(prompts=[[5, 9, 200]], max_new_tokens=2, chunk_tokens=1 << 20)
NO_NUMBER = {"nan": b"\x00\x7e", "inf": b"\x00\xfc"}


def scale(file: Path, block: BlockType, count: int, offset: int = 64) -> Scale:
    entry = TensorEntry(file, offset, count * block.nbytes, block.name, (count, block.columns))
    return Scale("blk.0.ffn_up.weight", entry, False, torch.float16, block.nbytes, _HALVES[block.name])


@pytest.mark.parametrize("block", CODED.values(), ids=lambda block: block.name)
@pytest.mark.parametrize("number", NO_NUMBER)
def test_a_block_is_refused_wherever_a_read_is_cut(block: BlockType, number: str) -> None:
    draw = np.random.default_rng(7)
    stored = draw.integers(0, 256, (40, block.nbytes), np.uint8)
    for at in _HALVES[block.name]:
        stored[:, at : at + 2] = np.frombuffer(np.full(40, 0.5, np.float16).tobytes(), np.uint8).reshape(-1, 2)
    one = scale(Path("model.gguf"), block, 40)
    assert one.is_sound(memoryview(stored.tobytes()))
    broken, place = int(draw.integers(40)), int(draw.choice(_HALVES[block.name]))
    stored[broken, place : place + 2] = np.frombuffer(NO_NUMBER[number], np.uint8)
    whole = memoryview(stored.tobytes())
    for _ in range(20):
        cuts = [0, *sorted(2 * draw.integers(1, len(whole) // 2, 3)), len(whole)]
        parts = [(whole[a:b], int(a)) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert [one.is_sound(part, at) for part, at in parts].count(False) == 1
        told = [at <= broken * block.nbytes + place < at + len(part) for part, at in parts]
        assert [not one.is_sound(part, at) for part, at in parts] == told


def broken_gguf(directory: Path, tensor: str) -> Path:
    file = directory / "broken.gguf"
    shutil.copy(COMMITTED / "Q4_K_M.gguf", file)
    entry = next(entry for name, entry in read_checkpoint(file).tensors.items() if name == tensor)
    block = next(block for block in CODED.values() if block.name == entry.dtype)
    with open(file, "r+b") as out:
        out.seek(entry.offset + 3 * block.nbytes + _HALVES[block.name][-1])
        out.write(NO_NUMBER["nan"])
    return file


@pytest.mark.parametrize(
    "tensor", ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"]
)
@pytest.mark.parametrize("card", [False, True], ids=["from the SSD", "resident"])
def test_a_gguf_file_with_a_scale_that_is_no_number_is_refused(tensor: str, card: bool, tmp_path: Path) -> None:
    file = broken_gguf(tmp_path, tensor)
    made = decisions(gpu=True, resident=(2, 2, 1), slots=2) if card else decisions(hwm=2)
    opening = opened(plan_for(file, made, gpu=card), file, *([HostCopier()] if card else []))
    with pytest.raises(UserError, match=rf"broken\.gguf: tensor {tensor} holds scales that are no numbers"), opening as session:
        logits_of(session, BATCH)
    with pytest.raises(UserError, match=f"{tensor} holds scales"):
        pack_checkpoint(file, tmp_path / "out", None, False, lambda *_: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("card", [False, True], ids=["from the SSD", "resident"])
def test_an_expert_whose_scales_are_no_numbers_is_refused_when_it_comes(card: bool, tmp_path: Path) -> None:
    bad = gpt_oss(tmp_path / "bad")
    tensor = "model.layers.1.mlp.experts.down_proj_scales"
    (shard,) = bad.glob("*.safetensors")
    tensors = load_file(shard)
    tensors[tensor][:, 7, 1] = 255
    save_file(tensors, shard, metadata={"format": "pt"})
    made = decisions(gpu=True, resident=(1, 2, 1)) if card else decisions()
    opening = opened(plan_for(bad, made, gpu=card), bad, *([HostCopier()] if card else []))
    with pytest.raises(UserError, match=rf"tensor {tensor} holds scales that are no numbers"), opening as session:
        logits_of(session, BATCH)


def test_what_came_once_is_not_looked_at_again(tmp_path: Path) -> None:
    block = next(block for block in CODED.values() if block.name == "Q8_0")
    looked: list[int] = []

    class Counted(ArrivingScales):
        def refuse(self, extents: object, into: memoryview) -> None:
            looked.append(len(list(extents)))  # type: ignore[call-overload]

    class AtOnce:
        def read(self, extents, into, done, name="load") -> None:  # type: ignore[no-untyped-def]
            done(None)

    reads = SoundReads(AtOnce(), Counted([scale(tmp_path / "a.gguf", block, 8)]))
    for _ in range(3):
        reads.read((Extent(tmp_path / "a.gguf", 64, 34 * 8, 0),), memoryview(bytearray(4096)), lambda error: None)
    assert looked == [1]
