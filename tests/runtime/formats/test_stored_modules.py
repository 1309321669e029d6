"""Modules that hold a coded matrix compute what the plain ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from penstock.planner.contract.given.formats import QUANTISED
from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.scratch import Scratch
from penstock.runtime.formats.stored_embedding import StoredEmbedding
from penstock.runtime.formats.stored_linear import StoredLinear
from penstock.runtime.formats.stored_parameters import StoredParameter
from penstock.runtime.model.stored_formats import close_scratches


class Halves:
    """Bytes that are decoded to their halves, row by row."""

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        out.copy_(parts["weight"].to(out.dtype).mul_(0.5))

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None


STORED = {"weight": StoredParameter("FP8", ("w",))}


def table(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randint(0, 9, (rows, columns), dtype=torch.uint8), requires_grad=False)


@pytest.mark.parametrize("room", [40 * 16, 39 * 16, 7 * 16, 16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_matrix_larger_than_the_scratch_is_multiplied_by_some_rows_at_a_time(room: int, bias: bool) -> None:
    plain, weight, x = nn.Linear(16, 40, bias=bias), table(40, 16), torch.randn(2, 3, 16)
    stored = StoredLinear(plain, QUANTISED["FP8"], Halves(), {"weight": weight}, STORED, Scratch(room))
    with torch.no_grad():
        plain.weight.copy_(weight * 0.5)
        assert torch.allclose(stored(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("made", [lambda: nn.Embedding(30, 16), lambda: Gemma3TextScaledWordEmbedding(30, 16, 0, 4.0)])
def test_rows_of_a_coded_table_are_looked_up_decoded_and_scaled(made) -> None:
    plain, same, weight, ids = made(), made(), table(30, 16), torch.tensor([[3, 0, 29], [3, 3, 1]])
    stored = StoredEmbedding(same, Halves(), {"weight": weight}, STORED)
    with torch.no_grad():
        plain.weight.copy_(weight * 0.5)
        assert torch.equal(stored(ids), plain(ids))
    assert [name for name, _ in stored.named_parameters()] == ["weight"]


def test_a_closed_scratch_holds_nothing_while_somebody_has_a_name_for_the_model() -> None:
    scratch, weight, x = Scratch(40 * 16), table(40, 16), torch.randn(2, 16)
    model = nn.Sequential(StoredLinear(nn.Linear(16, 40), QUANTISED["FP8"], Halves(), {"weight": weight}, STORED, scratch))
    with torch.no_grad():
        said = model(x)
        seen = scratch.of(40, 16, torch.float32, x.device)
        close_scratches(model)
        assert not seen.untyped_storage().nbytes()
        assert torch.equal(model(x), said), "a closed one is taken anew"
