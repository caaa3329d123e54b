"""Unchanged Transformers models on sequence shards: loss, logits and every gradient of the unsharded one."""

from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.models.batches import ONE, two_rows
from tests.models.hf.causal import FAMILIES, causal_model, unsharded
from tests.models.hf.run_parallel import fsdp_on_rank, on_rank, rows_of, two_models_on_rank
from tests.pool import Pool
from usp.mesh import TABLES
from usp.models.hf import sequence_parallel

# float64 sums of the same terms in another order, through two layers; relative to each tensor's largest entry
TOLERANCE = 1e-11
# Transformers' own tables of angles and its softmax are float32: a few units of 6e-8, through two layers
SINGLE = 2e-5


def assert_same(result: Any, want: Any, what: Any) -> None:
    loss, grads, logits, _ = result
    value, wanted, whole = want
    assert abs(loss - value) <= TOLERANCE * value, what
    assert (logits - whole).abs().max() <= TOLERANCE * whole.abs().max(), what
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (grads[name] - grad).abs().max() <= TOLERANCE * max(float(grad.abs().max()), 1e-3), (
            what,
            name,
        )


RUNS = {
    2: [
        ("llama", 1, 1, 2, "ulysses", "packed", True),
        ("gemma2", 1, 2, 1, "ring", "packed", False),
        ("gpt_oss", 1, 1, 2, "ulysses", "packed", False),
        ("mistral", 1, 2, 1, "ring", "whole rows", True),
        ("gemma4_text", 1, 1, 2, "ulysses", "packed", True),
        ("llama, both ways", 1, 1, 2, "ulysses", "whole rows", True),
    ],
    4: [
        ("llama", 1, 1, 4, "ulysses", "packed", False),
        ("qwen3", 1, 2, 2, "usp", "packed", True),
        ("mistral", 1, 2, 2, "usp", "packed", False),
        ("gemma2", 2, 1, 2, "ulysses", "whole rows", True),
        ("gemma3_text", 1, 2, 2, "usp", "packed", False),
        ("gemma4_text", 1, 2, 2, "usp", "packed", False),
        ("gpt_oss", 1, 2, 2, "usp", "packed", True),
        ("gpt_oss", 2, 2, 1, "ring", "whole rows", False),
        ("qwen3", 1, 2, 2, "usp", "short", False),
        ("gemma2", 1, 2, 2, "usp", "packed", False),
        ("llama, both ways", 1, 2, 2, "usp", "packed", False),
        ("llama, both ways", 2, 2, 1, "ring", "packed", False),
        ("llama", 1, 2, 2, "ulysses", "packed", False),  # ring only repeats: its copies must not count twice
    ],
}


@pytest.mark.parametrize("world", RUNS)
def test_equals_the_unsharded_model(world: int, two: Pool, four: Pool) -> None:
    # cases H5, H29, H30, H33, H40, H41, H46, H56, D28, D29, P24, P30, P33
    for run in RUNS[world]:
        results = {2: two, 4: four}[world].run(on_rank, *run)
        assert_same(results[0], unsharded(causal_model(run[0]), rows_of(run[5])), run)
        assert all(torch.equal(other[0], results[0][0]) for other in results), run
        assert results[0][3] == (run[0] != "gemma2"), run  # its capped logits are no plain product


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # the second's head is its embedding
def test_under_fsdp(family: str, four: Pool) -> None:
    # cases D9, D44: no sum is taken twice, and the loss needs a weight that is there in the forward alone
    run = (family, 2, 1, 2, "ulysses", "packed")
    result = four.run(fsdp_on_rank, *run)[0]
    assert_same(result, unsharded(causal_model(family), two_rows("packed")), run)
    assert result[3]


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_is_transformers_own(family: str) -> None:
    """The dense reference of these tests against Transformers' eager attention and its own masks."""
    model = causal_model(family)
    batch = two_rows("whole rows")
    with torch.no_grad():
        eager = model(input_ids=batch.tokens, use_cache=False).logits
    logits = unsharded(model, batch)[2]
    assert (eager - logits).abs().max() <= SINGLE * logits.abs().max()


def test_two_models_two_meshes(four: Pool) -> None:
    results = four.run(two_models_on_rank)
    for index, family in enumerate(("llama", "gemma2")):
        value, grads, _ = unsharded(causal_model(family), two_rows("packed"))
        norm = sum(float(g.square().sum()) for g in grads.values())
        for result in results:
            assert abs(result[index] - value) <= TOLERANCE * value
            assert abs(result[2][index] - norm) <= TOLERANCE * norm
    for *_, names, after, left in results:
        assert len(set(names)) == 2
        assert after == ("eager", "eager")
        assert not left


def test_adapters_of_the_head() -> None:
    """An adapter that adds nothing yet must not be taken for a plain matrix: it would never be trained."""
    import peft

    Peft: Any = peft.LoraConfig
    model: Any = peft.get_peft_model(causal_model("llama"), Peft(r=2, target_modules=["lm_head"]))
    with sequence_parallel(model, mesh=ONE, table=TABLES["usp"]) as sp:
        sp.loss(sp.shard(two_rows("packed"))).backward()
        assert not sp.fused
    grads = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert len(grads) == 1
    assert grads[0] is not None
    assert grads[0].any()


def test_undone_when_the_body_raises() -> None:
    model = causal_model("llama")
    before = set(ALL_ATTENTION_FUNCTIONS.keys())
    with pytest.raises(RuntimeError), sequence_parallel(model, mesh=ONE, table=TABLES["usp"]):
        raise RuntimeError
    assert set(ALL_ATTENTION_FUNCTIONS.keys()) == before
    assert model.config._attn_implementation == "eager"


def test_named_by_the_user() -> None:
    with sequence_parallel(mesh=ONE, table=TABLES["usp"]) as sp:
        model = causal_model("llama")
        model.set_attn_implementation(sp.name)
        sp.bind(model)
        loss = sp.loss(sp.shard(two_rows("packed")))
        other = causal_model("llama")
        other.set_attn_implementation(sp.name)
        with pytest.raises(ValueError, match="of another one"):
            other(input_ids=two_rows("packed").tokens)
        with pytest.raises(ValueError, match="plain call"):
            model(input_ids=two_rows("packed").tokens, use_cache=False)
    value, _, _ = unsharded(causal_model("llama"), two_rows("packed"))
    assert abs(loss - value) <= TOLERANCE * value


def test_no_influence_across_documents() -> None:
    # case H29: changing document 1 changes not one bit of document 2
    model = causal_model("gemma3_text")
    batch = two_rows("packed")
    other = batch.tokens.clone()
    other[0, :5] = (other[0, :5] + 1) % 101
    with torch.no_grad(), sequence_parallel(model, mesh=ONE, table=TABLES["usp"]) as sp:
        a, b = (sp(sp.shard(batch._replace(tokens=t))).logits for t in (batch.tokens, other))
    assert not torch.equal(a[0, :5], b[0, :5])
    assert torch.equal(a[0, 5:], b[0, 5:])
