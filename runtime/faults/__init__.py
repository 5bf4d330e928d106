"""Detection and reports of dead ranks, signals and bad numbers."""
