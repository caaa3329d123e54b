"""Every move between placements on local shards: values and gradients, exact against one tensor."""

import pytest
import torch

from tests.mesh.cases import (
    SPECS_1D,
    Sizes,
    assert_stands_for,
    dense,
    mesh_of,
    outside,
    pairs,
    shard,
    specs_2d,
)
from tests.pool import Pool
from usp.mesh import P, dual, redistribute

# Even and uneven sizes, pairwise different. Some are smaller than an axis: trailing ranks then hold nothing.
EVEN = {2: (4, 6, 2), 3: (3, 9, 6), 4: (4, 12, 8)}
UNEVEN = {2: ((2, 5, 3), (1, 7, 3)), 3: ((4, 7, 2), (1, 5, 10)), 4: ((3, 7, 5), (1, 13, 3))}

MESHES: dict[str, tuple[Sizes, tuple[P, ...]]] = {
    "ulysses2": ((1, 1, 2), SPECS_1D),
    "ulysses3": ((1, 1, 3), SPECS_1D),
    "ulysses4": ((1, 1, 4), SPECS_1D),
    "ring2 ulysses2": ((1, 2, 2), specs_2d("ring", "ulysses")),
    "dp2 ulysses2": ((2, 1, 2), specs_2d("dp", "ulysses")),
}


def move_all(sizes: Sizes, specs: tuple[P, ...], shape: tuple[int, ...], say_shape: bool) -> None:
    """Value and transpose of every pair of specs. The transpose is asked for by vjp and by plain autograd."""
    mesh, x = mesh_of(sizes), dense(shape)
    if outside(mesh):
        return
    cotangent = dense(shape, seed=1)
    given = shape if say_shape else None
    for src, dst in pairs(specs):
        note = f"{src} -> {dst} of {shape}"
        local = shard(x, src, mesh).requires_grad_()
        out = redistribute(local, src, dst, mesh, shape=given)
        assert_stands_for(out, dst, mesh, x, note)
        w = shard(cotangent, dual(dst, mesh), mesh)
        (grad,) = torch.autograd.grad(out, local, w)
        assert_stands_for(grad, dual(src, mesh), mesh, cotangent, f"gradient of {note}")
        pull = torch.func.vjp(lambda t: redistribute(t, src, dst, mesh, shape=given), local.detach())[1]  # noqa: B023
        assert torch.equal(pull(w)[0], grad), note


@pytest.mark.parametrize("name", MESHES)
def test_every_pair_even(name: str, ranks: Pool) -> None:
    sizes, specs = MESHES[name]
    world = sizes[0] * sizes[1] * sizes[2]
    for say_shape in (True, False):
        ranks.run(move_all, sizes, specs, EVEN[world], say_shape)


@pytest.mark.parametrize("name", MESHES)
def test_every_pair_uneven(name: str, ranks: Pool) -> None:
    """cases D18, D20, D21, D22, D62, P2: nothing is padded into a result, and no row is lost."""
    sizes, specs = MESHES[name]
    world = sizes[0] * sizes[1] * sizes[2]
    for shape in UNEVEN[world]:
        ranks.run(move_all, sizes, specs, shape, True)


def other_dtypes(sizes: Sizes, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(sizes)
    for dtype in (torch.int64, torch.int32, torch.bool, torch.int16, torch.bfloat16, torch.float8_e5m2):
        x = dense(shape, seed=3).to(dtype)
        for src, dst in pairs(specs_2d("ring", "ulysses")[:9]):
            out = redistribute(shard(x, src, mesh), src, dst, mesh, shape=shape)
            assert_stands_for(out, dst, mesh, x, f"{dtype}")
    ids = dense(shape).long()  # pending sums of integers stay integers
    src, dst = P(None, None, None, partial=("ring", "ulysses")), P(None, ("ring", "ulysses"), None)
    assert_stands_for(redistribute(shard(ids, src, mesh), src, dst, mesh, shape=shape), dst, mesh, ids)


def strides_and_aliases(sizes: Sizes) -> None:
    mesh, shape = mesh_of(sizes), (3, 7, 5)
    x = dense(shape)
    for src, dst in pairs(specs_2d("ring", "ulysses")):
        local = shard(x, src, mesh)
        strided = local.permute(2, 0, 1).contiguous().permute(1, 2, 0)  # same values, other strides
        before = strided.clone()
        out = redistribute(strided, src, dst, mesh, shape=shape)
        assert_stands_for(out, dst, mesh, x, f"{src} -> {dst} strided")
        if src != dst:
            out.fill_(-1)
        assert torch.equal(strided, before), f"{src} -> {dst} shares memory with its input"


def there_and_back(sizes: Sizes, shape: tuple[int, ...]) -> None:
    """case D18: seq -> heads -> seq is the identity, values and gradients."""
    mesh = mesh_of(sizes)
    seq, heads = P("dp", ("ring", "ulysses"), None, None), P("dp", "ring", "ulysses", None)
    local = shard(dense(shape), seq, mesh).requires_grad_()
    middle = redistribute(local, seq, heads, mesh, shape=shape)
    out = redistribute(middle, heads, seq, mesh, shape=shape)
    assert torch.equal(out, local)
    w = torch.rand_like(local)
    assert torch.equal(torch.autograd.grad(out, local, w)[0], w)


def test_dtypes_strides_round_trips(ranks: Pool) -> None:
    ranks.run(other_dtypes, (1, 2, 2), (2, 7, 3))
    ranks.run(strides_and_aliases, (1, 2, 2))
    for sizes in ((1, 1, 4), (1, 2, 2), (2, 1, 2), (1, 4, 1), (4, 1, 1)):
        for heads in (3, 5, 7, 9):
            ranks.run(there_and_back, sizes, (4, 11, heads, 2))
