"""The measurements of launch/bench_kernels.py."""
