"""What each table sends for one layer beside what the papers say, as a table in Markdown.

    python -m usp.tools.schemes

Counted from the tables, and equal to what ranks send: the page that shows it holds what this prints.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from usp.mesh import TABLES, Table
from usp.models import model_traffic
from usp.models.plan.local import local
from usp.models.plan.textbook import Formula, textbook
from usp.models.plan.traffic_kinds import Traffic
from usp.tools.examples.tp_sp import TP_SP
from usp.tools.presets import MODELS

MODEL, SEQ_LEN, DTYPE, RANKS = "llama-3-8b", 131072, torch.bfloat16, 8
MESHES = {
    "ulysses": {"dp": 1, "ring": 1, "ulysses": 8},
    "ring": {"dp": 1, "ring": 8, "ulysses": 1},
    "usp": {"dp": 1, "ring": 2, "ulysses": 4},
    "odysseus": {"dp": 1, "ring": 2, "ulysses": 4},
    "replicated": {"dp": 8, "ring": 1, "ulysses": 1},
    "tp_sp": {"dp": 1, "ring": 1, "ulysses": 8},
}
HEAD = ("table on", "scheme", "forward", "backward", "by the book, each way", "formula")


def schemes() -> str:
    tables = (*TABLES.values(), TP_SP)
    rows = [HEAD, ("---",) * len(HEAD), *(row for table in tables for row in _rows(table))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rows(table: Table) -> list[tuple[str, ...]]:
    """One for each scheme that the table combines."""
    sizes, batch = MESHES[table.name], MESHES[table.name]["dp"]
    cfg = MODELS[MODEL]
    layer = model_traffic(cfg, table, sizes, batch=batch, seq_len=SEQ_LEN, dtype=DTYPE).layers[0]
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    by_scheme: dict[str, list[Formula]] = {}
    for formula in textbook(local(cfg, table, sizes, batch=batch, seq_len=SEQ_LEN), DTYPE):
        by_scheme.setdefault(formula.scheme, []).append(formula)
    found = []
    for scheme, formulas in by_scheme.items():
        covers = {what for f in formulas for what in f.covers}
        there, back = sum(f.forward for f in formulas), sum(f.backward for f in formulas)
        sent = [_sent(t for t in way if t.what in covers) for way in layer]
        text = f"{formulas[0].text} ({formulas[0].source})"
        found.append((f"`{table.name}` on {mesh}", scheme, *sent, f"{_mib(there)}, {_mib(back)}", text))
    return found or [(f"`{table.name}` on {mesh}", "", "nothing", "nothing", "", "")]


def _sent(traffic: Iterable[Traffic]) -> str:
    calls: dict[str, int] = {}
    total = 0
    for t in traffic:
        calls[t.kind] = calls.get(t.kind, 0) + t.calls
        total += t.nbytes
    return f"{' + '.join(f'{n} {kind}' for kind, n in calls.items())}: {_mib(total)}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    print(schemes())
