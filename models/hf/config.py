"""How a trainer's ranks are used."""

from __future__ import annotations

from dataclasses import dataclass

from usp.mesh import TABLES, Table
from usp.mesh.devices import check_world_size


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """How the ranks are used; the names are those of Accelerate's ParallelismConfig where it has them.

    ulysses_size * ring_size ranks share one sequence (sp_size); dp_replicate_size groups of them read
    different rows, by default as many as there are. `table`: a name of `TABLES`, or a table.
    """

    ulysses_size: int = 1
    ring_size: int = 1
    dp_replicate_size: int | None = None
    table: str | Table = "usp"
    kernel: str = "auto"

    @property
    def sp_size(self) -> int:
        return self.ulysses_size * self.ring_size

    def resolve(self, world: int) -> tuple[Table, dict[str, int]]:
        """The table and the sizes of the mesh. ValueError for what does not fit or would cut nothing."""
        if isinstance(self.table, str) and self.table not in TABLES:
            raise ValueError(f"table={self.table!r} must be one of {', '.join(sorted(TABLES))}. Change it.")
        table = TABLES[self.table] if isinstance(self.table, str) else self.table
        for axis, size in (("ulysses", self.ulysses_size), ("ring", self.ring_size)):
            if size > 1 and axis not in table.tokens.axes:
                raise ValueError(
                    f"{axis}_size={size} must be 1 where it cuts nothing, got table={table.name!r}. Choose "
                    f"another table."
                )
        dp = max(1, world // self.sp_size) if self.dp_replicate_size is None else self.dp_replicate_size
        check_world_size(world, dp=dp, ring=self.ring_size, ulysses=self.ulysses_size)
        return table, {"dp": dp, "ring": self.ring_size, "ulysses": self.ulysses_size}
