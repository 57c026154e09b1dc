"""`memlens trace` on the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

import memlens
from memlens.testing import save_tiny
from memlens.tracer.intervene import generate, intervene
from memlens.tracer.intervention import Intervention
from memlens.tracer.trace import trace

PROMPT = "The river runs"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tiny_gpt2: Path, tiny_gpt2_index: memlens.Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, other/ and index/, an index of the first."""
    folder = tmp_path_factory.mktemp("cli-trace")
    (folder / "model").symlink_to(tiny_gpt2)
    (folder / "index").symlink_to(tiny_gpt2_index.folder)
    save_tiny(folder / "other", "gpt2", seed=1)
    return folder


def test_the_picture_has_a_line_a_layer_and_names_memories(run: Run, folder: Path) -> None:
    code, out, err = run("trace", folder / "model", PROMPT, "--top", 2)
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
    code, out, _ = run("trace", folder / "model", PROMPT, "--json", "--position", 1, "--token", " the", "--top", 4)
    expected = trace(folder / "model", PROMPT, position=1, token=" the", top=4).to_json()
    assert code == 0 and json.loads(out) == json.loads(json.dumps(expected)) | {"continuation": []}


def test_edits_show_before_and_after_and_both_continuations(run: Run, folder: Path) -> None:
    edits = ["--set", "L1N3=4", "--set", "L2=x-3", "--generate", 4]
    code, out, err = run("trace", folder / "model", PROMPT, *edits)
    assert code == 0 and err == ""
    model, intervention = memlens.load(folder / "model"), Intervention.parse("L1N3=4", "L2=x-3")
    compared = intervene(model, PROMPT, intervention)
    assert "with  L1N3=4  L2=x-3\n" in out and "before" in out and "after" in out and "KL" in out
    code, out, _ = run("trace", folder / "model", PROMPT, *edits, "--json", "--top", 10)
    content = json.loads(out)
    assert content["kl"] == pytest.approx(compared.kl) and content["after"]["logit"] == compared.after.logit
    texts = [generate(model, PROMPT, 4).text, generate(model, PROMPT, 4, intervention).text]
    assert [text["text"] for text in content["continuation"]] == texts


def test_many_edits_are_counted(run: Run, folder: Path) -> None:
    sets = [word for number in range(15) for word in ("--set", f"L1N{number}=0")]
    out = run("trace", folder / "model", PROMPT, *sets)[1]
    assert "L1N11=0" in out and "L1N12=0" not in out and "and 3 more edits" in out


def test_an_index_loads_its_model_and_adds_triggers(run: Run, folder: Path) -> None:
    code, out, _ = run("trace", folder / "index", PROMPT, "--json")
    content = json.loads(out)
    assert code == 0 and any(memory["trigger"] for layer in content["layers"] for memory in layer["by_effect"])
    code, out, _ = run("trace", folder / "index", PROMPT)
    assert code == 0 and "… The" in out


def test_an_intervention_is_saved_and_what_json_prints_of_it_is_a_document_to_replay(
    run: Run, refused: Callable[..., str], folder: Path, tmp_path: Path
) -> None:
    edits = ["--set", "L1N3=4", "--set", "L2=x-3", "--set", "L0N7=0", "--at", 0, "--at", -1]
    saved, asked = tmp_path / "saved.json", ("trace", folder / "model", PROMPT, "--json", "--top", 4)
    code, first, err = run(*asked, *edits, "--save", saved)
    document = json.loads(first)["intervention"]
    assert code == 0 and str(saved) in err and json.loads(saved.read_text()) == document
    assert document["model"]["fingerprint"] == memlens.load(folder / "model").fingerprint()
    bare, copy = tmp_path / "bare.json", tmp_path / "copy.json"
    bare.write_text(json.dumps(document | {"model": None}))
    for file in (saved, bare):
        assert run(*asked, "--file", file)[:2] == (0, first)
    assert run(*asked, "--file", bare, "--save", copy)[0] == 0 and json.loads(copy.read_text()) == document
    assert "fingerprint differs" in refused("trace", folder / "other", PROMPT, "--file", copy, "--json")


def test_the_words_of_a_word_model_stand_apart(run: Run) -> None:
    fixture = Path(__file__).parents[1] / "golden" / "fixture"
    code, out, _ = run("trace", fixture, "the city of", "--position", 1)
    assert code == 0 and out.startswith("the city   position 1")
    assert "score of '" in out and "its band's class" in out and "logit" not in out


def test_an_index_made_in_another_precision_says_so(refused: Callable[..., str], folder: Path) -> None:
    err = refused("trace", folder / "index", PROMPT, "--dtype", "bfloat16")
    assert "was made with the model in float32, not bfloat16" in err


@pytest.mark.parametrize("columns", [80, 120])
def test_the_picture_fits_the_terminal(run: Run, folder: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run("trace", folder / "index", "The river runs to the sea", "--set", "L1N3=4", "--generate", 20)
    assert code == 0 and max(map(cell_len, out.splitlines())) <= columns


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--set L0N1", "has no '='"),
        ("--token Constantinople", "is not one token"),
        ("--position 77", "position 77"),
        ("--save x.json", "no edits to save"),
        ("--at 0", "has no effect without --set"),
        ("--model elsewhere", "is not an index"),
        ("--top 0", "1 or more"),
        ("--file none.json", "cannot be read"),
        ("--generate 2 --temperature 1 --seed -1", "the seed is -1"),
        ("--temperature 0.8", "no effect without --generate"),
        ("--seed 3", "no effect without --generate"),
        ("--set L0N1=0 --at " + "999", "is not in the prompt"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    refused: Callable[..., str], folder: Path, options: str, words: str
) -> None:
    assert words in refused("trace", folder / "model", PROMPT, *options.split())
    assert "has no tokens" in refused("trace", folder / "model", "")
