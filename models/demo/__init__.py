"""Training of the bundled demo checkpoint."""
