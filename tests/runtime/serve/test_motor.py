"""What a motor says is what each prompt alone would be told, whoever shares its passes, its pages and its fate."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.runtime.engine.passes.rehearsal import longest_step
from penstock.runtime.kv.disk.writer_lock import Locked
from penstock.runtime.model.rows import Step
from penstock.runtime.serve.motor import served as serving
from penstock.runtime.serve.motor.inbox import Gone, Inbox
from penstock.runtime.serve.motor.logprobs import cut_step
from penstock.runtime.serve.motor.motor import patiently
from penstock.runtime.serve.motor.serving_loop import Steps
from penstock.runtime.serve.wire.frames import Frames
from penstock.runtime.serve.wire.messages import Cancel, Drain, Sampled, Stopped
from tests.runtime.serve.motors import Motor, alone, motor, serving_plan, submit
from tests.runtime.steppers import unstreamed
from tests.support import HostCopier


def prompt_of(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1, 300), k=tokens)


@pytest.fixture(scope="module")
def plain(exact_checkpoint: Path) -> PreTrainedModel:
    """transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(exact_checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def served(exact_checkpoint: Path) -> Iterator[Motor]:
    """A motor with room for four rows and 24 pages."""
    with motor(serving_plan(exact_checkpoint), exact_checkpoint) as made:
        yield made


@pytest.fixture
def ids(served: Motor) -> Iterator[int]:
    """Where numbers of requests begin that no test has used; what is asked leaves no page behind."""
    yield 1000 * (1 + len(served.front.requests))
    assert served.ended == []


def test_replies_are_those_of_the_prompt_alone_in_any_company(served: Motor, ids: int) -> None:
    asked = [submit(ids + k, prompt_of(k, 5 + 7 * k % 50), 3 + 5 * k % 17) for k in range(9)]
    found = served.front.answers(*asked)
    for one, heard in zip(asked, found, strict=True):
        assert heard.tokens[0] == alone(served.served, one.prompt, one.new_tokens)
        assert heard.over[0].reason == "length" and heard.began is not None and heard.began.prompt_tokens == len(one.prompt)


def test_rows_that_join_and_leave_between_passes_change_no_other(served: Motor, ids: int) -> None:
    front, asked = served.front, [submit(ids + k, prompt_of(50 + k, 30), 30) for k in range(8)]
    front.say(*asked[:2])
    for k, late in enumerate(asked[2:]):
        front.hear(lambda k=k: len(front.requests[ids].tokens.get(0, ())) > k)
        front.say(late, Cancel(ids + 2 * k + 1))
    left = [one for one in asked if one.id in {ids, ids + 2, ids + 4, ids + 6}]
    front.wait(*asked)
    for one in left:
        assert front.requests[one.id].tokens[0] == alone(served.served, one.prompt, 30)
    for one in asked:
        reply = front.requests[one.id]
        want = "length" if one in left else "abort"
        assert reply.over[0].reason == want or reply.over[0].reason == "length"
        assert reply.tokens[0] == alone(served.served, one.prompt, 30)[: len(reply.tokens[0])]


def test_a_row_that_gives_its_pages_up_says_the_same(exact_checkpoint: Path) -> None:
    with motor(serving_plan(exact_checkpoint, pages=8), exact_checkpoint) as tight:
        asked = [submit(k, prompt_of(k, 20), 40) for k in range(4)]
        found = tight.front.answers(*asked)
        assert [heard.tokens[0] for heard in found] == [alone(tight.served, one.prompt, 40) for one in asked]
        report = tight.front.drain()
    assert report["totals"]["given_up"] > 0 and report["totals"]["tokens"] == 160


@pytest.mark.parametrize(("rows", "pages"), [(4, 24), (1, 3), (3, 3)])
def test_what_a_card_s_server_rehearses_takes_no_page_and_changes_no_reply(exact_checkpoint: Path, rows: int, pages: int) -> None:
    """Its weights stream meanwhile, or lie there already; rows have several pages each, or one."""
    plan = serving_plan(exact_checkpoint, rows=rows, pages=pages, gpu=True, resident=(2, 1, 0))
    with motor(plan, exact_checkpoint, HostCopier()) as made:
        assert made.served.session.engine.kv.pages.free == pages
        asked = [submit(k, prompt_of(k, 20), 8) for k in range(3)]
        found = [heard.tokens[0] for heard in made.front.answers(*asked)]
        assert found == [alone(made.served, one.prompt, 8) for one in asked]


def test_a_request_is_told_to_have_begun_before_its_pass_is_computed(exact_checkpoint: Path) -> None:
    """So its response is made meanwhile."""
    computes = threading.Event()

    def held(step: Steps) -> Steps:
        def run(one: Step) -> torch.Tensor:
            assert computes.wait(60)
            return step(one)

        return run

    with motor(serving_plan(exact_checkpoint), exact_checkpoint, around=held) as made:
        front, one = made.front, submit(0, prompt_of(1, 20), 2)
        try:
            front.say(one)
            front.hear(lambda: front.requests[0].began is not None)
        finally:
            computes.set()
        front.wait(one)


def test_passes_with_a_prompt_are_told_from_those_without(exact_checkpoint: Path) -> None:
    with motor(serving_plan(exact_checkpoint), exact_checkpoint) as alone_:
        alone_.front.answers(submit(1, prompt_of(1, 20), 8))
        alone_.front.answers(submit(2, prompt_of(2, 20), 8))
        report = alone_.front.drain()
    totals, kinds = report["totals"], report["totals"]["kinds"]
    assert (kinds["prompt"]["passes"], kinds["decode"]["passes"]) == (2, 14)
    assert sum(kind["passes"] for kind in kinds.values()) == totals["passes"]
    assert sum(kind["seconds"] for kind in kinds.values()) == pytest.approx(totals["pass_s"])
    for kind in kinds.values():
        assert 0 < kind["longest_s"] <= kind["seconds"] and kind["predicted_s"] > 0
    assert report["predicted"]["pass_s"] == pytest.approx(sum(kind["predicted_s"] for kind in kinds.values()) / totals["passes"])


def test_prompts_share_pages_within_a_salt_alone(served: Motor, ids: int) -> None:
    prompt = prompt_of(99, 60)
    first, again, other = (
        served.front.answers(submit(ids + k, prompt, 4, salt=salt))[0] for k, salt in enumerate(["ours", "ours", "theirs"])
    )
    assert [heard.began and heard.began.cached_tokens for heard in (first, again, other)] == [0, 48, 0]
    assert first.tokens == again.tokens == other.tokens


def test_the_next_turn_begins_with_what_the_last_one_said(served: Motor, ids: int) -> None:
    prompt = prompt_of(7, 30)
    (first,) = served.front.answers(submit(ids, prompt, 20))
    turn = [*prompt, *first.tokens[0], 5, 6, 7]
    (second,) = served.front.answers(submit(ids + 1, turn, 6))
    assert second.began is not None and second.began.cached_tokens == 48
    assert second.tokens[0] == alone(served.served, turn, 6)


def test_n_replies_share_their_prompt_and_differ_by_chance(served: Motor, ids: int) -> None:
    hot = Sampled(temperature=5.0, top_k=0, seed=3)
    asked = [submit(ids + k, prompt_of(11, 40), 12, sampling=hot, n=3) for k in range(2)]
    (first,) = served.front.answers(asked[0])
    rest = [submit(ids + 10 + k, prompt_of(k, 20), 9) for k in range(3)]
    served.front.say(*rest)
    (again,) = served.front.answers(asked[1])
    served.front.wait(*rest)
    assert len({tuple(tokens) for tokens in first.tokens.values()}) == 3
    assert first.tokens == again.tokens, "what a row draws depends on its company"


def test_a_stop_token_ends_a_reply_and_is_no_part_of_it(served: Motor, ids: int) -> None:
    prompt = prompt_of(2, 25)
    said = alone(served.served, prompt, 16)
    stop = next(token for token in said[3:] if token not in said[:3]) if set(said[3:]) - set(said[:3]) else said[0]
    before = said.index(stop)
    ended, ignored, held = served.front.answers(
        submit(ids, prompt, 16, stop_ids=[stop]),
        submit(ids + 1, prompt, 16, stop_ids=[stop], ignore_eos=True),
        submit(ids + 2, prompt, 16, stop_ids=[stop], min_tokens=before + 3),
    )
    assert ended.tokens[0] == said[:before] and (ended.over[0].reason, ended.over[0].stop_id) == ("stop", stop)
    assert ignored.tokens[0] == said
    assert held.tokens[0][:before] == said[:before] and stop not in held.tokens[0] and len(held.tokens[0]) >= before + 3


def check_logprobs(made: Motor, id: int, plain: PreTrainedModel) -> None:
    prompt = prompt_of(21, 40)
    beside = submit(id + 1, prompt_of(22, 9), 8)
    heard, other = made.front.answers(submit(id, prompt, 5, logprobs=3, prompt_logprobs=2), beside)
    said = heard.tokens[0]
    with torch.inference_mode():
        want = plain(torch.tensor([[*prompt, *said]])).logits[0].log_softmax(-1)
    assert [token for token, *_ in heard.prompt] == prompt[1:]
    for at, (token, own, (top, values)) in enumerate(heard.prompt):
        assert own == pytest.approx(want[at, token].item(), abs=1e-4) and top == want[at].topk(2).indices.tolist()
        assert values == pytest.approx(want[at].topk(2).values.tolist(), abs=1e-4)
    for at, (token, (own, top, values)) in enumerate(zip(said, heard.logprobs[0], strict=True), len(prompt) - 1):
        assert own == pytest.approx(want[at, token].item(), abs=1e-4) and len(top) == len(values) == 3 and top[0] == token
    assert other.tokens[0] == alone(made.served, beside.prompt, 8)


def test_logprobs_are_transformers_own(served: Motor, ids: int, plain: PreTrainedModel) -> None:
    check_logprobs(served, ids, plain)


def test_a_prompt_whose_logits_do_not_fit_takes_several_passes(
    exact_checkpoint: Path, plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "wanted_rows", lambda plan, pass_tokens: 5)
    most = []

    def around(step: Steps) -> Steps:
        return lambda of: most.append(of.wanted) or step(of)  # type: ignore[func-returns-value]

    with motor(serving_plan(exact_checkpoint), exact_checkpoint, around=around) as made:
        check_logprobs(made, 0, plain)
    assert max(most) == 5


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=6), st.integers(6, 20))
def test_a_step_is_cut_into_passes_that_fit(rows: list[tuple[int, int]], most: int) -> None:
    counts = [(tokens, min(tokens, wanted)) for tokens, wanted in rows]
    passes = cut_step(counts, most)
    assert all(sum(wanted for *_, wanted in cut) <= most for cut in passes)
    for k, (tokens, wanted) in enumerate(counts):
        parts = [part for cut in passes for part in cut if part[0] == k]
        assert sum(count for _, count, _ in parts) == tokens and sum(part[2] for part in parts) == wanted
        assert all(count == own for _, count, own in parts[1:]), "tokens whose logits are not wanted lie before all others"
    assert all(cut for cut in passes[1:]) and all(len({k for k, *_ in cut}) == len(cut) for cut in passes)


def test_any_weather_changes_no_reply(exact_checkpoint: Path) -> None:
    """Requests that come, go and share at random, in a pool that is too small for them."""
    chance, stems = random.Random(1), [prompt_of(k, 40) for k in range(3)]
    with motor(serving_plan(exact_checkpoint, pages=8), exact_checkpoint) as made:
        asked = []
        for id in range(14):
            stem = chance.choice(stems)[: chance.randrange(1, 40)]
            prompt = stem + prompt_of(id, chance.randrange(1, 12))
            asked.append(submit(id, prompt, chance.randrange(8, 24), n=chance.choice([1, 1, 2]), salt=chance.choice("ab")))
        for one in asked:
            made.front.say(one)
            if chance.random() < 0.4:
                made.front.say(Cancel(chance.randrange(one.id + 1), chance.choice([None, 0, 1])))
            if chance.random() < 0.3:
                made.front.wait(asked[chance.randrange(one.id + 1)])
        made.front.wait(*asked)
        for one in asked:
            heard, want = made.front.requests[one.id], alone(made.served, one.prompt, one.new_tokens)
            for index, over in heard.over.items():
                assert over.reason in {"length", "abort"}
                said = heard.tokens[index]
                assert said == (want if over.reason == "length" else want[: len(said)])
        assert made.front.drain()["totals"]["given_up"] > 0


def test_one_reply_that_is_no_numbers_ends_alone(exact_checkpoint: Path) -> None:
    def around(step: Steps) -> Steps:
        def poisoned(of: Step) -> torch.Tensor:
            logits = step(of).clone()
            wanted = [row for row in of.rows if row.wanted]
            for k, row in enumerate(wanted):
                if row.sequence == 1 and row.start >= 12:
                    logits[k] = torch.nan
            return logits

        return poisoned

    with motor(serving_plan(exact_checkpoint), exact_checkpoint, around=around) as made:
        asked = [submit(k, prompt_of(k, 10), 12) for k in range(3)]
        good, lost, also = made.front.answers(*asked)
        assert lost.over[0].reason == "error" and "NaN" in (lost.over[0].message or "") and len(lost.tokens[0]) == 3
        for one, heard in ((asked[0], good), (asked[2], also)):
            assert heard.tokens[0] == alone(made.served, one.prompt, 12)


def test_a_pass_that_raises_ends_the_motor(exact_checkpoint: Path) -> None:
    def around(step: Steps) -> Steps:
        def raises(of: Step) -> torch.Tensor:
            raise OSError("the drive has gone")

        return raises

    with motor(serving_plan(exact_checkpoint), exact_checkpoint, around=around) as made:
        made.front.say(submit(0, [1, 2, 3]))
        made.thread.join(60)
        assert isinstance(made.ended[0], OSError)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"prompt": [1] * 90}, "too_long"),
        ({"prompt": []}, "bad_prompt"),
        ({"prompt": [300]}, "bad_prompt"),
        ({"sampling": Sampled(temperature=-1)}, "bad_sampling"),
        ({"sampling": Sampled(logit_bias={-1: 1.0})}, "bad_prompt"),
        ({"grammar": "{}"}, "bad_grammar"),
        ({"new_tokens": -1}, "bad_sampling"),
    ],
)
def test_what_cannot_be_computed_is_refused_and_changes_nothing(served: Motor, ids: int, changes: dict[str, Any], kind: str) -> None:
    (heard,) = served.front.answers(submit(ids, **{"prompt": [1, 2, 3]} | changes))
    assert heard.refused is not None and heard.refused.kind == kind and heard.refused.message
    (after,) = served.front.answers(submit(ids + 1, [1, 2, 3], 4))
    assert after.tokens[0] == alone(served.served, [1, 2, 3], 4)


def test_a_full_queue_refuses(exact_checkpoint: Path) -> None:
    with motor(serving_plan(exact_checkpoint), exact_checkpoint, queue=2) as made:
        asked = [submit(k, prompt_of(k, 20), 12, n=2) for k in range(6)]
        found = made.front.answers(*asked)
        refused = [heard for heard in found if heard.refused is not None]
        assert refused and {heard.refused.kind for heard in refused if heard.refused} == {"queue_full"}
        assert all(len(heard.over) == 2 for heard in found if heard.refused is None) and len(refused) < 6


def test_a_drain_finishes_what_lives_and_takes_nothing_new(exact_checkpoint: Path) -> None:
    with motor(serving_plan(exact_checkpoint), exact_checkpoint) as made:
        one, late = submit(0, prompt_of(1, 20), 12), submit(1, [1, 2])
        made.front.say(one, Drain(), late)
        made.front.hear(lambda: bool(made.front.others) and isinstance(made.front.others[-1], Stopped))
        assert len(made.front.requests[0].tokens[0]) == 12 and made.front.requests[1].refused is not None
        made.thread.join(60)
        assert made.ended == [True]


def test_a_motor_ends_when_its_front_has_gone(exact_checkpoint: Path) -> None:
    with motor(serving_plan(exact_checkpoint), exact_checkpoint) as made:
        made.front.say(submit(0, prompt_of(1, 20), 30))
        made.front.hear(lambda: bool(made.front.requests[0].tokens))
        made.front.close()
        made.thread.join(60)
        assert made.ended and made.ended[0] is not True


def test_a_motor_whose_front_has_gone_ends_inside_a_pass() -> None:
    ours, theirs = socket.socketpair()
    ended = threading.Event()
    with theirs:
        inbox = Inbox(Frames(theirs), after_s=0.05, end=ended.set)
        ours.close()
        assert ended.wait(60), "nobody looked at the inbox, as inside a pass"
        assert isinstance(inbox.next(60), Gone)


def test_a_directory_that_an_ending_motor_still_writes_to_is_waited_for() -> None:
    tried: list[int] = []

    def serve() -> int:
        tried.append(1)
        if len(tried) < 3:
            raise Locked("kv: process 1 writes there")
        return 0

    assert patiently(serve) == 0 and len(tried) == 3


@pytest.mark.parametrize(("slots", "shared"), [(12, False), (7, True)])
def test_a_step_of_rows_longer_than_their_share_can_be_recorded(plain: PreTrainedModel, slots: int, shared: bool) -> None:
    stepper, seen = unstreamed(plain, slots=slots), list[Step]()
    longest_step(stepper, 3, 60, seen.append)
    rows = seen[0].rows
    assert [row.end for row in rows] == [60] * 3 and all(len(row.pages) == 4 for row in rows)
    assert (len({row.pages for row in rows}) == 1) == shared
    assert stepper.pool.pages.free == slots
