"""Size limits of the fused kernels and of captured steps."""

__all__ = [
    "FAST_ROWS", "MAX_BATCH", "MAX_COLUMNS", "MAX_FUSED_ROWS", "MAX_HEADS_PER_KV", "MAX_PAIR_BATCH", "MAX_ROWS",
    "max_batch",
]  # fmt: skip

MAX_FUSED_ROWS = 16  # rows of a fused projection: two times N of the tensor-core instruction (m16n8)
FAST_ROWS = 8  # with more, the library multiplies 16-bit weights faster
MAX_COLUMNS = 64  # rows times query heads of a KV head in attention over a bf16 cache: one product
MAX_HEADS_PER_KV = 8  # query heads of a KV head over a quantised cache: the columns of one MMA
MAX_ROWS = 128  # rows of a captured step
MAX_BATCH = 32  # requests of one group: the last kernel of a step is unrolled over them
MAX_PAIR_BATCH = 8  # requests of a pair


def max_batch(mode: str) -> int:
    """Most requests of a captured step."""
    return MAX_PAIR_BATCH if mode == "paired" else MAX_BATCH
