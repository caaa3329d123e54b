"""The functional model as a Transformers model: parameters in modules, everything else in functions."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from usp import Shard
from usp.mesh import TABLES, MeshLike, Table, placements_of
from usp.mesh.agree import agree
from usp.mesh.dtensor import global_stride
from usp.mesh.tables import WHOLE
from usp.models import llama
from usp.models.config import LlamaConfig
from usp.models.files import convert
from usp.models.hf import skeleton
from usp.models.hf.handed import Handed
from usp.models.hf.inputs import shard_inputs
from usp.models.hf.reduce import reduce_module_grads, reported
from usp.models.layout import check_layout
from usp.models.options import Options
from usp.models.params import Leaf, Params, init, named_leaves, spec_of

ONE_RANK: Mapping[str, int] = {"dp": 1, "ring": 1, "ulysses": 1}


def _is_default(key: str, value: Any) -> bool:
    return value is None or value is False or (key == "return_dict" and value is True)


class BridgedCausalLM(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A Llama-family model that computes with `usp.models.loss` and looks like any Transformers model.

    Parameters have Hugging Face's names. Where `table.rest` cuts one it is a DTensor of this rank's shard;
    `whole=True` keeps all of them whole on every rank instead, as PEFT, Accelerate and
    DistributedDataParallel expect. `averaged`: whether such an engine takes the mean of the ranks' gradients;
    otherwise call `reduce_grads()` after the backward. Build it with `from_pretrained`, or with parameters.
    """

    config_class = PreTrainedConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = False  # `remat` says what is kept

    def __init__(
        self,
        config: PreTrainedConfig,
        params: Params | None = None,
        *,
        table: Table | None = None,
        mesh: MeshLike | None = None,
        whole: bool = False,
        averaged: bool = False,
        source: str | os.PathLike[str] | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(config)
        table = TABLES["replicated" if mesh is None else "usp"] if table is None else table
        self.table = replace(table, rest=WHOLE) if whole else table
        self.mesh = ONE_RANK if mesh is None else mesh
        self.cfg = LlamaConfig.from_hf_dict(config.to_dict())
        check_layout(self.cfg, mesh=self.mesh, table=self.table)
        self.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # trainers write the tokenizer's ids to it
        self.averaged, self.source, self.options = averaged, source, options
        if params is None:
            params = init(self.cfg, seed=0, table=self.table, mesh=self.mesh)
        values = dict(named_leaves(params))
        skeleton.build(self, self.cfg, lambda name, leaf: self._parameter(name, leaf, values[name]))
        if averaged and any(isinstance(p, DTensor) for p in self.parameters()):
            raise ValueError(
                f"averaged=True must go with whole parameters, got table={table.name!r} that cuts them. Pass "
                f"whole=True."
            )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, path: Any, *args: Any, **kwargs: Any
    ) -> BridgedCausalLM:
        """Read a Hugging Face directory through `usp.models.from_hf`: this rank's shards alone.

        `table`, `mesh`, `dtype`, `device`, and what the constructor takes. Raises ValueError on every rank
        alike for files that do not fit.
        """
        table, mesh, whole = kwargs.get("table"), kwargs.get("mesh"), kwargs.get("whole", False)
        table = TABLES["replicated" if mesh is None else "usp"] if table is None else table
        table = replace(table, rest=WHOLE) if whole else table
        over = mesh if isinstance(mesh, DeviceMesh) else None
        config = agree(lambda: AutoConfig.from_pretrained(path), over)
        _, params = convert.from_hf(
            path, table=table, mesh=ONE_RANK if mesh is None else mesh,
            dtype=kwargs.pop("dtype", None), device=kwargs.pop("device", "cpu"),
        )  # fmt: skip
        kwargs["table"] = table
        return cls(config, params, *args, source=path, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write a directory that any Transformers loads, side files of the source included.

        Where parameters are cut every rank calls this; where they are whole only one may, and with
        is_main_process=False nothing happens. Written beside the target first, then moved into it.
        """
        cut = any(isinstance(p, DTensor) for p in self.parameters())
        first = bool(kwargs.get("is_main_process", True))
        if not cut and not first:
            return
        target = Path(save_directory)
        with torch.no_grad():
            params = skeleton.read(self, self.cfg, self.table, self.mesh)
        placed: dict[str, Any] = {"table": self.table, "mesh": self.mesh} if cut else {}
        size = kwargs.get("max_shard_size", "5GB")
        if cut:
            convert.to_hf(params, self.cfg, target, source=self.source, max_shard_size=size, **placed)
            return
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as room:
            convert.to_hf(params, self.cfg, Path(room) / "hf", source=self.source, max_shard_size=size)
            for file in (Path(room) / "hf").iterdir():
                shutil.move(file, target / file.name)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        shard: Shard | Handed | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Loss of one global batch, the same on every rank, or this rank's logits.

        input_ids [B, S] and the rest are global, the same on every rank (see `shard_inputs`); or `shard`,
        what `shard_batch` made, alone. With labels or shift_labels (a shard always has them): `loss`, the
        mean over the targets of all ranks, or their sum divided by `num_items_in_batch`. Without: `logits`
        [b, s, V] placed as table.tokens. Communicates as `usp.models.loss`, and 1 all-reduce of a scalar per
        mesh axis. Raises ValueError for arguments that do not fit or would have no effect.
        """
        unused = sorted(key for key, value in kwargs.items() if not _is_default(key, value))
        if unused or (shard is None) == (input_ids is None):
            raise ValueError(
                f"forward takes either input_ids or shard, and knows no {unused or 'other'}. Leave it out."
            )
        wanted = shard is not None or labels is not None or shift_labels is not None
        if isinstance(shard, Handed):
            shard = shard.value
        if shard is None:
            inputs = {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "labels": labels,
                "position_ids": position_ids,
                "cu_seqlens": cu_seqlens,
                "shift_labels": shift_labels,
            }
            shard = shard_inputs(
                inputs, table=self.table, mesh=self.mesh, device=self.device, num_valid=num_items_in_batch
            )
        params = skeleton.read(self, self.cfg, self.table, self.mesh)
        placed: dict[str, Any] = {"table": self.table, "mesh": self.mesh, **self.options}
        if not wanted:
            return CausalLMOutputWithPast(logits=llama.logits(params, shard, self.cfg, **placed))
        part = llama.loss(params, shard, self.cfg, **placed)
        return CausalLMOutputWithPast(loss=reported(part, self.mesh, averaged=self.averaged))

    def reduce_grads(self) -> None:
        """Sum gradients of whole parameters over all ranks, see `reduce_module_grads`."""
        if self.averaged:
            raise ValueError("averaged=True must leave the sum to the engine. Build with averaged=False.")
        reduce_module_grads(self.parameters(), self.mesh)

    def get_input_embeddings(self) -> nn.Module:
        return self.get_submodule("model.embed_tokens")

    def get_output_embeddings(self) -> nn.Module:
        return self.get_submodule("model.embed_tokens" if self.cfg.tie_embeddings else "lm_head")

    @classmethod
    def can_generate(cls) -> bool:
        return False

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("generate with the exported model: save_pretrained, then AutoModel.")

    def _parameter(self, name: str, leaf: Leaf, value: Tensor) -> nn.Parameter:
        spec = spec_of(self.table.rest, name, leaf, table=self.table.name)
        mesh = self.mesh
        if not isinstance(mesh, DeviceMesh) or not spec.axes:
            return nn.Parameter(value.detach())
        local = DTensor.from_local(
            value.detach(), mesh, placements_of(spec, mesh), run_check=False,
            shape=torch.Size(leaf.shape), stride=global_stride(leaf.shape),
        )  # fmt: skip
        return nn.Parameter(local)
