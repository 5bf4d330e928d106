"""Lean decode attention over a FlashQ cache (TurboAttention)."""
