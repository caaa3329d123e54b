"""What is communicated, both ways; in which type sums are taken; what is refused before any of it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.func import grad, jvp, vmap

from tests.comm import counted
from tests.mesh.cases import assert_stands_for, dense, mesh_of, shard, specs_2d
from tests.mesh.test_dtensor import wrap
from tests.pool import Pool
from usp.mesh import P, dual, plan, redistribute
from usp.mesh.collectives import start_all_gather, wait
from usp.mesh.devices import group_name

Check = Callable[[], None]
RU = ("ring", "ulysses")
SEQ, HEADS = P("dp", RU, None), P("dp", "ring", "ulysses")


def tally(kinds: tuple[str, ...]) -> dict[str, int]:
    return {kind: kinds.count(kind) for kind in kinds}


def as_planned() -> None:
    """On gloo, every move runs the collectives of its plan, and the backward those of the dual move."""
    mesh, shape = mesh_of((1, 2, 2)), (3, 7, 5)
    specs = specs_2d("ring", "ulysses")
    for src in specs[::2]:
        for dst in specs[1:8:2] + specs[9:]:
            local = shard(dense(shape), src, mesh).requires_grad_()
            out: list[Tensor] = []
            forward = counted(lambda: out.append(redistribute(local, src, dst, mesh, shape=shape)))  # noqa: B023
            assert forward == tally(plan(src, dst, shape, local.dtype, mesh).collectives), f"{src} -> {dst}"
            backward = counted(lambda: out[0].backward(torch.ones_like(out[0])))  # noqa: B023
            mirror = plan(dual(dst, mesh), dual(src, mesh), shape, local.dtype, mesh).collectives
            assert backward == tally(mirror), f"backward of {src} -> {dst}"


def mirrors() -> None:
    """all-to-all <-> all-to-all back, gather <-> reduce-scatter, all-reduce <-> all-reduce."""
    mesh, shape = mesh_of((1, 1, 4)), (2, 7, 5)
    seq, heads, whole = P(None, "ulysses", None), P(None, None, "ulysses"), P(None, None, None)
    for src, dst, forward, backward in [
        (seq, heads, "all_to_all", "all_to_all"),
        (seq, whole, "all_gather", "reduce_scatter"),
        (P(None, None, None, partial="ulysses"), seq, "reduce_scatter", "all_gather"),
        (P(None, None, None, partial="ulysses"), whole, "all_reduce", "all_reduce"),
    ]:
        x = shard(dense(shape), src, mesh).requires_grad_()

        def move(x: Tensor) -> Tensor:
            return redistribute(x, src, dst, mesh, shape=shape)  # noqa: B023

        out = move(x)
        assert counted(lambda: move(x)) == {forward: 1}  # noqa: B023
        assert counted(lambda: out.sum().backward()) == {backward: 1}  # noqa: B023
        both = {forward: 2} if forward == backward else {forward: 1, backward: 1}
        assert counted(lambda: grad(lambda x: move(x).sum())(x.detach())) == both  # noqa: B023
        assert counted(lambda: jvp(move, (x.detach(),), (x.detach(),))) == {forward: 2}  # noqa: B023
        batch = torch.stack([x.detach()] * 3)
        assert counted(lambda: vmap(move)(batch)) == {forward: 1}, "vmap: one, not three"  # noqa: B023


def one_all_to_all_for_dtensors() -> None:
    """DTensor on gloo gathers and cuts; ours is one all-to-all each way."""
    mesh, shape = mesh_of((1, 2, 2)), (3, 7, 5)
    x = wrap(dense(shape), SEQ, mesh).requires_grad_()
    out: list[Tensor] = []
    assert counted(lambda: out.append(redistribute(x, HEADS))) == {"all_to_all": 1}
    w = wrap(dense(shape), HEADS, mesh)
    assert counted(lambda: torch.autograd.grad(out[0], x, w)) == {"all_to_all": 1}


def sums() -> None:
    """cases P18, D60: bfloat16 is summed in float32, on every axis, both ways, unless asked otherwise."""
    mesh, at = mesh_of((1, 2, 2)), torch.distributed.get_rank()
    # In bfloat16 256 + 1 is 256. Each column has its 256 on another rank: no order of summing saves all.
    x = torch.where(torch.arange(4) == at, 256.0, 1.0).expand(8, 4).bfloat16()
    exact = torch.tensor(259.0).bfloat16()
    for dst in (P(None, None), P(("ring", "ulysses"), None), P("ring", "ulysses"), P(None, "ulysses")):
        out = redistribute(x, P(None, None, partial=("ring", "ulysses")), dst, mesh)
        assert out.dtype == torch.bfloat16
        assert (out == exact).all(), f"{dst}: rounded between the two axes"
    one, line = P(None, None, partial="ulysses"), mesh_of((1, 1, 4))
    for dst in (P(None, None), P("ulysses", None)):
        assert (redistribute(x, one, dst, line) == exact).all(), f"{dst}: not summed in float32"
        rough = redistribute(x, one, dst, line, reduce_dtype=torch.bfloat16)
        assert (rough != exact).any(), f"{dst}: reduce_dtype=bfloat16 had no effect"
    gathered = P("ulysses", None)
    for dtype, same in ((None, True), (torch.float32, True), (torch.bfloat16, False)):
        leaf = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
        out = redistribute(leaf, gathered, P(None, None), line, reduce_dtype=dtype)
        out.backward(x)  # reduce-scatter
        assert leaf.grad is not None
        assert bool((leaf.grad == exact).all()) is same, f"backward, reduce_dtype={dtype}"
    wide = torch.full((4,), 1 + 2.0**-40 if at == 0 else 0.0, dtype=torch.float64)
    total = redistribute(wide, P(None, partial="ulysses"), P(None), line)
    assert (total == 1 + 2.0**-40).all(), "float64 is summed in float64"
    half = torch.full((4,), 60000.0 if at < 2 else -60000.0, dtype=torch.float16)
    assert (redistribute(half, P(None, partial="ulysses"), P(None), line) == 0).all(), "float16 overflowed"
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.int16):
        ones = torch.full((4,), 3, dtype=dtype)
        total = redistribute(ones, P(None, partial="ulysses"), P(None), line, reduce_dtype=torch.bfloat16)
        assert total.dtype == dtype
        assert (total == 12).all()


def refused_before_communicating() -> None:
    """ValueError on every rank alike, with nothing sent."""
    mesh, x = mesh_of((1, 2, 2)), torch.zeros(3, 6, 5)
    seq, heads, whole = P(None, "ulysses", None), P(None, None, "ulysses"), P(None, None, None)

    def move(src: P, dst: P, **options: Any) -> Tensor:
        return redistribute(x, src, dst, mesh, **options)

    for call, message in [
        (lambda: move(P(None, "ulysses"), whole), "src=.* must name 3 dimensions, got 2"),
        (lambda: move(seq, P("tp", None, None)), r"dst=.* must use axes of the mesh, got \['tp'\]"),
        (lambda: redistribute(x, seq, mesh=mesh), "dst=None must be a placement"),
        (lambda: move(seq, whole, shape=(3, 12)), "must have 3 dimensions"),
        # case P50: a shard is never taken for the whole
        (lambda: move(seq, whole, shape=(3, 6, 5)), r"must be global: placed .* holds \(3, 3, 5\)"),
        (lambda: move(seq, heads), "must mean even shards, got dimension 2 of 5"),
        (lambda: move(whole, heads), "must mean even shards, got dimension 2 of 5"),
        (lambda: move(P(None, RU, None), P("ulysses", None, "ring")), "must mean even shards"),
        (lambda: move(seq, whole, reduce_dtype=torch.int64), "reduce_dtype=torch.int64 must be floating"),
        (lambda: redistribute(x + 0j, seq, whole, mesh), "dtype=torch.complex64 must be real"),
    ]:

        def run(call: Callable[[], object] = call, message: str = message) -> None:
            with pytest.raises(ValueError, match=message):
                call()

        assert counted(run) == {}, message


def a_compiled_gather_is_waited_for_first() -> None:
    """By inductor: the memory that is still being sent must not be given to the product behind it."""
    group, num_ranks = group_name(mesh_of((1, 1, 4)), "ulysses"), 4

    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        started = start_all_gather((a @ b).view(-1), group, num_ranks)
        return b @ a, wait(started)

    both = dense((6, 6), seed=1), dense((6, 6), seed=2)
    got, (code,) = run_and_get_code(torch.compile(fn, fullgraph=True), *both)
    for value, want in zip(got, fn(*both), strict=True):
        assert torch.equal(value, want)  # whole numbers
    body = code[code.index("all_gather_into_tensor_out") :]
    assert body.index("wait_tensor") < body.index("mm(")


def at_most_one_copy_each_side() -> None:
    """case P16: besides the wire, a move allocates at most one send and one joined copy."""
    mesh = mesh_of((1, 1, 4))
    seq, heads = P(None, "ulysses", None, None), P(None, None, "ulysses", None)
    x = torch.zeros(1, 64, 8, 16)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        redistribute(x, seq, heads, mesh)
    bytes_each = math.prod(x.shape) * x.element_size()
    copies = sum(
        e.count for e in profile.key_averages() if e.key in ("aten::copy_", "aten::cat", "aten::_cat")
    )
    taken = sum(e.self_cpu_memory_usage for e in profile.key_averages() if e.self_cpu_memory_usage > 0)
    assert copies <= 2
    assert taken <= 3 * bytes_each + 4096  # send, received, joined


@pytest.mark.parametrize(
    "check",
    [
        as_planned,
        mirrors,
        one_all_to_all_for_dtensors,
        sums,
        refused_before_communicating,
        a_compiled_gather_is_waited_for_first,
        at_most_one_copy_each_side,
    ],
    ids=lambda f: f.__name__,
)
def test_collectives(check: Check, ranks: Pool) -> None:
    ranks.run(check)


def gathered_weight() -> None:
    """ZeRO-3 in small: a weight at rest over everything, its gradient back where it rests, exact."""
    mesh, shape = mesh_of((1, 2, 2)), (7, 3)
    rest, use = P(("dp", "ring", "ulysses"), None), P(None, None)
    W, rank = dense(shape), torch.distributed.get_rank()
    w = shard(W, rest, mesh).requires_grad_()
    (redistribute(w, rest, use, mesh, shape=shape) * (rank + 1)).sum().backward()
    assert w.grad is not None
    assert_stands_for(w.grad, rest, mesh, torch.full(shape, 10.0, dtype=torch.float64))


def test_weight_at_rest(ranks: Pool) -> None:
    ranks.run(gathered_weight)
