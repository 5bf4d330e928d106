"""The provenance of a measurement."""

from __future__ import annotations

import torch

from alspec.runtime.profiling.provenance import versions


def test_versions_name_the_packages() -> None:
    found = versions()
    assert found["torch"] == torch.__version__
    assert {"python", "cuda", "alspec", "triton"} <= set(found)
