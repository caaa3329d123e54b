"""Placements: named specs, meshes, plans and the collectives they compile to."""

if __name__ != "usp.mesh":
    raise ImportError(f"import {__name__!r} must be spelled 'usp.mesh'. Write `import usp.mesh`.")

from usp.mesh.devices import MeshLike, axis_sizes, build_mesh, coordinates
from usp.mesh.dtensor import placements_of, spec_from
from usp.mesh.exchange import exchange
from usp.mesh.plan import Plan, Step, plan
from usp.mesh.redistribute import redistribute
from usp.mesh.shard import shard_map
from usp.mesh.spec import P, dual, local_shape, local_slices, replicas
from usp.mesh.tables import TABLES, Table, differences

__all__ = [
    "TABLES",
    "MeshLike",
    "P",
    "Plan",
    "Step",
    "Table",
    "axis_sizes",
    "build_mesh",
    "coordinates",
    "differences",
    "dual",
    "exchange",
    "local_shape",
    "local_slices",
    "placements_of",
    "plan",
    "redistribute",
    "replicas",
    "shard_map",
    "spec_from",
]
