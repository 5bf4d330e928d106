"""What tells where a measurement comes from."""

from __future__ import annotations

import torch

from alspec.runtime.profiling.provenance import versions


def test_versions() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    assert {"python", "cuda", "alspec", "triton"} <= set(found)
