"""The functional model as a Transformers model: loss and gradients of Transformers' own, and its files."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import usp.models.hf
from tests.models.batches import ONE, two_rows
from tests.models.hf.causal import causal_model, unsharded
from tests.models.hf.run_bridge import (
    clipped_on_rank,
    inputs_of,
    on_rank,
    refused_on_rank,
    save_on_rank,
    shifted,
    step,
    summed_on_rank,
    whole,
)
from tests.models.test_parallel import TOLERANCE, reference
from tests.models.tiny import hf_model, load_hf, save_hf
from tests.pool import Pool
from usp.mesh import TABLES, P, build_mesh, placements_of, shard_map
from usp.models.hf import BridgedCausalLM, sequence_parallel, shard_inputs
from usp.models.hf.loader import check_same
from usp.models.options import Options

MODELS = {"tied": "gqa 9/3 tied", "qwen3": "qwen3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for key, name in MODELS.items():
        save_hf(hf_model(name), path / key)
    return path


def assert_same(loss: Any, grads: Any, key: str, case: str) -> None:
    value, wanted, _ = reference(hf_model(MODELS[key]), two_rows(case))
    assert abs(loss - value) <= TOLERANCE * value
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert (grads[name] - grad).abs().max() <= TOLERANCE * grad.abs().max(), name


@pytest.mark.parametrize("key", MODELS)
def test_one_process(folder: Path, key: str) -> None:
    # cases H2, H24, H28: the loss from shift_labels alone, positions made here
    model = BridgedCausalLM.from_pretrained(folder / key, dtype=torch.float64)
    inputs = inputs_of("packed")
    assert_same(*step(model, inputs), key, "packed")
    assert_same(*step(model, shifted(inputs)), key, "packed")
    with torch.no_grad():
        out = model(**{**inputs, "labels": None})
    _, _, logits = reference(hf_model(MODELS[key]), two_rows("packed"))
    assert out.loss is None
    assert (out.logits - logits).abs().max() <= TOLERANCE * logits.abs().max()


RUNS = {
    2: [
        (1, 1, 2, "ulysses", True, "packed", False),
        (1, 1, 2, "ulysses", False, "whole rows", True),
        (1, 2, 1, "ring", False, "packed", False),
        (2, 1, 1, "replicated", True, "packed", True),
    ],
    4: [
        (1, 2, 2, "usp", True, "packed", True),
        (1, 2, 2, "usp", False, "packed", False),
        (2, 1, 2, "ulysses", False, "packed", False),
        (1, 4, 1, "ring", True, "whole rows", False),
        (1, 2, 2, "ulysses", True, "packed", False),  # ring only repeats: its copies must not count twice
    ],
}


@pytest.mark.parametrize("key", MODELS)
@pytest.mark.parametrize("world", RUNS)
def test_ranks(folder: Path, world: int, key: str, two: Pool, four: Pool) -> None:
    # cases H2, H16, H24, H28, H30
    for run in RUNS[world]:
        results = {2: two, 4: four}[world].run(on_rank, folder / key, *run)
        loss, grads, cut = results[0]
        assert_same(loss, grads, key, run[5])
        assert all(torch.equal(other[0], loss) for other in results), run  # one reported loss
        assert bool(cut) == (not run[4] and run[3] != "replicated"), run


@pytest.mark.parametrize("keep_whole", [True, False])
def test_saves_what_transformers_loads(folder: Path, keep_whole: bool, two: Pool, tmp_path: Path) -> None:
    # case H72: what is tied is one parameter here, and tied again where it is loaded
    two.run(save_on_rank, folder / "tied", tmp_path / "out", "ulysses", keep_whole)
    model, info = load_hf(tmp_path / "out")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, value in hf_model(MODELS["tied"]).named_parameters():
        assert torch.equal(model.get_parameter(name), 2 * value), name


def test_what_would_mix_or_halve_in_silence(folder: Path, two: Pool) -> None:  # cases H58, D1
    for dealt, halved in two.run(refused_on_rank, folder / "tied"):
        assert "same global batch, got 2 different" in dealt
        assert "averaged=False must not go with DistributedDataParallel" in halved


def test_clipping_of_shards_in_bfloat16(two: Pool) -> None:
    two.run(clipped_on_rank)


def test_sums_in_float32(four: Pool) -> None:
    four.run(summed_on_rank)  # cases H9, P18


def test_batches_of_any_type_are_compared() -> None:
    check_same({"loss_weights": torch.ones(2, 3, dtype=torch.bfloat16)}, ONE)


def test_refusals(folder: Path) -> None:
    model = BridgedCausalLM.from_pretrained(folder / "tied")
    inputs = inputs_of("packed")
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(**inputs, inputs_embeds=torch.zeros(1))
    with pytest.raises(ValueError, match="restart"):  # packed by position values alone, H32
        model(
            input_ids=inputs["input_ids"],
            labels=inputs["labels"],
            position_ids=torch.arange(23).expand(2, 23) % 9,
        )
    with pytest.raises(ValueError, match="of the whole batch"):
        model(**{**inputs, "cu_seqlens": torch.tensor([0, 23])})
    with pytest.raises(ValueError, match="gradient_checkpointing=True must be False"):
        model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="averaged=True"):
        BridgedCausalLM.from_pretrained(folder / "tied", averaged=True).reduce_grads()


def test_extras_are_imported_by_name_alone() -> None:
    """`import usp.models.hf` asks for Transformers, and for none of its trainers and engines."""
    folder, seen, waiting = Path(usp.models.hf.__file__).parent, set(), ["__init__"]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for node in ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                assert module.split(".")[0] not in ("accelerate", "deepspeed", "peft", "trl"), (name, module)
                inner = module.removeprefix("usp.models.hf.").partition(".")[0]
                if module.startswith("usp.models.hf.") and inner not in seen:
                    waiting.append(inner)
    assert {"bridge", "parallel"} <= seen
    assert not {"trainer", "sft", "deepspeed", "resume"} & seen


def test_automatic_casts(folder: Path) -> None:
    """What trainers call bf16=True: parameters in float32, used in bfloat16, as with the option dtype."""
    model = BridgedCausalLM.from_pretrained(folder / "qwen3")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, grads = step(model, inputs_of("packed"))
    model.options = Options(dtype=torch.bfloat16)
    want, wanted = step(model, inputs_of("packed"))
    assert torch.equal(loss, want)
    assert all(torch.equal(grads[name], wanted[name]) for name in wanted)
    model.options = Options()
    assert not torch.equal(step(model, inputs_of("packed"))[0], want)
    plain = causal_model("llama").float()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        sequence_parallel(plain, mesh=ONE, table=TABLES["usp"]) as sp,
    ):
        value = sp.loss(sp.shard(two_rows("packed")))
    value.backward()
    exact = unsharded(causal_model("llama"), two_rows("packed"))[0]
    assert 0 < abs(float(value.detach()) - exact) < 2e-2 * exact  # three digits of bfloat16


def test_positions_start_anywhere(folder: Path) -> None:
    """Rotary positions are relative: a shift changes no logit, a stretch does."""
    model = BridgedCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float64)
    inputs = {"input_ids": inputs_of("packed")["input_ids"]}
    at = torch.arange(23).expand(2, 23)
    with torch.no_grad():
        plain, moved, wide = (model(**inputs, position_ids=p).logits for p in (at, at + 5, at * 2))
    # float32 tables of angles: 6e-8 of the largest angle, times what the layers make of it
    assert (plain - moved).abs().max() < 1e-5 * plain.abs().max()
    assert (plain - wide).abs().max() > 1e-2 * plain.abs().max()


def test_boundaries_do_not_come_from_positions() -> None:
    # case H32: whatever stands for the position of padding, documents are those that were named
    inputs = inputs_of("packed")
    mask = (torch.arange(23) < torch.tensor([[23], [19]])).long()
    at = torch.arange(23).expand(2, 23)
    placed: Any = {"mesh": ONE, "table": TABLES["usp"]}
    want = shard_inputs({**inputs, "attention_mask": mask}, **placed)
    assert want.cu_seqlens.tolist() == [0, 5, 6, 17, 23, 34, 42, 46]
    for fill in (-1, 0, 1):
        positions = at.where(mask.bool(), fill)
        got = shard_inputs({**inputs, "attention_mask": mask, "position_ids": positions}, **placed)
        assert torch.equal(got.positions, positions)
        for field in ("tokens", "labels", "cu_seqlens", "num_valid"):
            assert torch.equal(getattr(got, field), getattr(want, field)), (fill, field)


def functional_on_rank() -> Any:
    """`functional_call` on any module inside `shard_map`: rows over ranks, parameters whole."""
    mesh = build_mesh(ulysses=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    params = dict(model.named_parameters())
    x = torch.randn(6, 5, dtype=torch.float64)

    def local(p: Any, rows: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, p, (rows,)).square().sum()

    mapped = shard_map(
        local, mesh, (P_tree(params), P("ulysses", None)), P(partial=("dp", "ring", "ulysses"))
    )
    placed = {
        name: distribute_tensor(p.detach(), mesh, placements_of(P(*(None,) * p.dim()), mesh))
        for name, p in params.items()
    }
    rows = distribute_tensor(x, mesh, placements_of(P("ulysses", None), mesh))
    leaves = {name: p.requires_grad_() for name, p in placed.items()}
    value = mapped(leaves, rows)
    total = value.full_tensor()
    total.backward()
    want = model(x).square().sum()
    grads = torch.autograd.grad(want, list(params.values()))
    got = [leaves[name].grad for name in params]
    assert all(isinstance(g, DTensor) for g in got)
    return want.detach(), total.detach(), grads, [whole(g) for g in got]


def P_tree(params: dict[str, Any]) -> dict[str, P]:
    return {name: P(*(None,) * p.dim()) for name, p in params.items()}


def test_functional_call_inside_shard_map(two: Pool) -> None:
    for want, got, grads, got_grads in two.run(functional_on_rank):
        assert abs(want - got) <= 1e-13 * want  # the same six rows, summed in two parts
        for a, b in zip(grads, got_grads, strict=True):
            assert (a - b).abs().max() <= 1e-13 * a.abs().max()
