"""Compiled functions: their cache folder, when they are recompiled, and sorting inside compiled loops."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import memlens
from memlens.compiling import compiled, compiled_part, sort_, sort_with_

PACKAGE = Path(memlens.__file__).parent
HELPER = """
from memlens.compiling import compiled_part

@compiled_part
def helper(number):
    return number + {}
"""
USER = """
from memlens.compiling import compiled
from memlens.helper import helper

@compiled
def use(number):
    return 10 * helper(number)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return the folder of a package memlens with one compiled function, which calls a helper in another file."""
    folder = tmp_path / "memlens"
    folder.mkdir()
    shutil.copy(PACKAGE / "compiling.py", folder)
    (folder / "__init__.py").touch()
    (folder / "helper.py").write_text(HELPER.format(1))
    (folder / "user.py").write_text(USER)
    return folder


def run(package: Path, code: str = "print(use(4))", **environment: str) -> str:
    places = {"NUMBA_CACHE_DIR": str(package.parent / "cache"), "PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-B", "-c", f"from memlens.user import use\n{code}"]
    inherited = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    ran = subprocess.run(command, env=inherited | places | environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def cache_files(folder: Path) -> dict[Path, int]:
    """Return the files of machine code below a folder, with the time of their last change."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}


def test_machine_code_is_kept_until_a_helper_in_another_file_changes(package: Path) -> None:
    assert run(package) == "50"
    first = cache_files(package.parent)
    assert len(first) == 1 and run(package) == "50" and cache_files(package.parent) == first
    (package / "helper.py").write_text(HELPER.format(2))
    assert run(package) == "60"
    assert len(cache_files(package.parent)) == 2


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
def test_a_damaged_cache_file_is_replaced(package: Path, kind: str) -> None:
    run(package)
    (file,) = package.parent.rglob(kind)
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-20])
    assert run(package) == "50" and file.stat().st_size == whole


def test_machine_code_that_cannot_be_written_is_used(package: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))\nprint(use(4), use(4))"
    assert run(package, limit) == "50 50"


def test_the_cache_is_in_the_users_folder_or_in_the_temporary_one(package: Path) -> None:
    root = package.parent
    (root / "temporary").mkdir()
    places = {"NUMBA_CACHE_DIR": "", "TMPDIR": str(root / "temporary")}
    code = "import os\ndel os.environ['NUMBA_CACHE_DIR']\nfrom memlens.compiling import cache_folder\n"
    code += "cache_folder.cache_clear()\nprint(cache_folder().parent)"
    assert run(package, code, XDG_CACHE_HOME=str(root / "caches"), **places) == str(root / "caches/memlens/numba")
    assert run(package, code, HOME=str(root), **places) == str(root / ".cache/memlens/numba")
    assert run(package, code, HOME="/proc/nowhere", **places) == str(root / "temporary" / f"memlens-{os.getuid()}")


def test_a_folder_that_others_can_write_to_is_not_used(package: Path) -> None:
    code = "from pathlib import Path\nfrom memlens.compiling import _make_private\nprint(_make_private(Path('shared')))"
    shared = package.parent / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert run(package, f"import os\nos.chdir({str(package.parent)!r})\n{code}") == "None"


def test_compiling_leaves_the_settings_of_numba_as_they_are(package: Path) -> None:
    code = "import os, numba\nprint(numba.config.CACHE_DIR == os.environ['NUMBA_CACHE_DIR'])"
    assert run(package, code) == "True"


@compiled
def sort_compiled_(keys, count):
    sort_(keys, count)


@compiled
def sort_with_compiled_(keys, others, count):
    sort_with_(keys, others, count)


@pytest.mark.parametrize("kind", [np.uint64, np.int64, np.int32, np.float32])
def test_the_first_keys_are_sorted_and_the_rest_is_left(kind: type) -> None:
    random = np.random.default_rng(0)
    for count in (0, 1, 2, 3, 11, 57, 702, 5_000):
        keys = random.integers(0, max(count // 2, 2), count + 3).astype(kind)
        expected = np.concatenate([np.sort(keys[:count]), keys[count:]])
        sort_compiled_(keys, count)
        assert np.array_equal(keys, expected)


def test_numbers_beside_the_keys_are_moved_along() -> None:
    random = np.random.default_rng(1)
    for count in (0, 1, 2, 3, 11, 57, 702, 5_000):
        keys, others = random.integers(0, max(count // 2, 2), count + 3), random.standard_normal(count + 3)
        pairs = sorted(zip(keys[:count].tolist(), others[:count].tolist(), strict=True))
        rest = list(zip(keys[count:].tolist(), others[count:].tolist(), strict=True))
        sort_with_compiled_(keys, others, count)
        result = list(zip(keys.tolist(), others.tolist(), strict=True))
        assert sorted(result[:count]) == pairs
        assert [key for key, _ in result[:count]] == [key for key, _ in pairs]
        assert result[count:] == rest


@compiled_part
def _next(number):
    return number + 1


@compiled
def _inner(number):
    return _next(number) * 2


@compiled
def _outer(number):
    return _inner(number) + _next(3)


def test_compiled_functions_call_each_other_and_parts_can_be_called_from_python() -> None:
    assert (_outer(5), _inner(5), _next(1)) == (16, 12, 2)
