"""Models from Python: a plan, opened, and what can be asked of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.planner.common.errors import UserError, nearest
from penstock.planner.common.interrupt import uncollected, uninterrupted
from penstock.planner.common.threads import wait_asleep
from penstock.planner.contract.plan.plan import Plan
from penstock.plans import Value, load_plan, path_text, typed
from penstock.runtime.asked.order import capacity_tokens, check_fit
from penstock.runtime.asked.page_room import fitted, unplanned_dram_bytes
from penstock.runtime.asked.requests import Asked
from penstock.runtime.asked.run_schema import RunConfig
from penstock.runtime.asked.sampling_keys import SamplingKeys, check_sampling, sampling_of
from penstock.runtime.cli import PROGRAM
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.groundwork import Groundwork
from penstock.runtime.memory.kernels import keep_few_kernels
from penstock.runtime.told.piecewise import PieceByPiece

if TYPE_CHECKING:
    import torch

    from penstock.runtime.asked.prompts import Vocabulary
    from penstock.runtime.engine.passes.generate import Batch, Generation
    from penstock.runtime.engine.passes.sampling import Sampler
    from penstock.runtime.engine.session import Session

Prompt = str | Sequence[int]
"""A text, which the checkpoint's tokenizer reads, or token ids."""
KEYS = ("checkpoint", "adapter", "kv", "engine", "force")
"""Keys of `runtime run` that say how a model is opened; the others say what it is asked."""


@dataclass(frozen=True)
class Token:
    """One token of a stream. Printed, it is its text."""

    id: int
    text: str
    """What it adds to the text so far. A character that takes several tokens comes with the last of them, so it may be empty."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Completion:
    """What one prompt was continued with. Printed, it is its text."""

    tokens: list[int]
    """Without the stop token."""
    text: str
    """Special tokens left out; ids separated by spaces where the checkpoint has no tokenizer."""

    def __str__(self) -> str:
        return self.text


def open_model(
    plan: Plan | str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    overrides: Sequence[str] = (),
    **keys: Value,
) -> Model:
    """``plan``, or the plan in that file, opened: its memory taken, its weights loaded as far as they stay.

    ``checkpoint`` is a directory, a Hugging Face checkpoint or a packed store; None takes the plan's. The keys ``kv.*``, ``engine.*`` and
    ``force.*`` of `runtime run --help` go by their names, ``**{"kv.dir": "auto"}``, or as they are typed, in ``overrides``.

    Takes the plan's DRAM and VRAM (``plan.prediction.dram_bytes``, ``.vram_bytes``) until it is closed, and ``plan.prediction.load_s``
    seconds. One open model a process and card: torch's allocator is held to the plan's budget. Raises UserError where plan, checkpoint
    and machine do not fit together, before anything is loaded.
    """
    name = "(given)" if isinstance(plan, Plan) else path_text("plan", plan)
    given: dict[str, Value] = {"plan": name}
    if checkpoint is not None:
        given["checkpoint"] = path_text("checkpoint", checkpoint)
    words = typed(keys, overrides)
    for word in words:
        key = word.partition("=")[0].lstrip("+~ ").rstrip()
        if key.partition(".")[0] not in KEYS:
            raise UserError(f"{word}: a model is opened by {', '.join(KEYS)}; what it is asked goes to its methods")
    cfg = PROGRAM.configuration("run", [*typed(given), *words])
    fit, found = check_fit(cfg, plan if isinstance(plan, Plan) else load_plan(plan))
    return Model(cfg, fit, found)


class Model:
    """A model that is open. Made by :func:`penstock.open`; closed by ``with`` or :meth:`close`.

    From one thread. A call ends a stream that is still going on. Ctrl-C is heard between two passes over the weights, after which the
    model can be asked again, as after a stream that was left by ``break``. What fails within a pass (a read of the drive, memory) leaves
    the model of no use but to be closed.
    """

    def __init__(self, cfg: RunConfig, plan: Plan, checkpoint: Path):
        self._stack = ExitStack()
        self._passes: Generator[Generation, None, None] | None = None
        self._failed: str | None = None
        self._heard: list[int] = []
        keep_few_kernels()
        if plan.hardware.gpu or plan.prediction.ssd_bytes_per_token:
            wait_asleep()
        try:
            self._session, self._vocabulary = self._open(cfg, plan, checkpoint)
        except BaseException:
            self._failed = "it could not be opened"
            self.close()
            raise
        said = (self._session.pageable, self._session.slow_pages)
        self.plan = replace(self._session.plan, notes=(*plan.notes, *(line for line in said if line is not None)))
        """As it was opened: with what the machine cannot do as planned, among the notes."""

    def _open(self, cfg: RunConfig, plan: Plan, checkpoint: Path) -> tuple[Session, Vocabulary]:
        cfg = replace(cfg, kv=fitted(cfg.kv, plan))
        ground = self._stack.enter_context(Groundwork.of(plan, unplanned_dram_bytes(cfg.kv, plan)))
        ground.open_card()
        with uncollected():
            from penstock.runtime.asked.prompts import read_vocabulary
            from penstock.runtime.engine.open_session import open_session
            from penstock.runtime.engine.passes.sampling import Sampler, Sampling
            from penstock.runtime.engine.sides.engine_options import EngineOptions

        vocabulary = read_vocabulary(checkpoint, plan.model.vocab)
        options = EngineOptions(**vars(cfg.engine), row_tokens=capacity_tokens(plan, 1))
        session = self._stack.enter_context(open_session(plan, checkpoint, ground, options, cfg.kv))

        largest = _batch(plan, vocabulary, [(0,) * plan.workload.prompt_tokens] * plan.decisions.batch, 1)
        session.load(largest, samplers=[Sampler(each, session.device) for each in (Sampling(), Sampling(temperature=1.0, top_p=0.5))])
        return session, vocabulary

    @property
    def capacity_tokens(self) -> int:
        """Tokens that a prompt and its continuation may have together, where they are computed alone. By a server's plan those that it
        gives one row; prompts of one call share its pool."""
        return capacity_tokens(self.plan, 1)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        *,
        stop: Sequence[str] = (),
        **sampling: float | None,
    ) -> Iterator[Token]:
        """The continuation of ``prompt``, token by token as each is chosen; without the stop token. See :meth:`generate`.

        It may be left at any token: by ``break``, ``close()`` or Ctrl-C.
        """
        batch = self._read([prompt], max_new_tokens)
        return self._tokens(self._generating(batch, self._sampler(sampling), stop))

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | None = None,
        *,
        stop: Sequence[str] = (),
        **sampling: float | None,
    ) -> list[Completion]:
        """A continuation of each of ``prompts``, in their order; ``plan.decisions.batch`` at a time are computed together.

        Up to ``max_new_tokens`` each, the plan's ``workload.new_tokens`` where None; a stop token of the checkpoint or one of the texts
        ``stop`` ends it before. ``sampling`` has the keys of `runtime run`: ``greedy``, ``temperature``, ``top_k``, ``top_p``, ``min_p``,
        ``typical_p``, ``repetition_penalty``, ``frequency_penalty``, ``presence_penalty``, ``no_repeat_ngram``, ``seed``; what is left
        out is as the checkpoint's generation_config.json says. Raises UserError for a prompt that has no tokens, or more than the plan
        holds KV for.
        """
        groups, sampler = list(self._groups(prompts, max_new_tokens)), self._sampler(sampling)
        made: list[list[int]] = []
        for batch in groups:
            *_, last = self._generating(batch, sampler, stop)
            made += last.tokens
        return [Completion(tokens, self._vocabulary.text(tokens)) for tokens in made]

    def logits(self, prompts: Sequence[Prompt] | torch.Tensor) -> torch.Tensor:
        """Of the token that comes next behind each of ``prompts``, which are texts, lists of ids or a tensor of ids [rows, tokens].

        [rows, vocab] on the CPU, in the model's type: ``rows * vocab * dtype`` bytes. Raises UserError as :meth:`generate` does.
        """
        import torch

        rows: Sequence[Prompt] = prompts.tolist() if isinstance(prompts, torch.Tensor) else prompts
        found = []
        for batch in list(self._groups(rows, 1)):
            self._leave()
            with self._whole():
                found.append(self._session.logits(batch))
        return torch.cat(found)

    def close(self) -> None:
        """Give memory, threads and files back, once ``kv.dir`` has the prompts' KV or ``kv.flush_s`` is over. Safe to call twice."""
        self._leave()
        if self._failed is None:
            self._session.flush()
        self._failed = "it is closed"
        self._stack.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._failed = "it was left by an exception"
        self.close()

    def _sampler(self, sampling: Mapping[str, Any]) -> Sampler:
        from penstock.runtime.engine.passes.sampling import Sampler

        known = [field.name for field in fields(SamplingKeys)]
        for name in sampling:
            if name not in known:
                raise UserError(f"{name}: no such key of sampling; choose of {', '.join(known)}{nearest(name, known)}")
        keys = SamplingKeys(**sampling)
        check_sampling(keys)
        return Sampler(sampling_of(keys, self._vocabulary.generation), self._session.device)

    def _groups(self, prompts: Sequence[Prompt], max_new_tokens: int | None) -> Iterator[Batch]:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts or isinstance(prompts[0], int):
            raise UserError(f"prompts={prompts!r}: must be a list of texts or of lists of token ids; put one prompt into a list")
        size = self.plan.decisions.batch
        for first in range(0, len(prompts), size):
            yield self._read(prompts[first : first + size], max_new_tokens, first)

    def _read(self, prompts: Sequence[Prompt], max_new_tokens: int | None, first: int = 0) -> Batch:
        """``prompts``, of which the first is number ``first``, as a batch that fits."""
        from penstock.runtime.asked.prompts import ids_of

        if max_new_tokens is not None and (type(max_new_tokens) is not int or max_new_tokens < 1):
            raise UserError(f"max_new_tokens={max_new_tokens!r}: must be a whole number, 1 or more; None takes the plan's")
        asked = [Asked(f"prompt {k}", _text(p, k) if isinstance(p, str) else self._ids(p, k), 1) for k, p in enumerate(prompts, first)]
        ids = ids_of(asked, self._vocabulary)
        longest, room = max(map(len, ids)), capacity_tokens(self.plan, len(ids))
        new_tokens = min(self.plan.workload.new_tokens, room - longest) if max_new_tokens is None else max_new_tokens
        if new_tokens < 1 or longest + new_tokens > room:
            k = first + max(range(len(ids)), key=lambda i: len(ids[i]))
            raise UserError(
                f"prompt {k} has {longest} tokens and max_new_tokens={new_tokens}: the plan holds KV for {room} together,"
                f" of which 1 is new at least; solve again with workload.prompt_tokens={longest} workload.new_tokens={max(1, new_tokens)}"
            )
        return _batch(self.plan, self._vocabulary, ids, new_tokens)

    def _ids(self, prompt: Sequence[int], number: int) -> tuple[int, ...]:
        if not isinstance(prompt, Iterable):
            raise UserError(f"prompt {number} is {prompt!r}: must be a text or a list of token ids; give one")
        vocab, ids = self.plan.model.vocab, tuple(prompt)
        wrong = next((token for token in ids if type(token) is not int or not 0 <= token < vocab), None)
        if wrong is not None or not ids:
            what = "no tokens" if not ids else f"the token {wrong!r}"
            raise UserError(f"prompt {number} has {what}: it must have some ids, of 0 to {vocab - 1}; give such")
        return ids

    def _generating(self, batch: Batch, sampler: Sampler, stop: Sequence[str]) -> Generator[Generation, None, None]:
        """What ``batch`` has become after each pass that chose tokens; it takes the place of a stream that goes on."""
        if isinstance(stop, str) or not isinstance(stop, Collection) or not all(isinstance(text, str) and text for text in stop):
            raise UserError(f"stop={stop!r}: must be a list of texts that are not empty; leave it out, or give such")
        self._leave()

        def ended(tokens: list[list[int]]) -> list[bool]:
            return [any(text in self._vocabulary.text(t) for text in stop) for t in tokens]

        self._passes = self._each(self._session.generating(batch, sampler, ended if stop else None, self._hear))
        return self._passes

    def _each(self, made: Generator[Generation, None, None]) -> Generator[Generation, None, None]:
        with closing(made):
            while True:
                with self._whole():
                    result = next(made, None)
                if result is None:
                    return
                yield result

    def _tokens(self, passes: Generator[Generation, None, None]) -> Iterator[Token]:
        text = PieceByPiece(self._vocabulary.text)
        with closing(passes):
            for result in passes:
                (ids,) = result.tokens
                for token in ids[text.count :]:
                    yield Token(token, text.add(token))

    def _leave(self) -> None:
        """End the stream that is going on, if one is."""
        passes, self._passes = self._passes, None
        if passes is not None:
            passes.close()

    def _hear(self, *_: object) -> None:
        """Between two passes: leave them for a signal that came."""
        if self._heard:
            raise KeyboardInterrupt

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Inside, no signal breaks a pass, and what does leaves the model closed to more."""
        from penstock.runtime.memory.cuda import told_in_one_line

        if self._failed is not None:
            raise UserError(f"the model can be asked no more: {self._failed}; open it again")
        try:
            with told_in_one_line(Budget.of(self.plan), self._session.device), uninterrupted() as self._heard:
                yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._failed = f"a pass failed ({' '.join(str(error).split()) or type(error).__name__})"
            raise


def _text(prompt: str, number: int) -> str:
    """UserError for one that no encoding has, as of a file whose name is not UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        half = ascii(prompt[error.start])
        raise UserError(f"prompt {number} holds half a character, {half}: it must be a text that UTF-8 can hold; give one") from None
    return prompt


def _batch(plan: Plan, vocabulary: Vocabulary, prompts: Sequence[Sequence[int]], new_tokens: int) -> Batch:
    from penstock.runtime.engine.passes.generate import Batch

    return Batch(
        prompts=prompts,
        max_new_tokens=new_tokens,
        chunk_tokens=min(plan.chunk_tokens(len(prompts)), plan.workload.prompt_tokens),
        stop_ids=vocabulary.stop_ids,
    )
