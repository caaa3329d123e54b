"""What leaves are that a bundle has moved: memory of their own, whatever their sizes, compiled or not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.mesh.cases import dense, mesh_of, shard
from tests.pool import Pool
from usp.mesh import P
from usp.mesh.bundle import Bundle

Shapes = list[tuple[int, int]]
REST, USE = P("ulysses", None), P(None, None)


def problem(shapes: Shapes) -> tuple[Bundle, list[Tensor], list[Tensor]]:
    """The bundle, the leaves at rest and in use."""
    mesh = mesh_of((1, 1, 4))
    whole = [dense(shape, seed=i + 1) for i, shape in enumerate(shapes)]
    bundle = Bundle([REST] * len(shapes), [USE] * len(shapes), mesh, list(shapes))
    return bundle, [shard(x, REST, mesh) for x in whole], whole


def written_over() -> None:
    """One row a rank or more: each leaf contiguous, its own storage, open to in-place writes by autograd."""
    bundle, rest, whole = problem([(4, 3), (8, 3)])
    leaves = [x.requires_grad_() for x in rest]
    used = [y for y in bundle(leaves) if y is not None]
    for y, want in zip(used, whole, strict=True):
        assert torch.equal(y, want)
        assert y.is_contiguous()
        assert y.untyped_storage().nbytes() == want.nbytes
        y.mul_(2)
    grads = torch.autograd.grad(torch.stack([y.sum() for y in used]).sum(), leaves, create_graph=True)
    for grad, x in zip(grads, rest, strict=True):
        assert torch.equal(grad.mul_(2), torch.full_like(x, 16.0))
        assert grad.untyped_storage().nbytes() == x.nbytes


def empty() -> None:
    for shapes in ([(0, 3)], [(0, 3), (8, 0)], [(0, 3), (8, 2)], [(6, 0)]):
        bundle, rest, whole = problem(shapes)
        for found in (bundle(rest), bundle.start(rest).wait()):
            for y, want in zip(found, whole, strict=True):
                assert y is not None
                assert torch.equal(y, want)


def compiled() -> None:
    for shapes in ([(4, 3), (8, 3)], [(4, 3)]):
        bundle, rest, whole = problem(shapes)

        def there(*leaves: Tensor, bundle: Bundle = bundle) -> list[Tensor | None]:
            return bundle.start(leaves).wait()

        found = torch.compile(there, fullgraph=True, backend="aot_eager")(*rest)
        for y, want in zip(found, whole, strict=True):
            assert y is not None
            assert torch.equal(y, want)


@pytest.mark.parametrize("check", [written_over, empty, compiled], ids=lambda f: f.__name__)
def test_results(check: Callable[[], None], ranks: Pool) -> None:
    ranks.run(check)
