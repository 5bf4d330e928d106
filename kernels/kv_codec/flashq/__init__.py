"""FlashQ: block progressive quantisation of the KV cache (TurboAttention, section 3)."""
