"""Writing a bridged model as a directory that Transformers loads, whatever holds its parameters."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from usp.mesh import Table
from usp.mesh.agree import agree, place
from usp.models.config import LlamaConfig
from usp.models.files import convert
from usp.models.files.hf_names import hf_name
from usp.models.hf import skeleton
from usp.models.params import Leaf, Mesh, Params, abstract, map_params
from usp.state.files import sync


def write_directory(
    root: nn.Module,
    cfg: LlamaConfig,
    target: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None,
    table: Table,
    mesh: Mesh,
    cut: bool,
    state: Mapping[str, Tensor] | None,
    max_shard_size: int | str,
) -> None:
    """Write beside the target first, then move into it: what was there under the same names is replaced.

    `cut`: whether the parameters are shards, which every rank writes together; whole ones one rank writes
    alone. `state`: values that an engine has gathered, by Hugging Face's names, instead of the parameters'.
    """
    over = mesh if cut else None
    with torch.no_grad():
        params = skeleton.read(root, cfg, table, mesh) if state is None else _from_state(cfg, state)
    if not cut:
        _check_whole(params, cfg)
    folder, first = Path(target).absolute(), place(over)[0] == 0
    room = folder.parent / f".{folder.name}.tmp"  # the same on every rank
    if first:  # the only rank that looks at it
        shutil.rmtree(room, ignore_errors=True)
    placed: dict[str, Any] = {"table": table, "mesh": mesh} if cut else {}
    convert.to_hf(params, cfg, room, source=source, max_shard_size=max_shard_size, **placed)
    agree(lambda: _move(room, folder) if first else None, over)


def _from_state(cfg: LlamaConfig, state: Mapping[str, Tensor]) -> Params:
    def one(dotted: str, leaf: Leaf) -> Tensor:
        value = state.get(hf_name(dotted))
        if value is None:
            raise ValueError(
                f"state_dict must hold {hf_name(dotted)}, got {len(state)} others. Pass all of them; "
                f"DeepSpeed's are whole with stage3_gather_16bit_weights_on_model_save."
            )
        return value

    return map_params(one, abstract(cfg))


def _check_whole(params: Params, cfg: LlamaConfig) -> None:
    def one(dotted: str, value: Tensor, leaf: Leaf) -> None:
        if tuple(value.shape) != leaf.shape:
            raise ValueError(
                f"{hf_name(dotted)}={tuple(value.shape)} must be whole to be saved, got a part of "
                f"{leaf.shape} that an engine keeps. Save inside usp.models.hf.deepspeed.whole_parameters."
            )

    map_params(one, params, abstract(cfg))


def _move(room: Path, folder: Path) -> None:
    """What was there is let go last: at every moment each name that is there is a whole file."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {file.name for file in room.iterdir()}
    for name in names:
        os.replace(room / name, folder / name)
    for old in folder.glob("model*.safetensors*"):  # of an earlier save, which may have had more files
        if old.name not in names:
            old.unlink()
    sync(folder)
    room.rmdir()
