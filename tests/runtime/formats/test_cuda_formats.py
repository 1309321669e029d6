"""On a real card: what kernels decode is what the CPU decodes, products from the stored form are near it, and a stream of it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench.coded_synth import config_of, write_coded
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.formats.stored_linear import StoredLinear
from penstock.runtime.memory.device import CudaDevice
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250]], max_new_tokens=6, chunk_tokens=1 << 20)
LAYERS = 3
FORMATS = ("fp8", "int4", "int8", "gptq", "awq", "nvfp4", "q4_k")


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, config = tmp_path_factory.mktemp(request.param), config_of("demo", LAYERS)
    write_coded(request.param, config, directory / "coded")
    return directory / "coded"


def test_a_card_decodes_the_bits_that_the_cpu_does_and_multiplies_nearly_the_same(checkpoint: Path) -> None:
    device = torch.device("cuda", 0)
    plan = plan_for(checkpoint, decisions(gpu=True, resident=(LAYERS, LAYERS, 1)), gpu=True)
    with opened(plan, checkpoint, CudaDevice(0), device) as session:
        session.load(BATCH)
        layers = [m for m in session.engine.model.modules() if isinstance(m, StoredLinear)]
        assert layers
        for layer in layers[:7]:
            parts = {leaf: layer.get_parameter(leaf).detach() for leaf in layer.stored_parameters}
            size = (layer.out_features, layer.in_features)
            got, want = torch.empty(size, dtype=layer.dtype, device=device), torch.empty(size, dtype=layer.dtype)
            layer.coding.decode(parts, got)
            layer.coding.decode({leaf: part.cpu() for leaf, part in parts.items()}, want)
            assert torch.equal(got.cpu(), want)
            for rows in (1, 3, layer.form.product_rows):
                x = torch.randn(rows, layer.in_features, dtype=layer.dtype, device=device)
                product = layer.coding.linear(x, parts, None) if rows else None
                if product is not None:
                    exact = F.linear(x.float(), got.float())
                    assert (product.float() - exact).abs().max() <= 0.01 * exact.abs().max()


@pytest.mark.parametrize("resident", [(0, 0, 0), (1, 2, 1)])
def test_a_streamed_model_says_on_a_card_what_it_says_on_the_cpu(checkpoint: Path, resident: tuple[int, int, int]) -> None:
    device = torch.device("cuda", 0)
    with opened(plan_for(checkpoint, decisions()), checkpoint) as session:
        session.load(BATCH)
        want = session.generate(BATCH, Sampler(Sampling(), torch.device("cpu")), keep_logits=True)
    plan = plan_for(checkpoint, decisions(gpu=True, resident=resident), gpu=True)
    with opened(plan, checkpoint, CudaDevice(0), device) as session:
        session.load(BATCH)
        got = session.generate(BATCH, Sampler(Sampling(), device), keep_logits=True)
    first, right = got.logits[0].float().cpu(), want.logits[0].float()
    assert (first - right).abs().max() <= 0.03 * right.abs().max()
