"""Tables that cannot place a model are named before any work; no process group is needed. Case P57."""

from dataclasses import replace

import pytest

from usp.mesh import TABLES, P, Table
from usp.models import LlamaConfig, check_layout, param_specs

CFG = LlamaConfig(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    qkv_bias=True,
)
MESH = {"dp": 2, "ring": 1, "ulysses": 4}
ULYSSES = TABLES["ulysses"]


def using(**leaves: P) -> Table:
    return replace(ULYSSES, name="mine", use={**ULYSSES.use, **leaves})


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("ulysses", [1, 2, 3, 5, 6, 8])  # 8: more ranks than heads, cases H48, H52
def test_presets_place_every_head_count(name: str, ulysses: int) -> None:
    check_layout(CFG, mesh={"dp": 2, "ring": 3, "ulysses": ulysses}, table=TABLES[name], seq_len=1)


def test_a_scheme_of_ones_own_is_placed() -> None:
    """Weights stay cut by heads while in use: tables, not names, decide."""
    cut_out, cut_in = P("ulysses", None), P(None, "ulysses")
    leaves = {"w_gate": cut_out, "w_up": cut_out, "w_down": cut_in}
    check_layout(CFG, mesh=MESH, table=replace(using(**leaves), mlp_x=P("dp", None, None)))


BOTH = ("ring", "ulysses")
REFUSED: dict[str, tuple[Table, dict[str, int], str]] = {
    "ring of two axes": (
        replace(TABLES["usp"], name="mine", q=P("dp", BOTH, None, None), kv=P("dp", BOTH, None, None)),
        {"dp": 1, "ring": 2, "ulysses": 2},
        "must leave one axis larger than 1 on the sequence",
    ),
    "ring inside": (
        replace(TABLES["usp"], name="mine", residual=P("dp", ("ulysses", "ring"), None)),
        {"dp": 1, "ring": 2, "ulysses": 2},
        "must shard S over ('ring',) outermost",
    ),
    "mlp cut twice": (
        using(w_gate=P("ulysses", None), w_up=P("ulysses", None), w_down=P(None, "ulysses")),
        MESH,
        "must not share axes",
    ),
    "kv heads that do not follow": (using(wq=P("ulysses", None), wo=P(None, "ulysses")), MESH, "use['wk']"),
    "kv apart from q": (replace(ULYSSES, kv=P("dp", None, None, None)), MESH, "must be placed as q"),
    # case P50: what is added to the residual is placed as it is, or the table is refused
    "rows apart": (replace(ULYSSES, residual=P("ring", "ulysses", None)), MESH, "must shard B"),
    # case P32: there is no pipeline axis, so none that splits a backward
    "pipeline": (replace(ULYSSES, tokens=P(("dp", "pp"), "ulysses")), MESH, "got ['pp']"),
    "unknown axis": (replace(ULYSSES, mlp_x=P("dp", "tp", None)), MESH, "got ['tp']"),
    "model dimension cut": (replace(ULYSSES, residual=P("dp", None, "ulysses")), MESH, "must keep D whole"),
    "head cut": (using(lm_head=P("ulysses", None)), MESH, "use['lm_head']"),
    "broken chain": (
        using(w_gate=P("ulysses", None), w_up=P("ulysses", None)),
        MESH,
        "use['w_down'] must shard",
    ),
    "uneven pair": (using(wk=P("ulysses", None)), MESH, "use['wv'] must shard its output as use['wk']"),
    "bias apart": (using(bq=P("ulysses")), MESH, "use['bq'] must shard its output as use['wq']"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    table, mesh, named = REFUSED[case]
    with pytest.raises(ValueError, match=f"table='{table.name}' must fit") as error:
        check_layout(CFG, mesh=mesh, table=table)
    assert named in str(error.value)


def test_no_tokens() -> None:
    with pytest.raises(ValueError, match="seq_len=0 must be at least 1"):
        check_layout(CFG, mesh=MESH, table=ULYSSES, seq_len=0)


def test_missing_leaf() -> None:
    table = replace(ULYSSES, rest={k: v for k, v in ULYSSES.rest.items() if k != "bk"})
    with pytest.raises(ValueError, match="must place parameter 'bk'"):
        check_layout(CFG, mesh=MESH, table=table)
    with pytest.raises(ValueError, match="must place parameter 'bk'"):
        param_specs(CFG, table)
