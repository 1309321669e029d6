"""The order in which a decoder visits the layers that pass through DRAM: a cycle."""

from __future__ import annotations


class Cycle:
    """Layers in visiting order, wrapping from the last to the first when ``wrap`` is set."""

    def __init__(self, layers: tuple[int, ...], wrap: bool = True):
        self.layers = layers
        self.wrap = wrap
        self._position = {layer: i for i, layer in enumerate(layers)}
        self._laid_out = layers * 2 if wrap else layers

    def __len__(self) -> int:
        return len(self.layers)

    def ahead(self, layer: int, other: int) -> int:
        """Visits from ``layer`` until ``other`` comes, 0 for itself."""
        return (self._position[other] - self._position[layer]) % len(self.layers)

    def after(self, layer: int, count: int) -> tuple[int, ...]:
        """The next ``count`` layers after ``layer``, itself left out, each at most once."""
        first = self._position[layer] + 1
        return self._laid_out[first : first + min(count, len(self.layers) - 1)]
