"""The connections between a run's hosts while it lasts: each hears that the others live, and why all have ended."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.planner.common.outside.streams import tell
from penstock.planner.common.peers.sealed import BrokenWords, Sealed, Words
from penstock.runtime.company.heart import Heart

BEAT_S = 0.5
SILENT_S = 7.0
"""After which a host that computes is lost."""
LOADING_S = 60.0
"""The same while it loads: imports may hold the interpreter for long."""


@dataclass(frozen=True)
class OtherHost:
    """One that was met."""

    name: str
    ranks: range
    way: Sealed

    @property
    def called(self) -> str:
        numbers = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]} to {self.ranks[-1]}"
        return f"host {self.name} ({numbers})"


class HostLine:
    """Of the first rank of a host: to rank 0's host, or from there to all ``others``. Beats on threads of its own until :meth:`leave`."""

    def __init__(self, others: Sequence[OtherHost]):
        self._others = others
        self._heart: Heart | None = None
        self._left = threading.Event()
        self._ended = threading.Lock()
        self._steady = False
        self._threads = [threading.Thread(target=self._listen, args=(other,), daemon=True, name="penstock-host") for other in others]
        self._threads.append(threading.Thread(target=self._beat, daemon=True, name="penstock-host-beat"))
        self._telling = threading.Lock()
        for thread in self._threads:
            thread.start()

    def attach(self, heart: Heart) -> None:
        """What ends this host's ranks, and is told when they end by themselves."""
        self._heart = heart
        heart.when_lost(self.end)

    def steady(self, yes: bool = True) -> None:
        """From now on silence means that this host is lost, or no longer does."""
        self._steady = yes

    def leave(self) -> None:
        """This host goes on without the others. Safe to call twice."""
        if not self._left.is_set():
            self._left.set()
            self._tell({"bye": True})
            for other in self._others:
                with suppress(OSError):
                    other.way.sock.shutdown(socket.SHUT_RDWR)
                other.way.sock.close()

    def end(self, line: str) -> None:
        """All hosts end, as ``line`` says; this one by itself. Nothing where they have ended, or left."""
        if not self._left.is_set():
            self._left.set()
            self._tell({"end": line})

    def _beat(self) -> None:
        while not self._left.wait(BEAT_S):
            self._tell({"steady": self._steady})

    def _tell(self, words: Words) -> None:
        with self._telling:
            for other in self._others:
                with suppress(OSError):
                    other.way.tell(words)

    def _listen(self, other: OtherHost) -> None:
        patience_s = LOADING_S
        while not self._left.is_set():
            try:
                words = other.way.hear(patience_s)
            except BrokenWords as error:
                self._lost(f"{other.called} was lost: {error}; all ranks have ended")
                return
            if "bye" in words:
                return
            if "end" in words:
                self._lost(str(words["end"]))
                return
            patience_s = SILENT_S if words.get("steady") else LOADING_S

    def _lost(self, line: str) -> None:
        if self._left.is_set() or not self._ended.acquire(blocking=False):
            return
        self.end(line)
        if self._heart is not None:
            self._heart.end(2, line)
            return
        tell(f"runtime: {line}")
        os._exit(2)
