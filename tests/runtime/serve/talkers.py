"""A tokenizer whose tokens are bytes, 256 ends a reply; and chat templates as models have them."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from penstock.runtime.asked.prompts import Vocabulary
from penstock.runtime.serve.front.token_texts import byte_letters

SPECIAL = ("<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TAGGED = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for m in messages %}{% if m.role == 'raise' %}{{ raise_exception('no such role') }}{% endif %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}
{{ '\\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
"""As Qwen's."""
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def tokenizer(
    template: str | None, special: tuple[str, ...] = SPECIAL, added: tuple[str, ...] = ADDED, **said: Any
) -> PreTrainedTokenizerFast:
    bytes_alone = Tokenizer(models.BPE(vocab=byte_letters(), merges=[]))
    bytes_alone.pre_tokenizer, bytes_alone.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, chat_template=template, eos_token="<|im_end|>", **said)
    made.add_special_tokens({"additional_special_tokens": [AddedToken(name, normalized=False) for name in special]})
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    return made


def vocabulary(
    template: str | None = TAGGED, special: tuple[str, ...] = SPECIAL, added: tuple[str, ...] = ADDED, **said: Any
) -> Vocabulary:
    made = tokenizer(template, special, added, **said)
    return Vocabulary(made, frozenset({made.vocab["<|im_end|>"]}), len(made), GenerationConfig())
