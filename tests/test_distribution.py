"""The wheel and the source distribution have every file and run with the packages in their metadata."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from memlens.index.reader import Index

pytestmark = pytest.mark.sweep

ROOT = Path(__file__).parent.parent
MOST_BYTES = 25_000_000
BUILT_WITH = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the wheel and the source distribution, built as by `make dist`."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT]
    subprocess.run(command, check=True, capture_output=True, env=BUILT_WITH)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, source


def tracked(folder: str = ".") -> set[str]:
    files = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard", folder], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {name for name in files.stdout.split("\0") if name and (ROOT / name).is_file()}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        inside = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {name.removeprefix("src/"): (ROOT / name).read_bytes() for name in tracked("src/memlens")}
    assert inside == expected
    assert {"memlens/bundled/model/model.safetensors", "memlens/web/templates/base.html"} <= inside.keys()
    assert built[0].stat().st_size <= MOST_BYTES


def test_the_source_distribution_builds_the_same_wheel_byte_for_byte_anywhere(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    with tarfile.open(built[1]) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
        source.extractall(tmp_path, filter="data")
    hidden = {name for name in tracked() if name.startswith((".ci/", ".github/"))}
    assert inside == (tracked() - hidden) | {"PKG-INFO"}
    (folder,) = tmp_path.iterdir()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            os.utime(path, (1_800_000_000, 1_800_000_000))
    command = [sys.executable, "-P", "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again folder")]
    environment = BUILT_WITH | {"TZ": "Asia/Kolkata", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environment)
    (wheel,) = (tmp_path / "again folder").glob("*.whl")
    assert wheel.name == built[0].name and wheel.read_bytes() == built[0].read_bytes()


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(wheel: Path) -> list[str]:
    """Return the required packages in the metadata of the wheel."""
    with zipfile.ZipFile(wheel) as content:
        (name,) = [name for name in content.namelist() if name.endswith("/METADATA")]
        return Parser().parsestr(content.read(name).decode()).get_all("Requires-Dist", [])


def environment(wheel: Path, folder: Path) -> Path:
    """Return a folder with the packages of an environment that contains only the wheel and its requirements."""
    with zipfile.ZipFile(wheel) as content:
        content.extractall(folder)
    names: set[str] = set()
    pending = needs(wheel)
    while pending:
        line = pending.pop()
        name = re.match(r"[\w.-]+", line)
        if name is None or "extra ==" in line or plain(name[0]) in names:
            continue
        names.add(plain(name[0]))
        try:
            package = distribution(name[0])
        except PackageNotFoundError:  # a requirement on another system
            continue
        pending += package.requires or []
        for entry in {path.parts[0] for path in package.files or [] if ".." not in path.parts}:
            with suppress(FileExistsError):
                (folder / entry).symlink_to(package.locate_file(entry))
    return folder


def run_in(packages: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these packages only."""
    command = [sys.executable, "-S", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(packages), "PYTHONSAFEPATH": "1", "NO_COLOR": "1"} | variables
    return subprocess.run(command, cwd=packages.parent, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def packages(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(built[0], tmp_path_factory.mktemp("environment") / "packages")


IMPORTS = """
import importlib, pkgutil, memlens
for module in pkgutil.walk_packages(memlens.__path__, "memlens."):
    if not module.name.startswith(("memlens.web.", "memlens.__main__")):
        importlib.import_module(module.name)
print(memlens.__file__)
"""


def test_the_wheel_runs_with_the_packages_it_names(packages: Path, tiny_gpt2_values: Index) -> None:
    assert not {"fastapi", "uvicorn", "ray", "pytest", "playwright", "pandas"} & {
        entry.name for entry in packages.iterdir()
    }
    imported = run_in(packages, "-c", IMPORTS)
    assert imported.stdout.strip() == str(packages / "memlens" / "__init__.py"), imported.stderr
    info = run_in(packages, "-m", "memlens", "info", "bundled", "--json")
    assert info.returncode == 0 and json.loads(info.stdout), info.stderr
    report = run_in(packages, "-m", "memlens", "report", tiny_gpt2_values.folder, "-o", "report.html")
    assert report.returncode == 0 and (packages.parent / "report.html").is_file(), report.stderr


EXTRAS = {  # an extra, and a command that needs it
    "serve": ("serve", "index"),
    "gguf": ("info", "model.gguf", "--quiet"),
    "ray": ("scan", "bundled", "bundled", "-o", "new", "--executor", "ray"),
    "datasets": ("scan", "bundled", "hf:wikitext", "-o", "new"),
}


MAIN = """
import json, sys
from memlens.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    print(main(), file=sys.stderr)
"""


def test_a_package_that_only_some_commands_need_is_named_with_its_extra(
    built: tuple[Path, Path], packages: Path
) -> None:
    (packages.parent / "model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    commands = json.dumps([*EXTRAS.values()])
    process = run_in(packages, "-c", MAIN, commands, NUMBA_DISABLE_JIT="1")  # without compiling loops
    lines = process.stderr.splitlines()
    assert len(lines) == 2 * len(EXTRAS) and lines[1::2] == ["2"] * len(EXTRAS), process.stderr
    for extra, message in zip(EXTRAS, lines[::2], strict=True):
        assert f'pip install "memlens[{extra}]"' in message
        assert any(line.endswith(f"extra == '{extra}'") for line in needs(built[0]))
