"""Residual stream and RMSNorm, fused with the all-reduce in front of them."""
