"""How much a server takes on at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeLimits:
    """ValueError where they contradict each other."""

    rows: int
    """Sequences that live at once."""
    pass_tokens: int
    """Tokens that one pass carries: one for each row that decodes, the rest for prompts."""
    page_tokens: int
    """Tokens of a KV page."""
    pages: int
    """KV pages of the pool. A page has all layers."""
    queue: int
    """Requests that wait at most."""

    def __post_init__(self) -> None:
        if min(self.rows, self.page_tokens, self.pages, self.queue) < 1:
            raise ValueError(f"{self}; allowed: 1 or more of each")
        if self.pass_tokens < self.rows:
            raise ValueError(f"pass_tokens={self.pass_tokens}; allowed: {self.rows} or more, one for each of the rows")

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the whole pool: what one sequence may have."""
        return self.pages * self.page_tokens

    def pages_of(self, tokens: int) -> int:
        """Pages that hold ``tokens`` of one sequence."""
        return -(-tokens // self.page_tokens)
