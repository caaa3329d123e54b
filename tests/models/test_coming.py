"""The norm and the head travel while layers are computed: what sets out and is waited for, in which order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.batches import ONE, TABLE, two_rows
from tests.models.test_options import CFG, close
from tests.models.test_zero_modes import ZERO0
from tests.pool import Pool, pool_of
from usp import reduce_grads, shard_batch, value_and_grad
from usp.mesh import P, Table, build_mesh, redistribute
from usp.models import LlamaConfig, abstract, init, loss, map_params, named_leaves, param_specs

STARTS = {
    "all_gather_into_tensor_out": "gather",
    "reduce_scatter_tensor": "sum",
    "reduce_scatter_tensor_coalesced": "sum",
}
CONFIGS: dict[str, LlamaConfig] = {
    "uneven": CFG,  # 101 rows over 4 ranks: in one flat buffer
    "even": replace(CFG, vocab_size=104),
    "tied": replace(CFG, tie_embeddings=True),
}
MODES = {"zero3": TABLE, "zero0": ZERO0}


class Events(TorchDispatchMode):
    """What is done to the leaves around the layers, and `layer` for each layer's all-to-alls."""

    def __init__(self, sizes: dict[int, str]) -> None:
        super().__init__()
        self.sizes, self.seen = sizes, ["begin"]
        self.under_way: dict[int, str] = {}  # address -> whose

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace != "_c10d_functional":
            return out
        said = "layer" if name == "all_to_all_single" else ""
        if name == "wait_tensor":
            who = self.under_way.pop(args[0].data_ptr(), None)
            said = f"wait {who}" if who else ""
        elif kind := STARTS.get(name):
            inputs, outputs = pytree.tree_leaves(args[0]), pytree.tree_leaves(out)
            who = self.sizes.get(sum(t.numel() for t in inputs), "layer's leaves")
            self.under_way |= {t.data_ptr(): who for t in outputs if who != "layer's leaves"}
            said = f"{kind} {who}"
        if said and said != self.seen[-1]:
            self.seen.append(said)
        return out


def sizes_of(cfg: LlamaConfig, ranks: int) -> dict[int, str]:
    """Elements of what is sent, at rest and whole, of the embedding and of the norm with its head; of tokens
    and of x, on one rank, two and all."""
    tokens = 2 * 24  # with padding
    moving = {tokens // n: "tokens" for n in (4, 2)}
    moving |= {tokens // n * cfg.hidden_size: "x" for n in (4, 2, 1)}
    embed, norm = -(-cfg.vocab_size // ranks) * cfg.hidden_size, cfg.hidden_size // ranks
    head = norm if cfg.tie_embeddings else embed + norm
    ends = {n * times: who for n, who in ((embed, "embed"), (head, "head")) for times in (1, ranks)}
    assert not ends.keys() & moving.keys()
    return ends | moving


def problem(cfg: LlamaConfig, table: Table, mesh: Any, **options: Any) -> tuple[Any, Any]:
    """The loss as a function of the parameters, and these."""
    params = init(cfg, seed=1, dtype=torch.float64, table=table, mesh=mesh)
    shard = shard_batch(two_rows("packed"), table=table, mesh=mesh)
    return lambda p: loss(p, shard, cfg, table=table, mesh=mesh, **options), params


def order(config: str, how: str, options: dict[str, Any]) -> list[str]:
    cfg = CONFIGS[config]
    fn, params = problem(cfg, TABLE, build_mesh(dp=2, ulysses=2), **options)
    with Events(sizes_of(cfg, 4)) as events:
        if how == "value_and_grad":
            value_and_grad(fn)(params)
        elif how == "autograd":
            fn(map_params(lambda _, t: t.requires_grad_(), params)).backward()
        else:
            with torch.no_grad():
                fn(params)
    return events.seen


LEAVES = "gather layer's leaves"  # twice in a row at first, which is said once
GATHERED = ["gather embed", "wait embed"], ["sum embed", "wait embed"]
STAYS = 2 * ["gather tokens", "wait tokens"] + 2 * ["sum x", "wait x"], 2 * ["gather x", "wait x"]
EMBED = {"uneven": STAYS, "even": STAYS, "tied": GATHERED}  # over two axes
FORWARD = [LEAVES, "layer", LEAVES, "gather head", "layer", "wait head"]
LAST, OTHER, END = ["layer"], ["sum layer's leaves", "layer"], ["sum layer's leaves"]
AGAIN = ["sum head", "wait head", LEAVES, "layer", "sum layer's leaves", LEAVES, *LAST, *OTHER]


@pytest.mark.parametrize(
    ("how", "options", "backward"),
    [
        ("value_and_grad", {}, ["sum head", *LAST, "wait head", *OTHER, *OTHER, *END]),
        ("value_and_grad", {"remat": ("none",) * 3}, ["sum head", *LAST, "wait head", *OTHER, *OTHER, *END]),
        ("value_and_grad", {"remat": "full"}, [*AGAIN, *END]),
        ("no_grad", {"remat": "full"}, []),
    ],
)
@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_waited_for(
    config: str, how: str, options: dict[str, Any], backward: list[str], ranks: Pool
) -> None:
    there, back = EMBED[config]
    for seen in ranks.run(order, config, how, options):
        assert seen[1:] == [*there, *FORWARD, *backward, *(back if backward else [])]


def test_plain_autograd_waits_at_once(ranks: Pool) -> None:
    """No layer's gradients travel behind there: the head's would be held whole through all the backward."""
    for config in ("uneven", "tied"):
        for seen in ranks.run(order, config, "autograd", {}):
            back = seen[seen.index("sum head") :]
            assert back[1] == "wait head"
            assert [said for said in back if "layer" not in said] == [
                "sum head",
                "wait head",
                *EMBED[config][1],
            ]


def whole(tree: Any, cfg: LlamaConfig, table: Table, mesh: Any) -> Any:
    def one(_: str, t: Tensor, spec: P, leaf: Any) -> Tensor:
        return redistribute(t, spec, P(*(None for _ in leaf.shape)), mesh, shape=leaf.shape)

    specs = param_specs(cfg, table)
    return map_params(one, reduce_grads(tree, specs, mesh), specs, abstract(cfg))


def derivatives(config: str, table: Table, mesh: Any) -> tuple[Any, ...]:
    """The slope along the parameters by both forward modes; gradients, by value_and_grad and by autograd, and
    their slope."""
    cfg = CONFIGS[config]
    fn, params = problem(cfg, table, mesh, kernel="reference")

    def like_params(tensors: Sequence[Tensor]) -> Any:
        found = iter(tensors)
        return map_params(lambda _, t: next(found), params)

    def of_tensors(*tensors: Tensor) -> Tensor:
        return fn(like_params(tensors))

    at = tuple(t for _, t in named_leaves(params))
    leaves = [t.clone().requires_grad_() for t in at]
    grads = grad(of_tensors, tuple(range(len(at))))
    by_autograd = torch.autograd.grad(of_tensors(*leaves), leaves)
    found = [value_and_grad(fn)(params)[1], like_params(by_autograd), like_params(jvp(grads, at, at)[1])]
    with forward_ad.dual_level():
        by_hand = forward_ad.unpack_dual(of_tensors(*(forward_ad.make_dual(t, t) for t in at))).tangent
    assert by_hand is not None
    slopes = torch.stack([jvp(of_tensors, at, at)[1], by_hand])
    if dist.is_initialized():
        dist.all_reduce(slopes)
    return slopes, *(whole(tree, cfg, table, mesh) for tree in found)


def on_ranks(config: str, mode: str) -> tuple[Any, ...]:
    return derivatives(config, MODES[mode], build_mesh(dp=2, ulysses=2))


@pytest.mark.parametrize(
    ("config", "mode"), [*((config, "zero3") for config in CONFIGS), ("uneven", "zero0")]
)
def test_every_derivative(config: str, mode: str, ranks: Pool) -> None:
    slopes, *want = derivatives(config, TABLE, ONE)
    for got_slopes, *got in ranks.run(on_ranks, config, mode):
        # float64 sums over ranks, and through softmax, in another order
        assert torch.allclose(got_slopes, slopes, rtol=1e-12, atol=0)
        for g, w in zip(got, want, strict=True):
            close(g, w, 1e-12)


ranks = pool_of(4)
