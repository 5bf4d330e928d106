"""One decode step: eager, and as fused kernels in a captured graph."""
