"""Tensors are sorted into units by name, and held against what config.json says."""

from __future__ import annotations

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_spec import spec_from_tensors
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.checkpoint.tensor_names import FUSED, TensorRole, classify

SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64
)


class TestNames:
    @pytest.mark.parametrize(
        "name, role",
        [
            ("model.layers.7.self_attn.q_proj.weight", TensorRole("attn", 7, stack="model.layers")),
            ("layers.7.self_attn.q_norm.weight", TensorRole("attn", 7, stack="layers")),
            ("model.language_model.layers.0.mlp.up_proj.weight", TensorRole("ffn", 0, stack="model.language_model.layers")),
            ("model.layers.1.block_sparse_moe.experts.3.w1.weight", TensorRole("ffn", 1, 3, "model.layers")),
            ("model.layers.1.mlp.experts.gate_up_proj", TensorRole("ffn", 1, FUSED, "model.layers")),
            ("model.layers.1.mlp.shared_experts.up_proj.weight", TensorRole("ffn", 1, stack="model.layers")),
            ("model.layers.1.mlp.gate.weight", TensorRole("ffn", 1, stack="model.layers")),
            ("model.layers.1.feed_forward.w1.weight", TensorRole("ffn", 1, stack="model.layers")),
            ("model.layers.1.input_layernorm.weight", TensorRole("norm", 1, stack="model.layers")),
            ("model.norm.weight", TensorRole("norm")),
            ("model.embed_tokens.weight", TensorRole("embed")),
            ("lm_head.weight", TensorRole("head")),
            ("language_model.lm_head.weight", TensorRole("head")),
            ("model.vision_tower.encoder.layers.0.self_attn.q_proj.weight", TensorRole("ignored")),
            ("visual.blocks.0.mlp.up.weight", TensorRole("ignored")),
            ("model.multi_modal_projector.linear.weight", TensorRole("ignored")),
            ("model.layers.0.self_attn.rotary_emb.inv_freq", TensorRole("ignored")),
            ("transformer.h.0.attn.c_attn.weight", TensorRole("attn", 0, stack="transformer.h")),
            ("h.3.ln_1.weight", TensorRole("norm", 3, stack="h")),
            ("model.decoder.layers.2.fc1.bias", TensorRole("ffn", 2, stack="model.decoder.layers")),
            ("model.layers.2.conv.in_proj.weight", TensorRole("attn", 2, stack="model.layers")),
            ("backbone.layers.4.mixer.A_log", TensorRole("attn", 4, stack="backbone.layers")),
            ("model.layers.1.experts.gate_up_proj", TensorRole("ffn", 1, FUSED, "model.layers")),
            ("model.layers.1.attention_layer_norm.weight", TensorRole("norm", 1, stack="model.layers")),
            ("mtp.layers.0.self_attn.q_proj.weight", TensorRole("ignored")),
            ("gpt_neox.embed_in.weight", TensorRole("embed")),
            ("embed_out.weight", TensorRole("head")),
        ],
    )
    def test_a_name_says_the_unit(self, name, role):
        assert classify(name) == role


def layer_tensors(layers: int, stack: str = "model.layers") -> dict[str, TensorInfo]:
    """The names of a small model, one tensor a block."""
    found = {}
    for i in range(layers):
        found[f"{stack}.{i}.self_attn.k_proj.weight"] = TensorInfo(2 * 16 * 32, (16, 32), "BF16")
        found[f"{stack}.{i}.mlp.up_proj.weight"] = TensorInfo(2 * 48 * 32, (48, 32), "BF16")
        found[f"{stack}.{i}.input_layernorm.weight"] = TensorInfo(64, (32,), "BF16")
    return found | {"model.embed_tokens.weight": TensorInfo(2 * 64 * 32, (64, 32), "BF16")}


class TestTensors:
    """Cases that no small model of transformers has: made from names."""

    def spec(self, tensors, **config):
        return spec_from_tensors({**SIZES, "model_type": "x", **config}, tensors, "x", "/x", "d")

    def test_a_multimodal_checkpoint_is_read_as_its_decoder(self):
        tensors = layer_tensors(3, "model.language_model.layers")
        vision = {"model.vision_tower.layers.0.self_attn.q_proj.weight": TensorInfo(9999, (9999,), "F8_E4M3")}
        spec = spec_from_tensors({"model_type": "outer", "text_config": {**SIZES, "model_type": "inner"}}, tensors | vision, "x", "/x", "d")
        assert spec.model_type == "inner" and spec.weight_bytes == sum(t.nbytes for t in tensors.values())

    def test_widths_that_a_config_leaves_out_come_from_the_projections(self):
        tensors = layer_tensors(3) | {"model.layers.0.self_attn.q_proj.weight": TensorInfo(2 * 40 * 32, (40, 32), "BF16")}
        spec = spec_from_tensors({"num_hidden_layers": 3, "intermediate_size": 48}, tensors, "x", "/x", "d")
        assert (spec.attn_width, spec.kv_width, spec.hidden, spec.vocab) == (40, 16, 32, 64)

    def test_gates_beside_the_queries_are_no_part_of_attention(self):
        """As of Qwen3-Next, whose query projection has twice the rows."""
        heads = {"num_hidden_layers": 3, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        tensors = layer_tensors(3)
        for i in range(3):
            tensors[f"model.layers.{i}.self_attn.q_proj.weight"] = TensorInfo(2 * 64 * 32, (64, 32), "BF16")
        assert spec_from_tensors(heads, tensors, "x", "/x", "d").attn_width == 64, "nothing says otherwise"
        for i in range(3):
            tensors[f"model.layers.{i}.self_attn.o_proj.weight"] = TensorInfo(2 * 32 * 32, (32, 32), "BF16")
        assert spec_from_tensors(heads, tensors, "x", "/x", "d").attn_width == 32

    def test_layers_for_multi_token_prediction_are_left_out(self):
        assert self.spec(layer_tensors(4), num_nextn_predict_layers=1).layers == 3

    def test_fused_experts_are_sized_by_their_number(self):
        fused = {f"model.layers.{i}.mlp.experts.gate_up_proj": TensorInfo(4 * 100, (4, 50), "BF16") for i in range(3)}
        assert self.spec(layer_tensors(3) | fused, num_experts=4, num_experts_per_tok=1).experts.expert_bytes == 100

    @pytest.mark.parametrize(
        "change, config, says",
        [
            ({"model.layers.1.self_attn.k_proj.weight": None}, {}, "layer 1 has no self_attn, found input_layernorm, mlp"),
            ({"model.layers.2.mlp.up_proj.weight": None}, {}, "layer 2 has no mlp"),
            ({"model.embed_tokens.weight": None}, {}, "embed_tokens.weight is missing"),
            ({}, {"num_hidden_layers": 4}, "layer 3 is missing and config.json says num_hidden_layers is 4"),
            ({}, {"num_hidden_layers": 2}, "has tensors of layer 2 and config.json says num_hidden_layers is 2"),
            ({}, {"num_hidden_layers": 0}, "num_hidden_layers"),
            ({}, {"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
            ({}, {"num_hidden_layers": None}, "num_hidden_layers is missing or 0"),
            ({}, {"hidden_size": 33}, "hidden_size is 33 and embed_tokens.weight has 32"),
            ({}, {"vocab_size": 65}, "vocab_size is 65"),
            ({}, {"head_dim": 16}, "different models"),
            ({}, {"tie_word_embeddings": False}, "lm_head.weight is missing"),
            ({}, {"quantization_config": {"quant_method": "exl3"}}, "quant_method 'exl3' is not read; read are fp8"),
            ({}, {"is_encoder_decoder": True}, "encoder-decoder"),
            ({"model.encoder.layers.0.self_attn.k_proj.weight": TensorInfo(2, (1,), "BF16")}, {}, "needs one stack of decoder layers"),
            ({"model.layers.0.mlp.up_proj.weight": TensorInfo(8, (8,), "F8_E4M3")}, {}, r"'model.layers.0.mlp.up_proj.weight' is F8_E4M3"),
            ({"model.layers.0.mlp.qweight": TensorInfo(8, (2,), "I32")}, {}, r"'model.layers.0.mlp.qweight' is I32"),
            ({"model.layers.0.mlp.experts.0.w1.weight": TensorInfo(2, (1,), "BF16")}, {}, "the checkpoint has experts"),
            (
                {"model.layers.0.mlp.experts.0.w1.weight": TensorInfo(2, (1,), "BF16")},
                {"num_experts": 2, "num_experts_per_tok": 1},
                "layer 0 expert 1 is missing",
            ),
        ],
    )
    def test_what_cannot_be_run_is_refused(self, change, config, says):
        tensors = {name: info for name, info in (layer_tensors(3) | change).items() if info is not None}
        with pytest.raises(UserError, match=says):
            self.spec(tensors, **config)

    def test_a_width_that_a_config_leaves_out_is_the_widest_of_the_tensors(self):
        assert self.spec(layer_tensors(3), intermediate_size=None).ffn_width == 48

    def test_a_model_without_layers_is_told_what_was_found(self):
        tensors = {"tower.0.wq.weight": TensorInfo(2, (1,), "F32"), "wte.weight": TensorInfo(2, (1,), "F32")}
        with pytest.raises(UserError, match=r"needs a list of decoder layers.*tower\.0\.wq\.weight"):
            self.spec(tensors)
