"""What a reply may say, by a grammar: llguidance's matchers over the checkpoint's own tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from penstock.planner.common.errors import UserError
from penstock.runtime.kv.attention.page_tables import Put

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORD_BITS = 64
PUT_WORDS = 1 << 14
"""Words of masks that are brought to the device at once: what passes through page-locked memory."""


class Matcher:
    """One reply's place in its grammar."""

    def __init__(self, matcher: LLMatcher, words: int):
        self._matcher, self._words = matcher, words

    def twin(self) -> Matcher:
        """Another reply's, which is as far."""
        return Matcher(self._matcher.deep_copy(), self._words)

    def mask(self) -> array[int]:
        """The tokens that may come next, a bit each, in words of 64. RuntimeError where the grammar became too large."""
        words = array("q", bytes(8 * self._words))
        self._matcher.unsafe_compute_mask_ptr(words.buffer_info()[0], 8 * self._words)
        self._check()
        return words

    def accept(self, token: int) -> None:
        """``token`` was chosen."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def over(self) -> bool:
        """Whether nothing may come any more but the end."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(f"the reply's grammar: {_line(self._matcher.get_error())}")


class Grammars:
    """Compiles grammars on a thread of its own, with the checkpoint's ``tokenizer``. Its trie is begun at once: about a second for 128k
    tokens. ``vocab`` are the logits of a token, ``stop_ids`` what ends a reply. To be closed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab: int, stop_ids: Sequence[int]):
        self._words = -(-vocab // WORD_BITS)
        self._thread = ThreadPoolExecutor(1, "penstock-grammar")
        self._tokens: Future[LLTokenizer] = self._thread.submit(_tokens, tokenizer, vocab, sorted(stop_ids))

    def compile(self, grammar: str, done: Callable[[Matcher | UserError], None]) -> None:
        """``done`` gets what became of llguidance's ``grammar``, on another thread."""
        self._thread.submit(self._compile, grammar).add_done_callback(partial(_tell, done))

    def _compile(self, grammar: str) -> Matcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens.result(), grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"the grammar is not understood: {_line(matcher.get_error())}")
        return Matcher(matcher, self._words)

    def close(self) -> None:
        """What is being compiled is waited for; the rest is dropped."""
        self._thread.shutdown(cancel_futures=True)


def forbid(scores: torch.Tensor, masks: Mapping[int, array[int]], put: Put) -> None:
    """Rows of ``scores`` [rows, vocab] keep what their masks allow. Costs 17 bytes a logit of as many rows as ``PUT_WORDS`` are the masks
    of, one at least."""
    rows, vocab = list(masks), scores.shape[1]
    together = max(1, PUT_WORDS // -(-vocab // WORD_BITS))
    shifts = torch.arange(WORD_BITS, device=scores.device)
    for first in range(0, len(rows), together):
        some = rows[first : first + together]
        words = put(array("q", b"".join(masks[row].tobytes() for row in some))).view(len(some), -1, 1)
        forbidden = ((words >> shifts) & 1).view(len(some), -1)[:, :vocab] == 0
        for row, own in zip(some, forbidden, strict=True):
            scores[row].masked_fill_(own, -torch.inf)


def _tokens(tokenizer: PreTrainedTokenizerBase | None, vocab: int, stop_ids: list[int]) -> LLTokenizer:
    if not isinstance(tokenizer, TokenizersBackend):
        raise UserError("the checkpoint has no fast tokenizer, which grammars need; leave the grammar out")
    try:
        from llguidance.hf import from_tokenizer
    except ImportError:
        raise UserError("grammars need llguidance, which is not installed; pip install llguidance") from None
    try:
        return from_tokenizer(tokenizer, n_vocab=max(vocab, len(tokenizer)), eos_token=stop_ids or None)
    except ValueError as error:
        raise UserError(f"the checkpoint's tokenizer makes no grammar: {_line(str(error))}") from error


def _tell(done: Callable[[Matcher | UserError], None], made: Future[Matcher]) -> None:
    if made.cancelled():
        return
    error = made.exception()
    if error is None:
        done(made.result())
    else:
        done(error if isinstance(error, UserError) else UserError(f"the grammar cannot be compiled: {_line(str(error))}"))


def _line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
