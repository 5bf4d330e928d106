import itertools

from tiers import covering, fast, pairwise


def test_pairwise_has_every_pair_of_values() -> None:
    factors = [(1, 2, 3), "ab", (None, True), (0.5, 1.5)]
    cases = pairwise(*factors)
    assert len(cases) < len(list(itertools.product(*factors)))
    for i, j in itertools.combinations(range(len(factors)), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(factors[i], factors[j]))


def test_the_full_tier_has_every_case_once() -> None:
    cases = covering((1, 2, 3), "ab", (4, 5, 6))
    values = [case.values if hasattr(case, "marks") else case for case in cases]
    assert values == list(itertools.product((1, 2, 3), "ab", (4, 5, 6)))
    unmarked = {case for case in cases if not hasattr(case, "marks")}
    assert unmarked == set(pairwise((1, 2, 3), "ab", (4, 5, 6)))


def test_cases_that_are_not_kept_are_marked() -> None:
    kept, marked = fast([1, 2], keep=[1])
    assert kept == 1
    assert [mark.name for mark in marked.marks] == ["full"]
