"""Training of the bundled demo checkpoint."""

from pathlib import Path

__all__ = ["DEMO_CHECKPOINT"]

DEMO_CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
