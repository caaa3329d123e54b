"""The layer scan: one block over a stack of layers, and what is remembered, moved and run again for it."""

from usp.scan.api import REMAT, scan
from usp.scan.run import Gather, Pending

__all__ = ["REMAT", "Gather", "Pending", "scan"]
