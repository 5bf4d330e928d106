"""Tests that share a job: which tier the job has to run for."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def is_full_tier(request: pytest.FixtureRequest) -> bool:
    """Whether a test of this file that is marked `full` was selected. If not, shared jobs run the fast tier's cases."""
    of_file = (item for item in request.session.items if item.path == request.path)
    return any(item.get_closest_marker("full") for item in of_file)
