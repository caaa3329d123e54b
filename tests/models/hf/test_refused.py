"""Models, tables and arguments that cannot run on shards are refused by name, before any communication."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.models.batches import ONE, two_rows
from tests.models.hf.causal import causal_model
from usp.mesh import TABLES
from usp.models.hf import sequence_parallel

TWO = {
    "dp": 1,
    "ring": 1,
    "ulysses": 2,
}  # no process group exists: whatever communicates would fail otherwise


def enter(model: Any, table: str = "ulysses") -> None:
    with sequence_parallel(model, mesh=TWO, table=TABLES[table]):
        raise AssertionError("must be refused")


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30, "head_dim": 8}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_key_value_heads": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


def test_linear_attention_by_configuration() -> None:
    # cases H41, H42, D33, D34
    with pytest.raises(ValueError, match=r"Qwen3Next.*linear_attention"):
        enter(causal_model("qwen3_next", **SMALL, **LINEAR))


def test_stateful_layers_by_name() -> None:
    """The layer itself is found, whatever the configuration calls it."""
    model = causal_model("qwen3_next", **SMALL, **LINEAR)
    model.config.layer_types = ["full_attention"] * 2
    with pytest.raises(ValueError, match=r"model\.layers\.0\.linear_attn.* \(Qwen3NextGatedDeltaNet\)"):
        enter(model)


def test_a_convolution_of_the_users_own() -> None:
    model = causal_model("llama")

    class Shift(nn.Module):
        """Mixes each token with the one before."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    model.model.layers[1].mlp = Shift(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp"):
        enter(model)


# case H21 among them: the router's loss would see one shard
@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("llama", {"attention_dropout": 0.1}, "dropout=0.1"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0}},
            "dynamic",
        ),
        ("gpt_oss", {"output_router_logits": True}, "output_router_logits"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "both ways"),
    ],
)
def test_by_option(family: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        enter(causal_model(family, **changes))


def test_windows_that_only_a_mask_would_know() -> None:
    # case H40
    model = causal_model("gemma3_text")
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn.*window of sliding_attention"):
        enter(model)
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ValueError, match="layer_types with chunked_attention"):
        enter(model)


def test_parameters_without_values() -> None:
    # case H72: nothing is tied or loaded later
    model = causal_model("llama").to("meta")
    with pytest.raises(ValueError, match="on the meta device"):
        enter(model)


def test_tables_that_move_weights() -> None:
    with pytest.raises(ValueError, match=r"odysseus.*Choose ulysses"):
        enter(causal_model("llama"), "odysseus")


AT = torch.arange(23)
LABELS = two_rows("packed").tokens
# what would be cut, filled up or taken for something else without a word
ODD: list[tuple[dict[str, torch.Tensor], str]] = [
    # case P66: positions in three dimensions of an image's patches
    (
        {"position_ids": AT.expand(3, 2, 23)},
        r"position_ids=\(3, 2, 23\).* one for each of input_ids=\(2, 23\)",
    ),
    ({"position_ids": AT[:-1].expand(2, -1)}, r"position_ids=\(2, 22\)"),
    ({"position_ids": torch.arange(24).expand(2, -1)}, r"position_ids=\(2, 24\)"),
    ({"position_ids": AT.float().expand(2, -1)}, "position_ids=.* torch.float32 must be whole numbers"),
    # cases H6, D6: each target is counted, so there is one for each token
    ({"shift_labels": LABELS[:, 1:]}, r"shift_labels=\(2, 22\)"),
    ({"shift_labels": torch.cat([LABELS, LABELS[:, :1]], 1)}, r"shift_labels=\(2, 24\)"),
    ({"shift_labels": LABELS[:1]}, r"shift_labels=\(1, 23\)"),
    ({"shift_labels": LABELS.where(LABELS > 9, -1)}, "shift_labels=-1 must be 0 or more, or -100"),
    # cases H29, H34, D30: documents that a mask counts, or that only one kernel's arguments know
    ({"attention_mask": 1 + (AT > 9).long().expand(2, -1)}, "attention_mask=2 must be 0 or 1"),
    ({"seq_idx": (AT > 9).int().expand(2, -1)}, "seq_idx must come with boundaries"),
]


def test_batches() -> None:
    model = causal_model("llama")
    tokens = two_rows("packed").tokens
    with sequence_parallel(model, mesh=ONE, table=TABLES["usp"]) as sp:
        with pytest.raises(ValueError, match="restart"):  # case H32
            sp.shard({"input_ids": tokens, "position_ids": torch.arange(23).expand(2, 23) % 7})
        for given, match in ODD:
            with pytest.raises(ValueError, match=match):
                sp.shard({"input_ids": tokens, **given})
        with pytest.raises(ValueError, match="pixel_values"):
            sp.shard({"input_ids": tokens, "pixel_values": tokens})
        shard = sp.shard({"input_ids": tokens, "labels": tokens})
        with pytest.raises(ValueError, match="attention_mask"):
            sp(shard, attention_mask=torch.ones(2, 1, 23, 23))


def test_statistics_of_a_shard() -> None:
    # case H21: the router's loss of a call would be that of one shard
    with sequence_parallel(causal_model("gpt_oss"), mesh=ONE, table=TABLES["usp"]) as sp:
        shard = sp.shard(two_rows("packed"))
        with pytest.raises(ValueError, match="output_router_logits is set"):
            sp(shard, output_router_logits=True)


def test_an_engine_around_another_model() -> None:
    """Its head would give logits, which summed are no loss."""
    model, other = causal_model("llama"), causal_model("llama")
    with sequence_parallel(model, mesh=ONE, table=TABLES["usp"]) as sp:
        shard = sp.shard({"input_ids": two_rows("packed").tokens, "labels": two_rows("packed").tokens})
        with pytest.raises(ValueError, match="engine must hold the model that this context was bound to"):
            sp.loss(shard, engine=other)
