"""INT8 attention for prompts (TurboAttention)."""
