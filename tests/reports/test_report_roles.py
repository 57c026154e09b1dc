"""The report's shares of roles by depth are what one counts in the table of roles."""

import json
from collections.abc import Callable
from typing import Any

import memlens
from memlens.index.reader import Index
from memlens.memory import ROLES
from memlens.reports.report import gather, render
from memlens.reports.sections import role_section


def test_shares_of_roles_are_counted_by_thirds_of_the_layers(
    tiny_gpt2_values: Index, copy_of: Callable[..., Index]
) -> None:
    assert role_section(tiny_gpt2_values) is None
    index = memlens.roles(copy_of(tiny_gpt2_values), rate=0.99)
    rows = index.table("roles").to_pylist()  # 3 layers of 40 memories: a third is a layer
    section = role_section(index)
    assert section is not None and section.none == sum(row["role"] is None for row in rows) / 120
    assert {role for row in rows for role in row["roles"]} <= {one.role for one in section.roles}
    assert section.untested == ("enrichment", "depletion")  # no gates; a role that no memory has is listed
    assert [one.role for one in section.roles] == [role for role in ROLES if role not in section.untested]
    for one in section.roles:
        own = [sum(one.role in row["roles"] for row in rows if row["layer"] == layer) for layer in range(3)]
        assert one.count == sum(own) and one.share == sum(own) / 120 and one.shares == tuple(n / 40 for n in own)
        assert [counted[one.role] for counted in section.by_layer] == own


def test_the_report_says_whether_effects_appear_until_roles_are_made_again(
    tiny_gpt2_values: Index, copy_of: Callable[..., Index], run: Callable[..., Any]
) -> None:
    index = memlens.roles(copy_of(tiny_gpt2_values), rate=0.99)
    assert "have not been measured yet" in render(gather(index), "")
    found = json.loads(run("roles", index.folder, "--effects", "--json")[1])
    section = role_section(memlens.Index(index.folder))
    assert section is not None and [one.change for one in section.effects] == [one["change"] for one in found]
    page = render(gather(memlens.Index(index.folder)), "")
    assert all(f"{one.measure}: {one.verdict}" in page for one in section.effects)
    assert run("check", index.folder)[0] == 0
    again = memlens.roles(memlens.Index(index.folder), rate=0.5)
    section = role_section(again)
    assert section is not None and section.effects == []
