"""`scan`: run one block over a stack of layers, and decide what is remembered for the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from usp.arena import Arena
from usp.levels import levels, one_gradient
from usp.scan.closure import check_no_grad, held, needs_grad
from usp.scan.function import apply_scan
from usp.scan.memory import HostMemory, Memory, PlainMemory
from usp.scan.run import Gather, Run
from usp.scan.stored import apply_stored

REMAT = ("none", "full", "attention")
OFFLOAD = ("none", "host")


def scan(
    block: Callable[..., Tensor],
    x: Tensor,
    layers: Sequence[Any],
    *consts: Any,
    each: Sequence[Mapping[str, Any]] = (),
    remat: str | Sequence[str] = "none",
    group: int = 1,
    offload: str = "none",
    arena: Arena | None = None,
    gather: Gather | None = None,
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Tensor:
    """x = block(x, layer, *consts) for every layer, the counterpart of `lax.scan` with `jax.checkpoint`.

    `layers` are pytrees of tensors and None, all alike; `consts` are tensors or None and get no gradient.
    `each`, if given, holds further keyword arguments of the block for every layer, which are no tensors.

    remat="none" keeps what autograd keeps, and allows any transform (inside one reverse-mode transform alone
    each block keeps its own graph, which may be compiled, for one backward). "full" keeps each block's input
    and runs the block again in the backward; "attention" too, but calls the block with `kept=`, a
    `usp.kept.Kept`, whose results are kept as well and not computed again ("full" hands one that records
    nothing to a block that has such a parameter: it says when the value is not read). One name for all
    layers, or one per layer. group=k keeps only every k-th layer's input and runs a group forward once more
    to find the others (Chen et al., arXiv 1604.06174, applied twice).
    offload="host" keeps all this in the page-locked buffers of `arena`, copied on a stream of their own, and
    allows one backward per forward. Re-runs see the autocast state and random numbers of the first run.

    `gather` (a `usp.mesh.bundle.Bundle`) turns the leaves of one layer at rest into those that the block
    sees, one layer ahead; with remat it does so again in the backward, and brings each layer's gradients
    back while the next layer's are computed. `compile`, such as torch.compile, is applied to the block.

    Other values of remat than "none" give first derivatives in reverse mode only, and only to what `block` is
    given: it must not close over tensors that need a gradient. Leaves that need none (requires_grad under
    autograd; not an argument of the transform under torch.func) cost none. Communicates what `block` and
    `gather` do: with remat once more in the backward, with groups twice for all but the last of each. Raises
    ValueError for options that do not exist or would have no effect, for a const or closed-over tensor that
    asks for a gradient it would not get, and when the host's memory cannot hold what is offloaded.
    """
    if isinstance(layers, (Mapping, Tensor)) or hasattr(layers, "_fields"):
        raise ValueError(
            f"layers={type(layers).__name__} must be a list of trees, one for each layer. Put one layer in "
            f"a list; unstack what is stacked: [tree_map(lambda t: t[i], layers) for i in range(num_layers)]."
        )
    check_settings(remat, group, offload, arena, len(layers))
    check_no_grad("consts", consts)
    if "attention" in ([remat] if isinstance(remat, str) else remat) and not _may_take_kept(block):
        raise ValueError(
            "remat='attention' must go with a block that takes kept=, got one that does not. Hand it on to "
            "usp.attention(..., kept=kept), or choose remat='full'."
        )
    if each and len(each) != len(layers):
        raise ValueError(f"each={len(each)} must go with layers={len(layers)}. Give one mapping per layer.")
    segments = _segments(remat, len(layers))
    for how, part in segments:
        x = _segment(
            block, x, layers[part], consts, how, each=each[part], group=group, arena=arena, gather=gather,
            compile=compile,
        )  # fmt: skip
    return x


def _segment(
    block: Callable[..., Tensor],
    x: Tensor,
    layers: Sequence[Any],
    consts: Sequence[Any],
    remat: str,
    *,
    each: Sequence[Mapping[str, Any]],
    group: int,
    arena: Arena | None,
    gather: Gather | None,
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
) -> Tensor:
    """Layers that are all treated alike."""
    tracing = torch.compiler.is_compiling()
    func = tracing or bool(levels())
    stored = remat == "none" and not tracing and one_gradient() and not needs_grad(held(block))
    if remat != "none" and not tracing:
        check_no_grad("block", held(block))
    with_kept = remat == "attention" or (remat == "full" and _takes_kept(block))
    if compile is not None:
        if func and remat == "none" and not stored:
            raise ValueError(
                "compile must not be given with remat='none' inside nested torch.func transforms, which "
                "would run the block uncompiled. Choose another remat, or use plain autograd."
            )
        block = compile(block)
    if (remat == "none" and not stored) or not layers:
        for i, layer in enumerate(layers):
            x = block(x, _used(layer, gather), *consts, **(each[i] if each else {}))
        return x
    flat = [pytree.tree_flatten(layer) for layer in layers]
    leaves = [leaf for one, _ in flat for leaf in one]
    memory: Memory = PlainMemory() if arena is None or stored else HostMemory(arena, len(flat), group)
    run = Run(
        block=block,
        trees=[tree for _, tree in flat],
        num_leaves=[len(one) for one, _ in flat],
        with_kept=with_kept,
        recording=remat == "attention",
        group=group,
        gather=gather,
        memory=memory,
        device=x.device,
        each=each,
    )
    if not torch.is_grad_enabled() and not func:
        return run.forward(x, leaves, consts, keep=False)
    return (apply_stored if stored else apply_scan)(run, x, leaves, consts)


def _takes_kept(block: Callable[..., Tensor]) -> bool:
    try:
        return "kept" in signature(block).parameters
    except ValueError:  # a builtin has no signature
        return False


def _may_take_kept(block: Callable[..., Tensor]) -> bool:
    """Whether it has such a parameter, or takes any name, or does not say."""
    try:
        found = signature(block).parameters
    except ValueError:
        return True
    return "kept" in found or any(p.kind is p.VAR_KEYWORD for p in found.values())


def _used(layer: Any, gather: Gather | None) -> Any:
    if gather is None:
        return layer
    leaves, tree = pytree.tree_flatten(layer)
    return pytree.tree_unflatten(gather(leaves), tree)


def check_settings(
    remat: str | Sequence[str], group: int, offload: str, arena: Arena | None, num_layers: int
) -> None:
    """ValueError for what a scan of so many layers would refuse."""
    names = [remat] if isinstance(remat, str) else list(remat)
    for name in names:
        if name not in REMAT:
            raise ValueError(f"remat={name!r} must be one of {', '.join(REMAT)}. Choose one of them.")
    if not isinstance(remat, str) and len(remat) != num_layers:
        raise ValueError(f"remat={len(names)} names must go with layers={num_layers}. Give one per layer.")
    if offload not in OFFLOAD:
        raise ValueError(f"offload={offload!r} must be one of {', '.join(OFFLOAD)}. Choose one of them.")
    if not isinstance(group, int) or group < 1:
        raise ValueError(f"group={group} must be a whole number of at least 1: layers per kept input.")
    if set(names) == {"none"} and (group != 1 or offload != "none"):
        raise ValueError(
            f"remat='none' must come without groups and offload, got group={group}, offload={offload!r}. "
            f"Use remat='full' or 'attention'."
        )
    if (offload == "host") != (arena is not None):
        raise ValueError(
            f"arena={arena} must be given with offload='host' and only then, got offload={offload!r}. "
            f"Make one usp.arena.Arena() and pass it every time, so that its buffers are used again."
        )


def _segments(remat: str | Sequence[str], num_layers: int) -> list[tuple[str, slice]]:
    """Runs of neighbouring layers that are treated alike."""
    if isinstance(remat, str):
        return [(remat, slice(0, num_layers))]
    segments: list[tuple[str, slice]] = []
    for i, one in enumerate(remat):
        if segments and segments[-1][0] == one:
            segments[-1] = one, slice(segments[-1][1].start, i + 1)
        else:
            segments.append((one, slice(i, i + 1)))
    return segments
