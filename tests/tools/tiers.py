"""Two tiers of tests: `make test` runs the fast one, `make test-full` also what is marked `full`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["covering", "fast", "pairwise"]


def fast(cases: Sequence[Any], keep: Sequence[Any]) -> list[Any]:
    """All `cases` for `pytest.mark.parametrize`; those not in `keep` are marked `full`."""
    assert all(case in cases for case in keep), "the fast tier keeps a case that does not exist"
    full = pytest.mark.full
    return [case if case in keep else pytest.param(*_arguments(case), marks=full) for case in cases]


def covering(*factors: Sequence[Any]) -> list[Any]:
    """The full product of `factors`; what a covering array (`pairwise`) does not need is marked `full`."""
    return fast(list(itertools.product(*factors)), pairwise(*factors))


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A covering array of strength 2: any two values of two factors occur together in one of these cases at least."""
    pairs = list(itertools.combinations(range(len(factors)), 2))
    left = {(i, a, j, b) for i, j in pairs for a in range(len(factors[i])) for b in range(len(factors[j]))}
    product = list(itertools.product(*(range(len(factor)) for factor in factors)))
    chosen = []
    while left:
        case = max(product, key=lambda case: sum((i, case[i], j, case[j]) in left for i, j in pairs))
        left -= {(i, case[i], j, case[j]) for i, j in pairs}
        chosen.append(tuple(factor[at] for factor, at in zip(factors, case, strict=True)))
    return chosen


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
