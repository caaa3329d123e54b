"""Within steps the garbage collector leaves alone what was there before; afterwards all is as it was."""

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.test_train import options
from usp.tools import loop
from usp.tools.bench.timing import measure
from usp.tools.cli import main as usp
from usp.tools.garbage import frozen

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> None:
    gc.unfreeze()


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_is_left_alone_until_the_end() -> None:
    gone, kept = weakref.ref(Circle()), Circle()
    later = weakref.ref(kept)
    with frozen():
        assert gone() is None  # looked at once, before
        assert gc.get_freeze_count() > 1000
        del kept
        during = weakref.ref(Circle())
        gc.collect()
        assert during() is None
        assert later() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert later() is None


def test_only_the_timed_steps_of_a_measurement() -> None:
    counts: list[bool] = []

    def step() -> torch.Tensor:
        counts.append(gc.get_freeze_count() > 0)
        return torch.zeros(())

    measure(step, steps=2, warmup=2, device=CPU)
    assert counts == [False, False, True, True]
    assert gc.get_freeze_count() == 0


def test_undone_after_a_step_that_failed() -> None:
    def step() -> torch.Tensor:
        raise RuntimeError(f"frozen={gc.get_freeze_count() > 0}")

    with pytest.raises(RuntimeError, match="frozen=True"):
        measure(step, steps=1, warmup=0, device=CPU)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("fails", [False, True])
def test_of_a_run(
    fails: bool, model_dir: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first step on, of which everything compiled is left."""
    counts: list[bool] = []
    rate = loop.learning_rate

    def learning_rate(cfg: Any, step: int) -> float:
        counts.append(gc.get_freeze_count() > 0)
        if fails and step == 3:
            raise ValueError("step=3 must not be reached, got this. Start again.")
        return rate(cfg, step)

    monkeypatch.setattr(loop, "learning_rate", learning_rate)
    words = ["train", *options(model_dir, corpus, tmp_path / "out"), "--log-every", "100"]
    ending = pytest.raises(ValueError, match="step=3 must") if fails else nullcontext()
    with ending as _:  # which holds on to the frames of what failed
        usp(words)
    assert counts[:3] == [False, True, True]
    assert gc.get_freeze_count() == 0
