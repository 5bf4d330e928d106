"""FlashQ block progressive quantisation (TurboAttention, section 3)."""
