"""What noise cannot hide: kernels, copies and waits of the host in one layer of a step, on two ranks."""

from typing import Any

import pytest
import torch

from tests.models.run_guards import COPIES, WAITS, per_layer
from tests.pool import Pool, pool_of

two = pool_of(2, threads=1)  # one collective at a time: gloo is not safe with the GPU's gathers at once


NARROW: dict[str, Any] = {"dtype": torch.bfloat16, "kernel": "cpu"}


@pytest.mark.parametrize(
    ("options", "products", "launches", "copies"),
    [  # 7 products in the forward, 14 in the backward; all but the last of the forward's again
        ({"remat": "none"}, 21, 125, 25),
        ({"remat": "attention"}, 27, 166, 33),
        ({"remat": "full"}, 27, 170, 36),
    ],
    ids=str,
)
def test_of_one_layer(options: dict[str, Any], products: int, launches: int, copies: int, two: Pool) -> None:
    """Forward, backward and update, nothing fused. The numbers may fall; one that rises wants a reason."""
    for found in two.run(per_layer, {**NARROW, **options}):
        layer = found["layer"]
        said = dict(layer.most_common())
        assert [layer[name] + found["step"][name] for name in WAITS] == [0] * len(WAITS)
        assert (
            layer["mm"] + layer["addmm"] + layer["bmm"]
            == {"none": 21, "attention": 27, "full": 27}[options["remat"]]
        ), said
        assert sum(layer.values()) <= launches, said
        assert sum(layer[name] for name in COPIES) <= copies, said
