"""Kernels for benchmarks and for the doctor command only."""
