"""Lean decode attention over a FlashQ cache (TurboAttention): one part of the code per file, see flashq_decode.py."""
