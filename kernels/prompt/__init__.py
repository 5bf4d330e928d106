"""Elementwise kernels of prompt processing."""
