"""`runtime chat`: a conversation with the model of a plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT

import transformers
from rich.console import Console
from rich.table import Table

from penstock.planner.common.console import Screen, harmless
from penstock.planner.common.errors import UserError, nearest
from penstock.planner.common.interrupt import noted
from penstock.planner.common.measures import show_rate, show_seconds
from penstock.planner.common.output import write_at_once
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.bills.cost import Prediction
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.chat_template import find_template, no_template
from penstock.runtime.asked.dialogue import Dialogue
from penstock.runtime.asked.foreseen import for_requests
from penstock.runtime.asked.prompts import Vocabulary, read_vocabulary
from penstock.runtime.asked.reasoning import Piece
from penstock.runtime.asked.run_schema import ChatConfig
from penstock.runtime.asked.sampling_keys import sampling_of
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.engine.talk import Talk
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.free_memory import refuse_if_short
from penstock.runtime.memory.groundwork import Groundwork
from penstock.runtime.told.progress import PhaseBar
from penstock.runtime.told.run_report import busiest
from penstock.runtime.told.spoken import Spoken
from penstock.runtime.told.stage_clock import StageClock
from penstock.runtime.tools.chat_input import FENCE, PipedInput, TerminalInput, unechoed

COMMANDS = {
    "/help": "this list",
    "/reset": "begin a new conversation",
    "/save": "FILE: write the conversation, as messages (*.json, *.jsonl) or as text",
    "/stats": "tokens a second beside predicted, what binds, and how full the context is",
    "/quit": "end, as Ctrl-D does",
}
KEYS = f"Enter sends, Alt-Enter begins a new line, {FENCE} begins and ends a text of several lines, Ctrl-C stops a reply, Ctrl-D ends."


class _Stopped(Exception):
    """Ctrl-C before the first token."""


@dataclass(frozen=True)
class Turn:
    """What one reply took."""

    prompt_tokens: int
    kept_tokens: int
    """Of these, computed in an earlier turn."""
    made: Generation
    stopped: bool
    predicted: Prediction
    """For a prompt and a reply of these lengths."""
    bound_by: str | None
    """The stage that was busy longest while it decoded."""

    @property
    def tokens(self) -> int:
        return len(self.made.tokens[0])

    @property
    def tokens_per_s(self) -> float | None:
        return self.made.stepped / self.made.decode_s if self.made.step_s else None


@dataclass
class _Said:
    """Counts of the whole conversation, for the closing line."""

    turns: list[Turn] = field(default_factory=list)

    def document(self) -> dict[str, object]:
        stepped = sum(turn.made.stepped for turn in self.turns)
        seconds = sum(turn.made.decode_s for turn in self.turns)
        return {
            "turns": len(self.turns),
            "computed_prompt_tokens": sum(turn.prompt_tokens - turn.kept_tokens for turn in self.turns),
            "kept_prompt_tokens": sum(turn.kept_tokens for turn in self.turns),
            "generated_tokens": sum(turn.tokens for turn in self.turns),
            "decode_tokens_per_s": stepped / seconds if seconds else None,
        }


def chat(cfg: ChatConfig, plan: Plan, checkpoint: Path, ground: Groundwork) -> None:
    """Talk until standard input ends. Takes the plan's memory meanwhile; ``ground`` is given back."""
    transformers.utils.logging.disable_progress_bar()
    device = ground.open_card()
    refuse_if_short(Budget.of(plan.of_rank(0)), ground.free())
    vocabulary = read_vocabulary(checkpoint, plan.model.vocab)
    if vocabulary.tokenizer is None:
        raise UserError(f"{checkpoint}: the checkpoint has no tokenizer, so there is nothing to talk in; add its tokenizer.json")
    template = find_template(vocabulary.tokenizer, cfg.template)
    if template is None and cfg.template is not False:
        raise UserError(no_template(checkpoint))
    if template is None and cfg.system is not None:
        raise UserError(f"system={cfg.system!r}: raw text has no system message; leave it out, or template=false")
    dialogue = Dialogue(vocabulary, template, cfg.system)
    aside = Console(stderr=True, highlight=False, quiet=cfg.quiet)
    sampling = sampling_of(cfg, vocabulary.generation)
    sampler = Sampler(sampling, device)
    with PhaseBar() as bar, open_session(plan, checkpoint, ground, EngineOptions(**vars(cfg.engine)), cfg.kv) as session:
        largest = Batch([(0,) * plan.workload.prompt_tokens], 1, min(plan.decisions.prefill_chunk_tokens, plan.workload.prompt_tokens))
        session.load(largest, bar, [sampler])
        bar.rest()
        if sampling.line is not None:
            aside.print(sampling.line, style="dim", markup=False, soft_wrap=True)
        talk, clock = Talk(session), StageClock(session.engine)
        Chat(cfg, session.plan, vocabulary, dialogue, talk, sampler, clock, aside, bar).converse()
        session.flush(bar)


class Chat:
    """Reads, replies, obeys commands."""

    def __init__(
        self,
        cfg: ChatConfig,
        plan: Plan,
        vocabulary: Vocabulary,
        dialogue: Dialogue,
        talk: Talk,
        sampler: Sampler,
        clock: StageClock,
        aside: Console,
        bar: PhaseBar,
    ):
        self._cfg, self._plan, self._vocabulary, self._dialogue, self._talk = cfg, plan, vocabulary, dialogue, talk
        self._sampler, self._clock, self._aside, self._bar = sampler, clock, aside, bar
        self._person = sys.stdin.isatty() and sys.stdout.isatty()
        self._screen, self._reasons = Screen(highlight=False, emoji=False), False
        self._said = _Said()

    def converse(self) -> None:
        """Until Ctrl-D, /quit or the end of what is piped in; then the closing line."""
        read = TerminalInput(COMMANDS, self._status).read if self._person else PipedInput().read
        self._greet()
        while True:
            try:
                text = read()
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._person:
                    raise
                self._tell("Ctrl-D ends, /help tells more")
                continue
            if text.strip() in ("/quit", "/exit"):
                break
            if text.strip():
                self._answer(text)
        self._talk.end()
        if not self._cfg.quiet or self._cfg.json:
            self._cfg.close(self._said.document())

    def _greet(self) -> None:
        p = self._plan
        what = "chat template" if self._cfg.template is not False else "raw text"
        self._tell(
            f"{p.model.name} on {p.hardware.name}: {show_rate(p.prediction.decode_tokens_per_s)} tokens/s predicted, context of "
            f"{self._talk.capacity_tokens} tokens, {what}; /help tells more"
        )

    def _answer(self, text: str) -> None:
        """A person's mistake is told, and the conversation goes on; what is piped in ends with it."""
        try:
            if text.startswith("/") and "\n" not in text:
                self._obey(text.strip())
            else:
                self._reply(text)
        except UserError as error:
            if not self._person:
                raise
            self._aside.print(str(error), style="yellow", markup=False, soft_wrap=True)

    def _obey(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._help(),
            "/reset": lambda _: self._reset(),
            "/save": self._save,
            "/stats": lambda _: self._stats(),
        }
        if word not in commands:
            raise UserError(f"{word}: no such command; there are {', '.join(COMMANDS)}{nearest(word, COMMANDS)}")
        commands[word](rest.strip())

    def _reply(self, text: str) -> None:
        prompt = self._prompt(text)
        room = self._talk.capacity_tokens - len(prompt)
        limit = room if self._cfg.max_new_tokens is None else min(room, self._cfg.max_new_tokens)
        made, stopped = self._speak(prompt, limit)
        if made is None:
            self._dialogue.take_back()
            self._tell("stopped before the first token; what you wrote last is forgotten")
            return
        self._dialogue.hear(made.tokens[0])
        turn = self._turn(prompt, made, stopped)
        self._said.turns.append(turn)
        if self._person:
            rate = (
                ""
                if turn.tokens_per_s is None
                else f", {show_rate(turn.tokens_per_s)} tokens/s ({show_rate(turn.predicted.decode_tokens_per_s)} predicted)"
            )
            self._tell(f"{turn.tokens} tokens{rate}{', stopped' if stopped else ''}")
        if not stopped and turn.tokens == room:
            self._tell(f"the context of {self._talk.capacity_tokens} tokens is full: {self._remedy()}")

    def _prompt(self, text: str) -> tuple[int, ...]:
        """The whole conversation, with room for a reply. UserError, and nothing said, where there is none."""
        prompt = self._dialogue.ask(text)
        if not prompt:
            self._dialogue.take_back()
            raise UserError("that has no tokens; write some text")
        while len(prompt) >= self._talk.capacity_tokens and self._cfg.clip is not None and self._dialogue.shorten():
            self._tell("clip=tail: the first turn is forgotten")
            prompt = self._dialogue.ids
        if len(prompt) >= self._talk.capacity_tokens:
            self._dialogue.take_back()
            raise UserError(
                f"with this the conversation has {len(prompt)} tokens, and the context has {self._talk.capacity_tokens}: {self._remedy()}"
            )
        return prompt

    def _remedy(self) -> str:
        most = self._plan.model.max_tokens
        if most and self._talk.capacity_tokens >= most:
            return "/reset begins anew, and the model is made for no more"
        return "/reset begins anew, and a plan for more is made with workload.context_tokens="

    def _speak(self, prompt: tuple[int, ...], limit: int) -> tuple[Generation | None, bool]:
        """The reply, printed token by token, and whether Ctrl-C stopped it; None where it did before the first token."""
        (decode, splitter), made = self._dialogue.reply(), None
        spoken = Spoken(decode, splitter, self._say)
        left: list[int] = []
        self._clock.book("aside")

        def progress(phase: str, done: int, total: int) -> None:
            if phase == "decode":
                if done == 1:
                    self._clock.book("prefill")
                return
            self._bar(phase, done, total)
            if left:
                raise _Stopped

        with noted(left, numbers=(SIGINT,)), unechoed(self._person), suppress(_Stopped):
            for made in self._talk.reply(prompt, limit, self._sampler, self._vocabulary.stop_ids, progress):
                self._bar.rest()
                spoken.add(made.tokens[0][spoken.count :])
                if left:
                    break
        self._bar.rest()
        if made is not None:
            spoken.rest()
            self._say(Piece("\n"))
            if spoken.only_reasons:
                self._tell("the reply ended before its answer: all of it is reasoning")
        self._clock.book("decode")
        return made, bool(left)

    def _turn(self, prompt: tuple[int, ...], made: Generation, stopped: bool) -> Turn:
        tokens = max(1, len(made.tokens[0]))
        predicted = for_requests(self._plan, 1, len(prompt), tokens, 1).prediction
        return Turn(
            len(prompt), self._talk.kept_tokens, made, stopped, predicted, busiest(self._clock.phases["decode"]) if made.step_s else None
        )

    def _status(self) -> str:
        used = self._talk.used_tokens
        last = self._said.turns[-1].tokens_per_s if self._said.turns else None
        rate = "" if last is None else f"   {show_rate(last)} tokens/s"
        return f"{self._plan.model.name}   {used} of {self._talk.capacity_tokens} tokens{rate}   /help"

    def _help(self) -> None:
        for name, meaning in COMMANDS.items():
            self._tell(f"{name:<8} {meaning}")
        self._tell(KEYS)

    def _reset(self) -> None:
        self._dialogue.reset()
        self._talk.end()
        self._tell("a new conversation")

    def _save(self, where: str) -> None:
        if not where:
            raise UserError("/save: name a file, such as /save talk.md")
        path, messages = user_path(where), self._dialogue.messages
        if path.suffix in (".json", ".jsonl"):
            text = json.dumps({"messages": messages}, ensure_ascii=False) + "\n"
        else:
            text = "\n\n".join(f"**{message['role']}**\n\n{message['content']}" for message in messages) + "\n"
        write_at_once(path, "/save", lambda temporary: temporary.write_text(text, encoding="utf-8"))
        self._tell(f"wrote {len(messages)} messages to {path}")

    def _stats(self) -> None:
        if not self._said.turns:
            raise UserError("/stats: nothing was said yet")
        last, p = self._said.turns[-1], self._said.turns[-1].predicted
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("")
        for name in ("measured", "predicted"):
            table.add_column(name, justify="right")
        rate = "-" if last.tokens_per_s is None else show_rate(last.tokens_per_s)
        table.add_row("tokens/s", rate, show_rate(p.decode_tokens_per_s))
        table.add_row("bound by", last.bound_by or "-", str(p.bottleneck_decode))
        table.add_row("first token", show_seconds(last.made.prefill_s + last.made.first_token_s), "")
        self._aside.print(table)
        computed = last.prompt_tokens - last.kept_tokens
        self._tell(f"of the last prompt's {last.prompt_tokens} tokens {last.kept_tokens} were kept and {computed} computed")
        self._tell(f"context: {self._talk.used_tokens} of {self._talk.capacity_tokens} tokens, {len(self._said.turns)} replies so far")

    def _tell(self, line: str) -> None:
        self._aside.print(line, style="dim", markup=False, soft_wrap=True)

    def _say(self, piece: Piece) -> None:
        """What is reasoned is dim on a terminal. Without one it goes where all else goes that is no answer."""
        ends, self._reasons = self._reasons and not piece.reasoning, piece.reasoning
        if not self._person:
            if piece.reasoning or ends:
                self._aside.print(piece.text if piece.reasoning else "", end="\n" if ends else "", markup=False, soft_wrap=True)
            if not piece.reasoning:
                print(piece.text, end="", flush=True)
            return
        if piece.reasoning:
            self._screen.print(harmless(piece.text), style="dim", end="", markup=False, soft_wrap=True)
        else:
            print("\n\n" * (ends and piece.text != "\n") + harmless(piece.text), end="", flush=True)
