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
from usp.batch import IGNORE
from usp.mesh import MeshLike, Table, axis_sizes
from usp.models.hf.attention import KEY, attend, wanted
from usp.models.hf.handed import Handed
from usp.models.hf.inputs import shard_inputs
from usp.models.hf.probe import refuse_by_config, refuse_by_running
from usp.models.hf.reduce import reduce_module_grads, reported
from usp.models.llama import mean_of
from usp.order import ring_axes
from usp.sequence_loss import weighted_cross_entropy

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

    def loss(self, shard: Shard, *, weights: Tensor | None = None, engine: Any = None) -> Tensor:
        """Mean over the targets of all ranks: one value everywhere, its gradient this rank's contribution.

        `weights`: those of the targets, from `weighted_inputs`. Where the model's head is one plain matrix,
        whole logits never exist. Communicates, per layer, as `attend`, and 1 all-reduce of a scalar per mesh
        axis.
        """
        if self.fused:
            with _loss_in_head(self.model.get_output_embeddings(), shard.labels, weights) as seen:
                total = self(shard, engine=engine).logits.sum()
            if not seen:
                raise ValueError(
                    "engine must hold the model that this context was bound to, got another one, whose head "
                    "was run. Bind that model in a context of its own."
                )
        else:
            logits = self(shard, engine=engine).logits
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
            labels = shard.labels if weights is None else shard.labels.where(weights != 0, IGNORE)
            losses = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="none")
            total = losses.sum() if weights is None else (losses * weights.flatten().to(losses.dtype)).sum()
        part = mean_of(total, shard.num_valid, self.table, self.mesh)
        return reported(part, self.mesh, averaged=self.averaged)

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
def _loss_in_head(head: nn.Module, labels: Tensor, weights: Tensor | None) -> Iterator[list[Tensor]]:
    """Inside, the head gives the sum of its tokens' losses in place of logits, as [1, 1, 1].

    Yields a list that holds what the head was given, once it has run.

    Made while the head runs, where an engine that keeps weights in parts (ZeRO-3, FSDP) has this one whole.
    """
    caught: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        caught.append(args[0])
        return (args[0][:, :1], *args[1:])

    def after(module: nn.Module, _: Any, __: Any) -> Tensor:
        matrix: Tensor = module.weight  # type: ignore[assignment]
        kind = matrix.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else matrix.dtype
        x, matrix = caught[0].to(dtype), matrix.to(dtype)
        with torch.autocast(kind, enabled=False):
            if weights is None:
                total = linear_cross_entropy(x, matrix, labels)
            else:
                total = weighted_cross_entropy(x, matrix, labels, weights)
        return total.view(1, 1, 1).clone()  # no view, to which engines could not add a hook

    # first of the head's forward hooks: an engine's own gives the weight up again
    handles = [head.register_forward_pre_hook(before), head.register_forward_hook(after, prepend=True)]
    try:
        yield caught
    finally:
        for handle in handles:
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
