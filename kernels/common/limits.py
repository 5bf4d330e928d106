"""What the fused decode kernels can take."""

__all__ = ["MAX_BATCH"]

MAX_BATCH = 8  # requests a step: the columns of one tensor-core product
