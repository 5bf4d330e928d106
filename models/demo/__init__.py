"""The bundled demo checkpoint and the scripts that train it."""

from pathlib import Path

__all__ = ["DEMO_CHECKPOINT"]

DEMO_CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
