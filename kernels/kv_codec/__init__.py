"""KV-cache codecs: layout, reference and kernels of each."""
