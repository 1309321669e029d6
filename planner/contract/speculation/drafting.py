"""How many of a chain's drafted tokens are kept on average."""

from __future__ import annotations


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens that a pass gives a sequence on average, where each of ``drafts`` drafted tokens is right with the probability
    ``acceptance``: 1 + a + ... + a^k = (1 - a^(k + 1)) / (1 - a) (Leviathan et al., https://arxiv.org/abs/2211.17192, equation 1)."""
    if acceptance >= 1:
        return drafts + 1.0
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))
