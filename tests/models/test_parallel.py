"""Loss and every gradient on several ranks equal those of Transformers' own model in float64 on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.batches import CUTS, ONE, SEQ, TABLE, two_rows
from tests.models.run_model import Result, Run, on_rank, run
from tests.models.tiny import hf_model, save_hf
from tests.ranks import run_ranks
from usp import Batch
from usp.models import from_hf

# float64 sums of the same terms in another order: a few units of 2e-16, over sums of up to 100 terms of mixed
# sign, relative to the largest entry of each tensor.
TOLERANCE = 1e-12


def exact_norms(model: Any) -> Any:
    """Transformers normalises in float32 whatever the dtype; a float64 reference must not."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def forward(x: Tensor, norm: Any = module) -> Tensor:
                return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)

            module.forward = forward
    return model


def reference(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """One process, dense masks, labels shifted by hand, plain autograd: (loss, gradients, logits)."""
    model = exact_norms(model.double())
    assert batch.labels is not None
    assert batch.cu_seqlens is not None
    total, count, rows = torch.zeros((), dtype=torch.float64), 0, []
    for tokens, labels, edges in zip(batch.tokens, batch.labels, batch.cu_seqlens, strict=True):
        cuts = torch.as_tensor(edges)
        document = torch.bucketize(torch.arange(SEQ), cuts[1:], right=True)
        position = torch.arange(SEQ) - cuts[document]
        mask = (document[:, None] == document[None, :]) & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
        out = model(
            tokens[None], attention_mask=mask[None, None], position_ids=position[None], use_cache=False
        )
        rows.append(out.logits[0])
        for i in range(SEQ - 1):
            if document[i] == document[i + 1] and labels[i + 1] != -100:
                total = total - out.logits[0, i].log_softmax(-1)[labels[i + 1]]
                count += 1
    value = total / count
    names, leaves = zip(*model.named_parameters(), strict=True)
    grads = dict(zip(names, torch.autograd.grad(value, leaves), strict=True))
    return value.detach(), grads, torch.stack(rows).detach()


def assert_equal(got: Result, want: tuple[Tensor, dict[str, Tensor], Tensor], one: str = "") -> None:
    value, grads, out = want
    assert abs(got.loss - value) <= TOLERANCE * value, one
    assert (got.logits - out).abs().max() <= TOLERANCE * out.abs().max(), one
    assert got.grads.keys() == grads.keys(), one
    for name, grad in grads.items():
        scale = grad.abs().max()
        assert scale > 0, (one, name)
        assert (got.grads[name] - grad).abs().max() <= TOLERANCE * scale, (one, name)


HF = {"tied": "gqa 9/3 tied", "untied": "gqa 6/2", "biases": "biases", "qwen3": "qwen3"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for key, name in HF.items():
        save_hf(hf_model(name), folder / key)
    return folder


@pytest.mark.parametrize("case", CUTS)
@pytest.mark.parametrize("model", HF)
def test_one_process(model: str, case: str, models: Path) -> None:
    cfg, params = from_hf(models / model, dtype=torch.float64)
    assert_equal(run(params, cfg, ONE, TABLE, case, "full"), reference(hf_model(HF[model]), two_rows(case)))


# What they are for: 9 query and 3 kv heads over 2 and 4 ranks are uneven (D22, D25, P68); packed documents
# span ranks (H29, H34, P37); batch 2 (H54); dp beside ulysses (H14, D5); a rank without labels (H22, D12);
# replicas of the same tokens (H8); tables of a user's own, two of them with a ring.
RUNS = {
    2: [
        Run(1, 1, 2, "ulysses", "tied", "packed", "none"),
        Run(1, 1, 2, "ulysses", "biases", "whole rows", "full"),
        Run(1, 2, 1, "ring", "tied", "packed", "full"),
        Run(1, 2, 1, "ring", "untied", "whole rows", "none"),
        Run(1, 1, 2, "odysseus", "biases", "packed", "none"),
        Run(2, 1, 1, "replicated", "untied", "packed", "full"),
        Run(1, 1, 2, "replicated", "tied", "packed", "full"),
        Run(1, 1, 2, "mine", "biases", "packed", "none"),
        Run(1, 1, 2, "ulysses", "biases", "packed", "none", 2),
        Run(1, 1, 2, "ulysses", "tied", "packed", "attention", 4),  # 5 and 4 heads of 3 kv heads, in 4 parts
        Run(1, 2, 1, "ring", "qwen3", "packed", "full", 4),
        Run(1, 1, 2, "tp_sp", "biases", "packed", "none"),
        Run(1, 1, 2, "tp_sp", "tied", "whole rows", "full"),  # 9 and 3 heads over 2 ranks
    ],
    4: [
        Run(1, 1, 4, "ulysses", "tied", "packed", "full"),
        Run(1, 1, 4, "ulysses", "untied", "whole rows", "none"),
        Run(2, 1, 2, "ulysses", "tied", "packed", "full"),
        Run(1, 4, 1, "ring", "qwen3", "packed", "full"),
        Run(1, 2, 2, "usp", "tied", "packed", "full"),
        Run(1, 2, 2, "usp", "biases", "whole rows", "none"),
        Run(2, 2, 1, "usp", "untied", "packed", "none"),
        Run(1, 1, 4, "odysseus", "tied", "packed", "full"),
        Run(1, 2, 2, "odysseus", "untied", "whole rows", "full"),
        Run(2, 1, 2, "usp", "qwen3", "packed", "none"),
        Run(2, 1, 2, "mine", "untied", "packed", "full"),
        Run(1, 1, 4, "ulysses", "tied", "packed", "attention", 2),
        Run(1, 1, 4, "ulysses", "untied", "packed", "none", 2),  # 2, 2, 1 and 1 heads in 2 parts
        Run(1, 2, 2, "usp", "tied", "whole rows", "attention", 3),
        Run(1, 2, 2, "odysseus", "tied", "packed", "none"),
        Run(2, 1, 2, "odysseus", "qwen3", "packed", "full"),
        Run(1, 1, 4, "mine", "tied", "whole rows", "none"),
        Run(1, 1, 4, "tp_sp", "tied", "packed", "full"),
        Run(2, 1, 2, "tp_sp", "qwen3", "packed", "none"),
        Run(1, 2, 2, "ring_tp", "biases", "packed", "full"),
        Run(1, 2, 2, "swapped", "tied", "packed", "none"),
    ],
}


@pytest.mark.parametrize("world", RUNS)
def test_loss_and_gradients(world: int, models: Path) -> None:
    # cases H1, H4, H6, H8, H17, H22, H29, H54, D1, D12, D22, D25, P60, P68
    by_rank = run_ranks(on_rank, world, models, RUNS[world], timeout=400)
    for index, one in enumerate(RUNS[world]):
        want = reference(hf_model(HF[one.model]), two_rows(one.case))
        assert_equal(by_rank[0][index], want, str(one))
        assert all(results[index].loss == by_rank[0][index].loss for results in by_rank), one
