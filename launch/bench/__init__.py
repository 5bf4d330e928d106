"""What launch/bench_kernels.py measures."""
