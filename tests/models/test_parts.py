"""Compiled parts of a layer: no number of lengths, runs and configurations is too many for torch.compile."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.models.test_options import CFG
from usp.models import parts

SIZE = CFG.hidden_size


def test_programs_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process: more than 8 kinds of runs of a norm, each of which wants a program of its own."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    weight = torch.randn(SIZE)
    for eps in (1e-2, 1e-3, 1e-4, 1e-5):
        cfg = replace(CFG, rms_eps=eps)
        norm = parts.local_parts(cfg, compiled=True).norm
        for length in (7, 11, 13):
            whole = torch.randn(2, 2 * length, SIZE)
            wanting = whole.clone().requires_grad_()
            want = parts.rms_norm(whole, weight, eps=eps)
            for x in (whole, wanting):
                for grad in (False, True):
                    with torch.set_grad_enabled(grad):
                        assert torch.equal(norm(x, weight), want)
                        assert torch.equal(norm(x[:, length:], weight), want[:, length:])
                        assert torch.equal(norm(x.transpose(0, 1), weight), want.transpose(0, 1))
                        assert norm(x, weight).requires_grad == (grad and x is wanting)
    parts.local_parts.cache_clear()
