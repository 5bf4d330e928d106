"""Draw measured rows."""
