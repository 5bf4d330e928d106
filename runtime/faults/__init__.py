"""Dead ranks, signals, bad numbers: found, named, reported."""
