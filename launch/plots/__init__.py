"""Pictures of measured rows."""
