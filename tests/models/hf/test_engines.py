"""Accelerate, PEFT and functional LoRA over a cut sequence, each against one process in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.batches import two_rows
from tests.models.hf.causal import causal_model, unsharded
from tests.models.hf.run_engines import (
    LORA,
    STEPS,
    accelerate_on_rank,
    batch_of,
    lora_on_rank,
    optimizer_of,
    peft_config,
    peft_on_rank,
    randomized,
)
from tests.models.tiny import load_hf
from tests.pool import Pool
from usp.models import LlamaConfig, from_hf
from usp.models.files.hf_names import hf_name
from usp.models.lora import LoraConfig, add_lora, init_lora, load_lora

# float64 sums of the same terms in another order, through two layers; five steps of AdamW grow it
TOLERANCE, AFTER_STEPS = 1e-11, 1e-8


def one_process() -> list[tuple[float, float]]:
    """A plain torch loop with Transformers' own model."""
    model = causal_model("llama")
    optimizer, seen = optimizer_of(model), []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(STEPS):
        value, grads, _ = unsharded(model, batch_of(step))
        for name, p in model.named_parameters():
            p.grad = grads[name]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        seen.append((float(value), float(norm)))
    return seen


RUNS = [(2, 1, 2, "usp", True), (1, 2, 2, "usp", True), (1, 1, 4, "ulysses", False)]


def test_accelerate(start: Path, four: Pool, tmp_path: Path) -> None:
    # cases H5, H64, H70
    want = one_process()
    for index, run in enumerate(RUNS):
        out = tmp_path / str(index)
        out.mkdir()
        (out / "start").symlink_to(start)
        for seen in four.run(accelerate_on_rank, out, *run):
            for got, wanted in zip(seen, want, strict=True):
                for a, b in zip(got, wanted, strict=True):
                    assert abs(a - b) <= AFTER_STEPS * abs(b), (run, seen, want)


def adapted() -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """PEFT on Transformers' own model, one process."""
    from peft import get_peft_model

    model: Any = randomized(get_peft_model(causal_model("llama"), peft_config()))
    inner = model.get_base_model()
    for p in inner.parameters():
        p.requires_grad_(True)
    value, grads, _ = unsharded(inner, two_rows("packed"))
    return model, value, {n: g for n, g in grads.items() if "lora_" in n}


@pytest.mark.parametrize("kind", ["whole", "hf"])
def test_peft(start: Path, kind: str, four: Pool, tmp_path: Path) -> None:
    # cases H69, D41
    (tmp_path / "start").symlink_to(start)
    model, value, want = adapted()
    loss, grads, frozen = four.run(peft_on_rank, tmp_path, 1, 2, 2, "usp", kind)[0]
    assert abs(loss - value) <= TOLERANCE * value
    assert len(grads) == len(want) > 0
    for name, grad in want.items():
        got = grads[f"base_model.model.{name}"]
        assert (got - grad).abs().max() <= TOLERANCE * grad.abs().max(), name
    assert not frozen
    if kind == "whole":
        merged, info = load_hf(tmp_path / "merged")
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, p in model.merge_and_unload().named_parameters():
            # float64 sums of three products, in another order
            assert (merged.get_parameter(name) - p).abs().max() <= 1e-14, name


def test_peft_on_shards_is_refused(start: Path, four: Pool, tmp_path: Path) -> None:
    """PEFT would give each rank an adapter of its shard's size."""
    (tmp_path / "start").symlink_to(start)
    for message in four.run(peft_on_rank, tmp_path, 1, 2, 2, "usp", "cut"):
        assert "Build the model with whole=True" in message


@pytest.mark.parametrize(
    ("table", "sizes"), [("usp", (1, 2, 2)), ("ulysses", (2, 1, 2)), ("ring", (1, 4, 1))]
)
def test_functional_adapters(
    start: Path, table: str, sizes: tuple[int, int, int], four: Pool, tmp_path: Path
) -> None:
    from peft import PeftModel

    (tmp_path / "start").symlink_to(start)
    model, value, want = adapted()
    model.save_pretrained(tmp_path / "adapters")
    results = four.run(lora_on_rank, tmp_path, tmp_path / "adapters", *sizes, table)
    loss, grads, held, cut, same = results[0]
    assert abs(loss - value) <= TOLERANCE * value
    assert cut  # the weights below are in shards
    assert same
    assert held == sum(g.numel() for g in want.values())  # nothing of the size of a weight
    number = 0
    for name, pair in grads.items():
        path = hf_name(name).removesuffix(".weight")
        for letter, got in zip("AB", pair, strict=True):
            grad = want[f"{path}.lora_{letter}.default.weight"]
            assert (got - grad).abs().max() <= TOLERANCE * grad.abs().max(), name
            number += 1
    assert number == len(want)
    again = PeftModel.from_pretrained(causal_model("llama"), tmp_path / f"again {table}")
    merged = load_hf(tmp_path / f"merged {table}")[0]
    for name, p in again.merge_and_unload().named_parameters():
        assert (merged.get_parameter(name) - p).abs().max() <= 1e-14, name


def test_refusals(start: Path, tmp_path: Path) -> None:
    import peft

    from usp.models.hf import BridgedCausalLM

    Peft: Any = peft.LoraConfig

    with pytest.raises(ValueError, match="rank=0"):
        LoraConfig(rank=0)
    cfg, params = from_hf(start)
    assert isinstance(cfg, LlamaConfig)
    other = init_lora(cfg, LoraConfig(rank=2, targets=LORA.targets), seed=0)
    with pytest.raises(ValueError, match="another set or shape"):
        add_lora(params, other, cfg, LORA)
    model, _, _ = adapted()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="rank=4"):
        load_lora(cfg, LoraConfig(rank=4, targets=LORA.targets), tmp_path)
    for more, match in (({"use_dora": True}, "DoRA"), ({"lora_dropout": 0.1}, "lora_dropout")):
        bridge: Any = BridgedCausalLM.from_pretrained(start)
        wrapped = peft.get_peft_model(bridge, Peft(r=2, target_modules=["q_proj"], **more))
        with pytest.raises(ValueError, match=match):
            wrapped(input_ids=two_rows("packed").tokens)
