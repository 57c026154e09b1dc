"""Hub datasets are read shard by shard. A folder stands in for one, read through the package `datasets` as well."""

import json
from pathlib import Path

import datasets
import pytest

from memlens.corpus.encoding import encode_corpus
from memlens.errors import CorpusError
from memlens.models.tokenizer import Tokenizer
from memlens.settings import CorpusSettings
from memlens.testing import tiny_tokenizer

SENTENCE = "The river runs to the sea. "


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset of three shards with 3 MB each. The last one cannot be read."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "texts"
    folder.mkdir()
    line = json.dumps({"text": SENTENCE * 40}) + "\n"
    for number in range(2):
        (folder / f"train-0000{number}.jsonl").write_text(line * 3000, encoding="utf-8")
    (folder / "train-00002.jsonl").write_text("{damaged", encoding="utf-8")
    return f"hf:{folder}"


def count_tokens(dataset: str, limit: int | None) -> int:
    tokenizer = Tokenizer(tiny_tokenizer())
    chunks = encode_corpus(CorpusSettings((dataset,)), tokenizer, max_length=64, max_tokens=limit)
    return sum(len(tokens) for chunk in chunks for tokens in chunk.rows.column("tokens").to_pylist())


def test_a_limit_of_tokens_ends_the_download(dataset: str, tmp_path: Path) -> None:
    assert 1000 <= count_tokens(dataset, 1000) < 1064  # the last sentence is complete
    assert not list((tmp_path / "cache").rglob("*.arrow"))  # no converted copy of the dataset


def test_without_a_limit_all_shards_are_read(dataset: str) -> None:
    with pytest.raises(CorpusError, match="record 6001 cannot be read"):
        count_tokens(dataset, None)
