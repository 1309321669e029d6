"""GGUF files run as they are: planned by their stored bytes, streamed and packed to the logits of transformers' own reading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import gguf_config, read_checkpoint, spec_from_checkpoint
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.runtime.asked.prompts import read_vocabulary
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.validate import load_unstreamed
from penstock.runtime.model.skeleton import open_skeleton
from penstock.runtime.store.verify import verify_store
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.formats.coded_checkpoints import logits_of, same
from tests.runtime.formats.gguf_made import COMMITTED, WIDE, as_gguf
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import HostCopier, decisions, plan_for, save_tiny

CPU = torch.device("cpu")
ROWS = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 11], max_new_tokens=4, chunk_tokens=1 << 20)


def transformers_model(file: Path, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).eval()


@pytest.mark.parametrize("name", ["Q4_K_M", "mixed"])
def test_streamed_and_packed_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    file = COMMITTED / f"{name}.gguf"
    want = list(said(transformers_model(file), ROWS).logits)
    with opened(plan_for(file, decisions(hwm=2)), file) as session:
        assert same(logits_of(session, ROWS), want)
    packed = tmp_path / "packed"
    pack_checkpoint(file, packed, None, False, lambda *_: None)
    assert verify_store(packed, lambda *_: None)["nbytes"]
    assert spec_from_checkpoint(packed).units == spec_from_checkpoint(file).units
    made = decisions(gpu=True, resident=(1, 0, 1), slots=2, hwm=2, embedding=Tier.vram, head_blocks=2)
    with opened(plan_for(packed, made, gpu=True), packed, HostCopier()) as session:
        assert same(logits_of(session, ROWS), want)
    ours, theirs = read_vocabulary(packed, 512).tokenizer, AutoTokenizer.from_pretrained(COMMITTED, gguf_file=file.name)
    assert ours is not None and ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    assert ours("def f(x):\n    return x + 1")["input_ids"] == theirs("def f(x):\n    return x + 1")["input_ids"]
    assert ours.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "user: a\n"


def test_a_units_planned_bytes_are_those_that_the_runtime_moves() -> None:
    file = COMMITTED / "mixed.gguf"
    spec, store = spec_from_checkpoint(file), open_skeleton(file).store
    for kind in (UnitKind.attn, UnitKind.ffn):
        for unit in spec.of_kind(kind):
            assert unit.stored_bytes == sum(t.nbytes for t in store.unit(Unit(kind.value, unit.layer or 0)).tensors)
    outside = sum(t.nbytes for layout in store.others().values() for t in layout.tensors)
    assert outside == spec.norm_bytes + spec.embed_bytes + spec.head_bytes
    assert spec.scratch_bytes == 256 * 256 * 2


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("qwen2", "Q8_0"),
        ("qwen3", "Q4_0"),
        ("llama", "F16"),
        ("qwen3_moe", "Q8_0"),
        ("qwen2_moe", "Q8_0"),
        ("phi3", "Q8_0"),
        ("gemma2", "Q8_0"),
        ("gemma3_text", "Q4_0"),
        ("starcoder2", "Q8_0"),
    ],
)
def test_other_architectures_and_types_say_what_transformers_says(model_type: str, kind: str, tmp_path: Path) -> None:
    sizes = WIDE | ({"query_pre_attn_scalar": 32} if "gemma" in model_type else {})
    file = as_gguf(
        save_tiny(tmp_path / "hf", model_type, tied=model_type in ("qwen2", "gemma2"), layers=2, **sizes), tmp_path / "m.gguf", kind
    )
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    config = gguf_config(file)
    assert config is not None
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name).to_dict()
    read = {key: value for key, value in AutoConfig.for_model(**config).to_dict().items() if key in theirs and theirs[key] is not None}
    unread = {
        "head_dim",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "vocab_size",
        "query_pre_attn_scalar",
    }  # by transformers, which takes defaults
    unread |= {"bos_token_id", "eos_token_id", "pad_token_id", "dtype", "_name_or_path"}
    near = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in theirs.items()}
    assert {key for key, value in read.items() if value != near[key]} <= unread
    if model_type.endswith("_moe"):
        want = said(AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=dtype).eval(), ROWS)
        with opened(plan_for(file, decisions(hwm=2)), file) as session:
            got = logits_of(session, ROWS)
        assert torch.cosine_similarity(got[0].float().flatten(), want.logits[0].float().flatten(), 0) > 0.99
        return
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=dtype, config=AutoConfig.from_pretrained(tmp_path / "hf")
    )
    with opened(plan_for(file, decisions(hwm=2)), file) as session:
        assert same(logits_of(session, ROWS), list(said(model.eval(), ROWS).logits))


def test_mixtral_runs_with_its_config_beside_the_file(tmp_path: Path) -> None:
    hf = save_tiny(tmp_path / "hf", "mixtral", layers=2, **WIDE)
    (tmp_path / "alone").mkdir()
    file = as_gguf(hf, tmp_path / "alone" / "m.gguf", "Q8_0")
    with pytest.raises(UserError, match=r"Mixtral.*config\.json beside"):
        read_checkpoint(file)
    shutil.copy(hf / "config.json", file.parent)
    want = said(AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16).eval(), ROWS)
    with opened(plan_for(file.parent, decisions(hwm=2)), file.parent) as session:
        got = logits_of(session, ROWS)
    assert torch.cosine_similarity(got[0].float().flatten(), want.logits[0].float().flatten(), 0) > 0.99


def test_a_split_model_is_that_of_one_file(tmp_path: Path) -> None:
    hf = save_tiny(tmp_path / "hf", layers=2, **WIDE)
    (tmp_path / "parts").mkdir()
    whole = as_gguf(hf, tmp_path / "m.gguf", "Q8_0")
    as_gguf(hf, tmp_path / "parts" / "m.gguf", "Q8_0", per_file=8)
    parts = sorted((tmp_path / "parts").glob("*.gguf"))
    assert len(parts) == 3
    one = read_checkpoint(whole)
    for named in (tmp_path / "parts", *parts):
        found = read_checkpoint(named)
        assert found.config == one.config
        assert {name: entry.nbytes for name, entry in found.tensors.items()} == {name: entry.nbytes for name, entry in one.tensors.items()}
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        assert torch.equal(load_unstreamed(parts[1], CPU)(ids).logits, load_unstreamed(whole, CPU)(ids).logits)
    parts[1].unlink()
    with pytest.raises(UserError, match=r"00002-of-00003.*no such file"):
        read_checkpoint(parts[0])


def test_llama_3s_frequencies_are_known_by_their_table(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    hf = save_tiny(tmp_path / "hf", layers=2, rope_parameters=scaling, **WIDE)
    plain = as_gguf(hf, tmp_path / "plain.gguf", "Q8_0")
    model = AutoModelForCausalLM.from_pretrained(hf)
    usual = 500000.0 ** (-torch.arange(0, 32, 2) / 32)
    table = (usual / model.model.rotary_emb.inv_freq).numpy()
    file = tmp_path / "m.gguf"
    reader, writer = gguf.GGUFReader(plain), gguf.GGUFWriter(file, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_tensor("rope_freqs.weight", table)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = gguf_config(file)
    assert config is not None and config["rope_scaling"] == {key: value for key, value in scaling.items() if key != "rope_theta"}
    assert AutoConfig.for_model(**config).rope_parameters == scaling
    assert torch.equal(load_unstreamed(file, CPU).model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_several_models_in_a_directory_are_named(tmp_path: Path) -> None:
    for name in ("a-Q4_K_M", "a-Q8_0"):
        shutil.copy(COMMITTED / "Q4_K_M.gguf", tmp_path / f"{name}.gguf")
    with pytest.raises(UserError, match=r"2 models, a-Q4_K_M\.gguf, a-Q8_0\.gguf; set model\.checkpoint to one"):
        spec_from_checkpoint(tmp_path)
    (tmp_path / "a-Q8_0.gguf").unlink()
    assert spec_from_checkpoint(tmp_path).layers == 2


def test_a_packed_store_of_a_file_among_others_holds_nothing_of_theirs(tmp_path: Path) -> None:
    shutil.copy(COMMITTED / "Q4_K_M.gguf", tmp_path / "m.gguf")
    (tmp_path / "notes.txt").write_text("mine")
    pack_checkpoint(tmp_path / "m.gguf", tmp_path / "packed", None, False, lambda *_: None)
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {"config.json", "manifest.json", "vocabulary.gguf", "weights.bin"}
    assert json.loads((tmp_path / "packed" / "config.json").read_text())["model_type"] == "llama"


def test_architectures_and_heads_that_cannot_be_are_refused_in_one_line(tmp_path: Path) -> None:
    hf = save_tiny(tmp_path / "hf", layers=2, **WIDE)
    for changed, said_of_it in ({"attention.head_count": 0}, "above 0"), ({"attention.head_count": 7}, "no multiple of twice its 7 heads"):
        file = as_gguf(hf, tmp_path / "m.gguf", "Q8_0", **changed)
        with pytest.raises(UserError, match=said_of_it) as refused:
            spec_from_checkpoint(file)
        assert "\n" not in str(refused.value)
    content = (COMMITTED / "Q4_K_M.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content.replace(b"llama", b"mamba", 1))
    with pytest.raises(UserError, match=r"'mamba' models are not read; read are llama, qwen2"):
        spec_from_checkpoint(tmp_path / "m.gguf")


def test_experts_of_mixed_types_have_slots_for_the_largest(tmp_path: Path) -> None:
    hf = save_tiny(tmp_path / "hf", "qwen3_moe", layers=2, **WIDE)
    file = as_gguf(hf, tmp_path / "m.gguf", "Q4_0", apart=("blk.1.ffn_down_exps", "Q8_0"))
    spec = spec_from_checkpoint(file)
    small, large = (unit.stored_bytes for unit in spec.of_kind(UnitKind.expert))
    assert spec.experts is not None and spec.experts.expert_bytes == large > small
    plan = plan_for(file, decisions(hwm=2))
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml").model == plan.model
    with opened(plan_for(file, decisions(hwm=2)), file) as session:
        want = logits_of(session, ROWS)
    with opened(plan_for(file, decisions(gpu=True, slots=2, hwm=2), gpu=True), file, HostCopier()) as session:
        assert same(logits_of(session, ROWS), want)
