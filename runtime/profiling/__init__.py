"""Timelines, kernel traces, statistics and where they come from."""
