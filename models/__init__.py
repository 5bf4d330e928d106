"""Llama as data flow over kernels; checkpoints, tokenizers and the demo model."""
