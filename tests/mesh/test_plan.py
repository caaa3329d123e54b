"""`plan` without a process group: steps, bytes, and what it says to a person."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from usp.mesh import TABLES, P, plan

MESH = {"dp": 1, "ring": 2, "ulysses": 4}
SHAPE = (3, 4096, 32, 128)  # [B, S, N, H]
BYTES = 3 * 4096 * 32 * 128 * 2  # bfloat16, whole
WIDE = 2 * BYTES  # sums travel in float32
U, R, RU = "ulysses", "ring", ("ring", "ulysses")
WHOLE = P(None, None, None, None)
SUM_U, SUM_R = P(None, None, None, None, partial=U), P(None, None, None, None, partial=R)
SUM_RU = P(None, None, None, None, partial=RU)
A2A, GATHER, SCATTER, REDUCE = "all_to_all", "all_gather", "reduce_scatter", "all_reduce"

# from, to: (kind, axis) of each step and bytes per rank. n (k-1)/k for an all-to-all and a reduce-scatter of
# n bytes held, n (k-1) for a gather, twice n (k-1)/k for an all-reduce, nothing for local steps.
MOVES: dict[str, tuple[P, P, list[tuple[str, str]], int]] = {
    "seq to heads": (P("dp", RU, None, None), P("dp", R, U, None), [(A2A, U)], BYTES // 8 * 3 // 4),
    "heads to seq": (P("dp", R, U, None), P("dp", RU, None, None), [(A2A, U)], BYTES // 8 * 3 // 4),
    "over ring": (P(None, R, None, None), P(None, None, R, None), [(A2A, R)], BYTES // 4),
    "gather": (P(None, U, None, None), WHOLE, [(GATHER, U)], BYTES // 4 * 3),
    "ring stays": (P("dp", RU, None, None), P("dp", R, None, None), [(GATHER, U)], BYTES // 8 * 3),
    "gather both": (P(None, RU, None, None), WHOLE, [(GATHER, U), (GATHER, R)], BYTES // 8 * 7),
    "slice": (WHOLE, P(None, U, None, None), [("slice", U)], 0),
    "slice both": (WHOLE, P(None, RU, None, None), [("slice", R), ("slice", U)], 0),
    "scatter": (SUM_U, P(None, U, None, None), [(SCATTER, U)], WIDE * 3 // 4),
    "scatter both": (
        SUM_RU,
        P(None, RU, None, None),
        [(SCATTER, R), (SCATTER, U)],
        WIDE // 2 + WIDE // 2 * 3 // 4,
    ),
    "reduce": (SUM_U, WHOLE, [(REDUCE, U)], 2 * WIDE * 3 // 4),
    "a sum stays": (
        P(None, U, None, None, partial=R),
        P(None, None, U, None, partial=R),
        [(A2A, U)],
        BYTES // 4 * 3 // 4,
    ),
    "sum and seq to heads": (
        P(None, U, None, None, partial=R),
        P(None, None, U, None),
        [(A2A, U), (REDUCE, R)],
        BYTES // 4 * 3 // 4 + WIDE // 4,
    ),
    "to a sum": (WHOLE, SUM_R, [("mask", R)], 0),
    "shard to a sum": (P(None, R, None, None), SUM_R, [("pad", R)], 0),
    "nothing": (P("dp", R, None, None), P("dp", R, None, None), [], 0),
    "an axis of size 1": (P("dp", None, None, None), P(None, None, "dp", None), [], 0),
}


@pytest.mark.parametrize("name", MOVES)
def test_steps_and_bytes(name: str) -> None:
    src, dst, steps, nbytes = MOVES[name]
    made = plan(src, dst, SHAPE, torch.bfloat16, MESH)
    assert [(s.kind, s.axis) for s in made.steps] == steps
    assert made.nbytes == nbytes
    local = ("slice", "mask", "pad")
    assert made.collectives == tuple(kind for kind, _ in steps if kind not in local)
    assert not dist.is_initialized()


def test_a_table_moves_with_one_all_to_all() -> None:
    """The move between two rows of a table compiles to what is needed and nothing else, on any mesh."""
    table = TABLES["usp"]
    seq = P(*table.attn_x.dims, None)
    for dp, ring, ulysses in product((1, 2), (1, 2, 4), (2, 8)):
        mesh = {"dp": dp, "ring": ring, "ulysses": ulysses}
        there, back = (
            plan(seq, table.q, SHAPE, torch.float32, mesh),
            plan(table.q, seq, SHAPE, torch.float32, mesh),
        )
        assert there.collectives == back.collectives == ("all_to_all",)
        share = -(-3 // dp) * (4096 // ring // ulysses) * 32 * 128 * 4
        assert there.nbytes == back.nbytes == share * (ulysses - 1) // ulysses
        weight = plan(table.rest["wq"], table.use["wq"], (4096, 4096), torch.bfloat16, mesh)
        assert set(weight.collectives) == {"all_gather"}
        assert weight.nbytes == 4096 * 4096 * 2 // (dp * ring * ulysses) * (dp * ring * ulysses - 1)


SPECS = [
    P(None, None),
    P(R, None),
    P(None, R),
    P(RU, None),
    P((U, R), None),
    P(R, U),
    P(U, R),
    P(None, None, partial=RU),
    P(R, None, partial=U),
]


def test_the_path_does_not_depend_on_sizes() -> None:
    """All ranks, dtypes and lengths compile the same steps, also where nothing divides and sizes are tiny."""
    for src, dst in product(SPECS, SPECS):
        want = [
            (s.kind, s.axis, s.dim, s.to_dim) for s in plan(src, dst, (64, 64), torch.float32, MESH).steps
        ]
        for shape in ((1, 64), (64, 1), (5, 7), (1, 1), (0, 3)):
            for dtype in (torch.bool, torch.bfloat16, torch.float64):
                made = plan(src, dst, shape, dtype, MESH)
                assert [(s.kind, s.axis, s.dim, s.to_dim) for s in made.steps] == want
                assert made.nbytes >= 0


def test_steps_lead_from_src_to_dst() -> None:
    for src, dst in product(SPECS, SPECS):
        steps = plan(src, dst, (5, 7), torch.float32, MESH).steps
        ends = [src, *[s.after for s in steps]]
        assert [s.before for s in steps] == ends[:-1]
        assert ends[-1] == dst
        axes = [s.axis for s in steps]
        assert not {"ring", "ulysses"} & set(axes) or src != dst  # equal placements: nothing moves


def test_no_detour_over_an_axis_that_holds_copies() -> None:
    """A sum over one axis never cuts along another that is replicated before and after."""
    made = plan(P(None, partial="ulysses"), P(None), (4096,), torch.float32, MESH)
    assert [s.kind for s in made.steps] == ["all_reduce"]


def test_uneven_bytes_are_those_of_the_largest_shard() -> None:
    made = plan(P("ulysses", None), P(None, "ulysses"), (9, 5), torch.float32, MESH)
    assert made.nbytes == 3 * 5 * 4 * 3 // 4  # 9 rows over 4 ranks: 3, 3, 3, 0


def test_sums_travel_in_the_type_they_are_taken_in() -> None:
    src, dst = P(None, partial="ulysses"), P("ulysses")
    sent = {
        (torch.bfloat16, None): 4, (torch.bfloat16, torch.bfloat16): 2, (torch.float32, torch.bfloat16): 2,
        (torch.float64, None): 8, (torch.int32, torch.bfloat16): 4, (torch.bool, None): 8,
    }  # fmt: skip
    for (dtype, wanted), itemsize in sent.items():
        made = plan(src, dst, (4096,), dtype, MESH, reduce_dtype=wanted)
        assert made.nbytes == 4096 * itemsize * 3 // 4, (dtype, wanted)


def test_print_explains() -> None:
    src, dst = P("dp", ("ring", "ulysses"), None, None), P("dp", "ring", None, None)
    text = str(plan(src, dst, (1, 4096, 8, 128), torch.bfloat16, MESH))
    for words in (
        "[1, 4096, 8, 128] bfloat16 on dp 1 x ring 2 x ulysses 4",
        "P('dp', ('ring', 'ulysses'), None, None) -> P('dp', 'ring', None, None)",
        "1. all_gather",
        "over ulysses (4 ranks)",
        "dim 1",
        "3.0 MiB sent per rank",
        "total: 3.0 MiB sent per rank",
    ):
        assert words in text, text
    assert "nothing to do" in str(plan(dst, dst, (1, 4096, 8, 128), torch.bfloat16, MESH))
    everything = [str(plan(a, b, (10**6, 10**7), torch.float32, MESH)) for a, b in product(SPECS, SPECS)]
    words = (
        "all_to_all",
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "slice",
        "mask",
        "pad",
        "local",
        "TiB",
    )
    assert all(any(word in text for text in everything) for word in words)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (P("dp"), P("dp", None), r"src=P\('dp'\) must name 2 dimensions, got 1"),
        (P("dp", None), P("dp"), r"dst=P\('dp'\) must name 2 dimensions, got 1"),
        (P("tp", None), P(None, None), r"src=P\('tp', None\) must use axes of the mesh, got \['tp'\]"),
        (P(None, None), P(None, None, partial="pp"), r"dst=.* must use axes of the mesh, got \['pp'\]"),
    ],
)
def test_refused(src: P, dst: P, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(src, dst, (4, 4), torch.float32, MESH)
