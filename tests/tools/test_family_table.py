"""The table of families in docs/transcripts.md is what its script prints."""

from __future__ import annotations

import pytest
from family_models import CASES
from family_table import family_table
from paths import ROOT
from tiers import fast


@pytest.mark.parametrize("case", fast(list(CASES), keep=["llama-biases", "qwen3", "yarn"]))
def test_the_document_has_the_tokens_of_today(case: str) -> None:
    shown = (ROOT / "docs" / "transcripts.md").read_text(encoding="utf-8").splitlines()
    heading, rule, row = family_table([case])
    assert shown[shown.index(heading) + 1] == rule
    assert row in shown
    assert row.endswith("| equal |")
    assert sum(line.startswith(f"| {case} |") for line in shown) == 1
