"""Size limits of the fused decode kernels."""

__all__ = ["MAX_BATCH"]

MAX_BATCH = 8  # requests per step: N of the tensor-core instruction (m16n8)
