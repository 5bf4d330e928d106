"""Prompts and flags for tests of generate.py, and a strict reader of its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PROMPT = "The old man and the sea; the sea and the old man."
LONG_PROMPT = "".join(f"line {number}: the value is {number * 7919 % 997}.\n" for number in range(16))  # > 2 S + 64
SMALL = ("--max-new-tokens", 12, "--ignore-eos")
# Sink and window alone: with recalled blocks, A~ of short texts leaves hardly a token out.
WINDOW = ("--speculation", "simulated", "--predictor", "window")


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def read_json(path: Path) -> Any:
    """Strictly: Python's own parser would take NaN and Infinity."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
