"""Lean decode attention over a quantised cache: one schedule and one main loop for every codec."""
