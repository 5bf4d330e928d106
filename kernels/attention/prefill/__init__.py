"""INT8 prefill attention (TurboAttention)."""
