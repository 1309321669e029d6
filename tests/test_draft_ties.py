"""Whether a first difference is a tie: what rounding is measured by, and at how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch")

from bench.draft_ties import SEEN, Look, Parting, look, places  # noqa: E402
from penstock.runtime.engine.passes.generate import Generation, Pass  # noqa: E402
from penstock.runtime.model.rows import Row, RowKind, Step  # noqa: E402

PROMPT, REPLY, ROWS = (5,) * 20, (1, 2, 3) * 8, 6
APART, OFF = 0.0156, 0.0312


@dataclass
class Played:
    """A model whose logits are ``OFF`` otherwise in passes of many rows, but not behind ``alike`` tokens."""

    alike: frozenset[int] = frozenset()
    says: tuple[int, ...] = REPLY
    read: list[tuple[int, int]] = field(default_factory=list)
    """Of each text but the plain reply: its tokens, and those of a pass."""

    def logits(self, place: int, off: float) -> torch.Tensor:
        logits = torch.zeros(1, 9)
        logits[0, self.says[place]], logits[0, 4] = 2.0 + APART + off, 2.0
        return logits

    def __call__(self, tokens: Sequence[int], new: int, chunk: int) -> Generation:
        place = len(tokens) - len(PROMPT)
        many = place > 0
        if many:
            assert tuple(tokens) == PROMPT + self.says[:place]
            self.read.append((len(tokens), chunk))
        else:
            assert chunk > ROWS, "the prompt of a plain reply is read as in the run"
        steps = [Pass(_step(4, wanted=0), torch.zeros(0, 9))]
        off = OFF if many and len(tokens) not in self.alike else 0.0
        steps += [Pass(_step(1, wanted=1), self.logits(place + k, off)) for k in range(new)]
        return Generation([list(self.says[place : place + new])], passes=steps)


def _step(tokens: int, wanted: int) -> Step:
    return Step((Row(0, (0,) * tokens, 0, (), RowKind.prompt, wanted),))


def test_rounding_is_measured_behind_whole_passes_next_to_where_the_texts_part() -> None:
    assert places(20, 24, 10, 6) == [10, 4, 16, 22]
    many = places(400, 128, 57, 6)
    assert len(many) == SEEN and all((400 + place) % 6 == 0 and abs(place - 57) <= 27 for place in many)
    played = Played()
    look(played, PROMPT, REPLY, 10, 512, ROWS)
    assert played.read == [(30, 6), (24, 6), (36, 6), (42, 6)]


def test_logits_that_are_the_same_to_the_last_bit_where_the_texts_part_hide_no_rounding() -> None:
    """As BF16's are: those of one row and of six differed at most tokens of a run by two steps, and not at the one that parted."""
    seen = look(Played(alike=frozenset({30, 24, 36})), PROMPT, REPLY, 10, 512, ROWS)
    assert (seen.apart, seen.rounding, seen.repeats) == (pytest.approx(APART, abs=1e-6), pytest.approx(OFF, abs=1e-6), True)
    assert Parting(0, 10, seen).is_tie


def test_rounding_is_what_two_logits_move_against_each_other() -> None:
    played = Played()
    plain = played.logits
    played.logits = lambda place, off: plain(place, off) + (torch.tensor([[-off] * 9]) if off else 0.0)  # type: ignore[method-assign]
    seen = look(played, PROMPT, REPLY, 10, 512, ROWS)
    assert seen.rounding == pytest.approx(OFF, abs=1e-6), "all logits moved by -OFF, and one of them by OFF besides"


def test_where_one_row_and_many_give_the_same_logits_no_difference_is_a_tie() -> None:
    assert not Parting(0, 10, look(Played(alike=frozenset(range(99))), PROMPT, REPLY, 10, 512, ROWS)).is_tie


def test_plain_decoding_that_says_otherwise_before_is_no_tie() -> None:
    its = (*REPLY[:8], 7, *REPLY[9:])
    assert not look(Played(), PROMPT, its, 10, 512, ROWS).repeats
    assert look(Played(), PROMPT, its, 8, 512, ROWS).repeats
    assert str(Parting(3, 10, Look(0.0, 1.0, False))) == "text 3 parts at token 10, and plain decoding parts from itself before"
