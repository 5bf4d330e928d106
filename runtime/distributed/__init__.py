"""Ranks: placement, transports, memory that several ranks write, agreement."""
