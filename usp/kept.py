"""`Kept`: results that a block computes once, although the scan runs the block again for its gradient."""

from __future__ import annotations

from collections import deque
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
    recording=False: every run computes everything. `go_on`: what `last_use` puts off.
    """

    def __init__(
        self,
        *,
        recording: bool = True,
        value_unused: bool = False,
        own_grad: bool = False,
        go_on: Callable[[], None] | None = None,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.trees: list[tuple[pytree.TreeSpec, tuple[Any, ...]]] = []
        self.value_unused = value_unused
        """True in the run that only prepares the gradient: the value that the block returns is not read, so
        what is only added to it need not be computed (its gradient must still flow)."""
        self.own_grad = own_grad
        """True where the gradient of that value is the scan's own: what alone reads it may write over it."""
        self.at_hand = True
        """False where what is replayed comes from the host's memory, and reading it waits for that."""
        self._recording, self._replaying = recording, False
        self._calls = 0
        self._early: deque[Any] = deque()
        self._ready: deque[Callable[[], Tensor]] = deque()
        self._go_on, self._awaited = go_on, 0

    @classmethod
    def replay(
        cls,
        ready: Sequence[Callable[[], Tensor]],
        trees: Sequence[tuple[pytree.TreeSpec, tuple[Any, ...]]],
        *,
        recording: bool = True,
        value_unused: bool = False,
        own_grad: bool = False,
        at_hand: bool = True,
        go_on: Callable[[], None] | None = None,
    ) -> Kept:
        """A record to read from once, each tensor by a call that waits for it; what was read is let go."""
        kept = cls(recording=recording, value_unused=value_unused, own_grad=own_grad, go_on=go_on)
        kept._ready, kept.trees, kept._replaying = deque(ready), list(trees), recording
        kept.at_hand = at_hand
        return kept

    @property
    def replaying(self) -> bool:
        return self._replaying

    def last_use(self) -> Callable[[], None]:
        """To be called when the backward has read what was kept for the last time.

        The scan fetches what the next layer needs then, and not while the memory is needed here. Without a
        call of `last_use` it does so before the backward.
        """
        self._awaited += 1
        return self._used

    def prepared(self) -> None:
        """The run is done, its backward comes."""
        if not self._awaited and self._go_on is not None:
            self._go_on()

    def done(self) -> None:
        """The run is over: ValueError when it asked less often than the forward pass."""
        if self._replaying and self._calls != len(self.trees):
            raise ValueError(
                f"kept must be asked as often as in the forward pass, got {self._calls} of {len(self.trees)} "
                f"calls. Let the block make the same calls whenever it runs."
            )

    def _used(self) -> None:
        self._awaited -= 1
        self.prepared()

    def ahead(self) -> Any:
        """What the next `get` of a run that replays will return."""
        self._early.append(self._read())
        return self._early[-1]

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
        result: T = self._early.popleft() if self._early else self._read()
        return result

    def _read(self) -> Any:
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
                leaves.append(self._ready.popleft()())
            else:
                leaves.append(other[0])
        return pytree.tree_unflatten(leaves, spec)
