"""Timelines, kernel traces, statistics, and the provenance of measurements."""
