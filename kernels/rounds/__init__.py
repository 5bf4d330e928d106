"""Kernels of rounds: tokens are drafted, verified together, and the right ones are kept, without the host."""
