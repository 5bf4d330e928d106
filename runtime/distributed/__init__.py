"""Ranks: placement, transports, memory that peers write, agreement."""
