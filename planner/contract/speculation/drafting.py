"""How many of a chain's drafted tokens are kept on average."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.contract.decided.speculating import Speculation


def expected_tokens(acceptance: float, drafts: int, at: Sequence[float] = ()) -> float:
    """Tokens that a pass gives a sequence on average, where each of ``drafts`` drafted tokens is right with the probability
    ``acceptance``: 1 + a + ... + a^k = (1 - a^(k + 1)) / (1 - a) (Leviathan et al., https://arxiv.org/abs/2211.17192, equation 1).

    ``at``: the probabilities of the first, second, ... one, where they differ: 1 + a1 + a1 * a2 + ...
    """
    total = kept = 1.0
    for k in range(drafts):
        kept *= at[k] if k < len(at) else acceptance
        total += kept
    return total


def counted_tokens(decided: Speculation, drafts: int) -> float:
    """Tokens that a pass gives a sequence on average, by what ``decided`` counts on: some passes have no proposal."""
    return 1 + decided.proposes * (expected_tokens(decided.acceptance, drafts, decided.acceptance_at) - 1)


def counted_s(decided: Speculation, plain_s: float, drafted_s: float) -> float:
    """Seconds of a pass on average: ``plain_s`` without a proposal, ``drafted_s`` with one."""
    return plain_s + decided.proposes * (drafted_s - plain_s)
