"""AdamW and gradient clipping on local shards of a parameter tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.optim.adamw import adamw

from usp.adamw import Leaf, suits, update_large
from usp.arena import Arena
from usp.mesh import MeshLike, P, dual, redistribute, replicas
from usp.mesh.devices import axis_sizes
from usp.side import Side


class AdamWState(NamedTuple):
    """Moments like the parameters, and the updates made (one scalar per leaf, as torch's kernel wants).

    Moments on the host of parameters on a GPU visit it one leaf at a time.
    """

    exp_avg: Any
    exp_avg_sq: Any
    steps: Any


def adamw_init(params: Any, *, arena: Arena | None = None) -> AdamWState:
    """Zero moments, in the dtype and placement of each parameter; with `arena` in its memory, on the host."""

    def zero(p: Tensor) -> Tensor:
        return torch.zeros_like(p) if arena is None else arena.keep(p).zero_()

    def zeros() -> Any:
        return pytree.tree_map_only(Tensor, zero, params)

    steps = pytree.tree_map_only(
        Tensor, lambda p: torch.zeros((), dtype=torch.float32, device=p.device), params
    )
    return AdamWState(zeros(), zeros(), steps)


@torch.no_grad()
def adamw_update(
    params: Any,
    grads: Any,
    state: AdamWState,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: Tensor | None = None,
    compiled: bool | None = None,
) -> tuple[Any, AdamWState]:
    """One AdamW step on local shards. The memory of `params` and `state` holds the results.

    Decay is decoupled (Loshchilov and Hutter, arXiv 1711.05101) and applies to matrices only, not to 1-D
    leaves. `grad_scale`, a scalar on the device, multiplies the gradients (`clip_scale`) in the same pass;
    what `grads` holds afterwards is not said. `compiled`: large leaves by a compiled pass (`usp.adamw`), the
    others by torch's fused kernel; None: on a GPU. Does not communicate: gradients must already be at rest,
    whole sums (`reduce_grads`).
    """
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "grad_scale": grad_scale}
    if grad_scale is not None:
        grads = _each_its_own(grads)
    for decay, chosen in ((weight_decay, _matrices), (0.0, _vectors)):
        trees = (params, grads, state.exp_avg, state.exp_avg_sq, state.steps)
        leaves = [Leaf(*leaf) for leaf in zip(*(chosen(params, tree) for tree in trees), strict=True)]
        away = [leaf for leaf in leaves if _away(leaf)]
        here = [leaf for leaf in leaves if not _away(leaf)]
        if here:
            _update(here, weight_decay=decay, compiled=compiled, **options)
        if away:
            _update_visiting(away, weight_decay=decay, compiled=compiled, **options)
    return params, state


def _each_its_own(grads: Any) -> Any:
    """Gradients of which no two share memory, as those of parameters that are added do: torch's kernel writes
    what it has scaled back, and would scale it twice."""
    seen: dict[int, list[tuple[int, int]]] = {}  # what is taken of each storage

    def own(grad: Tensor) -> Tensor:
        if not grad.is_contiguous():
            return grad  # copied before it is scaled
        taken = seen.setdefault(grad.untyped_storage()._cdata, [])
        start = int(grad.storage_offset())
        stop = start + grad.numel()
        if any(start < b and a < stop for a, b in taken):
            return grad.clone()
        taken.append((start, stop))
        return grad

    return pytree.tree_map_only(Tensor, own, grads)


def _away(leaf: Leaf) -> bool:
    return leaf.m.device != leaf.p.device


def _update(leaves: Sequence[Leaf], *, compiled: bool | None, **options: Any) -> None:
    large: list[Leaf] = []
    rest: list[Leaf] = []
    for leaf in leaves:
        wanted = leaf.p.device.type == "cuda" if compiled is None else compiled
        (large if wanted and suits(leaf) else rest).append(leaf)
    if large:
        update_large(large, **options)
    if rest:
        _update_fused(rest, **options)


def _update_fused(
    leaves: Sequence[Leaf], *, betas: tuple[float, float], grad_scale: Tensor | None, **options: Any
) -> None:
    """Of all leaves at once, by torch's kernel. It walks memory, not strides: a transposed gradient would be
    applied to the wrong entries."""
    options |= {"beta1": betas[0], "beta2": betas[1]}
    options["grad_scale"] = None if grad_scale is None else grad_scale.float().reciprocal()  # it divides
    grads = [leaf.grad.contiguous() for leaf in leaves]
    kept = [[leaf[place] for leaf in leaves] for place in (0, 2, 3)]
    p, m, v = ([t.contiguous() for t in tensors] for tensors in kept)
    steps = [leaf.steps for leaf in leaves]
    adamw(p, grads, m, v, [], steps, fused=True, amsgrad=False, maximize=False, **options)
    for tensors, updated in zip(kept, (p, m, v), strict=True):
        for tensor, new in zip(tensors, updated, strict=True):
            if new is not tensor:
                tensor.copy_(new)


def _update_visiting(leaves: Sequence[Leaf], **options: Any) -> None:
    """Moments come to the parameter's device and go back beside the updates: the next leaf's on their way
    while this one's are used. The host does not wait; the current stream has them back when this is done."""
    side = Side(leaves[0].p.device)

    def fetch(leaf: Leaf) -> tuple[Tensor, Tensor, Any]:
        m, v = torch.empty_like(leaf.p), torch.empty_like(leaf.p)
        with side.run(m, v):
            m.copy_(leaf.m, non_blocking=True)
            v.copy_(leaf.v, non_blocking=True)
        return m, v, side.mark()

    coming = fetch(leaves[0])
    for place, (p, grad, m_host, v_host, steps) in enumerate(leaves):
        m, v, mark = coming
        if place + 1 < len(leaves):
            coming = fetch(leaves[place + 1])
        side.join(mark=mark)
        _update([Leaf(p, grad, m, v, steps)], **options)
        with side.run(m, v):
            m_host.copy_(m, non_blocking=True)
            v_host.copy_(v, non_blocking=True)
    side.join()


def _matrices(params: Any, tree: Any) -> list[Tensor]:
    return [t for p, t in _pairs(params, tree) if p.dim() > 1 and p.numel()]


def _vectors(params: Any, tree: Any) -> list[Tensor]:
    return [t for p, t in _pairs(params, tree) if p.dim() <= 1 and p.numel()]


def _pairs(params: Any, tree: Any) -> list[tuple[Tensor, Tensor]]:
    pairs = zip(pytree.tree_leaves(params), _like(params, tree, "grads and state"), strict=True)
    return [(p, t) for p, t in pairs if isinstance(p, Tensor)]


def reduce_grads(grads: Any, specs: Any, mesh: MeshLike) -> Any:
    """Sum each gradient over the ranks that hold a copy of its parameter; `specs` are the placements at rest.

    Sharded parameters' gradients are whole already (their gather's transpose summed them). One all-reduce per
    replicated leaf and axis, in at least float32.
    """

    def one(grad: Any, spec: P | None) -> Any:
        if grad is None or spec is None:
            return grad
        return redistribute(grad, dual(spec, mesh), spec, mesh)

    return _map(one, grads, specs)


def global_norm(grads: Any, specs: Any, mesh: MeshLike) -> Tensor:
    """2-norm of all gradients together, the same on every rank and mesh. Gradients at rest, whole sums.

    Each leaf counts once however many ranks hold it; squares are summed in float32 or wider. One all-reduce
    per axis larger than 1.
    """
    leaves, specs = _aligned(grads, specs)
    placed = [spec for grad, spec in zip(leaves, specs, strict=True) if isinstance(grad, Tensor)]
    return norm_of_all(local_norms(grads), placed, mesh)


def local_norms(grads: Any) -> list[Tensor]:
    """2-norm of this rank's part of each gradient, in float32 or wider. Does not communicate."""
    leaves = [g for g in pytree.tree_leaves(grads) if isinstance(g, Tensor)]
    norms: dict[int, Tensor] = {}
    for dtype in {g.dtype for g in leaves}:  # of many at once: a leaf of its own is a launch of its own
        places = [i for i, g in enumerate(leaves) if g.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        found = torch._foreach_norm([leaves[i] for i in places], 2, wide)  # pyright: ignore[reportPrivateImportUsage]
        norms.update(zip(places, found, strict=True))
    return [norms[i] for i in range(len(leaves))]


def norm_of_all(norms: Sequence[Tensor], specs: Sequence[P], mesh: MeshLike) -> Tensor:
    """`global_norm` of the gradients that have these `local_norms`; `specs`: where each lies."""
    if not norms:
        raise ValueError("grads must hold at least one tensor, got none. Pass the tree from value_and_grad.")
    alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for norm, spec in zip(norms, specs, strict=True):
        alike.setdefault((replicas(spec, mesh), norm.dtype), []).append(norm)
    parts = [torch.stack(group).square().sum() / count for (count, _), group in alike.items()]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    everything = P(partial=tuple(axis_sizes(mesh)))
    return redistribute(total, everything, P(), mesh).sqrt()


def clip_by_global_norm(grads: Any, specs: Any, mesh: MeshLike, max_norm: float) -> tuple[Any, Tensor]:
    """Scale the gradients to a `global_norm` of at most `max_norm`; returns them and the norm before.

    Never waits for the device. A norm that is not finite makes every gradient NaN, so it is not hidden.
    """
    norm = global_norm(grads, specs, mesh)
    scale = clip_scale(norm, max_norm)

    def scaled(grad: Tensor) -> Tensor:
        return (grad.to(torch.promote_types(grad.dtype, scale.dtype)) * scale).to(grad.dtype)

    return pytree.tree_map_only(Tensor, scaled, grads), norm


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this `global_norm` are multiplied with to have one of at most `max_norm`."""
    if max_norm <= 0:
        raise ValueError(f"max_norm={max_norm} must be positive. Leave clipping out instead of passing 0.")
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) + 0 * norm  # NaN for an infinite norm, not 0


def _aligned(tree: Any, specs: Any) -> tuple[list[Any], list[Any]]:
    return pytree.tree_leaves(tree), _like(tree, specs, "specs")


def _like(tree: Any, other: Any, name: str) -> list[Any]:
    """The leaves of `other` in the order of those of `tree`: by key and place, dicts may be in any order."""
    try:
        return pytree.tree_structure(tree).flatten_up_to(other)
    except ValueError as error:
        raise ValueError(f"{name} must have the structure of the tree it goes with: {error}") from error


def _map(fn: Any, tree: Any, specs: Any) -> Any:
    leaves, placed = _aligned(tree, specs)
    new = [fn(g, s) for g, s in zip(leaves, placed, strict=True)]
    return pytree.tree_unflatten(new, pytree.tree_structure(tree))
