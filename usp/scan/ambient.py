"""What a block sees besides its arguments, so that it sees the same when it runs again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


class Autocast:
    """The autocast state at the time it is made."""

    def __init__(self) -> None:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        self._states = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in self._states:
                if enabled != torch.is_autocast_enabled(kind) or (
                    enabled and dtype != torch.get_autocast_dtype(kind)
                ):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache)
                    )
            yield


class Random:
    """The state of the random number generators, of the CPU and of one device, at the time it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu, self._own = _states(device)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        now = _states(self._device)
        try:
            self._set(self._cpu, self._own)
            yield
        finally:
            self._set(*now)

    def _set(self, cpu: torch.Tensor | None, own: torch.Tensor | None) -> None:
        if cpu is not None:
            torch.set_rng_state(cpu)
        if own is not None:
            torch.cuda.set_rng_state(own, self._device)


def _states(device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if torch.compiler.is_compiling():
        return None, None  # traced, not run
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None  # does not wait for the device
    return torch.get_rng_state(), own
