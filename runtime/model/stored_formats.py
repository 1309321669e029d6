"""Modules that hold what a checkpoint stores: coded matrices in place of plain ones."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.tensor_names import classify
from penstock.planner.contract.stored.stored_matrix import StoredMatrix
from penstock.runtime.formats.coding import Coding
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.formats.scratch import Scratch
from penstock.runtime.formats.stored_embedding import StoredEmbedding
from penstock.runtime.formats.stored_experts import JOINT, ExpertMatrix
from penstock.runtime.formats.stored_linear import StoredLinear
from penstock.runtime.formats.stored_parameters import StoredParameter
from penstock.runtime.memory.vram import give_back
from penstock.runtime.model.interleaved import Interleaved
from penstock.runtime.store.parameters import DTYPES
from penstock.runtime.store.tensor_parts import Place, places_of

_GATED = ("gate_proj", "up_proj")
"""What the matrices are called that transformers puts together as ``gate_up_proj``."""


@dataclass(frozen=True)
class StoredFormats:
    """Puts :class:`StoredLinear` in place of each linear layer whose matrix is coded, and coded parameters in place of routed experts'.

    ``matrices``: of the checkpoint in the directory ``where``. UserError: a shape that is not the model's, a coded matrix that
    belongs to neither.
    """

    matrices: Mapping[str, StoredMatrix]
    where: str

    def convert(self, model: PreTrainedModel) -> None:
        experts: dict[str, dict[int, list[StoredMatrix]]] = defaultdict(lambda: defaultdict(list))
        linear: dict[str, StoredMatrix] = {}
        for name, place in places_of(model, self.matrices).items():
            matrix = self.matrices[name]
            owner = model.get_submodule(place.parameter.rpartition(".")[0])
            if hasattr(owner, "is_transposed"):
                experts[place.parameter][place.source].append(matrix)
            else:
                self._check(matrix, place, tuple(model.get_parameter(place.parameter).shape))
                linear[place.parameter] = matrix
        in_layers = [name for name in linear if classify(name).layer is not None]
        sizes = [linear[name].elements for name in in_layers]
        sizes += [sum(math.prod(group[0].shape[-2:]) for group in sources.values()) for sources in experts.values()]
        scratch = Scratch(max(sizes, default=0))
        for parameter, matrix in linear.items():
            self._replace(model, parameter.removesuffix(".weight"), matrix, scratch)
        for parameter, sources in experts.items():
            module, _, leaf = parameter.rpartition(".")
            self._take_experts(model.get_submodule(module), leaf, [group for _, group in sorted(sources.items())], scratch)

    def _replace(self, model: PreTrainedModel, name: str, matrix: StoredMatrix, scratch: Scratch) -> None:
        replaced, (owner, _, child) = model.get_submodule(name), name.rpartition(".")
        coding, parts, stored = _coding(matrix), {}, {}
        for leaf, each in matrix.leaves.items():
            parts[leaf] = nn.Parameter(_empty(each.shape, each.dtype), requires_grad=False)
            stored[leaf] = StoredParameter(matrix.format.name, (each.tensor,))
        if isinstance(replaced, nn.Embedding) or replaced is model.get_output_embeddings():
            self._check_rows(matrix)
        if isinstance(replaced, nn.Embedding):
            head, tied = model.get_output_embeddings(), replaced.weight
            setattr(model.get_submodule(owner), child, StoredEmbedding(replaced, coding, parts, stored))
            if type(head) is nn.Linear and head.weight is tied:
                model.set_output_embeddings(StoredLinear(head, matrix.format, coding, parts, stored, scratch))
            return
        if type(replaced) is not nn.Linear:
            raise UserError(
                f"{self.where}: {matrix.name} is stored in {matrix.format.name} and belongs to a {type(replaced).__name__}; coded are only "
                f"linear layers and routed experts: use the model's BF16 checkpoint"
            )
        kind: Any = type(model.get_submodule(owner))
        if reads_weight(kind, child):
            raise UserError(
                f"{self.where}: {matrix.name} is stored in {matrix.format.name}, and {kind.__name__} looks at it beside multiplying by it, "
                f"which only plain weights allow; use the model's BF16 checkpoint"
            )
        setattr(model.get_submodule(owner), child, StoredLinear(replaced, matrix.format, coding, parts, stored, scratch))

    def _take_experts(self, module: Any, name: str, groups: Sequence[list[StoredMatrix]], scratch: Scratch) -> None:
        """Give ``module`` the leaves of the matrices that its parameter ``name`` would be made of."""
        made, names = [], _GATED if len(groups) == 2 else (name,)
        for each, group in zip(names, groups, strict=True):
            first, count = group[0], _count(group)
            forms = {tuple((leaf, stored.shape, stored.dtype) for leaf, stored in matrix.leaves.items()) for matrix in group}
            if count != module.num_experts or len(forms) > 1 or len({matrix.format.name for matrix in group}) > 1:
                raise UserError(
                    f"{self.where}: the experts beside {first.name} are not {module.num_experts} stored alike; download it again"
                )
            for leaf, stored in first.leaves.items():
                shape = stored.shape if len(first.shape) == 3 else (count, *stored.shape)
                tensors = tuple(matrix.leaves[leaf].tensor for matrix in group)
                module.register_parameter(f"{each}{JOINT}{leaf}", nn.Parameter(_empty(shape, stored.dtype), requires_grad=False))
                known = getattr(module, "stored_parameters", {})
                module.stored_parameters = known | {f"{each}{JOINT}{leaf}": StoredParameter(first.format.name, tensors)}
            rows, columns = first.shape[-2:]
            made.append(ExpertMatrix(each, rows, columns, _coding(first), tuple(first.leaves), first.format.product_rows))
        replaced = tuple(module.get_parameter(name).shape[1:])
        whole = (sum(matrix.rows for matrix in made), made[0].columns)
        if whole != (replaced[::-1] if module.is_transposed else replaced):
            raise self._differs(groups[0][0], name, replaced)
        module.stored_experts = getattr(module, "stored_experts", {}) | {name: tuple(made)}
        module.scratch, module.stored_dtype = scratch, module.get_parameter(name).dtype
        module.register_parameter(name, None)

    def _check_rows(self, matrix: StoredMatrix) -> None:
        """A table is looked up, and an LM head streamed, by its rows."""
        if set(matrix.leaves) != {"weight"} or matrix.leaves["weight"].shape[0] != matrix.shape[0]:
            raise UserError(
                f"{self.where}: {matrix.name} is stored in {matrix.format.name}, of which single rows cannot be read; embedding tables and "
                f"LM heads run in BF16, F16, F32 and the formats of GGUF: use the model's BF16 checkpoint"
            )

    def _check(self, matrix: StoredMatrix, place: Place, shape: tuple[int, ...]) -> None:
        if matrix.shape != shape or place.source:
            raise self._differs(matrix, place.parameter, shape)

    def _differs(self, matrix: StoredMatrix, parameter: str, shape: tuple[int, ...]) -> UserError:
        return UserError(
            f"{self.where}: {matrix.name} in {matrix.format.name} has shape {list(matrix.shape)} for parameter {parameter} of shape "
            f"{list(shape)}; config.json and the weights are of different models"
        )


def close_scratches(model: nn.Module) -> None:
    """Give back what coded matrices of ``model`` were decoded into, although somebody may have a name for the model; nothing that is under
    way decodes any more."""
    for scratch in {known for module in model.modules() if isinstance(known := getattr(module, "scratch", None), Scratch)}:
        give_back(scratch.leave())


@cache
def reads_weight(owner: type[nn.Module], child: str) -> bool:
    """Whether the forward of ``owner`` looks at the weight of its linear layer ``child``, as indexers of DeepSeek-V3.2 do at its dtype."""
    return f"self.{child}.weight" in inspect.getsource(owner.forward)


def _coding(matrix: StoredMatrix) -> Coding:
    coding = CODINGS[matrix.format.name]
    return Interleaved(coding, matrix.heads) if matrix.heads else coding


def _count(group: Sequence[StoredMatrix]) -> int:
    """Of experts that ``group`` has matrices of."""
    return group[0].shape[0] if len(group[0].shape) == 3 else len(group)


def _empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")
