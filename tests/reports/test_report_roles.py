"""The report's shares of roles by depth are what one counts in the table of roles."""

from collections.abc import Callable

import memlens
from memlens.index.reader import Index
from memlens.reports.roles import role_section


def test_shares_of_roles_are_counted_by_thirds_of_the_layers(
    tiny_gpt2_values: Index, copy_of: Callable[..., Index]
) -> None:
    assert role_section(tiny_gpt2_values) is None
    index = memlens.roles(copy_of(tiny_gpt2_values), rate=0.99)
    rows = index.table("roles").to_pylist()  # 3 layers of 40 memories: a third is a layer
    section = role_section(index)
    assert section is not None and section.none == sum(row["role"] is None for row in rows) / 120
    assert {one.role for one in section.roles} == {role for row in rows for role in row["roles"]} != set()
    for one in section.roles:
        own = [sum(one.role in row["roles"] for row in rows if row["layer"] == layer) for layer in range(3)]
        assert one.count == sum(own) and one.share == sum(own) / 120 and one.shares == tuple(n / 40 for n in own)
        assert [counted[one.role] for counted in section.by_layer] == own
