"""A run without a card multiplies few rows by coded matrices as they are stored, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.runtime.asked.run_schema import CpuProduct, PackFormat
from penstock.runtime.beside.host_ffn import HostFfn
from penstock.runtime.beside.host_library import products_unbuilt
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.beside.on_host import OnHost
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.model.interleaved import Interleaved
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.beside.coded_matrices import coded_matrices
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for, save_tiny

pytestmark = pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler here")
ROWS = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 30], max_new_tokens=4, chunk_tokens=1 << 20)
SIZES = {"hidden_size": 128, "intermediate_size": 256}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Input rows of each product of a pool."""
    made: list[int] = []
    ffn = HostPool.ffn

    def counted(pool: HostPool, unit: HostFfn, x: torch.Tensor, out: torch.Tensor) -> None:
        made.append(len(x))
        ffn(pool, unit, x, out)

    monkeypatch.setattr(HostPool, "ffn", counted)
    return made


def logits_of(checkpoint: Path, cpu_product: CpuProduct | None) -> tuple[torch.Tensor, dict[str, str] | None]:
    with opened(plan_for(checkpoint, decisions()), checkpoint, cpu_product=cpu_product) as session:
        session.load(ROWS)
        made = session.generate(ROWS, Sampler(Sampling(), torch.device("cpu")), keep_logits=True)
        return torch.cat(list(made.logits)).float(), session.cpu_products


@pytest.mark.parametrize("model_type", ["qwen3", "mixtral"])
@pytest.mark.parametrize("form", [PackFormat.int4, PackFormat.lossless])
def test_logits_are_those_of_decoded_matrices_within_rounding(
    tmp_path: Path, products: list[int], model_type: str, form: PackFormat
) -> None:
    """Linear layers and routed experts."""
    sizes = SIZES | ({"head_dim": 32} if model_type == "qwen3" else {})
    packed = tmp_path / "packed"
    pack_checkpoint(save_tiny(tmp_path / "tiny", model_type, layers=2, **sizes), packed, None, False, lambda *_: None, form=form)
    decoded, none = logits_of(packed, CpuProduct.decode)
    assert none is None and not products
    stored, told = logits_of(packed, CpuProduct.stored)
    assert 0 < max(products) <= 16
    made = len(products)
    assert told == {"INT4-128" if form is PackFormat.int4 else "lossless": "stored"}
    steps = (ROWS.max_new_tokens, len(ROWS.prompts))
    agreed = (stored.argmax(-1) == decoded.argmax(-1)).view(steps).cumprod(0)
    alike = torch.cat([torch.ones_like(agreed[:1]), agreed[:-1]]).bool()  # a near tie may end another way; what follows has another text
    errors = ((stored - decoded).norm(dim=-1) / decoded.norm(dim=-1)).view(steps)
    assert (errors[alike] < 2**-6).all() and alike.sum() >= 10
    unasked, how = logits_of(packed, None)
    if form is PackFormat.int4:
        assert torch.equal(unasked, stored) and how == told and len(products) == 2 * made
    else:
        assert torch.equal(unasked, decoded) and how == {"lossless": "decode"} and len(products) == made


def test_with_plain_weights_attention_is_ours_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, attended = save_tiny(tmp_path, "qwen3", layers=2, **SIZES | {"head_dim": 32}), []
    attend = HostPool.attend
    monkeypatch.setattr(HostPool, "attend", lambda pool, asked: (attended.append(asked), attend(pool, asked)))
    (torchs, none), (again, told) = logits_of(checkpoint, CpuProduct.decode), logits_of(checkpoint, None)
    assert none is told is None and torch.equal(torchs, again) and not attended
    ours, told = logits_of(checkpoint, CpuProduct.stored)
    assert told == {"attention": "own"} and len(attended) >= 2 * (ROWS.max_new_tokens - 1)
    first = len(ROWS.prompts)
    assert 0 < (ours - torchs)[first : 2 * first].norm() < 2**-6 * torchs[first : 2 * first].norm()


def test_queries_whose_rows_lie_interleaved_come_out_in_order() -> None:
    form, parts = coded_matrices(24, 256)["Q8_0"]
    plain, x = torch.empty(24, 256, dtype=torch.bfloat16), torch.randn(2, 256).bfloat16()
    Interleaved(CODINGS[form], 3).decode(parts, plain)
    with HostPool(1) as pool:
        made = Interleaved(OnHost(CODINGS[form], form, pool), 3).linear(x, parts, None)
    assert made is not None
    assert torch.allclose(made.double(), x.double() @ plain.double().T, rtol=2**-7, atol=0.05), "with AVX2 no weight is rounded"


def test_many_rows_and_other_types_are_left_to_decoding() -> None:
    form, parts = coded_matrices(8, 128)["INT4-64"]
    with HostPool(1) as pool:
        coding, bias = OnHost(CODINGS[form], form, pool), torch.arange(8.0).bfloat16()
        x = torch.zeros(16, 128, dtype=torch.bfloat16)
        assert torch.equal(coding.linear(x, parts, bias), bias.expand(16, 8))
        assert coding.linear(torch.zeros(17, 128, dtype=torch.bfloat16), parts, bias) is None
        assert torch.equal(coding.linear(x.half(), parts, bias.half()), bias.half().expand(16, 8))
        assert coding.linear(x.float(), parts, bias) is None
        form, parts = coded_matrices(8, 128)["lossless"]
        assert OnHost(CODINGS[form], form, pool).linear(x.half(), parts, None) is None, "it is a form of BF16"
