"""Evaluation: the loss of Transformers, the same on any number of ranks, at any batch size and length."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.batches import ONE
from tests.models.run_evaluate import VOCAB, batches, on_rank
from tests.models.tiny import hf_model, save_hf
from tests.pool import Pool
from usp import Batch
from usp.batch import fill_rows
from usp.mesh import TABLES
from usp.models import Evaluation, evaluate, from_hf

NAME = "gqa 9/3 tied"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(hf_model(NAME), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    made = {world: Pool(world) for world in (2, 4)}
    yield made
    for pool in made.values():
        pool.stop()


def alone(model: Path, chosen: list[Batch], **options: Any) -> Evaluation:
    cfg, params = from_hf(model, dtype=torch.float64)
    return evaluate(params, chosen, cfg, table=TABLES["usp"], mesh=ONE, **options)


def by_transformers(chosen: list[Batch]) -> Evaluation:
    """Document by document, with the loss that Transformers computes itself."""
    model = hf_model(NAME).double()
    total, count = 0.0, 0
    for batch in chosen:
        labels = batch.tokens if batch.labels is None else batch.labels
        for row in range(len(batch.tokens)):
            length = batch.tokens.shape[1] if batch.valid is None else int(batch.valid[row].sum())
            edges: Any = [0, length] if batch.cu_seqlens is None else batch.cu_seqlens[row]
            for start, stop in pairwise(edges):
                stop = min(stop, length)
                own = labels[row, start:stop][None]
                num = int((own[:, 1:] != -100).sum())
                if num:
                    found = model(batch.tokens[row, start:stop][None], labels=own).loss
                    total, count = total + num * float(found.detach()), count + num
    return Evaluation(total, count)


def close(got: Evaluation, want: Evaluation) -> None:
    assert got.num_tokens == want.num_tokens
    assert got.loss_sum == pytest.approx(want.loss_sum, rel=1e-5)  # Transformers takes float32 logits
    assert got.perplexity == pytest.approx(math.exp(want.loss), rel=1e-5)


def test_the_loss_of_transformers(model: Path) -> None:
    for batch in batches():  # case H62: any batch size and length
        want = by_transformers([batch])
        if want.num_tokens:
            close(alone(model, [batch]), want)
    close(alone(model, batches(), mlp_tile=4), by_transformers(batches()))


RUNS: list[tuple[int, dict[str, int], str, dict[str, Any]]] = [
    (2, {"dp": 1, "ring": 1, "ulysses": 2}, "ulysses", {}),
    (2, {"dp": 2, "ring": 1, "ulysses": 1}, "usp", {}),
    (2, {"dp": 1, "ring": 2, "ulysses": 1}, "ring", {"mlp_tile": 3}),
    (2, {"dp": 1, "ring": 1, "ulysses": 2}, "odysseus", {}),
    (2, {"dp": 1, "ring": 1, "ulysses": 2}, "replicated", {}),
    (4, {"dp": 1, "ring": 2, "ulysses": 2}, "usp", {"head_chunks": 2}),
    (4, {"dp": 1, "ring": 1, "ulysses": 4}, "ulysses", {}),
    (4, {"dp": 2, "ring": 1, "ulysses": 2}, "odysseus", {}),
    (4, {"dp": 4, "ring": 1, "ulysses": 1}, "ulysses", {}),
]


@pytest.mark.parametrize(("world", "degrees", "table", "options"), RUNS)
def test_the_same_on_every_mesh(
    world: int,
    degrees: dict[str, int],
    table: str,
    options: dict[str, Any],
    model: Path,
    pools: dict[int, Pool],
) -> None:
    # cases H18, H20, H64: one sum over one count, not times the ranks; H22, D12, D13: ranks and batches
    # without labels; H46: rows shorter than the ranks that share them
    want = alone(model, batches())
    for got in pools[world].run(on_rank, model, degrees, table, options):
        assert got.num_tokens == want.num_tokens
        assert got.loss_sum == pytest.approx(want.loss_sum, rel=1e-12)


def test_nothing_counts(model: Path) -> None:  # case H22, D12
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    found = alone(model, [Batch(tokens, torch.full_like(tokens, -100))])
    assert found == Evaluation(0.0, 0)
    with pytest.raises(ValueError, match="num_tokens=0"):
        _ = found.loss


def test_whole_logits_never_exist(model: Path) -> None:  # cases H25, D38
    """Longer than one tile of the loss: no tensor has a row of the vocabulary for every token."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.shape[-1:] == (VOCAB,):
                    self.elements = max(self.elements, t.numel())
                assert not (isinstance(t, torch.Tensor) and t.requires_grad)
            return out

    tokens = torch.randint(VOCAB, (1, 9000), generator=torch.Generator().manual_seed(3))
    rows = [[*range(0, 9000, 250), 9000]]
    with Largest() as seen:
        found = alone(model, [Batch(tokens, cu_seqlens=rows)])
    assert found.num_tokens == 9000 - 36
    assert 0 < seen.elements <= 4096 * VOCAB


def test_rows_are_filled() -> None:
    batch = fill_rows(Batch(torch.ones(3, 5, dtype=torch.int64), cu_seqlens=[[0, 2, 5], [0, 5], [0, 5]]), 4)
    assert batch.tokens.shape == (4, 5)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens[3] == [0, 5]
    assert batch.labels is not None
    assert batch.valid is not None
    assert (batch.labels[3] == -100).all()
    assert batch.valid.sum() == 15
    assert fill_rows(batch, 2) is batch
