"""Training state on disk: each rank writes what it holds, any mesh reads what it needs.

One checkpoint is a folder `step-00000010` with a safetensors file for each rank that wrote, `index.json` (for
every tensor its global shape and which file holds which part, with a checksum) and, written last, `complete`
(the checksum of the index). There is no pickle anywhere, which is why this is not
torch.distributed.checkpoint: its file reader unpickles the metadata.
"""

from usp.state.files import Damaged, Index, Placed, folder_of, steps_in
from usp.state.load import Reader, open_last, set_aside
from usp.state.save import Saver

__all__ = [
    "Damaged",
    "Index",
    "Placed",
    "Reader",
    "Saver",
    "folder_of",
    "open_last",
    "set_aside",
    "steps_in",
]
