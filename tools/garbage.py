"""Python's garbage collector, kept from stopping the host inside a step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen() -> Iterator[None]:
    """What is there now is looked at once, and left out of every later collection until this ends.

    What was imported and compiled makes millions of objects, and one look at all of them takes the host as
    long as it takes to start several layers.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
