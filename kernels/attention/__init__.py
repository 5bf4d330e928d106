"""Attention: plain torch, fp64 oracles, and the dispatch to the kernels by codec."""
