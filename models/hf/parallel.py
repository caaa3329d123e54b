"""Any Transformers causal model on this rank's part of the sequence, for as long as a context lasts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from usp import Batch, Shard, linear_cross_entropy, shard_batch
from usp.loss import IGNORE
from usp.mesh import MeshLike, Table, axis_sizes
from usp.models.hf.attention import KEY, attend, wanted
from usp.models.hf.handed import Handed
from usp.models.hf.inputs import shard_inputs
from usp.models.hf.probe import refuse_by_config, refuse_by_running
from usp.models.hf.reduce import num_replicas, reduce_module_grads, reported
from usp.order import ring_axes

_numbers = itertools.count()


class SequenceParallel:
    """What `sequence_parallel` yields: the batch cut, the loss and the sum of gradients for one model.

    `name`: what stands in the model's `attn_implementation` meanwhile.
    """

    def __init__(self, mesh: MeshLike, table: Table, *, averaged: bool, kernel: str) -> None:
        _check_table(table, mesh)
        self.name = f"usp_{table.name}_{next(_numbers)}"
        self.mesh, self.table, self.averaged, self.kernel = mesh, table, averaged, kernel
        self.model: Any = None
        self.fused = False
        self._names: dict[nn.Module, str] = {}
        self._probed: list[str] | None = None

    def bind(self, model: Any) -> None:
        """Take a model whose `attn_implementation` is this one's name, after checking that it can run so.

        Raises ValueError, naming layers, before any communication.
        """
        if self.model is not None:
            raise ValueError(f"one context must serve one model, got a second {type(model).__name__}.")
        refuse_by_config(model)
        self._names = {module: name for name, module in model.named_modules()}
        training = model.training
        try:
            self.fused = refuse_by_running(model, lambda t, p: self._probe(model, t, p))
        finally:
            self._probed = None
            model.train(training)
        self.model = model

    def shard(self, batch: Batch | Mapping[str, Any], **kwargs: Any) -> Shard:
        """This rank's part of a global batch, the same on every rank (`shard_batch`, `shard_inputs`)."""
        placed: dict[str, Any] = {"table": self.table, "mesh": self.mesh, **kwargs}
        placed.setdefault("device", self.model.get_input_embeddings().weight.device)
        if isinstance(batch, Batch):
            return shard_batch(batch, **placed)
        return shard_inputs(batch, **placed)

    def __call__(self, shard: Shard, *, engine: Any = None, **kwargs: Any) -> Any:
        """The model's own output on this rank's tokens; `engine`: what wraps the model, if anything."""
        model = self.model if engine is None else engine
        handed: dict[str, Any] = {KEY: Handed(shard)}
        return model(
            input_ids=shard.tokens, position_ids=shard.positions, use_cache=False, **handed, **kwargs
        )

    def loss(self, shard: Shard, *, engine: Any = None) -> Tensor:
        """Mean over the targets of all ranks: one value everywhere, its gradient this rank's contribution.

        Where the model's head is one plain matrix, whole logits never exist. Communicates, per layer, as
        `attend`, and 1 all-reduce of a scalar per mesh axis.
        """
        if self.fused:
            with _caught(self.model.get_output_embeddings()) as caught:
                self(shard, engine=engine)
            weight = self.model.get_output_embeddings().weight
            total = linear_cross_entropy(caught[0], weight, shard.labels)
        else:
            logits = self(shard, engine=engine).logits
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
            total = F.cross_entropy(wide, shard.labels.flatten(), ignore_index=IGNORE, reduction="sum")
        count = shard.num_valid.clamp(min=1) * num_replicas(self.table, self.mesh)
        return reported(total / count.to(total.dtype), self.mesh, averaged=self.averaged)

    def reduce_grads(self) -> None:
        """Sum the parameters' gradients over all ranks. Not for engines that do it themselves."""
        if self.averaged:
            raise ValueError("averaged=True must leave the sum to the engine. Use averaged=False.")
        reduce_module_grads(self.model.parameters(), self.mesh)

    def _probe(self, model: Any, tokens: Tensor, positions: Tensor) -> int:
        self._probed = []
        model.eval()
        handed: dict[str, Any] = {KEY: Handed(None)}  # type: ignore[arg-type]
        model(input_ids=tokens, position_ids=positions, use_cache=False, **handed)
        return len(self._probed)

    def attention(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """What Transformers calls in each layer."""
        name = self._names.get(module)
        if name is None:
            raise ValueError(
                f"attn_implementation={self.name!r} must be used by the model it was bound to, got a layer "
                f"{type(module).__name__} of another one. Give each model its own context."
            )
        want = wanted(module, name, mask, kwargs)
        if self._probed is not None:
            if not isinstance(kwargs.get(KEY), Handed):
                raise ValueError(
                    f"layer={name!r} must get the model's keyword arguments. This model cannot run here."
                )
            self._probed.append(name)
            return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2), None
        if want.shard is None:
            raise ValueError("the model must be called as sp(shard) or sp.loss(shard), got a plain call.")
        if q.shape[2] != (num_tokens := want.shard.tokens.shape[1]):
            raise ValueError(f"layer={name!r} must see this rank's tokens, {num_tokens}, got {q.shape[2]}.")
        return attend(q, k, v, want, table=self.table, mesh=self.mesh, kernel=self.kernel), None


@contextmanager
def sequence_parallel(
    model: Any = None, *, mesh: MeshLike, table: Table, averaged: bool = False, kernel: str = "auto"
) -> Iterator[SequenceParallel]:
    """Run an unchanged Transformers causal model on sequence shards inside this context.

        with sequence_parallel(model, mesh=mesh, table=TABLES["usp"]) as sp:
            loss = sp.loss(sp.shard(batch))
            loss.backward()
            sp.reduce_grads()

    Attention is registered under a name of its own, set in this model's configuration alone, and both are
    undone at the end. Without `model`: load one with attn_implementation=sp.name, then `sp.bind(model)`.
    `averaged`: as in `reported`. `kernel`: as in `usp.attention`. Documents come from the batch alone.
    Raises ValueError for a model or a table that cannot run so, before any communication.
    """
    sp = SequenceParallel(mesh, table, averaged=averaged, kernel=kernel)
    interface: Any = ALL_ATTENTION_FUNCTIONS
    interface[sp.name] = sp.attention
    before = None if model is None else model.config._attn_implementation
    try:
        if model is not None:
            model.set_attn_implementation(sp.name)
            sp.bind(model)
        yield sp
    finally:
        if model is not None:
            model.set_attn_implementation(before)
        del interface[sp.name]


@contextmanager
def _caught(head: nn.Module) -> Iterator[list[Tensor]]:
    """What goes into the head; the head itself sees one token a row."""
    caught: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        caught.append(args[0])
        return (args[0][:, :1], *args[1:])

    handle = head.register_forward_pre_hook(hook)
    try:
        yield caught
    finally:
        handle.remove()


def _check_table(table: Table, mesh: MeshLike) -> None:
    """A model's own layers run on the tokens a rank has, with whole weights."""
    sizes = axis_sizes(mesh)
    problems = [
        f"{name} unlike tokens"
        for name in ("residual", "attn_x", "mlp_x")
        if [a for a in getattr(table, name).dims[1] if sizes[a] > 1]
        != [a for a in table.tokens[1] if sizes[a] > 1]
    ]
    problems += [] if not any(sizes[a] > 1 for a in table.use["wq"].axes) else ["use['wq'] cut"]
    if len(ring_axes(table, mesh)) > 1:
        problems.append(f"attention's sequence over {ring_axes(table, mesh)}")
    if problems:
        raise ValueError(
            f"table={table.name!r} must leave a model's own layers their tokens and weights, got "
            f"{'; '.join(problems)}. Choose ulysses, ring or usp."
        )
