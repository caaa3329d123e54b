"""What the scan keeps, where, and what it runs again: counted, with results to the last bit."""

import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.func import grad

from tests.usp.dense import Watch, normal
from tests.usp.test_scan import DEPTH, equal
from usp import scan, value_and_grad
from usp.arena import Arena
from usp.host import available_bytes
from usp.kept import Kept

ROWS, DIM = 7, 6
CALLS: list[str] = []


class _Costly(torch.autograd.Function):
    """sin, with its derivative by hand, that keeps its result and a statistic as an attention kernel does."""

    @staticmethod
    def forward(x: Tensor, kept: Kept | None) -> tuple[Tensor, Tensor]:
        def compute() -> tuple[Tensor, Tensor]:
            CALLS.append("costly")
            return x.sin(), x.cos()

        y, c = compute() if kept is None else kept.get(compute)
        return y.detach(), c.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


def block(x: Tensor, w: dict[str, Tensor], kept: Kept | None = None) -> Tensor:
    CALLS.append("block")
    y: Any = _Costly.apply(x @ w["weight"], kept)  # type: ignore[no-untyped-call]
    return x + w["scale"] * y[0]


def layers_of(depth: int = DEPTH) -> list[dict[str, Tensor]]:
    return [{"weight": normal(DIM, DIM, seed=i), "scale": normal(1, seed=100 + i)} for i in range(depth)]


X = normal(ROWS, DIM, seed=50)


def loss(x: Tensor, layers: Any, **how: Any) -> Tensor:
    return scan(block, x, layers, **how).square().sum()


def run(depth: int = DEPTH, x: Tensor = X, **how: Any) -> Any:
    return value_and_grad(partial(loss, **how), argnums=(0, 1))(x, layers_of(depth))


@pytest.mark.parametrize("group", [1, 2, 3, DEPTH, 9])
@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("remat", ["full", "attention"])
def test_every_way_gives_the_same_bits(remat: str, offload: str, group: int) -> None:
    arena = Arena() if offload == "host" else None
    how: dict[str, Any] = {"remat": remat, "offload": offload, "group": group, "arena": arena}
    want = run()
    for _ in range(2):  # buffers are used again
        equal(run(**how), want)
    equal(grad(partial(loss, **how))(X, layers_of()), want[1][0])
    leaves = [{k: t.clone().requires_grad_() for k, t in w.items()} for w in layers_of()]
    x = X.clone().requires_grad_()
    loss(x, leaves, **how).backward()
    equal(x.grad, want[1][0])
    equal([{k: t.grad for k, t in w.items()} for w in leaves], want[1][1])


@pytest.mark.parametrize("group", [1, 2, 3])
def test_what_runs_again(group: int) -> None:
    """Once more a layer, and with groups once more for all but each group's last; the costly part once."""
    starts = -(-DEPTH // group)
    for remat in ("full", "attention"):
        CALLS.clear()
        run(remat=remat, group=group)
        blocks = DEPTH * (2 if group == 1 else 3) - (0 if group == 1 else starts)
        assert CALLS.count("block") == blocks
        assert CALLS.count("costly") == (DEPTH if remat == "attention" else blocks)


def saved_bytes(**how: Any) -> int:
    """Of all tensors that autograd saves for the scan, beside its parameters."""
    seen: dict[int, int] = {}
    layers = layers_of()
    own = {t.untyped_storage().data_ptr() for w in layers for t in w.values()}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            seen[t.untyped_storage().data_ptr()] = t.nbytes
        return t

    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = scan(block, x, layers, **how)
    del y
    return sum(seen.values())


def test_what_is_kept() -> None:
    one = X.nbytes
    assert saved_bytes(remat="full") == DEPTH * one
    assert saved_bytes(remat="full", group=2) == 3 * one
    assert saved_bytes(remat="attention") == 3 * DEPTH * one  # the input and two kept tensors a layer
    assert saved_bytes(remat="attention", group=3) == (2 + 2 * DEPTH) * one


def test_offloaded_bytes() -> None:
    """Nothing stays with autograd; the host holds all layers but the last, a second step nothing new."""
    one, arena = X.nbytes, Arena()
    assert saved_bytes(remat="attention", offload="host", arena=arena) == 0
    assert arena.nbytes == 3 * (DEPTH - 1) * one
    assert arena.free_bytes == arena.nbytes  # the scan was forgotten without a backward
    for group, num_inputs in ((1, DEPTH - 1), (2, 2), (3, 2)):
        arena = Arena()
        for _ in range(3):
            run(remat="attention", offload="host", arena=arena, group=group)
            assert arena.nbytes == (num_inputs + 2 * (DEPTH - 1)) * one
            assert arena.free_bytes == arena.nbytes


def test_the_host_holds_the_longest_length_alone() -> None:
    """Lengths that change do not add up."""
    arena, longest = Arena(), 0
    for rows in (64, 16, 40, 16, 64, 200, 60, 16, 200, 9):
        x = normal(rows, DIM, seed=rows)
        equal(run(DEPTH, x, remat="attention", offload="host", arena=arena), run(DEPTH, x, remat="attention"))
        longest = max(longest, rows)
        needed = 3 * (DEPTH - 1) * longest * DIM * x.itemsize
        assert arena.nbytes == arena.free_bytes
        assert arena.nbytes == needed if rows == longest else arena.nbytes <= needed


def test_a_loss_that_is_kept_does_not_hold_the_hosts_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, losses, made = Arena(), [], weakref.WeakSet[torch.UntypedStorage]()
    make = arena.make

    def noted(nbytes: int, *, locked: bool) -> Tensor:
        buffer = make(nbytes, locked=locked)
        made.add(buffer.untyped_storage())
        return buffer

    monkeypatch.setattr(arena, "make", noted)
    for rows in (10, 40, 90):
        x = normal(rows, DIM, seed=rows).requires_grad_()
        losses.append(loss(x, layers_of(), remat="attention", offload="host", arena=arena))
        losses[-1].backward()
        assert sum(storage.nbytes() for storage in made) == arena.nbytes


def test_memory_does_not_grow_with_the_layers_when_offloaded() -> None:
    wide = normal(4096, DIM, seed=50)

    def peak(depth: int) -> float:
        arena = Arena()
        run(depth, wide, remat="attention", offload="host", arena=arena)
        with Watch() as watch:  # the second step: the host's buffers are there already
            run(depth, wide, remat="attention", offload="host", arena=arena)
        return watch.peak / wide.nbytes

    assert peak(12) <= peak(4) + 0.1


def test_one_backward_for_each_offloaded_forward() -> None:
    x = X.clone().requires_grad_()
    y = loss(x, layers_of(), remat="full", offload="host", arena=Arena())
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="offload='host' keeps what one backward needs"):
        y.backward()
    x = X.clone().requires_grad_()
    y = loss(x, layers_of(), remat="full")
    y.backward(retain_graph=True)
    first = x.grad
    assert first is not None
    first = first.clone()
    y.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * first)


def test_too_little_host_memory() -> None:
    need = 3 * (DEPTH - 1) * X.nbytes
    for remat, bytes_needed in (("full", need // 3), ("attention", need)):
        with (
            patch("usp.arena.available_bytes", return_value=need // 3 - 1),
            pytest.raises(ValueError, match=rf"host memory={need // 3 - 1} bytes available must hold"),
        ):
            run(remat=remat, offload="host", arena=Arena())
        with patch("usp.arena.available_bytes", return_value=bytes_needed):
            run(remat=remat, offload="host", arena=Arena())
    # inputs fit, and so does what is kept, but not both; the first input is there when the rest is judged
    with (
        patch("usp.arena.available_bytes", return_value=need - X.nbytes - 1),
        pytest.raises(ValueError, match="bytes available must hold"),
    ):
        run(remat="attention", offload="host", arena=Arena())
    arena = Arena()
    run(remat="full", offload="host", arena=arena)
    with patch("usp.arena.available_bytes", return_value=0):  # what the arena has is enough
        run(remat="full", offload="host", arena=arena)
        run(remat="full", offload="host", arena=Arena(room=need // 3))  # what is given counts alone
        with pytest.raises(ValueError, match=rf"host memory={need // 3 - 1} bytes available must hold"):
            run(remat="full", offload="host", arena=Arena(room=need // 3 - 1))


def test_available_bytes(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   20 kB\n")
    assert available_bytes(tmp_path) == 20 * 1024
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("5\n")
    assert available_bytes(tmp_path) == 20 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("105\n")
    assert available_bytes(tmp_path) == 100
    assert (available_bytes() or 0) > 0


@pytest.mark.parametrize(("times", "said"), [((1, 1, 1, 2), "call 2 of 1"), ((2, 2, 1), "1 of 2 calls")])
def test_a_block_that_asks_more_or_less_often_than_before(times: tuple[int, ...], said: str) -> None:
    left = iter(times)

    def uneven(x: Tensor, w: Tensor, kept: Kept) -> Tensor:
        for _ in range(next(left)):
            kept.get(lambda: x.detach())
        return x * w

    with pytest.raises(ValueError, match=f"as often as in the forward pass, got {said}"):
        value_and_grad(lambda x: scan(uneven, x, [X, X], remat="attention").sum())(X)


def test_offloaded_tensors_come_back_as_they_were() -> None:
    """Strides too, which kernels look at; what is not dense comes back packed."""
    lease, copies = Arena().lease(), Arena().copies(torch.device("cpu"))
    dense, gaps = normal(2, 3, 4, seed=1).movedim(1, 0), normal(4, 6, seed=2)[:, ::2]
    empty = normal(0, 3, seed=3)
    for t, stride in ((dense, dense.stride()), (gaps, (3, 1)), (normal(seed=3), ()), (empty, None)):
        back = copies.back(copies.out(t, lease.take(t)).tensor, t.device).ready()
        assert torch.equal(back, t)
        assert stride is None or back.stride() == stride


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(mode: Any) -> None:
    with mode(), patch("usp.scan.run.Random", side_effect=AssertionError):
        equal(scan(block, X, layers_of(), remat="full"), scan(block, X, layers_of()))


def test_refused() -> None:
    for match, how in (
        ("offload='disk' must be one of none, host", {"remat": "full", "offload": "disk"}),
        ("group=0 must be a whole number of at least 1", {"remat": "full", "group": 0}),
        ("remat='none' must come without groups", {"group": 2}),
        ("must be given with offload='host' and only then", {"remat": "full", "offload": "host"}),
        ("must be given with offload='host' and only then", {"remat": "full", "arena": Arena()}),
    ):
        with pytest.raises(ValueError, match=match):
            loss(X, layers_of(), **how)
