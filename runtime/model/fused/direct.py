"""Modules computed without what torch does around each call of one: that takes the host longer than most kernels take it to launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ATTENDS = "penstock_attends"
"""Attribute of a module of attention: what it attends by, if somebody has said so."""
_CALL = nn.Module.__call__
Interface = Callable[..., tuple[torch.Tensor, Any]]


def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``module(*args, **kwargs)``, hooks among it, for models that are not trained."""
    if type(module).__call__ is not _CALL:
        return module(*args, **kwargs)
    if not module._forward_pre_hooks and not module._forward_hooks:
        return module.forward(*args, **kwargs)
    if module._forward_pre_hooks_with_kwargs or module._forward_hooks_with_kwargs:
        return module(*args, **kwargs)
    for before in module._forward_pre_hooks.values():
        given = before(module, args)
        if given is not None:
            args = given if isinstance(given, tuple) else (given,)
    made = module.forward(*args, **kwargs)
    for behind in module._forward_hooks.values():
        other = behind(module, args, made)
        made = made if other is None else other
    return made


def product(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a linear ``layer`` makes of ``x``."""
    if type(layer) is not nn.Linear or layer._forward_pre_hooks or layer._forward_hooks or "forward" in layer.__dict__:
        made: torch.Tensor = called(layer, x)
        return made
    held = layer._parameters
    return F.linear(x, held["weight"], held["bias"])  # type: ignore[arg-type] # as a linear layer has them


class Bare:
    """``module`` of attention as its own code sees it, run with this for an object: its children compute by :func:`product`, and
    ``config`` says nothing of how it attends, which :class:`Attending` knows. All else is the module's."""

    def __init__(self, module: Any):
        self.bare_of = module
        self.config = _Config(module.config)

    def __getattr__(self, name: str) -> Any:
        module = self.bare_of
        child = module._modules.get(name)
        if child is None:
            return getattr(module, name)

        def compute(x: torch.Tensor) -> torch.Tensor:
            return product(module._modules[name], x)

        vars(self)[name] = compute  # found at once from now on
        return compute


class _Config:
    """``config``, whose attributes take code of `transformers`'s own to read."""

    _attn_implementation = None

    def __init__(self, config: Any):
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class Attending:
    """Stands for `transformers`' table of ``functions`` where the code of ``module`` runs as a :class:`Bare`."""

    def __init__(self, functions: Any, module: Any):
        self._functions, self._module = functions, module

    def get_interface(self, _name: None, eager: Interface) -> Interface:
        """What ``module`` attends by: what somebody gave it, or what its config names, ``eager`` if that."""
        module = self._module
        found = getattr(module, ATTENDS, None) or self._functions.get_interface(module.config._attn_implementation, eager)
        return lambda _bare, *args, **kwargs: found(module, *args, **kwargs)
