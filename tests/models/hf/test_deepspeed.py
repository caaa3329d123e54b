"""DeepSpeed's ZeRO in every stage over a cut sequence, and its Ulysses beside ours, against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.batches import ONE
from tests.models.hf.causal import causal_model, unsharded
from tests.models.hf.run_deepspeed import (
    CLIP,
    STEPS,
    TRAINED,
    batches_of,
    dense,
    heads_of,
    optimizer_of,
    theirs_and_ours,
    train,
    trainer_on_rank,
)
from tests.models.hf.run_engines import batch_of
from tests.models.hf.run_trainer import plain
from tests.models.hf.test_trainer import assert_same, beside, eval_loss
from tests.models.tiny import load_hf
from tests.pool import Pool, pool_of
from usp.mesh import TABLES
from usp.models.hf import BridgedCausalLM, sequence_parallel
from usp.models.hf.deepspeed import deepspeed_engine
from usp.models.hf.inputs import count_targets

# ZeRO's optimizers and sums are float32 (6e-8 a term), through two layers and two steps; relative to each
# tensor's largest entry
SINGLE = 2e-5
# float64 sums of the same terms in another order
DOUBLE = 1e-13


four_with_deepspeed = pool_of(4)


@pytest.fixture(scope="module")
def want() -> Any:
    """A plain torch loop in float64: losses, norms, the first gradients, parameters."""
    model = causal_model("llama")
    optimizer, seen, first = optimizer_of(model), [], {}
    for step in range(STEPS):
        batches, count = batches_of(step)
        total, number = 0.0, len(batches)
        sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for i, inputs in enumerate(batches):
            part = count_targets(inputs) / count
            value, grads, _ = unsharded(model, batch_of(number * step + i))
            total += float(value) * part
            for name, grad in grads.items():
                sums[name] += grad * part
        first = first or {name: grad.clone() for name, grad in sums.items()}
        for name, p in model.named_parameters():
            p.grad = sums[name]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        seen.append((total, float(norm)))
    return seen, first, {n: p.detach() for n, p in model.named_parameters()}


RUNS = [
    (0, 2, 1, 2, "ulysses", "bridge"),
    (1, 1, 2, 2, "usp", "bridge"),
    (2, 2, 2, 1, "ring", "bridge"),
    (3, 1, 2, 2, "usp", "bridge"),
    (0, 1, 2, 2, "usp", "plain"),
    (1, 2, 1, 2, "ulysses", "plain"),
    (2, 1, 2, 2, "ulysses", "plain"),  # ring only repeats: its copies must not count twice
    (3, 2, 1, 2, "ulysses", "plain"),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"zero-{run[0]} {run[5]}")
def test_stages(run: Any, want: Any, start: Path, four_with_deepspeed: Pool, tmp_path: Path) -> None:
    # cases H8, H10, H12, H14, H68, D1, D2, D5, D8, D17, D56, D58, P60, P64
    wanted, gradients, parameters = want
    (tmp_path / "start").symlink_to(start)
    results = four_with_deepspeed.run(train, tmp_path, *run)
    seen, grads, params = results[0]
    assert all(other[0] == seen for other in results)  # case H16: one reported loss
    for (loss, norm), (value, size) in zip(seen, wanted, strict=True):
        assert abs(loss - value) <= SINGLE * value
        assert norm is None if run[0] == 0 else abs(norm - size) <= SINGLE * size  # stage 0 tells none
    for name in gradients:
        for got, expected in ((grads, gradients), (params, parameters)):
            error = (got[name].double() - expected[name]).abs().max()
            assert error <= SINGLE * expected[name].abs().max(), (run, name)
    model, info = load_hf(tmp_path / "trained")
    assert not info["missing_keys"]
    for name, value in params.items():
        assert torch.equal(model.get_parameter(name), value), name


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 1)])
def test_beside_deepspeeds_ulysses(num_heads: int, num_kv_heads: int, four_with_deepspeed: Pool) -> None:
    """A partner, not an oracle: each is compared with dense attention in float64, and with the other."""
    q, k, v, upstream = heads_of(num_heads, num_kv_heads)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    o = dense(None, leaves[0], leaves[1], leaves[2], None)[0].transpose(1, 2)
    whole = [o.detach(), *torch.autograd.grad(o, leaves, upstream)]
    for at, theirs, ours in four_with_deepspeed.run(theirs_and_ours, num_heads, num_kv_heads):
        half = whole[0].shape[2] // 2
        for a, b, c in zip(theirs, ours, whole, strict=True):
            part: Tensor = c[:, :, at * half : (at + 1) * half]
            assert a.shape == b.shape == part.shape
            for x, y in ((a, part), (b, part), (a, b)):
                assert (x - y).abs().max() <= DOUBLE * part.abs().max()


@pytest.mark.parametrize(("kind", "sizes"), [("plain", (2, 1, 2)), ("whole", (1, 2, 2))])
def test_trainer(kind: str, sizes: Any, start: Path, four_with_deepspeed: Pool, tmp_path: Path) -> None:
    """Last, as Accelerate's state of a process is DeepSpeed's from here on."""
    want = plain(tmp_path / "plain", max_steps=TRAINED)[0]
    out = beside(start, tmp_path)
    results = four_with_deepspeed.run(trainer_on_rank, out, *sizes, kind)
    for got, loss in results:
        assert_same(got, want, kind, TRAINED)
        assert abs(loss - eval_loss(load_hf(out / "saved")[0])) <= SINGLE * loss


def test_refusals(start: Path) -> None:
    bridge = BridgedCausalLM.from_pretrained(start, averaged=True)
    for config, match in (
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4 must be 1"),
    ):
        with pytest.raises(ValueError, match=match):
            deepspeed_engine(bridge, config=config)
    with pytest.raises(ValueError, match="averaged=False must be True"):
        deepspeed_engine(BridgedCausalLM.from_pretrained(start), config={})
    with (
        sequence_parallel(causal_model("llama"), mesh=ONE, table=TABLES["usp"]) as sp,
        pytest.raises(ValueError, match="to sequence_parallel"),
    ):
        deepspeed_engine(sp, config={})
    model: Any = causal_model("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM must be a BridgedCausalLM"):
        deepspeed_engine(model, config={})
