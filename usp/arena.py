"""`Arena`: page-locked host buffers that are made once and used again, and copies to and from them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

LOOSE = 4  # times what is asked for that a buffer may hold


class Arena:
    """Host memory for what a scan offloads: make one, pass it every step.

    Buffers are page-locked where a GPU is there, grow with the first step and serve every later one of the
    same shapes. For other shapes they serve where they are large enough, and are let go where that keeps the
    whole from growing: it holds what its largest step needs, and little more. `nbytes` counts all buffers,
    `free_bytes` those that are not lent. Each device has one stream for copies both ways, so a buffer is
    never written before it was read. Used on a CPU, buffers are ordinary memory and copies happen at once.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._copies: dict[torch.device, Copies] = {}
        self._most = 0  # that it has held at once
        self.nbytes = 0
        self.free_bytes = 0

    def lease(self) -> Lease:
        return Lease(self)

    def copies(self, device: torch.device) -> Copies:
        if device not in self._copies:
            self._copies[device] = _StreamCopies(device) if device.type == "cuda" else _DirectCopies()
        return self._copies[device]

    def take(self, nbytes: int, *, locked: bool) -> Tensor:
        """A buffer of at least so many bytes, from those that are free or a new one."""
        fitting = [size for size, free in self._free.items() if free and nbytes <= size <= LOOSE * nbytes]
        if fitting:
            buffer = self._free[min(fitting)].pop()
            self.free_bytes -= buffer.nbytes
            return buffer
        self._make_room(nbytes)
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if locked and nbytes:
            _lock(buffer)
        self.nbytes += nbytes
        self._most = max(self._most, self.nbytes)
        return buffer

    def _make_room(self, nbytes: int) -> None:
        """Let free buffers go, the smallest first, as long as so many more bytes make it larger than ever."""
        if self.free_bytes and self.nbytes + nbytes > self._most:
            for copies in self._copies.values():
                copies.finish()  # a buffer that is free for the next copy may still be read by the last
        for size in sorted(self._free):
            while self._free[size] and self.nbytes + nbytes > self._most:
                self._free[size].pop()
                self.nbytes -= size
                self.free_bytes -= size

    def keep(self, like: Tensor) -> Tensor:
        """Room for a tensor that is never given back."""
        return _shaped(self.take(like.nbytes, locked=like.device.type == "cuda"), like)

    def give(self, buffers: list[Tensor]) -> None:
        for buffer in buffers:
            self._free.setdefault(buffer.nbytes, []).append(buffer)
            self.free_bytes += buffer.nbytes
        buffers.clear()


class Lease:
    """Buffers of an arena that go back to it together: at `end`, or when the lease is forgotten."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._buffers: list[Tensor] = []
        self.end: Any = weakref.finalize(self, arena.give, self._buffers)

    def take(self, like: Tensor) -> Tensor:
        """Room for a tensor, strides and all: copies are plain, and kernels find it as they left it."""
        buffer = self._arena.take(like.nbytes, locked=like.device.type == "cuda")
        self._buffers.append(buffer)
        return _shaped(buffer, like)


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
