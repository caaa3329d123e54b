"""Functions whose result torch.compile may take for a constant of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

MARK = "_dynamo_marked_constant"


def constant(fn: F) -> F:
    """As `torch.compiler.assume_constant_result`: `fn` is called while tracing, its result is kept.

    Torch's decorator imports the whole compiler to set this one mark, and that import changes the
    environment. A test holds the mark against torch's own.
    """
    setattr(fn, MARK, True)
    return fn
