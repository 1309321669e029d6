"""A decoder's layers, which a pass goes through without making them modules of a new list."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from penstock.runtime.store.decoder import ListedLayers, decoder_layers


class LayersListed:
    """For the layers of any decoder, where torch's own list holds them."""

    def convert(self, model: PreTrainedModel) -> None:
        layers = decoder_layers(model)
        if type(layers) is nn.ModuleList:
            layers.__class__ = ListedLayers
