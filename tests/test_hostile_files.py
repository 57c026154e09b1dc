"""Files that contain code are read as data or rejected in one line, and the code does not run.

docs/security.md lists the files that memlens reads and why they cannot run code.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gguf import GGUFWriter

import memlens
from memlens.annotations.records import Annotations, Label
from memlens.corpus.store import CorpusStore, read_batches
from memlens.errors import IndexFolderError, MemlensError
from memlens.files import write_sealed
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.models.load import load


class Trap:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return the path that a trap creates when it runs."""
    return tmp_path / "mark"


def test_the_traps_of_these_tests_work(mark: Path) -> None:
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()
    (mark.parent / "trap.py").write_text(program(mark.parent / "ran"))
    subprocess.run([sys.executable, "-c", "import trap"], cwd=mark.parent, check=True)
    assert (mark.parent / "ran").exists()


def program(mark: Path) -> str:
    """Return Python code that creates the mark when it is imported. It defines the names that loaders look up."""
    return f"import os\nos.makedirs({str(mark)!r}, exist_ok=True)\nclass Own: pass\ndef generate(*a, **k): pass\n"


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def own_network(folder: Path, mark: Path) -> None:
    (folder / "own.py").write_text(program(mark))
    change(folder / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})


def own_tokenizer(folder: Path, mark: Path) -> None:
    (folder / "own.py").write_text(program(mark))
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", "own.Own"]}, tokenizer_class="Own")


def own_generation(folder: Path, mark: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(program(mark))
    (folder / "generation_config.json").write_text(json.dumps({"custom_generate": str(folder)}))


def modules_beside(folder: Path, mark: Path) -> None:
    for name in ("json", "torch", "modeling_gpt2", "tokenization_gpt2", "setup", "sitecustomize", "__init__"):
        (folder / f"{name}.py").write_text(program(mark))


def template(folder: Path, mark: Path) -> None:
    ran = f"{{{{ ''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__['os'].mkdir('{mark}') }}}}"
    (folder / "chat_template.jinja").write_text(ran)
    change(folder / "tokenizer_config.json", chat_template=ran)


def pickled(file: str) -> Callable[[Path, Path], None]:
    def trap(folder: Path, mark: Path) -> None:
        (folder / file).write_bytes(pickle.dumps(Trap(mark)))

    return trap


def pickled_weights(write: Callable[[Any, Path], Any]) -> Callable[[Path, Path], None]:
    def trap(folder: Path, mark: Path) -> None:
        (folder / "model.safetensors").unlink()
        write({"transformer.wte.weight": Trap(mark)}, folder / "pytorch_model.bin")

    return trap


def shards_elsewhere(folder: Path, mark: Path) -> None:
    """Write an index of weight files that names a pickle outside the folder."""
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Trap(mark)}, folder.parent / "elsewhere.bin")
    listed = {"metadata": {}, "weight_map": {"transformer.wte.weight": "../elsewhere.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(listed))


def header_without_end(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


IGNORED = (own_network, own_tokenizer, own_generation, modules_beside, template)
REFUSED = {
    "pickled config.json": pickled("config.json"),
    "pickled tokenizer.json": pickled("tokenizer.json"),
    "pickled safetensors": pickled("model.safetensors"),
    "pickled .bin": pickled_weights(lambda content, path: path.write_bytes(pickle.dumps(content))),
    "pickle in torch's archive": pickled_weights(torch.save),
    "weights elsewhere": shards_elsewhere,
    "safetensors header without end": header_without_end,
}


@pytest.mark.parametrize("trap", IGNORED, ids=lambda trap: trap.__name__)
def test_code_beside_a_checkpoint_is_ignored(
    tiny_gpt2: Path, tmp_path: Path, mark: Path, trap: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_gpt2, tmp_path / "model")
    trap(folder, mark)
    monkeypatch.chdir(folder)
    model = load(folder)
    assert torch.equal(model.logits(torch.tensor([[3, 1, 4]])), load(tiny_gpt2).logits(torch.tensor([[3, 1, 4]])))
    model.tokenizer.encode(["The river"])
    assert not mark.exists()


@pytest.mark.parametrize("trap", REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_that_needs_code_or_objects_is_refused(
    tiny_gpt2: Path, tmp_path: Path, mark: Path, trap: Callable[..., None]
) -> None:
    folder = shutil.copytree(tiny_gpt2, tmp_path / "model")
    trap(folder, mark)
    with pytest.raises(MemlensError) as caught:
        load(folder)
    assert not mark.exists() and "\n" not in str(caught.value)


@pytest.mark.parametrize("setting", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("wish", ["somebody/kernel", "kernels-community/flash-attn3", "flash_attention_2"])
def test_attention_that_a_checkpoint_would_fetch_from_the_hub_is_not_fetched(
    tiny_gpt2: Path, tmp_path: Path, setting: str, wish: str
) -> None:
    folder = shutil.copytree(tiny_gpt2, tmp_path / "model")
    change(folder / "config.json", **{setting: wish})
    network: Any = load(folder).network
    assert network.config._attn_implementation == load(tiny_gpt2).network.config._attn_implementation  # type: ignore[union-attr]


@pytest.mark.parametrize("lie", ["tensors", "entries", "array", "text"])
def test_a_gguf_file_that_declares_more_than_it_contains_is_rejected(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_array("some.numbers", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    content = bytearray(path.read_bytes())
    places = {"tensors": 8, "entries": 16, "text": 24, "array": content.index(b"some.numbers") + 12 + 4 + 4}
    content[places[lie] : places[lie] + 8] = (2**60).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(MemlensError) as caught:
        load(path)
    assert "model.gguf is not a readable .gguf file" in str(caught.value)


def test_a_corpus_with_a_pickled_column_type_is_text_or_refused(
    tiny_gpt2: Path, tmp_path: Path, mark: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """pyarrow before 14.0.1 unpickled this type while it read a schema (CVE-2023-47248)."""
    note = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Trap(mark))}
    schema = pa.schema([pa.field("text", pa.string(), metadata=note)])
    pq.write_table(pa.table({"text": ["The river."]}, schema), tmp_path / "text.parquet")
    code, _, err = run("scan", tiny_gpt2, tmp_path / "text.parquet", "-o", tmp_path / "index")
    assert not mark.exists() and (code == 0 or (code == 2 and err.count("\n") == 1))
    for name in ("text.jsonl", "text.txt", "text.txt.gz", "text.parquet"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap(mark)))
        code, _, err = run("scan", tiny_gpt2, tmp_path / name, "-o", tmp_path / "other")
        assert code == 2 and err.startswith(f"memlens: '{tmp_path / name}'") and not mark.exists()


def test_an_unfinished_scan_with_objects_in_its_arrays_is_refused(
    tiny_gpt2: Path, tiny_text: Path, tmp_path: Path, mark: Path
) -> None:
    out = tmp_path / "shard"
    memlens.scan(tiny_gpt2, tiny_text, out=out, top=3, threads=1, shard="1/2")
    partial = out / "partial"
    objects = np.array([Trap(mark)], dtype=object)
    np.savez(partial / "batches.npz", batches=objects)
    with pytest.raises(MemlensError, match="damaged"):
        read_batches(partial / "batches.npz")
    (part,) = (partial / "parts").glob("*.npz")
    np.savez(part, **{"done": objects})
    (partial / "shard.json").unlink()
    with pytest.raises(MemlensError):
        memlens.scan(tiny_gpt2, tiny_text, out=out, top=3, threads=1, shard="1/2")
    assert not mark.exists()


FACTS = {"bytes": 1, "sha256": "0"}
SEALED = (
    {"counts": None},
    {"counts": []},
    {"counts": {}},
    {"counts.tokens": "7"},
    {"counts.tokens": -1},
    {"counts.tokens": 10**30},
    {"counts.sentences": True},
    {"counts.sentences": 2.5},
    {"counts.cut_tokens": [1]},
    {"files": None},
    {"files": []},
    {"files": {}},
    {"files.tokens.bin": None},
    {"files.tokens.bin": 3},
    {"files.tokens.bin": {}},
    {"files.tokens.bin": {**FACTS, "more": 1}},
    {"files.tokens.bin": {"bytes": "1", "sha256": "0"}},
    {"files.corpus.parquet": {"bytes": 1, "sha256": None}},
    {"files.../manifest.json": FACTS},
)


def test_an_unfinished_scan_with_a_valid_checksum_and_wrong_types_is_rejected(
    tiny_gpt2: Path, tiny_text: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    out = tmp_path / "shard"
    memlens.scan(tiny_gpt2, tiny_text, out=out, top=3, threads=1, shard="1/2")
    document = out / "partial" / "corpus.json"
    (out / "partial" / "shard.json").unlink()
    good = json.loads(document.read_text())
    for change in SEALED:
        ((place, wrong),) = change.items()
        part, _, name = place.partition(".")
        write_sealed(document, {**good, part: {**good[part], name: wrong} if name else wrong})
        with pytest.raises(IndexFolderError, match=r"corpus.json is missing or damaged; start over with --fresh"):
            CorpusStore(out / "partial")
    words = ("scan", tiny_gpt2, tiny_text, "-o", out, "--top", 3, "--threads", 1, "--shard", "1/2")
    assert run(*words) == (2, "", f"memlens: {document} is missing or damaged; start over with --fresh\n")
    write_sealed(document, {name: content for name, content in good.items() if name in ("counts", "files")})
    assert run(*words)[0] == 0


def test_an_index_whose_tables_are_pickles_is_refused(
    tiny_gpt2_index: Index, copy_of: Callable[..., Index], mark: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    folder = copy_of(tiny_gpt2_index).folder
    for name in ("triggers.parquet", "memories.parquet", "corpus.parquet", "manifest.json"):
        (folder / name).write_bytes(pickle.dumps(Trap(mark)))
        for command in (("show", folder, "L0N0"), ("search", folder, "river"), ("check", folder)):
            code, _, err = run(*command)
            assert code == 2 and "Traceback" not in err
    assert not mark.exists()


@pytest.mark.parametrize("line", [b'!!python/object/apply:os.system ["x"]', b"[" * 100_000, b"\0" * 100, b"\xff\xfe"])
def test_invalid_lines_in_the_annotation_log_are_ignored(
    tiny_gpt2_index: Index, copy_of: Callable[..., Index], line: bytes
) -> None:
    index = copy_of(tiny_gpt2_index)
    annotations = Annotations(index)
    annotations.save(Label("ann", MemoryId(0, 0), ()))
    with annotations.path.open("ab") as file:
        file.write(line + b"\n")
    annotations.save(Label("bob", MemoryId(0, 1), ()))
    assert Annotations(index).list_annotators() == ["ann", "bob"]


def test_intervention_and_annotation_documents_are_read_as_text_only(
    tiny_gpt2_index: Index, tmp_path: Path, mark: Path, run: Callable[..., tuple[int, str, str]], tiny_gpt2: Path
) -> None:
    code = f"__import__('os').mkdir({str(mark)!r})"
    contents = (
        pickle.dumps(Trap(mark)),
        code.encode(),
        json.dumps({"kind": "memlens intervention", "edits": code}).encode(),
    )
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.json").write_bytes(content)
        for command in (
            ("trace", tiny_gpt2, "The river", "--edits", tmp_path / f"{number}.json"),
            ("annotate", tiny_gpt2_index.folder, "import", tmp_path / f"{number}.json"),
        ):
            ended, out, err = run(*command)
            assert (ended, out) == (2, "") and err.count("\n") == 1, err
    assert not mark.exists()
