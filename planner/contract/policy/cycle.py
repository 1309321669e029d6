"""The order in which a decoder visits the layers that pass through DRAM: a cycle."""

from __future__ import annotations

from collections.abc import Iterator


class Cycle:
    """Layers in visiting order, wrapping from the last to the first when ``wrap`` is set."""

    def __init__(self, layers: tuple[int, ...], wrap: bool = True):
        self.layers = layers
        self.wrap = wrap
        self._position = {layer: i for i, layer in enumerate(layers)}

    def __len__(self) -> int:
        return len(self.layers)

    def ahead(self, layer: int, other: int) -> int:
        """Visits from ``layer`` until ``other`` comes, 0 for itself."""
        return (self._position[other] - self._position[layer]) % len(self.layers)

    def after(self, layer: int, count: int) -> Iterator[int]:
        """The next ``count`` layers after ``layer``, itself left out, each at most once."""
        start = self._position[layer]
        for step in range(1, min(count, len(self.layers) - 1) + 1):
            if start + step >= len(self.layers) and not self.wrap:
                return
            yield self.layers[(start + step) % len(self.layers)]
