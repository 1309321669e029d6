"""A small trained checkpoint as one that answers: with a chat template, and with an end-of-text token that is often the likeliest.

    python bench/ending_model.py source=shared/models/tiny-llama out=DIR

A language model without instruction never ends a reply by itself. Its output matrix has no bias, so the row of the end-of-text token gets
a direction along which every state of the replies to :data:`PROMPTS` lies alike, but their first, where it is nothing (least squares). It
is scaled so that each of these replies ends within :data:`LONGEST` tokens and none at once.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from bench.keys import given_of  # noqa: E402

TEMPLATE = """\
{%- if tools %}# Functions: {{ tools | tojson }}
# They are called by <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>
{% endif %}{%- for m in messages %}# {{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}

{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"""
PROMPTS = (
    "Say hello in exactly 3 words.", "Say hello.", "Count from 1 to 5.", "Say one word.", "What is my name? Reply with just the name.",
    "Repeat only the number.", "What is the weather in San Francisco?", "test",
)  # fmt: skip
LONGEST = 64
_RIDGE = 1e-4
_MARGIN = 0.5
"""Logits by which the end leads or trails: BF16 and another order of sums must not change who does."""


def ending_checkpoint(source: Path, out: Path) -> int:
    """Write it -> tokens of its longest reply to :data:`PROMPTS`. SystemExit where no scale ends them all."""
    shutil.copytree(source, out, dirs_exist_ok=True, copy_function=shutil.copyfile)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    end = int(tokenizer.eos_token_id)
    row = model.get_output_embeddings().weight[end].detach().clone()
    replies = [
        _reply(model, tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"], end)
        for text in PROMPTS
    ]
    states = torch.cat([states for states, _ in replies])
    alike = torch.cat([torch.ones(len(states)).index_fill(0, torch.tensor([0]), 0.0) for states, _ in replies])
    direction = torch.linalg.solve(states.T @ states + _RIDGE * len(states) * torch.eye(states.shape[1]), states.T @ alike)
    leads = torch.cat([leads for _, leads in replies])
    for scale in torch.quantile(leads, torch.linspace(0.05, 1.0, 20)).tolist():
        added = (row + direction * scale).bfloat16().float() - row
        lengths = [_length(leads - states @ added) for states, leads in replies]
        if None not in lengths:
            _store(out, row + added)
            return max(length for length in lengths if length is not None)
    raise SystemExit(f"{source}: no scale of the end-of-text token ends every reply within {LONGEST} tokens and none at once")


def _reply(model: torch.nn.Module, ids: list[int], end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a greedy reply that does not end: (positions, hidden) last states, and by how much the likeliest token leads the end at each."""
    said = model.generate(  # type: ignore[operator]
        torch.tensor([ids]), max_new_tokens=LONGEST, min_new_tokens=LONGEST, do_sample=False, suppress_tokens=[end]
    )
    with torch.no_grad():
        found = model(said, output_hidden_states=True)
    logits = found.logits[0, len(ids) - 1 : -1]
    leads = logits.index_fill(-1, torch.tensor([end]), -torch.inf).max(-1).values - logits[:, end]
    return found.hidden_states[-1][0, len(ids) - 1 : -1], leads


def _length(leads: torch.Tensor) -> int | None:
    """Of the reply in which the end trails by ``leads``; None where it ends at once, never, or hardly."""
    ends = (leads < 0).nonzero()
    if not len(ends) or not int(ends[0]) or bool((leads[: int(ends[0]) + 1].abs() < _MARGIN).any()):
        return None
    return int(ends[0])


def _store(out: Path, row: torch.Tensor) -> None:
    """``row`` as the end's in ``out``, whose one file holds all and whose output matrix is the embedding."""
    config = json.loads((out / "config.json").read_text())
    path = out / "model.safetensors"
    tensors = load_file(path)
    name = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    tensors[name][config["eos_token_id"]] = row.to(tensors[name].dtype)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    given = given_of(sys.argv[1:], ("source", "out"), __doc__)
    print(json.dumps({"longest_reply_tokens": ending_checkpoint(Path(given["source"]), Path(given["out"]))}))
