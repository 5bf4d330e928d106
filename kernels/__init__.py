"""Kernels with their launchers and oracles."""
