"""The command lines, one module each, and what they share."""
