"""Attention a few heads at a time, so that q, k, v and what goes with them never exist for all heads at once.

Every rank's heads are cut into chunks of neighbours, so pretrained weights need no other order. A kv head is
sent once each way, with the first chunk that attends with it, and stays until the last that does. While one
chunk's attention runs, the next chunk's heads come, and the last one's result is sent back. The idea of
chunks is that of UPipe (arXiv 2602.21196).
"""

from usp.head_chunks.deal import Chunk, Range, deal_chunks
from usp.head_chunks.function import chunked_attention
from usp.head_chunks.project import Projections

__all__ = ["Chunk", "Projections", "Range", "chunked_attention", "deal_chunks"]
