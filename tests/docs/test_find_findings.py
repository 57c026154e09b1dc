"""examples/find_findings.py finds the memory that was planted, and measures what intervening on it measures."""

import importlib.util
import json
import random
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memlens
from memlens.cli import main
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.pattern.table import compute_patterns
from memlens.reports.findings import select_findings
from memlens.testing import tiny_model, tiny_tokenizer

SCRIPT = Path(__file__).parents[2] / "examples" / "find_findings.py"
WORDS = ("the city", "people read", "news of", "rain fell", "hills and", "a war", "the press", "in spring", "the day")
PLANTED = MemoryId(1, 7)
Paths, Capture = dict[str, Path], pytest.CaptureFixture[str]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("find_findings", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["find_findings"] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def sentences(seed: int, count: int) -> str:
    """Sentences of random words; " river" is in every third, and " of" follows it."""
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        parts = draw.choices(WORDS, k=draw.randint(2, 4))
        if number % 3 == 0:
            parts.insert(draw.randint(1, len(parts)), "river of")
        lines.append(" ".join(parts).capitalize() + ".")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """A checkpoint in which L1N7 fires on " river" alone and writes what " of" is read by, scanned and looked over."""
    folder = tmp_path_factory.mktemp("findings")
    network, tokenizer = tiny_model("gpt2", n_positions=64, tie_word_embeddings=False), tiny_tokenizer()
    river, of = tokenizer.convert_tokens_to_ids(["Ġriver", "Ġof"])
    with torch.no_grad():
        network.transformer.wte.weight[:, 0] = 0.0
        network.transformer.wte.weight[river] = torch.eye(24)[0] * 12
        network.transformer.wpe.weight.zero_()
        for block in network.transformer.h:
            for parameter in (block.attn.c_proj.weight, block.attn.c_proj.bias, block.mlp.c_proj.weight):
                parameter.mul_(0.05)
            block.ln_2.weight.fill_(1.0)
            block.ln_2.bias.zero_()
        own = network.transformer.h[PLANTED.layer].mlp
        own.c_fc.weight[:, PLANTED.memory] = torch.eye(24)[0] * 4
        own.c_fc.bias[PLANTED.memory] = -10.0
        own.c_proj.weight[PLANTED.memory] = network.lm_head.weight[of] * 2
    network.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "scanned.txt").write_text(sentences(1, 450))
    (folder / "held-out.txt").write_text(sentences(2, 120))
    index = memlens.scan(folder / "model", folder / "scanned.txt", out=folder / "index", top=25, unit="line", threads=1)
    memlens.values(index, top=10, threads=1)
    compute_patterns(memlens.Index(index.folder))
    return {name: folder / name for name in ("model", "index", "scanned.txt", "held-out.txt")}


def run(made: Paths, capsys: Capture, *options: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = load_script().main([str(made["index"]), "--held-out", str(made["held-out.txt"]), *options])
    return code, *capsys.readouterr()


def test_the_planted_memory_is_found_and_measured(made: Paths, capsys: Capture) -> None:
    code, out, err = run(made, capsys, "--json", "--prompts", "6")
    assert code == 0 and err == ""
    found: list[dict[str, Any]] = json.loads(out)
    first = found[0]
    assert first["candidate"]["memory"] == asdict(PLANTED)
    assert first["candidate"]["text"] == " of" and "river" in first["candidate"]["patterns"][0]
    assert len(first["measured"]) == 6 == first["fell"] and first["effect"] > 0
    scanned = set(made["scanned.txt"].read_text().splitlines())
    held_out = [line for line in made["held-out.txt"].read_text().splitlines() if line not in scanned]
    model = memlens.load(made["model"])
    for row in first["measured"]:
        assert any(line.startswith(row["prompt"]) for line in held_out) and row["prompt"].endswith("river")
        assert row["is_next"]
        compared = memlens.intervene(model, row["prompt"], f"{PLANTED}=0", token=" of")
        assert row["p"] == pytest.approx(compared.before.token.p, rel=1e-4)
        assert row["p_without"] == pytest.approx(compared.after.token.p, rel=1e-4)
        shown = {one.memory: one.coefficient for one in memlens.trace(model, row["prompt"], top=40).layers[1].by_size}
        assert row["coefficient"] == pytest.approx(shown[PLANTED], rel=1e-4)
    assert [one["effect"] for one in found] == sorted((one["effect"] for one in found), reverse=True)


def test_the_page_has_commands_that_repeat_it(made: Paths, capsys: Capture) -> None:

    code, out, _ = run(made, capsys, "--prompts", "3")
    assert code == 0 and out.startswith(f"## {PLANTED}: ") and "held-out prompts: p of ' of' falls on 3" in out
    commands = [line for line in out.splitlines() if line.startswith("memlens ")]
    assert len(commands) >= 2
    for command in commands[:2]:
        assert main(shlex.split(command)[1:]) == 0


@pytest.mark.parametrize(("option", "number"), [("--count", "0"), ("--prompts", "-1"), ("--sentences", "0")])
def test_none_and_less_are_refused(made: Paths, capsys: Capture, option: str, number: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(made, capsys, option, number)
    assert caught.value.code == 2 and f"invalid at_least_one value: '{number}'" in capsys.readouterr().err


def test_a_prompt_that_begins_with_a_dash_is_repeated_by_its_command(made: Paths) -> None:

    script = load_script()
    candidate = script.Candidate(PLANTED, "", ["p"], 0, " of", 1, 1, 1, [], 1.0)
    finding = script.Finding(candidate, [script.Measured("-x river", 1.0, 0.5, 0.4, 0.0, True)])
    page = script.as_markdown(memlens.open_index(made["index"]), finding)
    (command,) = (line for line in page.splitlines() if line.startswith("memlens trace "))
    assert main(shlex.split(command)[1:]) == 0


def test_an_index_without_patterns_is_refused_in_one_line(tiny_gpt2_index: Index, capsys: Capture) -> None:
    code = load_script().main([str(tiny_gpt2_index.folder), "--held-out", str(SCRIPT)])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.startswith("find_findings: ") and err.count("\n") == 1


def places_in(
    made: Paths, memories: list[MemoryId], *texts: str
) -> tuple[MemoryModel, list[Any], list[tuple[int, int]]]:
    """The sentences as the script has them, and (sentence, position) of where the memories are highest."""
    script, model = load_script(), memlens.load(made["model"])
    encoded = zip(texts, model.tokenizer.encode(texts), strict=True)
    sentences = [script.Sentence(text, one.ids, one.ends) for text, one in encoded]
    found = script.highest_places(model, sentences, memories, 9).values()
    return model, sentences, [place for own in found for _, *place in own]


def test_a_prompt_is_never_cut_within_a_letter(made: Paths) -> None:
    """Silencing is measured on the prompt as text; if that were other tokens, another prefix would be measured."""
    memories = [MemoryId(layer, memory) for layer in range(3) for memory in range(40)]
    model, (sentence,), places = places_in(made, memories, "A 東 river")
    (encoded,) = model.tokenizer.encode(["A 東 river"])
    read = {at: model.tokenizer.encode([sentence.until(at)])[0].ids for at in range(len(encoded.ids))}
    own = {at for at, ids in read.items() if ids == encoded.ids[: at + 1]}
    assert 1 < len(own) < len(encoded.ids) and places and {position for _, position in places} <= own


def test_equal_prompts_are_measured_once(made: Paths) -> None:
    texts = ("The river of", "The river runs", "The river", "A river")
    _, sentences, places = places_in(made, [PLANTED], *texts)
    assert sorted(sentences[number].until(position) for number, position in places) == ["A river", "The river"]


def test_the_first_finding_is_the_planted_memory(made: Paths, tmp_path: Path) -> None:
    index = memlens.open_index(shutil.copytree(made["index"], tmp_path / "index"))
    memlens.experiment(index, "silencing", threads=1)
    finding = select_findings(index)[0]
    assert finding.memory == str(PLANTED) and finding.title.startswith(f"{PLANTED} promotes ' of'")
    assert all(token == " river" for _, token in finding.triggers)
    verb, folder, prompt, *options = shlex.split(finding.command)[1:]
    assert (verb, folder) == ("trace", str(index.folder)) and options == ["--token", " of", "--set", f"{PLANTED}=0"]
    compared = memlens.intervene(index.load_model(), prompt, f"{PLANTED}=0", token=" of")
    p, without = compared.before.token.p, compared.after.token.p
    assert f"p falls {p:.2g} → {without:.2g}" in finding.lines[0] and main(shlex.split(finding.command)[1:]) == 0
