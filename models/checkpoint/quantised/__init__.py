"""Checkpoints with quantised weights: what config.json says of them, their tensors, and one canonical form."""
