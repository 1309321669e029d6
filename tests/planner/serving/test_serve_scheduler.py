"""The scheduler held to its promises in any interleaving of arrivals, cancellations, early ends and bad restores."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.contract.serving.counted_pages import CountedPages
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serve_scheduler import Scheduler
from penstock.planner.contract.serving.serve_step import Share
from penstock.planner.contract.serving.waiting import QueueFull, ServeRequest

MANY = settings(max_examples=150, deadline=None, derandomize=True)


class Ledger:
    """Pages with numbers. ``restored``: tokens that each admission finds of a prompt."""

    def __init__(self, limits, restored):
        self.page_tokens, self.restored = limits.page_tokens, restored
        self.unused, self.of, self.prompts = list(range(limits.pages)), {}, {}

    @property
    def free(self):
        return len(self.unused)

    def prefix(self, number):
        assert not self.of.get(number)
        whole = min(self.restored.get(number, 0), self.prompts[number] - 1) // self.page_tokens
        assert self.hold(number, whole * self.page_tokens) or (whole := 0) == 0
        return whole * self.page_tokens

    def hold(self, number, tokens):
        missing = -(-tokens // self.page_tokens) - len(self.of.get(number, ()))
        if missing > len(self.unused):
            return False
        self.of.setdefault(number, []).extend(self.unused.pop() for _ in range(missing))
        return True

    def trim(self, number, tokens):
        needed = -(-tokens // self.page_tokens)
        self.unused += self.of[number][needed:]
        self.of[number] = self.of[number][:needed]

    def release(self, number):
        self.unused += self.of.pop(number, [])


class Played:
    """A scheduler in use, and what each request has seen of it."""

    def __init__(self, limits, restored=None):
        self.limits, self.pages = limits, Ledger(limits, restored or {})
        self.scheduler = Scheduler(limits, self.pages)
        self.computed, self.given, self.asked, self.here, self.begun, self.kept_up = {}, {}, {}, [], [], set()

    def add(self, request):
        self.pages.prompts[request.number] = request.prompt_tokens
        self.scheduler.add(request)
        self.asked[request.number] = request
        self.here.append(request.number)
        self.given[request.number] = 0

    def known(self, number):
        return self.asked[number].prompt_tokens + self.given[number]

    def step(self, over=(), bad=None, drafts=None, kept=None):
        """One pass, checked; row ``bad``'s restore turns out void. Of ``drafts`` each row keeps ``kept`` at most."""
        lived = [number for number in self.here if number in self.computed]
        decoding = [n for n in lived if self.given[n] and self.computed[n] == self.known(n) - 1]
        step = self.scheduler.next_step(drafts)
        for number in step.given_up:
            del self.computed[number]
            assert number not in self.pages.of
        shares = {share.number: share for share in step.rows}
        assert len(shares) == len(step.rows) <= self.limits.rows
        assert step.tokens <= self.limits.pass_tokens
        assert [share.kind == "prompt" for share in step.rows] == sorted(share.kind == "prompt" for share in step.rows)
        assert all(n in shares and shares[n].kind != "prompt" for n in decoding if n not in step.given_up), "a row that decodes starves"
        if lived:
            assert lived[0] in shares, "the oldest row starves"
        for number, share in shares.items():
            if number not in self.computed:
                assert share.start % self.limits.page_tokens == 0 and share.start < self.asked[number].prompt_tokens
                self.began(number)
            else:
                assert share.start == self.computed[number]
            end = share.start + share.count
            if share.kind == "verify":
                assert 1 < share.count <= 1 + drafts[number] and share.start == self.known(number) - 1
                assert end <= self.asked[number].end_tokens and len(self.pages.of[number]) * self.limits.page_tokens >= end
                self.computed[number] = share.start + min(share.count, 1 + kept)
                continue
            assert share.count >= 1 and end <= self.known(number) and share.wanted == (end == self.known(number))
            assert len(self.pages.of[number]) * self.limits.page_tokens >= end
            self.computed[number] = end
        held = [page for pages in self.pages.of.values() for page in pages] + self.pages.unused
        assert sorted(held) == list(range(self.limits.pages)), "a page is used twice, or lost"
        if bad in shares:
            self.scheduler.recomputed(bad, 0)
            self.computed[bad] = 0
        said = {n: min(share.count, 1 + kept) for n, share in shares.items() if share.kind == "verify"}
        ended = self.scheduler.finished(over, said) if step.rows else ()
        for number, share in shares.items():
            self.given[number] += said.get(number, share.wanted) if number != bad else 0
        for number in set(said) & set(self.pages.of) - {bad}:
            assert len(self.pages.of[number]) <= self.limits.pages_of(self.known(number)), "a draft's page is held"
        assert (
            set(ended) == {n for n in self.here if (n in shares and self.given[n] >= self.asked[n].new_tokens) or n in over} or not shares
        )
        for number in ended:
            self.gone(number)
        return step

    def began(self, number):
        """Admission follows the order of arrival, those apart that wait for another's prompt."""
        if number in self.begun:
            return
        before = [n for n in self.here if n < number and n not in self.begun]
        assert all(self.asked[n].after is not None for n in before), f"{number} overtakes {before}"
        after = self.asked[number].after
        if after in self.here:
            assert self.computed.get(after, 0) >= self.asked[after].prompt_tokens
        self.begun.append(number)

    def gone(self, number):
        self.here.remove(number)
        self.computed.pop(number, None)
        assert number not in self.pages.of


@st.composite
def limits_of(draw):
    rows = draw(st.integers(1, 6))
    return ServeLimits(
        rows, rows + draw(st.integers(0, 12)), draw(st.sampled_from([1, 2, 4])), draw(st.integers(3, 24)), draw(st.integers(1, 12))
    )


@MANY
@given(st.data())
def test_any_interleaving_computes_every_token_once_in_order_and_ends(data):
    limits = data.draw(limits_of())
    numbers = st.integers(0, 20)
    played = Played(limits, data.draw(st.dictionaries(numbers, st.integers(0, 30), max_size=8)))
    for number in range(data.draw(st.integers(1, 20))):
        most = limits.capacity_tokens
        prompt = data.draw(st.integers(1, most))
        new = data.draw(st.integers(1, most - prompt + 1))
        after = data.draw(st.sampled_from([None, None, number - 1, number - 2]))
        try:
            played.add(ServeRequest(number, prompt, new, after))
        except QueueFull:
            assert played.scheduler.waiting >= limits.queue
        for action in data.draw(st.lists(st.sampled_from(["step", "step", "step", "abort", "over", "bad"]), max_size=4)):
            if action == "abort" and played.here:
                gone = data.draw(st.sampled_from(played.here))
                played.scheduler.abort(gone)
                played.gone(gone)
            else:
                over = data.draw(st.lists(numbers, max_size=2)) if action == "over" else ()
                drafts = {number: data.draw(st.integers(0, 9)) for number in played.scheduler.rooms}
                played.step(over, data.draw(numbers) if action == "bad" else None, drafts, data.draw(st.integers(0, 9)))
    greedy = data.draw(st.integers(0, 15))
    left = sum(played.asked[n].end_tokens for n in played.here)
    for _ in range(left * (len(played.here) + 1) + 1):
        if not played.here:
            break
        drafts = dict.fromkeys(played.scheduler.rooms, greedy)
        assert played.step(drafts=drafts, kept=greedy // 2).rows, "something is to be done, and nothing is"
    assert played.here == []
    assert played.pages.free == limits.pages
    assert played.step().rows == ()
    assert (played.scheduler.living, played.scheduler.waiting) == (0, 0)


def test_the_youngest_row_is_computed_again_when_pages_run_out():
    played = Played(ServeLimits(2, 8, 1, 8, 4))
    played.add(ServeRequest(0, 2, 6))
    played.add(ServeRequest(1, 3, 4))
    seen = [played.step() for _ in range(3)]
    assert [step.given_up for step in seen] == [(), (), (1,)]
    while played.here:
        seen.append(played.step())
    again = next(share for step in seen[3:] for share in step.rows if share.number == 1)
    assert again == Share(1, 0, 5, "prompt", True), "its prompt and the two tokens that it has given"
    assert played.given == {0: 6, 1: 4}


def test_a_long_prompt_shares_the_pass_with_rows_that_decode():
    played = Played(ServeLimits(3, 5, 4, 100, 4))
    played.add(ServeRequest(0, 3, 20))
    played.step()
    played.add(ServeRequest(1, 11, 2))
    played.add(ServeRequest(2, 3, 2))
    steps = [[(share.number, share.count) for share in played.step().rows] for _ in range(4)]
    assert steps == [[(0, 1), (1, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 3), (2, 1)], [(0, 1), (1, 1), (2, 2)]]


def test_drafts_share_what_prompts_leave_of_the_pass_and_give_their_pages_back():
    played = Played(ServeLimits(3, 10, 2, 16, 4))
    for number in (0, 1):
        played.add(ServeRequest(number, 3, 12))
    played.step()
    played.add(ServeRequest(2, 4, 2))
    drafts = {0: 9, 1: 1}
    step = played.step(drafts=drafts, kept=0)
    assert [(share.number, share.kind, share.count) for share in step.rows] == [(0, "verify", 4), (1, "verify", 2), (2, "prompt", 4)]
    assert [len(played.pages.of[number]) for number in (0, 1, 2)] == [3, 3, 2], "row 0 had four pages"
    assert [share.count for share in played.step(drafts={0: 2, 1: 2, 2: 9}, kept=2).rows] == [3, 3, 1], "the last of two tokens"
    assert played.given == {0: 5, 1: 5, 2: 2}, "two of three drafts, and one more"


def test_copies_wait_for_the_prompt_that_they_share_while_others_pass():
    played = Played(ServeLimits(4, 4, 2, 20, 9), {1: 7})
    played.add(ServeRequest(0, 7, 3))
    played.add(ServeRequest(1, 7, 3, after=0))
    played.add(ServeRequest(2, 2, 1))
    steps = [[(share.number, share.start, share.count) for share in played.step().rows] for _ in range(3)]
    assert steps == [[(0, 0, 4)], [(0, 4, 3), (2, 0, 1)], [(0, 7, 1), (2, 1, 1), (1, 6, 1)]]


def test_limits_and_requests_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="pass_tokens=3; allowed: 4 or more"):
        ServeLimits(4, 3, 16, 8, 8)
    scheduler = Scheduler(ServeLimits(1, 4, 4, 2, 1), CountedPages(2, 4))
    with pytest.raises(ValueError, match="request 0 of 6 .* 4 tokens; allowed: .* 8 together"):
        scheduler.add(ServeRequest(0, 6, 4))
    scheduler.add(ServeRequest(0, 6, 3))
    with pytest.raises(QueueFull):
        scheduler.add(ServeRequest(1, 1, 1))
    scheduler.next_step()
    with pytest.raises(ValueError, match="request 0 is here already"):
        scheduler.add(ServeRequest(0, 1, 1))
    with pytest.raises(RuntimeError, match="the last step is not over"):
        scheduler.next_step()
