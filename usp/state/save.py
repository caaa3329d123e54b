"""`Saver`: checkpoints written behind the training, each whole or not there at all."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from usp.mesh import MeshLike
from usp.mesh.agree import Over, agree, gather_objects, place
from usp.state.files import (
    MARKER,
    Index,
    Piece,
    Placed,
    file_name,
    folder_of,
    merged,
    own_pieces,
    steps_in,
    sync,
    write_index,
    write_pieces,
)


class Saver:
    """Saves below `root`, which every rank must see, and keeps the newest `keep` checkpoints.

    `start` returns when the values have been copied to the host; a thread writes them. A checkpoint appears
    by one rename after all ranks' files are on disk, so a process that ends at any moment leaves the earlier
    ones as they were. `over`: a gloo process group of all ranks that nothing else uses, None for a process
    alone; for `save`, which has no thread, any group or mesh of all ranks. A failed save is raised by
    `check`, `wait` and the next `start`, on every rank; the earlier checkpoints stay. Raises ValueError when
    `keep` is below 1.
    """

    def __init__(self, root: Path, *, mesh: MeshLike, keep: int = 2, over: Over = None) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1. Change keep.")
        self.root, self._mesh, self._keep, self._over = root, mesh, keep, over
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last: int | None = None
        """Step of the newest checkpoint that is complete."""

    def start(
        self,
        step: int,
        tensors: Mapping[str, Placed],
        *,
        own: Mapping[str, Tensor] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Save `tensors`, which every rank passes in the same order with its shards, after the save before.

        `own`: tensors of this rank alone, under names that no other rank uses. `meta`: JSON, from the first
        rank. Waits for the device, and for the save before; communicates in its thread, on `over`.
        """
        self.wait()
        pieces = own_pieces(tensors, self._mesh)
        for name, value in (own or {}).items():
            shape = tuple(value.shape)
            pieces[name] = Piece(value, tuple((0, n) for n in shape), shape)
        pieces = self._copied(pieces)
        args = (step, pieces, dict(meta or {}))
        self._thread = threading.Thread(target=self._run, args=args, name="save", daemon=True)
        self._thread.start()

    def save(
        self, step: int, tensors: Mapping[str, Placed], *, meta: Mapping[str, Any] | None = None
    ) -> None:
        """As `start`, but in the caller's thread and until all of it is there."""
        self.wait()
        self._write(step, self._copied(own_pieces(tensors, self._mesh)), dict(meta or {}))
        self.last = step

    def check(self) -> None:
        """Raise what a save that has ended failed with."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread.join()
            self._thread = None
        if self._thread is None and self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Until nothing is being written; then as `check`."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _copied(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """On the host, in memory that is used again by the next save, pinned beside a GPU."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # what is on the host may have been on its way there
        out, device = {}, False
        for name, piece in pieces.items():
            value, buffer = piece.value, self._buffers.get(name)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(value, non_blocking=True)
            device = device or value.is_cuda
            out[name] = piece._replace(value=buffer)
        if device:
            torch.cuda.current_stream().synchronize()
        return out

    def _run(self, step: int, pieces: Mapping[str, Piece], meta: dict[str, Any]) -> None:
        try:
            self._write(step, pieces, meta)
            self.last = step
        except BaseException as error:  # raised where the caller looks
            self._error = error

    def _write(self, step: int, pieces: Mapping[str, Piece], meta: dict[str, Any]) -> None:
        rank = place(self._over)[0]
        target = folder_of(self.root, step)
        scratch = self.root / f".{target.name}.tmp"

        def said(error: OSError) -> OSError:
            return OSError(
                f"step={step} must be saved to {self.root}, got: {error}. Earlier checkpoints are kept; make "
                "room or correct the folder, and resume."
            )

        def guarded(fn: Any) -> Any:
            try:
                return fn()
            except OSError as error:
                raise said(error) from None

        try:
            agree(lambda: guarded(lambda: _fresh(scratch)) if rank == 0 else None, self._over)
            mine = agree(lambda: guarded(lambda: write_pieces(scratch, file_name(rank), pieces)), self._over)
            everyone = gather_objects(mine, self._over)
            index = Index(step, meta, merged(everyone))
            agree(lambda: guarded(lambda: self._publish(scratch, target, index, rank)), self._over)
        except BaseException:
            if rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
            raise

    def _publish(self, scratch: Path, target: Path, index: Index, rank: int) -> None:
        if rank != 0:
            return
        write_index(scratch, index)
        aside = target.with_name(f".{target.name}.old")
        if target.exists():  # of a run that went on from an earlier one
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(target, aside)
        os.rename(scratch, target)
        sync(self.root)
        for left in self.root.glob(".step-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        for step in steps_in(self.root)[self._keep :]:
            old = folder_of(self.root, step)
            (old / MARKER).unlink(missing_ok=True)  # first, so that half a folder is never taken for a whole
            shutil.rmtree(old, ignore_errors=True)


def _fresh(scratch: Path) -> None:
    if scratch.exists():
        shutil.rmtree(scratch)
    scratch.mkdir(parents=True)
