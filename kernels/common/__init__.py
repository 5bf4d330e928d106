"""Helpers for all kernels: compiling and launching, dependent launch, small device functions."""
