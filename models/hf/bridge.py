"""The functional model as a Transformers model: parameters in modules, everything else in functions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from usp import Shard
from usp.mesh import TABLES, MeshLike, Table
from usp.mesh.agree import agree
from usp.mesh.tables import WHOLE
from usp.models import llama
from usp.models.config import LlamaConfig
from usp.models.files import convert
from usp.models.hf import skeleton
from usp.models.hf.handed import Handed
from usp.models.hf.inputs import weighted_inputs
from usp.models.hf.loader import check_same
from usp.models.hf.reduce import reduce_module_grads, reported
from usp.models.hf.saving import write_directory
from usp.models.layout import check_layout
from usp.models.options import Options
from usp.models.params import Params, init, named_leaves
from usp.sequence_loss import weighted_cross_entropy

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
        self._checked = False
        if params is None:
            params = init(self.cfg, seed=0, table=self.table, mesh=self.mesh)
        values = dict(named_leaves(params))
        skeleton.build(self, self.cfg, values, self.table, self.mesh)
        if averaged and self.is_cut:
            raise ValueError(
                f"averaged=True must go with whole parameters, got table={table.name!r} that cuts them. Pass "
                f"whole=True."
            )

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds shards of the parameters; then it holds none of them whole but small ones."""
        return any(isinstance(p, DTensor) for p in self.parameters())

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

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        *,
        max_shard_size: int | str = "5GB",
        **kwargs: Any,
    ) -> None:
        """Write a directory that any Transformers loads, side files of the source included.

        Where parameters are cut every rank calls this; where they are whole only one may, and with
        is_main_process=False nothing happens. Written beside the target first, then moved into it.
        `state_dict`: values that an engine has gathered. Raises ValueError for options of Transformers that
        change what is written.
        """
        unused = sorted(key for key in ("push_to_hub", "variant") if kwargs.get(key))
        if unused or kwargs.get("safe_serialization") is False:
            raise ValueError(f"save_pretrained knows no {unused or 'pickles'}. Leave that out.")
        if not self.is_cut and not is_main_process:
            return
        write_directory(
            self, self.cfg, save_directory, source=self.source, table=self.table, mesh=self.mesh,
            cut=self.is_cut, state=state_dict, max_shard_size=max_shard_size,
        )  # fmt: skip

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Take the values of a Hugging Face directory: this rank's shards alone, in the types that are held.

        Every rank calls this. Raises ValueError on every rank alike for files that do not fit.
        """
        _, params = convert.from_hf(path, table=self.table, mesh=self.mesh, device=self.device)
        skeleton.write(self, self.cfg, params)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        shift_labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        shard: Shard | Handed | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Loss of one global batch, the same on every rank, or this rank's logits.

        input_ids [B, S] and the rest are global, the same on every rank (see `shard_inputs`); or `shard`,
        what `shard_batch` made, alone. With labels or shift_labels (a shard always has them): `loss`, the
        mean over the targets of all ranks, or their sum divided by `num_items_in_batch`; with `loss_weights`
        [B, S], one for each label, the weighted mean. Without labels: `logits` [b, s, V] placed as
        table.tokens. Communicates as `usp.models.loss`, and 1 all-reduce of a scalar per
        mesh axis. Raises ValueError for arguments that do not fit or would have no effect.
        """
        unused = sorted(key for key, value in kwargs.items() if not _is_default(key, value))
        beside = [attention_mask, labels, position_ids, cu_seqlens, shift_labels, loss_weights]
        alone = shard is None or all(x is None for x in (*beside, num_items_in_batch))
        if unused or (shard is None) == (input_ids is None) or not alone:
            raise ValueError(
                f"forward takes either input_ids and what goes with them or shard alone, and knows no "
                f"{unused or 'other'}. Leave it out."
            )
        wanted = shard is not None or labels is not None or shift_labels is not None
        if loss_weights is not None and not wanted:
            raise ValueError("loss_weights must come with labels or shift_labels, got none. Pass them.")
        ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if ddp is not None and not self.averaged:
            raise ValueError(
                "averaged=False must not go with DistributedDataParallel, which takes the mean of the ranks' "
                "gradients. Build the model with averaged=True."
            )
        if shard is None:
            inputs = {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "labels": labels,
                "position_ids": position_ids,
                "cu_seqlens": cu_seqlens,
                "shift_labels": shift_labels,
                "loss_weights": loss_weights,
            }
            placed: dict[str, Any] = {"table": self.table, "mesh": self.mesh, "device": self.device}
            if not self._checked:  # once: a loader that deals out batches would mix them
                check_same(inputs, self.mesh)
                self._checked = True
            shard, weights = weighted_inputs(inputs, num_valid=num_items_in_batch, **placed)
        else:
            shard, weights = (shard.value, shard.weights) if isinstance(shard, Handed) else (shard, None)
        options = self._precision()
        with torch.autocast(self.device.type, enabled=False):
            return self._compute(shard, weights, options, wanted)

    def _compute(
        self, shard: Shard, weights: Tensor | None, options: Options, wanted: bool
    ) -> CausalLMOutputWithPast:
        params = skeleton.read(self, self.cfg, self.table, self.mesh)
        placed: dict[str, Any] = {"table": self.table, "mesh": self.mesh}
        if not wanted:
            return CausalLMOutputWithPast(logits=llama.logits(params, shard, self.cfg, **placed, **options))
        if weights is None:
            part = llama.loss(params, shard, self.cfg, **placed, **options)
        else:
            x, head = llama.hidden_and_head(params, shard, self.cfg, self.table, self.mesh, options)
            total = weighted_cross_entropy(x, head, shard.labels, weights)
            part = llama.mean_of(total, shard.num_valid, self.table, self.mesh)
        return CausalLMOutputWithPast(loss=reported(part, self.mesh, averaged=self.averaged))

    def _precision(self) -> Options:
        """Where an engine asks for automatic casts: parameters stay as they are and are used in that type."""
        if not torch.is_autocast_enabled(self.device.type):
            return self.options
        options: Options = {"dtype": torch.get_autocast_dtype(self.device.type)}
        return {**options, **self.options}

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "gradient_checkpointing=True must be False for this model, whose `remat` says what is kept. "
            "Build it with remat='full' or 'attention'."
        )

    gradient_checkpointing_enable = activation_checkpointing_enable

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
