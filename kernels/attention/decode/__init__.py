"""Lean (stream-K) decode attention over a bf16 cache, with A~ and the sums of the verdict."""
