"""Files with random content cause a one-line error, never a traceback."""

import copy
import gzip
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from scale_helpers import Scans

import memlens
from memlens.corpus.sentences import corpus_fingerprint, read_units, tokenize_units
from memlens.errors import MemlensError
from memlens.index.memory import summarize
from memlens.models.memory_model import MemoryModel
from memlens.settings import CorpusSettings
from memlens.testing import tiny_model, tiny_tokenizer
from memlens.tracer.intervention import Intervention

QUICK = settings(
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # finding is enough; making it small would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
LINES = st.lists(
    st.binary(max_size=30)
    | st.text(max_size=30).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | JSON.map(lambda content: json.dumps(content).encode())
    | JSON.map(lambda content: json.dumps({"text": content}).encode()),
    max_size=6,
).map(b"\n".join)
ENDINGS = st.sampled_from([".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz", ".txt.zst", ".parquet.zst"])


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return memlens.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), prove=False)


@contextmanager
def refused_in_one_line() -> Iterator[None]:
    try:
        yield
    except MemlensError as error:
        assert "\n" not in str(error)


@given(LINES, ENDINGS, st.booleans(), st.sampled_from(["sentence", "line", "document", "block:3"]))
@QUICK
def test_a_corpus_file_of_nonsense(model, tmp_path, content, ending, packed, unit) -> None:
    path = tmp_path / f"text{ending}"
    path.write_bytes(gzip.compress(content) if packed and ending.endswith(".gz") else content)
    corpus = CorpusSettings((str(path),), unit=unit)
    with refused_in_one_line():
        corpus_fingerprint(corpus)
        limits = {"max_length": 9, "block": corpus.block}
        for sentence in tokenize_units(read_units(corpus), model.tokenizer.encode, **limits):
            assert sentence.tokens


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all parts of a JSON document."""
    is_list = isinstance(document, list)
    inside = document.items() if isinstance(document, dict) else enumerate(document if is_list else ())
    return [place for key, value in inside for place in [(*path, key), *places(value, (*path, key))]]


def changed(document: Any, draw: st.DrawFn) -> Any:
    """Return the document with one to three of its values replaced or removed."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        known = places(result)
        if not known:
            break
        *path, last = draw(st.sampled_from(known))
        holder = result
        for key in path:
            holder = holder[key]
        if draw(st.booleans()):
            holder[last] = draw(JSON)
        else:
            del holder[last]
    return result


def nonsense(document: Any, draw: st.DrawFn) -> bytes:
    """Return random bytes, random JSON or, most often, the document with changes."""
    kind = draw(st.sampled_from(["changed", "changed", "changed", "json", "bytes"]))
    if kind == "bytes":
        return draw(st.binary(max_size=40))
    return json.dumps(draw(JSON) if kind == "json" else changed(document, draw)).encode()


@pytest.fixture(scope="module")
def small_index(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(alone, tmp_path_factory.mktemp("fuzzed") / "index"))


@given(st.data())
@QUICK
def test_a_manifest_of_nonsense(small_index: Path, scans: Scans, data: st.DataObject) -> None:
    whole = json.loads((scans.alone / "manifest.json").read_text())
    (small_index / "manifest.json").write_bytes(nonsense(whole, data.draw))
    for use in (
        lambda: memlens.open_index(small_index).triggers("L0N3", limit=2),
        lambda: memlens.open_index(small_index)["L2N39"],
        lambda: repr(memlens.open_index(small_index)),
        lambda: summarize(memlens.open_index(small_index)),
        lambda: memlens.check(small_index),
        lambda: scans.run(small_index),
    ):
        with refused_in_one_line():
            use()


@given(st.data())
@QUICK
def test_an_intervention_of_nonsense(model: MemoryModel, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "intervention.json"
    whole = Intervention.parse("L0N1=0", "L1N2=3.5", "L2=x2", positions=[0, -1]).meant_for(model).to_json()
    path.write_bytes(nonsense(whole, data.draw))
    with refused_in_one_line():
        Intervention.load(path).check(model)
