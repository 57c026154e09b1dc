"""Sets with a high Jaccard index, against comparing all with all."""

from hypothesis import given, strategies as st

from memlens.pattern.related import AlikeSets

SETS = st.lists(st.frozensets(st.integers(0, 12), min_size=1, max_size=9), min_size=1, max_size=25, unique=True)


@given(SETS, st.sampled_from([0.1, 0.3, 0.5, 2 / 3, 0.8, 1.0]))
def test_every_set_finds_all_that_are_alike_to_it(sets: list[frozenset[int]], least: float) -> None:
    alike = AlikeSets(sets, least)
    for number, own in enumerate(sets):
        naive = {o: len(own & other) / len(own | other) for o, other in enumerate(sets) if o != number}
        naive = {o: jaccard for o, jaccard in naive.items() if jaccard >= least}
        others, jaccards = alike.of(number)
        assert dict(zip(others.tolist(), jaccards.tolist(), strict=True)) == naive
