"""Prompts as token ids: from text, or at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, TokenizersBackend
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import gguf_config
from penstock.planner.contract.checkpoint.gguf_checkpoint import files_beside, vocabulary_file
from penstock.planner.contract.gguf.gguf_config import FAMILIES
from penstock.planner.contract.gguf.gguf_header import read_gguf
from penstock.runtime.asked.chat_template import ChatTemplate
from penstock.runtime.asked.requests import Asked

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "spiece.model")
"""Files of which a checkpoint with a tokenizer has one."""
_READERS = ("sentencepiece", "tiktoken", "protobuf")
"""Packages that read some of them."""


@dataclass(frozen=True)
class Vocabulary:
    """A checkpoint's tokenizer, None when it has none, and the ids that it ends with."""

    tokenizer: PreTrainedTokenizerBase | None
    stop_ids: frozenset[int]
    size: int
    generation: GenerationConfig
    """generation_config.json, or what config.json says in its place."""

    def text(self, ids: list[int]) -> str:
        """Decoded text; ids separated by spaces without a tokenizer."""
        return " ".join(map(str, ids)) if self.tokenizer is None else _decoded(self.tokenizer, ids, special=False)

    def marked_text(self, ids: list[int]) -> str:
        """The same with special tokens, as a chat template writes them."""
        return self.text(ids) if self.tokenizer is None else _decoded(self.tokenizer, ids, special=True)


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int], special: bool) -> str:
    """What ``tokenizer.decode`` says. Where that only asks the tokenizers library it is asked itself: 4 µs instead of 20, twice a token."""
    if type(tokenizer)._decode is TokenizersBackend._decode and not tokenizer.clean_up_tokenization_spaces:
        return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=not special))
    return str(tokenizer.decode(ids, skip_special_tokens=not special))


class LongText(Exception):
    """A text has more tokens than it may have: so many ``tokens``."""

    def __init__(self, tokens: int):
        super().__init__(f"{tokens} tokens")
        self.tokens = tokens


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool, most: int | None = None) -> list[int]:
    """Ids of ``text``, with what the tokenizer puts around a text where ``special``. LongText where they are more than ``most``.

    A text of more characters than that is counted before its ids are Python's: 32 bytes each, among what others keep, so that memory which
    they shared is not given back for long.
    """
    if most is not None and len(text) > most and _asks_library_alone(tokenizer):
        # of a list, as transformers asks: for one text alone the library keeps the interpreter, and no token is sent meanwhile
        (encoding,) = tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=special)
        if (tokens := len(encoding)) > most:
            del encoding  # of 100 bytes a character, which would live as long as the error that passed it
            raise LongText(tokens)
        return list(encoding.ids)
    ids = list(tokenizer(text, add_special_tokens=special)["input_ids"])
    if most is not None and len(ids) > most:
        raise LongText(len(ids))
    return ids


def _asks_library_alone(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether reading a text is the tokenizers library's work and nothing else's."""
    kind = type(tokenizer)
    own = kind.__call__ is PreTrainedTokenizerBase.__call__ and getattr(kind, "_encode_plus", None) is TokenizersBackend._encode_plus
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (
        own
        and backend is not None
        and backend.truncation is None
        and backend.padding is None
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    )


def read_vocabulary(directory: Path, vocab_size: int) -> Vocabulary:
    """Tokenizer and stop tokens of a checkpoint directory, the latter from config.json where there is no generation_config.json."""
    path, directory = directory, files_beside(directory)
    tokenizer, file = None, vocabulary_file(path)
    if file is not None or any((directory / name).exists() for name in TOKENIZERS):
        try:
            tokenizer = _tokenizer(directory, file)
        except Exception as error:  # the tokenizers library raises nothing narrower
            _check_config(directory)
            raise UserError(f"{directory}: the tokenizer cannot be read ({_first_line(error)}); {_remedy(error)}") from error
    try:
        if (directory / GENERATION).exists():
            generation = GenerationConfig.from_pretrained(directory)
        else:
            said = gguf_config(path)
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False) if said is None else AutoConfig.for_model(**said)
            generation = GenerationConfig.from_model_config(config)
        eos = generation.eos_token_id
        stop = frozenset([eos] if isinstance(eos, int) else eos or ())
    except Exception as error:  # transformers checks what a config says by exceptions of many kinds
        _check_config(directory)
        raise UserError(f"{directory}: {GENERATION} cannot be read ({_first_line(error)}); download it again, or remove it") from error
    return Vocabulary(tokenizer, stop, vocab_size, generation)


def _check_config(directory: Path) -> None:
    """UserError where it is config.json that transformers cannot read, which it also reads for a tokenizer."""
    if not (directory / CONFIG).exists():
        return
    try:
        AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{directory / CONFIG}: transformers cannot read it ({why}); restore the model's own {CONFIG}") from error


def _tokenizer(directory: Path, file: Path | None) -> PreTrainedTokenizerBase:
    """Of the files in ``directory``; where there are none, of the GGUF ``file``, by the class that transformers has for its model."""
    if file is None or any((directory / name).exists() for name in TOKENIZERS):
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    families = {architecture: model_type for architecture, (model_type, _) in FAMILIES.items()}
    model_type = families.get(str(read_gguf(file).metadata.get("general.architecture")), "")
    found = tokenizer_class_from_name(TOKENIZER_MAPPING_NAMES.get(model_type) or "TokenizersBackend") or TokenizersBackend
    return found.from_pretrained(file.parent, gguf_file=file.name)


def ids_of(asked: Sequence[Asked], vocabulary: Vocabulary, template: ChatTemplate | None = None) -> list[tuple[int, ...]]:
    """The ids of each request's own prompt: messages, and what a person says, as ``template`` renders it where there is one. What the
    tokenizer puts at a text's beginning and end is left out of a conversation's later turns, which are continuations. UserError for a text
    that has no tokens, or without a tokenizer."""
    begun: set[str] = set()
    prompts = []
    for request in asked:
        prompts.append(_ids(request, vocabulary, template, special=request.conversation not in begun))
        if request.conversation is not None:
            begun.add(request.conversation)
    return prompts


def random_ids(count: int, tokens: int, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """``count`` prompts of ``tokens`` random ids each, the same for the same ``seed``."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(vocab_size) for _ in range(tokens)) for _ in range(count)]


def _remedy(error: Exception) -> str:
    """What to do about a tokenizer that cannot be read."""
    absent = [name for name in _READERS if not any(distributions(name=name))]
    if absent:
        return f"it may want a package that is not installed: pip install {' '.join(absent)}"
    if "custom code" in str(error):
        return "code of a checkpoint is never run: use a model whose tokenizer transformers has"
    return "download its files again"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _ids(request: Asked, vocabulary: Vocabulary, template: ChatTemplate | None, special: bool) -> tuple[int, ...]:
    if request.messages and template is None:
        raise UserError(
            f"{request.where}: messages need a chat template, and there is none; give the text as prompt, or leave template=false out"
        )
    if template is not None and (request.messages or request.said):
        return template.ids(request.messages or [{"role": "user", "content": request.prompt}], request.where)
    if not isinstance(request.prompt, str):
        return request.prompt
    if vocabulary.tokenizer is None:
        raise UserError(
            f"{request.where}: the checkpoint has no tokenizer, so text cannot be read; give ids as `tokens` in a .jsonl file, or leave"
            " prompt= and prompts= out for random tokens"
        )
    ids = vocabulary.tokenizer(request.prompt, add_special_tokens=special)["input_ids"]
    if not ids:
        raise UserError(f"{request.where}: the prompt {request.prompt!r} has no tokens; give some text")
    return tuple(ids)
