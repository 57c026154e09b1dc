"""The colours of charts, and of the map, stay apart for colour-blind readers."""

import re
from importlib import resources
from itertools import combinations

import numpy as np
import pytest

from memlens.experiments.patterns import HUES
from memlens.experiments.style import CATEGORIES, COLOURS
from memlens.memory import ROLES

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
SEEN_AS = {
    "all cones": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, eyes: str) -> np.ndarray:
    srgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(SEEN_AS[eyes]) @ linear, 0, 1)
    scaled = TO_XYZ @ seen / [0.9505, 1.0, 1.089]
    x, y, z = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("page", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN_AS)
def test_no_two_hues_of_a_chart_merge(page: int, eyes: str) -> None:
    seen = {name: lab(COLOURS[name][page], eyes) for name in CATEGORIES}
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 18, (one, other)


def test_a_kind_of_pattern_has_one_colour_in_charts_and_on_the_map() -> None:
    css = resources.files("memlens.web").joinpath("static", "overview.css").read_text("utf-8")
    for place, kind in enumerate(("shallow", "semantic", "both"), 1):
        assert f"--kind-{place}: var(--{HUES[kind]});" in css


@pytest.mark.parametrize("page", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN_AS)
def test_every_role_of_the_map_has_a_colour_of_its_own(page: int, eyes: str) -> None:
    css = resources.files("memlens.web").joinpath("static", "overview.css").read_text("utf-8")
    colours = dict(re.findall(r"--role-(\d+): (#\w{6}|var\(--ink\));", css))
    assert list(colours) == [str(1 + place) for place in range(len(ROLES))]
    without_role = re.findall(r"--kind-0: (#\w{6})", css)[page]
    seen = [COLOURS["ink"][page] if one.startswith("var") else one for one in [*colours.values(), without_role]]
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(lab(one, eyes) - lab(other, eyes)) > 20, (one, other)
