"""Size limits of the fused decode kernels."""

__all__ = ["MAX_BATCH", "MAX_ROWS"]

MAX_BATCH = 8  # requests per step: N of the tensor-core instruction (m16n8)
MAX_ROWS = 16  # rows of all requests in a round: two of these instructions
