"""`P`, the arithmetic of shards, meshes of sizes alone, and the tables. One process, no group."""

import copy
import pickle
import re
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

from usp.mesh import (
    TABLES,
    P,
    axis_sizes,
    build_mesh,
    coordinates,
    dual,
    local_shape,
    local_slices,
    redistribute,
    replicas,
)
from usp.mesh.constants import constant
from usp.mesh.devices import AXES, check_world_size
from usp.mesh.tables import MATRICES, VECTORS

BAD: Any = 3
MESH = {"dp": 1, "ring": 2, "ulysses": 4}


def test_a_spec_is_a_value() -> None:
    spec = P("dp", ("ring", "ulysses"), None)
    assert spec.dims == (("dp",), ("ring", "ulysses"), ())
    assert (len(spec), spec[1], spec.partial) == (3, ("ring", "ulysses"), ())
    assert spec.axes == {"dp", "ring", "ulysses"}
    assert (
        spec == P(["dp"], ["ring", "ulysses"], ()) == copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec))
    )
    assert hash(spec) == hash(P(("dp",), ("ring", "ulysses"), None))
    assert spec != P("dp", ("ulysses", "ring"), None)
    assert P(None, partial=("ulysses", "dp")) == P(None, partial=["dp", "ulysses"])  # a sum has no order
    assert P(None, partial="dp").reduced() == P(None)
    assert pytree.tree_leaves({"a": (spec, spec)}) == [spec, spec]  # one leaf, not a tuple of names
    with pytest.raises(AttributeError):
        spec.dims = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    "spec",
    [
        P(),
        P(None),
        P("dp", ("ring", "ulysses"), None),
        P(None, partial="dp"),
        P("dp", partial=("ring", "ulysses")),
    ],
)
def test_repr_builds_the_same_spec(spec: P) -> None:
    assert eval(repr(spec), {"P": P}) == spec


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: P("dp", "dp"), "axis='dp' must appear once in a spec, got P('dp', 'dp')"),
        (lambda: P(("ring", "ring")), "axis='ring' must appear once"),
        (lambda: P("dp", partial="dp"), "axis='dp' must appear once"),
        (lambda: P(BAD), "spec entry=3 must be None, an axis name or a tuple of names"),
        (lambda: P(("dp", BAD)), "spec entry=('dp', 3) must be None"),
        (lambda: P("dp", partial=(BAD,)), "spec entry=(3,) must be"),
        (lambda: local_shape(P("dp"), (2, 3), MESH), "spec=P('dp') must name 2 dimensions, got 1"),
        (lambda: local_shape(P("dp", "tp"), (2, 3), MESH), "spec=P('dp', 'tp') must use axes of the mesh"),
        (lambda: local_shape(P(None, partial="tp"), (2,), MESH), "must use axes of the mesh, got ['tp']"),
        (lambda: replicas(P("tp"), MESH), "must use axes of the mesh, got ['tp']"),
        (lambda: local_shape(P("ring"), (2,), MESH), "must be a DeviceMesh when an axis is larger than 1"),
        (lambda: coordinates(MESH), "must be a DeviceMesh when an axis is larger than 1"),
        (lambda: redistribute(torch.ones(2), P("ring"), P(None), MESH), "must be a DeviceMesh when"),
    ],
)  # fmt: skip
def test_refused(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()  # type: ignore[operator]


def test_dual_and_replicas() -> None:
    specs = [
        P("dp", ("ring", "ulysses")),
        P(None, "ulysses"),
        P(None, None),
        P("dp", None, partial="ring"),
        P(None, partial=AXES),
    ]
    assert [replicas(s, MESH) for s in specs] == [1, 2, 8, 4, 1]
    assert dual(P(None, "ulysses"), MESH) == P(None, "ulysses", partial=("dp", "ring"))
    assert dual(P("dp", None, partial="ring"), MESH) == P("dp", None, partial="ulysses")
    assert all(dual(dual(s, MESH), MESH) == s for s in specs)


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_shards_tile_a_dimension(length: int, outer: int, inner: int) -> None:
    """Pieces of any length over any two axes follow each other, and are those of torch.chunk, twice."""
    mesh = {"ring": outer, "ulysses": inner}
    x, seen = torch.arange(length), []
    for ring, ulysses in product(range(outer), range(inner)):
        at = {"ring": ring, "ulysses": ulysses}
        piece = x[local_slices(P(("ring", "ulysses")), (length,), mesh, at)]
        assert piece.shape == local_shape(P(("ring", "ulysses")), (length,), mesh, at)
        seen.append(piece)
        blocks = [*x.chunk(outer), *[x[:0]] * outer] if length else [x] * outer
        pieces = [*blocks[ring].chunk(inner), *[x[:0]] * inner] if len(blocks[ring]) else [x[:0]] * inner
        assert torch.equal(piece, pieces[ulysses])
    assert torch.equal(torch.cat(seen), x)


def test_one_process_stands_for_a_mesh_of_ones() -> None:
    ones = dict.fromkeys(AXES, 1)
    x = torch.rand(2, 3)
    assert coordinates(ones) == dict.fromkeys(AXES, 0)
    assert axis_sizes(ones) == ones
    assert redistribute(x, P("dp", "ring"), P("ulysses", "dp"), ones, shape=(2, 3)) is x
    assert torch.equal(
        torch.func.grad(lambda x: redistribute(x, P("dp", None), P(None, None), ones).sum())(x),
        torch.ones(2, 3),
    )


@pytest.mark.parametrize(
    ("world", "degrees", "words"),
    [
        (8, (1, 2, 2), ["world_size=8", "1 * 2 * 2 = 4", "--nproc-per-node 4,", "set ulysses=4 or dp=2"]),
        (8, (2, 3, 1), ["2 * 3 * 1 = 6", "--nproc-per-node 6,", "change a degree"]),
        (2, (1, 2, 4), ["world_size=2", "= 8", "--nproc-per-node 8,", "set ulysses=1"]),
    ],
)
def test_world_size_names_the_number_to_change(
    world: int, degrees: tuple[int, int, int], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="must equal dp") as error:
        check_world_size(world, dp=degrees[0], ring=degrees[1], ulysses=degrees[2])
    assert all(word in str(error.value) for word in words), error.value
    check_world_size(degrees[0] * degrees[1] * degrees[2], dp=degrees[0], ring=degrees[1], ulysses=degrees[2])


def test_build_mesh_refuses_before_it_communicates() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="process group must be initialised first"):
        build_mesh()
    for name in AXES:
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            build_mesh(**dict[str, Any]({name: 0}))


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_complete(name: str) -> None:
    table = TABLES[name]
    assert table.name == name
    ranks = {"tokens": 2, "residual": 3, "attn_x": 3, "q": 4, "kv": 4, "mlp_x": 3}
    for column, ndim in ranks.items():
        spec = getattr(table, column)
        assert len(spec) == ndim
        assert spec.axes <= set(AXES)
        assert spec[0] == ("dp",)  # the batch is dealt over dp and nothing else
    assert table.residual.dims[:2] == table.tokens.dims
    assert set(table.rest) == set(table.use) == {*MATRICES, *VECTORS}
    for leaf in (*MATRICES, *VECTORS):
        ndim = 2 if leaf in MATRICES else 1
        assert len(table.rest[leaf]) == len(table.use[leaf]) == ndim
    with pytest.raises(TypeError):
        table.rest["wq"] = P(None, None)  # type: ignore[index]
    with pytest.raises(TypeError):
        TABLES["mine"] = table  # type: ignore[index]


@pytest.mark.parametrize(("name", "sequence"), [("ulysses", None), ("usp", "ring")])
def test_heads_over_ulysses_and_a_ring_where_the_sequence_stays_cut(name: str, sequence: str | None) -> None:
    table = TABLES[name]
    assert table.q == P("dp", sequence, "ulysses", None)
    # ZeRO-3: over all of dp, ring, ulysses
    assert all(spec.axes == set(AXES) for spec in table.rest.values())
    assert all(not spec.axes for spec in table.use.values())


def test_constants_are_marked_as_torch_marks_them() -> None:
    def named() -> int:
        return 1

    theirs: Any = torch.compiler.assume_constant_result(lambda: 1)  # type: ignore[no-untyped-call]
    assert vars(constant(named)) == vars(theirs)
