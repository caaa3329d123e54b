"""Rotary positions without waiting for a GPU, and what is no position."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from usp.models import LlamaConfig, Rope
from usp.models.rope import inverse_frequencies, rope_cos_sin

HALF = 5
ROPES: dict[str, Rope] = {
    "default": Rope(),
    "linear": Rope(rope_type="linear", factor=3.0),
    "llama3": Rope(rope_type="llama3", factor=8.0, original_max_position=64),
    "dynamic": Rope(rope_type="dynamic", factor=2.5),
    "yarn": Rope(rope_type="yarn", factor=4.0, original_max_position=64),
    "longrope": Rope(
        rope_type="longrope", factor=None, original_max_position=64,
        short_factor=(1.0,) * HALF, long_factor=(1.0, 1.5, 2.0, 3.0, 5.0),
    ),
}  # fmt: skip


def config(rope: str) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, head_dim=2 * HALF,
        max_position=256, rope=ROPES[rope],
    )  # fmt: skip


class Moves(TorchDispatchMode):
    """From the host to another device: whether the host goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
            if source.device.type == "cpu" and out.device.type != "cpu":
                self.seen.append((kwargs or {}).get("non_blocking", False) or args[2:] == (True,))
        return out


@pytest.mark.parametrize("rope", ROPES)
def test_the_host_does_not_wait(rope: str) -> None:
    """What a configuration decides is sent on the side; nothing could be read back from "meta"."""
    positions = torch.arange(300, device="meta")[None]
    with Moves() as moves:
        cos, sin = rope_cos_sin(positions, config(rope), torch.bfloat16, seq_len=300)
    assert cos.device == sin.device == positions.device
    assert moves.seen == [True] * (rope in ("yarn", "longrope"))


def test_positions_are_whole_numbers() -> None:
    with pytest.raises(ValueError, match=r"positions=torch.float32 must be whole numbers"):
        rope_cos_sin(torch.arange(3.0)[None], config("default"), torch.float32)


def test_length_decides() -> None:
    for rope in ("dynamic", "longrope"):
        short, same, long = (inverse_frequencies(config(rope), seq_len=n) for n in (60, 64, 300))
        assert torch.equal(short, same)
        assert not torch.equal(short, long)
        with pytest.raises(ValueError, match="seq_len=None must be the length of the whole sequence"):
            inverse_frequencies(config(rope))
