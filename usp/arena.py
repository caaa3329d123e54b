"""`Arena`: page-locked host buffers that are made once and used again, and copies to and from them."""

from __future__ import annotations

import heapq
import os
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from usp.host import available_bytes


class Arena:
    """Host memory for what a scan offloads: make one, pass it every step.

    Buffers are page-locked where a GPU is there, grow with the first step and serve every later one: what is
    asked for in the same place of a step gets the same buffer, which is made anew only when it is too small.
    So lengths that change need no more than the longest. `nbytes` counts all buffers, `free_bytes` those that
    are not lent. Each device has one stream for copies both ways, so a buffer is never written before it was
    read. Used on a CPU, buffers are ordinary memory and copies happen at once.

    `room`: bytes that its buffers may take, alike in every step. None: its share, among the ranks of this
    machine, of what the machine has left when they are asked for, which differs from rank to rank.
    """

    def __init__(self, room: int | None = None) -> None:
        self._room = room
        self._buffers: list[Tensor] = []
        self._free: list[int] = []  # places in it, as a heap: the first that is free is lent first
        self._copies: dict[torch.device, Copies] = {}
        self.nbytes = 0
        self.free_bytes = 0

    def left(self) -> int | None:
        """Bytes that new buffers may take, None if unknown."""
        if self._room is not None:
            return max(self._room - self.nbytes, 0)
        have = available_bytes()
        return None if have is None else have // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def lease(self) -> Lease:
        return Lease(self)

    def copies(self, device: torch.device) -> Copies:
        if device not in self._copies:
            self._copies[device] = _StreamCopies(device) if device.type == "cuda" else _DirectCopies()
        return self._copies[device]

    def make(self, nbytes: int, *, locked: bool) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if locked and nbytes:
            _lock(buffer)
        self.nbytes += nbytes
        return buffer

    def keep(self, like: Tensor) -> Tensor:
        """Room for a tensor that is never given back."""
        return _shaped(self.make(like.nbytes, locked=like.device.type == "cuda"), like)

    def take(self, nbytes: int, *, locked: bool) -> int:
        """The place of a buffer of at least so many bytes, lent until it is given back."""
        place = heapq.heappop(self._free) if self._free else len(self._buffers)
        if place == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        old = self._buffers[place].nbytes
        self.free_bytes -= old
        if old < nbytes:
            try:
                self._renew(place, nbytes, locked=locked)
            except BaseException:
                heapq.heappush(self._free, place)
                raise
        return place

    def _renew(self, place: int, nbytes: int, *, locked: bool) -> None:
        if self._buffers[place].nbytes:
            for copies in self._copies.values():
                copies.finish()  # the last copy may still read what is let go
        self.nbytes -= self._buffers[place].nbytes
        self._buffers[place] = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
        self._buffers[place] = self.make(nbytes, locked=locked)

    def at(self, place: int) -> Tensor:
        return self._buffers[place]

    def give(self, places: list[int]) -> None:
        for place in places:
            heapq.heappush(self._free, place)
            self.free_bytes += self._buffers[place].nbytes
        places.clear()


class Lease:
    """Buffers of an arena that go back to it together: at `end`, or when the lease is forgotten."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._places: list[int] = []
        self.end: Any = weakref.finalize(self, arena.give, self._places)

    def take(self, like: Tensor) -> Tensor:
        """Room for a tensor, strides and all: copies are plain, and kernels find it as they left it."""
        self._places.append(self._arena.take(like.nbytes, locked=like.device.type == "cuda"))
        return _shaped(self._arena.at(self._places[-1]), like)


def wait_for(event: Any, device: torch.device) -> None:
    """Hold up the current stream, not the host, until an event, if there is one."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


@dataclass
class Copied:
    """A copy under way: what it fills, and the device at the other end."""

    tensor: Tensor
    device: torch.device
    event: Any = None

    def wait(self) -> None:
        """Hold up the current stream, not the host, until the copy is done."""
        wait_for(self.event, self.device)

    def ready(self) -> Tensor:
        self.wait()
        return self.tensor


class Copies(Protocol):
    def out(self, t: Tensor, host: Tensor) -> Copied:
        """t to the host. The caller holds t until it has waited."""
        ...

    def back(self, host: Tensor, device: torch.device) -> Copied: ...

    def finish(self) -> None:
        """Hold up the host until all copies are done."""
        ...


class _DirectCopies:
    """For tensors on the CPU."""

    def out(self, t: Tensor, host: Tensor) -> Copied:
        host.copy_(t)
        return Copied(host, t.device)

    def back(self, host: Tensor, device: torch.device) -> Copied:
        return Copied(host.clone(), device)

    def finish(self) -> None:
        pass


class _StreamCopies:
    """On a stream beside the one that computes; never waits on the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, t: Tensor, host: Tensor) -> Copied:
        self._stream.wait_stream(torch.cuda.current_stream(t.device))
        with torch.cuda.stream(self._stream):
            host.copy_(t, non_blocking=True)
            return Copied(host, t.device, self._stream.record_event())

    def back(self, host: Tensor, device: torch.device) -> Copied:
        t = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # memory of t may be in use until here
        with torch.cuda.stream(self._stream):
            t.copy_(host, non_blocking=True)
            return Copied(t, device, self._stream.record_event())

    def finish(self) -> None:
        self._stream.synchronize()


def _shaped(buffer: Tensor, like: Tensor) -> Tensor:
    stride = torch.empty_like(like, device="meta").stride()  # its own where it is dense
    return buffer[: like.nbytes].view(like.dtype).as_strided(like.shape, stride)


def _lock(buffer: Tensor) -> None:
    """Page-lock memory where it is: torch's own allocator would round up to a power of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 1))
    if code != 0:
        raise RuntimeError(
            f"host memory={buffer.nbytes} bytes must be page-locked, got CUDA error {code}. "
            f"Raise the limit of locked memory (ulimit -l), or leave out offload."
        )
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, buffer.data_ptr())
