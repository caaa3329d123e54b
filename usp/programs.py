"""torch.compile for functions that are compiled for many configurations, lengths and kinds of runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


def own_programs(fn: Callable[..., Any], *, dynamic: bool | None = None) -> Any:
    """`fn` compiled whole, twice: for runs with a graph and for those without.

    torch.compile keeps 8 programs of one code object, then it fails. So each call of this gives code of its
    own, and a run without a graph sees no tensor that is a part of another or wants a gradient: what is left
    to differ is the number of tokens, the first and any (`dynamic`: any from the start).
    """

    def own() -> Any:
        code = fn.__code__.replace()
        copy = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
        return torch.compile(copy, fullgraph=True, dynamic=dynamic)

    bare, graphed = own(), own()

    @wraps(fn)
    def run(*args: Any) -> Any:
        if torch.is_grad_enabled():
            return graphed(*args)
        return bare(*pytree.tree_map_only(Tensor, Tensor.detach, args))

    return run
