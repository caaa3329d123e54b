"""`Kept`: results that a block computes once, although the scan runs the block again for its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.utils._pytree as pytree
from torch import Tensor

T = TypeVar("T")


class Kept:
    """A record of one block's run, in order, with no state outside of it.

    `o, lse = kept.get(lambda: kernel_forward(...))` computes and records in the forward pass, and returns the
    recorded tensors when the scan runs the block again; the function is not called then. A block must make
    the same calls in every run. What is recorded belongs to what the scan saves (or offloads); it is never
    differentiated: record where the derivative is written by hand, inside an autograd.Function's forward.
    recording=False: every run computes everything.
    """

    def __init__(self, *, recording: bool = True, value_unused: bool = False) -> None:
        self.tensors: list[Tensor] = []
        self.trees: list[tuple[pytree.TreeSpec, tuple[Any, ...]]] = []
        self.value_unused = value_unused
        """True in the run that only prepares the gradient: the value that the block returns is not read, so
        what is only added to it need not be computed (its gradient must still flow)."""
        self._recording, self._replaying = recording, False
        self._calls = self._place = 0

    @classmethod
    def replay(
        cls,
        tensors: Sequence[Tensor],
        trees: Sequence[tuple[pytree.TreeSpec, tuple[Any, ...]]],
        *,
        value_unused: bool = False,
    ) -> Kept:
        """A record to read from, any number of times: each run of the block takes a new one."""
        kept = cls(value_unused=value_unused)
        kept.tensors, kept.trees, kept._replaying = list(tensors), list(trees), True
        return kept

    @property
    def replaying(self) -> bool:
        return self._replaying

    def get(self, compute: Callable[[], T]) -> T:
        """`compute()`, a pytree of tensors and other values, or what it returned in the forward pass."""
        if not self._recording:
            return compute()
        if not self._replaying:
            value = compute()
            leaves, spec = pytree.tree_flatten(value)
            self.tensors += [t.detach() for t in leaves if isinstance(t, Tensor)]
            self.trees.append((spec, tuple(None if isinstance(t, Tensor) else (t,) for t in leaves)))
            return value
        if self._calls == len(self.trees):
            raise ValueError(
                f"kept must be asked as often as in the forward pass, got call {self._calls + 1} of "
                f"{len(self.trees)}. Let the block make the same calls whenever it runs."
            )
        spec, others = self.trees[self._calls]
        self._calls += 1
        leaves = []
        for other in others:
            if other is None:
                leaves.append(self.tensors[self._place])
                self._place += 1
            else:
                leaves.append(other[0])
        result: T = pytree.tree_unflatten(leaves, spec)
        return result
