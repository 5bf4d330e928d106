"""The commands, one module each, and their shared code."""
