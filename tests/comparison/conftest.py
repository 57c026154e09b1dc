"""Real indexes of tiny models to compare: other weights, other text, another shape, two ends. Only look at them."""

import random
from pathlib import Path

import pytest

import memlens
from index_by_hand import complete_table
from memlens.index.reader import Index
from memlens.pattern.table import NAMES_SCHEMA, PATTERNS_SCHEMA
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.vocab.table import compute_values

TEXT = """The river runs to the sea. The river runs to the hills. The press was free in the city of Paris.
Rain fell on the hills, and the rivers rose. In 1990 a café opened near the river; it was the first of its kind.
The end of the war came in the spring, as the papers of the day had said it would. The River City was free.
A <script>alert("river")</script> in the city. The end.
"""
WORDS = ["city", "end", "hill", "press", "river", "sea"]
OTHER_TEXT = """The river runs to the town. Rain fell on the fields, and the war came. The news of the day was free.
The end of the spring came in 1990. A café near the sea opened; the people of Paris read of it. The end.
"""


@pytest.fixture(scope="session")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Index]:
    """By name; `bare` and `wide` lack values and patterns, `raw` reads values otherwise, `spaced` has other tokens."""
    folder = tmp_path_factory.mktemp("indexes")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "other.txt").write_text(OTHER_TEXT, encoding="utf-8")
    made = {
        "base": ("gpt2", 0, "text.txt", {}),
        "tuned": ("gpt2", 1, "text.txt", {}),
        "moved": ("gpt2", 0, "other.txt", {}),
        "gated": ("llama", 0, "text.txt", {}),
        "gated tuned": ("llama", 3, "text.txt", {}),
        "raw": ("gpt2", 1, "text.txt", {}),
        "bare": ("gpt2", 2, "text.txt", {}),
        "wide": ("gpt2", 0, "text.txt", {"n_inner": 52}),
        "spaced": ("gpt2", 4, "text.txt", {}),
    }
    return {name: _make(folder, name, *recipe) for name, recipe in made.items()}


def _make(folder: Path, name: str, family: str, seed: int, text: str, overrides: dict[str, int]) -> Index:
    style = "spaces" if name == "spaced" else "bytes"  # another vocabulary
    model = memlens.load(tiny_model(family, seed, **overrides), tokenizer=tiny_tokenizer(style=style))
    # the paper's text: the same prefix may be listed more than once
    index = memlens.scan(model, folder / text, out=folder / name, top=9, threads=1, dedup="none")
    if name not in ("bare", "wide"):
        compute_values(index, model, top=11 if name == "base" else 8, reading="raw" if name == "raw" else None)
        _write_patterns(index, seed)
    return index


def _write_patterns(index: Index, seed: int) -> None:
    """Patterns drawn by lot: so small a corpus has none of its own."""
    draw = random.Random(seed)
    patterns, names = [], []
    for layer in index.layers:
        for memory in range(index.memories(layer)):
            whose = {"layer": layer, "memory": memory}
            chosen = sorted(draw.sample(WORDS, draw.randint(0, 3)))
            names.append(whose | {"name": ", ".join(chosen) or "no pattern found"})
            for word in chosen:
                kind = "semantic" if word > "m" else "shallow"
                described = {"pattern": f"ending:{word}", "kind": kind, "description": f'ends with "{word}"'}
                patterns.append(whose | described | {"prefixes": [0, 1, 2], "confidence": draw.random()})
    tables = {
        "patterns": (PATTERNS_SCHEMA, iter([complete_table("patterns", patterns, PATTERNS_SCHEMA)])),
        "names": (NAMES_SCHEMA, iter([complete_table("names", names, NAMES_SCHEMA)])),
    }
    index.write(tables, lambda: {"patterns": {"top": 3, "rate": 0.01}})
