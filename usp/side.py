"""Work beside the main work of a GPU, on a stream of its own; on the CPU one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> Any:
    """One for each device: the allocator keeps memory apart for every stream it sees."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Side:
    """One stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = _stream(device) if device.type == "cuda" else None

    @contextmanager
    def run(self, *reads: Tensor) -> Iterator[None]:
        """What is launched inside runs beside, after all that was launched before; it may read `reads`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        for t in reads:
            t.record_stream(self._stream)  # not to be given away while it is read there

    def mark(self) -> Any:
        """A point in the work beside, for `join`."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, *tensors: Tensor, mark: Any = None) -> None:
        """What is launched from here on runs after the work beside up to `mark`, and may use `tensors`."""
        if self._stream is None:
            return
        main = torch.cuda.current_stream()
        if mark is None:
            main.wait_stream(self._stream)
        else:
            main.wait_event(mark)
        for t in tensors:
            t.record_stream(main)
