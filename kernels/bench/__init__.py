"""Kernels that only benchmarks and the doctor launch."""
