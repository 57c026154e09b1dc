"""`memlens trace` on the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

import memlens
from memlens.cli import main
from memlens.testing import save_tiny
from memlens.tracer.intervene import generate, intervene
from memlens.tracer.intervention import Intervention
from memlens.tracer.trace import trace

PROMPT = "The river runs"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["trace", *(str(argument) for argument in arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def folder(tiny_gpt2: Path, tiny_gpt2_index: memlens.Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, other/ and index/, an index of the first."""
    folder = tmp_path_factory.mktemp("cli-trace")
    (folder / "model").symlink_to(tiny_gpt2)
    (folder / "index").symlink_to(tiny_gpt2_index.folder)
    save_tiny(folder / "other", "gpt2", seed=1)
    return folder


def test_the_picture_has_a_line_a_layer_and_names_memories(run: Run, folder: Path) -> None:
    code, out, err = run(folder / "model", PROMPT, "--top", 2)
    found = trace(folder / "model", PROMPT, top=2)
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert PROMPT in lines[0] and f"settled in layer {found.settled}" in lines[1]
    first = next(number for number, line in enumerate(lines) if line.split()[:1] == ["layer"])
    for layer, line in zip(found.layers, lines[first + 1 :], strict=False):
        assert line.split()[0] == str(layer.layer) and layer.case in line
        assert f"{layer.by_effect[0].memory}{layer.by_effect[0].effect:+.2f}" in line
    assert f"memories {found.parts['memories']:+.3f}" in out


def test_json_is_what_the_library_gives(run: Run, folder: Path) -> None:
    code, out, _ = run(folder / "model", PROMPT, "--json", "--position", 1, "--token", " the", "--top", 4)
    assert code == 0
    expected = trace(folder / "model", PROMPT, position=1, token=" the", top=4).to_json()
    content = json.loads(out)
    assert content.pop("continuation") == []
    assert content == json.loads(json.dumps(expected))


def test_edits_show_before_and_after_and_both_continuations(run: Run, folder: Path) -> None:
    edits = ["--set", "L1N3=4", "--set", "L2=x-3", "--generate", 4]
    code, out, err = run(folder / "model", PROMPT, *edits)
    assert code == 0 and err == ""
    model, intervention = memlens.load(folder / "model"), Intervention.parse("L1N3=4", "L2=x-3")
    compared = intervene(model, PROMPT, intervention)
    assert "with  L1N3=4  L2=x-3\n" in out and "before" in out and "after" in out and "KL" in out
    code, out, _ = run(folder / "model", PROMPT, *edits, "--json", "--top", 10)
    content = json.loads(out)
    assert content["kl"] == pytest.approx(compared.kl) and content["after"]["logit"] == compared.after.logit
    texts = [generate(model, PROMPT, 4).text, generate(model, PROMPT, 4, intervention).text]
    assert [text["text"] for text in content["continuation"]] == texts


def test_an_index_loads_its_model_and_adds_triggers(run: Run, folder: Path) -> None:
    code, out, _ = run(folder / "index", PROMPT, "--json")
    content = json.loads(out)
    assert code == 0 and any(memory["trigger"] for layer in content["layers"] for memory in layer["by_effect"])
    code, out, _ = run(folder / "index", PROMPT)
    assert code == 0 and "… The" in out


def test_an_intervention_is_saved_and_replayed(run: Run, folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "edits.json"
    code, first, err = run(folder / "model", PROMPT, "--set", "L1N3=4", "--at", -1, "--save", saved, "--json")
    assert code == 0 and str(saved) in err
    code, again, _ = run(folder / "model", PROMPT, "--file", saved, "--json")
    assert code == 0 and json.loads(again)["after"] == json.loads(first)["after"]
    code, out, err = run(folder / "other", PROMPT, "--file", saved)
    assert code == 2 and out == "" and "fingerprint differs" in err


def test_what_json_prints_of_an_intervention_is_a_document_to_replay(run: Run, folder: Path, tmp_path: Path) -> None:
    edits = ["--set", "L1N3=4", "--set", "L2=x-3", "--set", "L0N7=0", "--at", 0, "--at", -1]
    code, first, _ = run(folder / "model", PROMPT, *edits, "--json", "--top", 4)
    document = json.loads(first)["intervention"]
    assert code == 0 and document["model"]["fingerprint"] == memlens.load(folder / "model").fingerprint()
    for number, content in enumerate([document, document | {"model": None}]):
        file = tmp_path / f"edits{number}.json"
        file.write_text(json.dumps(content))
        code, again, _ = run(folder / "model", PROMPT, "--file", file, "--json", "--top", 4)
        assert code == 0 and again == first
    code, again, _ = run(folder / "model", PROMPT, "--file", file, "--save", tmp_path / "copy.json", "--json")
    assert code == 0 and json.loads((tmp_path / "copy.json").read_text()) == document
    code, out, err = run(folder / "other", PROMPT, "--file", tmp_path / "copy.json", "--json")
    assert code == 2 and out == "" and "fingerprint differs" in err


def test_the_words_of_a_word_model_stand_apart(run: Run) -> None:
    fixture = Path(__file__).parents[1] / "golden" / "fixture"
    code, out, _ = run(fixture, "the city of", "--position", 1)
    assert code == 0 and out.startswith("the city   position 1")
    assert "score of '" in out and "its band's class" in out and "logit" not in out


def test_an_index_made_in_another_precision_says_so(run: Run, folder: Path) -> None:
    code, out, err = run(folder / "index", PROMPT, "--dtype", "bfloat16")
    assert code == 2 and out == "" and "was made with the model in float32, not bfloat16" in err


@pytest.mark.parametrize("columns", [80, 120])
def test_the_picture_fits_the_terminal(run: Run, folder: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(folder / "index", "The river runs to the sea", "--set", "L1N3=4", "--generate", 20)
    assert code == 0 and max(map(cell_len, out.splitlines())) <= columns


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], "has no tokens"),
        ([PROMPT, "--set", "L0N1"], "changes nothing"),
        ([PROMPT, "--token", " Constantinople"], "is not one token"),
        ([PROMPT, "--position", "77"], "position 77"),
        ([PROMPT, "--save", "x.json"], "nothing to save"),
        ([PROMPT, "--at", "0"], "there is no --set"),
        ([PROMPT, "--model", "elsewhere"], "is not an index"),
        ([PROMPT, "--top", "0"], "1 or more"),
        ([PROMPT, "--file", "none.json"], "cannot be read"),
        ([PROMPT, "--generate", "2", "--temperature", "1", "--seed", "-1"], "the seed is -1"),
        ([PROMPT, "--temperature", "0.8"], "there is no --generate"),
        ([PROMPT, "--seed", "3"], "there is no --generate"),
        ([PROMPT, "--set", "L0N1=0", "--at", "9" * 30], "is not in the prompt"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, folder: Path, arguments: list[str], words: str) -> None:
    code, out, err = run(folder / "model", *arguments)
    assert code == 2 and out == ""
    assert err.startswith("memlens: ") and err.count("\n") == 1 and words in err
