"""Codecs of the KV cache: layout, reference and kernels."""
