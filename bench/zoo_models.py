"""The models of bench/zoo.py: random checkpoints of the sizes in bench/zoo.yaml, as transformers saves and loads published ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

VOCAB = 512
_KEPT = ("A_log", "D", "dt_bias")


@dataclass(frozen=True)
class Case:
    """One model. ``sizes`` are its config's; a wrapper has a class of its own, and may have its tensors' names as published."""

    name: str
    group: str
    sizes: Mapping[str, Any]
    class_name: str = ""
    renamed: str = ""
    refused = ""
    """What the one line names by which it is refused; empty for what runs."""

    @property
    def loaded(self) -> Mapping[str, Any] | None:
        """Arguments of transformers' ``from_pretrained`` beside the dtype; None where it has no decoder for the weights."""
        return {}

    def source(self, directory: Path) -> Path:
        """What is planned for, of the checkpoint in ``directory``."""
        return directory

    def save(self, directory: Path) -> None:
        """Random weights in F32, loaded in BF16 as transformers does (what it keeps in F32 stays so), and saved with a tokenizer."""
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(**self.sizes)
        if self.class_name == "AUTO":
            model = transformers.AutoModelForImageTextToText.from_config(config)
        elif self.class_name:
            model = getattr(transformers, self.class_name)(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = model.float()
        randomise(model)
        model.tie_weights()
        _stop_nowhere(model)
        wide = directory.with_name("f32")
        model.save_pretrained(wide)
        model = type(model).from_pretrained(wide, dtype=torch.bfloat16)
        _stop_nowhere(model)
        model.save_pretrained(directory)
        save_tokenizer(directory)
        if self.renamed:
            _rename(directory / "model.safetensors", _published if self.renamed == "published" else _visual)


def cases() -> list[Case]:
    """All of bench/zoo.yaml."""
    listed = yaml.safe_load(Path(__file__).with_name("zoo.yaml").read_text())
    found = []
    for name, sizes in listed["text"].items():
        bare, _ = sizes.pop("bare", False), sizes.pop("long", False)
        found.append(Case(name, "architecture", sizes if bare else listed["base"] | sizes))
    for name, sizes in listed["wrappers"].items():
        class_name, renamed = sizes.pop("class"), sizes.pop("renamed", "")
        found.append(Case(name, "wrapper", sizes | {"text_config": listed["base"] | sizes["text_config"]}, class_name, renamed))
    return found


def greedy(directory: Path, prompts: Sequence[str], new_tokens: int, out: Path, loaded: Mapping[str, Any]) -> None:
    """Write what `generate` makes of each prompt alone, the model ``loaded`` so: token ids."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    of_file = {"gguf_file": loaded["gguf_file"]} if "gguf_file" in loaded else {}
    known = type(AutoConfig.from_pretrained(directory, **of_file)) in AutoModelForCausalLM._model_mapping
    kind, dtype = AutoModelForCausalLM if known else AutoModelForImageTextToText, torch.bfloat16 if loaded else "auto"
    model = kind.from_pretrained(directory, dtype=dtype, **loaded).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, **of_file)
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.inference_mode():
            made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        tokens.append(made[0, ids.shape[1] :].tolist())
    out.write_text(json.dumps(tokens))


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Weights by which different tokens give different texts."""
    draw = torch.Generator().manual_seed(0)
    configs = (model.config, model.config.get_text_config())
    tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
    for name, p in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf in _KEPT or ("conv" in name and p.dim() == 3):
            continue
        noise = torch.randn(p.shape, generator=draw)
        if "sinks" in leaf:
            p.copy_(noise)
        elif p.dim() == 1 and leaf == "weight":
            p.add_(0.1 * noise)
        elif p.dim() == 1:
            p.copy_(0.05 * noise) if "bias" in leaf else p.add_(0.05 * noise)
        elif "embed" in name or "wte" in name:
            p.copy_((0.04 if tied else 0.5) * noise)
        else:
            p.copy_(0.12 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.02 * torch.randn(buffer.shape, generator=draw))


def _stop_nowhere(model: Any) -> None:
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0


def save_tokenizer(directory: Path) -> None:
    """One token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i + 3 for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def _rename(file: Path, rename: Any) -> None:
    from safetensors.torch import load_file, save_file

    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def _published(name: str) -> str:
    """As Gemma 3 and Mistral Small 3.1 have it."""
    name = re.sub(r"^model\.language_model\.", "language_model.model.", name)
    name = re.sub(r"^lm_head\.", "language_model.lm_head.", name)
    return re.sub(r"^model\.(vision_tower|multi_modal_projector|vision_model)", r"\1", name)


def _visual(name: str) -> str:
    """As Qwen2.5-VL has it."""
    return re.sub(r"^model\.(language_model\.|(?=visual))", lambda found: "model." if found[1] else "", name)
