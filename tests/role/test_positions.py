"""The role positional: numbers against plain counting, chance against draws, and memories planted to have it."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import memlens
from memlens.index.reader import Index
from memlens.role.positions import explained, p_of_positions
from memlens.testing import tiny_model, tiny_tokenizer

LENGTHS = [3, 17, 40, 9, 80, 25, 33, 5, 64, 12] * 30
EDGES = np.array([1, 2, 4, 8, 16, 32, 64])


AT = np.concatenate([np.arange(length) for length in LENGTHS])
RANGES = np.searchsorted(EDGES, AT, side="right")


def counted(fires: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(fired, prefixes, sentences) by range of positions, [1, ranges], from the firing of every sentence."""
    starts = RANGES[np.isin(AT, [0, *EDGES])]  # a sentence with a prefix in a range has the first one of that range
    counts = (RANGES[np.concatenate(fires)], RANGES, starts)
    fired, prefixes, sentences = (np.bincount(own, minlength=len(EDGES) + 1)[None] for own in counts)
    return fired, prefixes, sentences


def test_what_position_explains_is_information_over_entropy() -> None:
    fired, prefixes = np.array([[5, 0, 30, 0], [0, 0, 0, 0]]), np.array([[5, 10, 60, 0], [5, 10, 60, 0]])

    def h(x: float) -> float:
        return 0.0 if x in (0, 1) else -x * math.log(x) - (1 - x) * math.log(1 - x)

    whole = h(35 / 75)
    left = sum(n / 75 * h(k / n) for k, n in zip(fired[0], prefixes[0], strict=True) if n)
    assert explained(fired, prefixes) == pytest.approx([(whole - left) / whole, 0.0])


@pytest.mark.parametrize("together", [False, True])
def test_chance_passes_for_position_no_more_often_than_it_may(together: bool) -> None:
    """Prefixes that fire independently, and sentences that fire as a whole: neither has to do with position."""
    random = np.random.default_rng(0)
    draws = []
    for _ in range(300):
        rate = random.choice([0.02, 0.2, 0.6])
        draws.append([
            np.full(n, random.random() < rate) if together else random.random(n) < rate for n in LENGTHS
        ])  # fmt: skip
    fired, prefixes, sentences = (np.concatenate(own) for own in zip(*map(counted, draws), strict=True))
    p = p_of_positions(fired, prefixes, sentences)
    for level in (0.01, 0.05, 0.2):
        assert (p <= level).mean() <= level + 3 * math.sqrt(level * (1 - level) / len(p))


def test_memories_that_fire_by_position_are_found() -> None:
    random = np.random.default_rng(1)
    rules = (lambda at: at == 0, lambda at: at >= 16, lambda at: (at >= 4) & (at < 8))
    for rule in rules:
        fires = [rule(np.arange(n)) ^ (random.random(n) < 0.01) for n in LENGTHS]
        fired, prefixes, sentences = counted(fires)
        assert explained(fired, prefixes)[0] > 0.25 and p_of_positions(fired, prefixes, sentences)[0] < 1e-6


def test_a_planted_memory_is_positional_in_the_index(tmp_path: Path) -> None:
    """A model whose memory L0N0 is moved by nothing but the embedding of positions, up to position 3."""
    network = tiny_model("gpt2", activation_function="relu")
    body = network.transformer
    with torch.no_grad():
        body.wte.weight[:, 0] = 0.0
        body.wpe.weight[:, 0] = -4.0
        body.wpe.weight[:4, 0] = 4.0
        body.h[0].mlp.c_fc.weight[:, 0] = 0.0
        body.h[0].mlp.c_fc.weight[0, 0] = 5.0
        body.h[0].mlp.c_fc.bias[0] = 0.0
    text = tmp_path / "text.txt"
    words = [f"{a}{b}" for a in "klmnpst" for b in ("ar", "et", "in", "os")]
    random = np.random.default_rng(0)
    text.write_text("\n".join(" ".join(random.choice(words, random.integers(3, 12))) + "." for _ in range(80)))
    index = memlens.scan(network, text, out=tmp_path / "index", tokenizer=tiny_tokenizer(), workers=1)
    memlens.roles(index, model=memlens.load(network, tokenizer=tiny_tokenizer()))
    row = index.table("roles").to_pylist()[0]
    assert "positional" in row["roles"] and row["position"] > 0.5 and row["position_from"] < 4


def test_an_index_without_counts_has_roles_but_this_one_and_says_so(
    tiny_gpt2_values: Index, copy_of: Callable[..., Index], run: Callable[..., tuple[int, str, str]]
) -> None:
    index = copy_of(tiny_gpt2_values)
    index.folder.joinpath("counts.parquet").unlink()
    index.manifest.with_files({}, without=["counts.parquet"]).write(index.folder)
    code, _, err = run("roles", index.folder)
    assert code == 0 and "the index has no counts by position" in err and "--fresh" in err
    rows = memlens.Index(index.folder).table("roles").to_pylist()
    assert all(row["position"] is None and "positional" not in row["roles"] for row in rows)


def test_quadrants_of_a_gated_memory_are_shown(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The river runs to the sea. Rain fell on the hills, and the rivers rose. The press was free.")
    index = memlens.scan(
        tiny_model("llama"), text, out=tmp_path / "index", tokenizer=tiny_tokenizer(), workers=1, threads=1
    )
    shown = json.loads(run("show", index.folder, "L1N3", "--json")[1])["quadrants"]
    counts = index.table("counts").to_pylist()[index.memories(0) + 3]
    assert [one["prefixes"] for one in shown] == counts["quadrants"]
    assert [bool(one["triggers"]) for one in shown] == [count > 0 for count in counts["quadrants"]]
    filled = next(one for one in shown if one["triggers"])
    assert f"{filled['quadrant']}  gate " in run("show", index.folder, "L1N3")[1]
    assert all((one["coefficient"] > 0) == (filled["quadrant"] in ("++", "--")) for one in filled["triggers"])
    assert run("check", index.folder)[0] == 0
