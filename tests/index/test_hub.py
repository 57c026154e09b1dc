"""Push and pull transfer the same bytes or nothing, whatever fails on the way; hf:REPO stands for an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

import memlens
from full_disk import files_no_larger_than
from hub_stand_in import Hub, connected
from memlens.errors import FilesError, HubError, IndexFolderError, SettingError
from memlens.index import hub as memlens_hub
from memlens.index.hub import Repository
from memlens.index.reader import Index

REPO = "me/tiny-index"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with connected(tmp_path / "home") as started:
        yield started


def noted(folder: Path) -> dict[str, bytes]:
    """Return the names and bytes of the manifest and of every file that it lists."""
    return {name: (folder / name).read_bytes() for name in ["manifest.json", *Index(folder).manifest.files]}


def test_what_is_pulled_is_what_was_pushed(hub: Hub, tiny_gpt2_values: Index, tmp_path: Path, run: Callable) -> None:
    folder = shutil.copytree(tiny_gpt2_values.folder, tmp_path / "index")
    memlens.experiment(folder, ["agreement"], threads=1)
    code, out, err = run("push", folder, REPO)
    assert (code, out.strip()) == (0, f"{hub.address}/datasets/{REPO}"), err
    code, out, err = run("pull", REPO, "-o", tmp_path / "copy", "--json")
    assert code == 0 and json.loads(out)["index"] == str(tmp_path / "copy"), err
    assert noted(tmp_path / "copy") == noted(folder) and not (tmp_path / "copy" / "partial").exists()
    assert memlens.check(tmp_path / "copy").is_whole
    latest = hub.at(REPO, "main")
    assert latest is not None and latest[1].keys() == {*noted(folder), "README.md", ".gitattributes"}
    asked = len(hub.requests)
    assert run("pull", REPO, "-o", tmp_path / "copy")[0] == 0  # there already
    assert not [line for line in hub.requests[asked:] if line.startswith("GET") and ".parquet" in line]


def test_the_card_says_what_the_manifest_says(hub: Hub, tiny_gpt2_values: Index) -> None:
    memlens.push(tiny_gpt2_values, REPO)
    latest = hub.at(REPO, "main")
    assert latest is not None
    card = latest[1]["README.md"].decode()
    manifest = tiny_gpt2_values.manifest
    assert "one row per token: its count" in card and "the experiment tokens" not in card
    assert card.startswith("---\n") and "config_name: triggers" in card
    assert f"| tokens | {manifest.counts.tokens:,} |" in card and "`--top 7`" in card
    assert all(f"`{name}`" in card and facts.sha256[:16] in card for name, facts in manifest.files.items())
    assert f"memlens pull {REPO}" in card and f"memlens show hf:{REPO} L0N0" in card


def test_a_second_push_replaces_the_first_and_leaves_nothing_of_it(
    hub: Hub, tiny_gpt2_values: Index, tiny_llama_index: Index, tmp_path: Path
) -> None:
    first = memlens.push(tiny_gpt2_values, REPO)
    memlens.push(tiny_llama_index, REPO)
    latest = hub.at(REPO, "main")
    assert latest is not None and "values.parquet" not in latest[1]
    assert noted(memlens.pull(REPO, out=tmp_path / "new").folder) == noted(tiny_llama_index.folder)
    old = memlens.pull(f"{REPO}@{first.commit}", out=tmp_path / "old")
    assert noted(old.folder) == noted(tiny_gpt2_values.folder)
    with pytest.raises(IndexFolderError, match="a different index"):
        memlens.pull(REPO, out=tmp_path / "old")
    assert noted(tmp_path / "old") == noted(tiny_gpt2_values.folder)
    memlens.pull(REPO, out=tmp_path / "old", resume=False)
    assert noted(tmp_path / "old") == noted(tiny_llama_index.folder)
    assert not (tmp_path / "old" / "values.parquet").exists()


# break off at every third request by default, at every request as a sweep
EVERY = pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.sweep)])


@EVERY
def test_a_push_that_breaks_off_anywhere_changes_nothing_for_those_who_pull(
    hub: Hub, tiny_gpt2_index: Index, tiny_llama_index: Index, step: int
) -> None:
    memlens.push(tiny_gpt2_index, REPO)
    start = len(hub.requests)
    before, blobs = list(hub.commits[REPO]), dict(hub.blobs)
    memlens.push(tiny_llama_index, REPO)
    count, expected = len(hub.requests) - start, hub.commits[REPO][-1]
    broken = 0
    for number in range(0, count, step):
        hub.commits[REPO], hub.blobs = list(before), dict(blobs)
        hub.requests.clear()
        hub.fail_at = number
        try:
            memlens.push(tiny_llama_index, REPO)
        except HubError as error:
            assert "cannot be reached" in str(error)
            assert hub.commits[REPO] == before
            broken += 1
        hub.fail_at = None
        memlens.push(tiny_llama_index, REPO)
        assert hub.commits[REPO][-1][1] == expected[1]
    assert broken


def test_a_table_that_cannot_be_read_during_a_push_is_one_line(
    hub: Hub, tiny_gpt2_index: Index, copy_of: Callable[..., Index]
) -> None:
    path = copy_of(tiny_gpt2_index).folder / "triggers.parquet"

    class Requests(list[str]):
        """Removes the table as soon as the client asks where to upload it."""

        def append(self, request: str) -> None:
            super().append(request)
            if request.endswith("lfs/objects/batch"):
                path.unlink(missing_ok=True)

    hub.requests = Requests()
    with pytest.raises(FilesError, match=r"triggers.parquet cannot be read \(No such file or directory\)"):
        memlens.push(path.parent, REPO)


@EVERY
def test_a_pull_that_breaks_off_anywhere_is_no_index_and_continues(
    hub: Hub, tiny_gpt2_index: Index, tmp_path: Path, step: int
) -> None:
    memlens.push(tiny_gpt2_index, REPO)
    hub.requests.clear()
    memlens.pull(REPO, out=tmp_path / "whole")
    broken = 0
    for number in range(0, len(hub.requests), step):
        out = tmp_path / f"broken-{number}"
        hub.requests.clear()
        hub.fail_at = number
        try:
            memlens.pull(REPO, out=out)
        except HubError:
            assert not (out / "manifest.json").exists()
            broken += 1
        hub.fail_at = None
        assert noted(memlens.pull(REPO, out=out).folder) == noted(tiny_gpt2_index.folder)
    assert broken


def test_a_full_disk_during_a_pull_is_named_and_the_pull_continues(
    hub: Hub, tiny_gpt2_index: Index, tmp_path: Path
) -> None:
    memlens.push(tiny_gpt2_index, REPO)
    largest = max(facts.bytes for facts in tiny_gpt2_index.manifest.files.values())
    with (
        files_no_larger_than(largest - 1),
        pytest.raises(FilesError, match=r"^cannot write .*out: the file would exceed the size limit"),
    ):
        memlens.pull(REPO, out=tmp_path / "out")
    assert noted(memlens.pull(REPO, out=tmp_path / "out").folder) == noted(tiny_gpt2_index.folder)


@pytest.mark.parametrize(("first", "step"), [(1, 20), pytest.param(0, 1, marks=pytest.mark.sweep)])
def test_a_hub_that_falls_silent_is_not_waited_for(
    hub: Hub,
    tiny_gpt2_index: Index,
    tmp_path: Path,
    run: Callable,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    step: int,
) -> None:
    """The client has requests without a timeout, and replaces its session after a failed request."""
    commands = {"push": ("push", tiny_gpt2_index.folder, REPO), "pull": ("pull", REPO, "-o", tmp_path / "copy")}
    for name, command in commands.items():
        for silence in (120.0, 120.0, 0.2):  # the client sends some requests only once per process
            hub.silent_at = None
            monkeypatch.setattr(memlens_hub, "_SILENCE", silence)
            for number in range(first, len(hub.requests), step) if silence < 1 else [None]:
                shutil.rmtree(tmp_path / "copy", ignore_errors=True)
                if name == "push":
                    hub.blobs.clear()
                hub.requests.clear()
                hub.silent_at = number
                code, _, err = run(*command)
                assert (code, "cannot be reached" in err) == ((0, False) if number is None else (2, True)), (
                    name,
                    number,
                )


def test_an_interrupted_push_prints_no_progress_bar(
    hub: Hub, tiny_gpt2_index: Index, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An interruption while the client starts an upload thread leaves a thread that nothing waits for."""
    uploads: list[Thread] = []
    start = Thread.start

    def interrupt_upload(thread: Thread) -> None:
        if not (thread.name.startswith("ThreadPoolExecutor") and hub.requests[-1].endswith("/objects/batch")):
            return start(thread)
        uploads.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(Thread, "start", interrupt_upload)
    with pytest.raises(KeyboardInterrupt):
        memlens.push(tiny_gpt2_index, REPO)
    for thread in uploads:
        start(thread)
        thread.join()
    assert hub.requests[-1].startswith("PUT") and capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["triggers.parquet", "manifest.json"])
def test_a_file_that_was_changed_on_the_hub_is_refused(
    hub: Hub, tiny_gpt2_index: Index, tmp_path: Path, refused: Callable[..., str], name: str
) -> None:
    memlens.push(tiny_gpt2_index, REPO)
    content = (tiny_gpt2_index.folder / name).read_bytes()
    middle = len(content) // 2
    hub.damage(REPO, name, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    for _ in range(2):
        assert REPO in refused("pull", REPO, "-o", tmp_path / "copy")
        assert not (tmp_path / "copy" / "manifest.json").exists()
    words = "there is no index folder" if name == "manifest.json" else "unfinished copy from the Hub"
    assert words in refused("show", tmp_path / "copy", "L0N0")
    hub.damage(REPO, name, content)
    assert noted(memlens.pull(REPO, out=tmp_path / "copy").folder) == noted(tiny_gpt2_index.folder)


def test_a_manifest_that_names_files_elsewhere_is_refused(
    hub: Hub, copy_of: Callable[..., Index], tiny_gpt2_index: Index, tmp_path: Path, refused: Callable[..., str]
) -> None:
    index = copy_of(tiny_gpt2_index)
    memlens.push(index, REPO)
    for name in (
        "../../stolen.parquet",
        "/tmp/stolen.parquet",
        "annotations.jsonl",
        "a/b/c.parquet",
        "-rf.parquet",
        "sub/x.parquet",
    ):
        index.manifest.with_files({name: {"bytes": 1, "sha256": "0" * 64}}).write(index.folder)
        hub.damage(REPO, "manifest.json", (index.folder / "manifest.json").read_bytes())
        assert "which is not part of an index" in refused("pull", REPO, "-o", tmp_path / "copy")
    assert not list(tmp_path.rglob("stolen*"))


def test_hf_before_a_repository_stands_for_an_index(
    hub: Hub, tiny_gpt2_values: Index, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    memlens.push(tiny_gpt2_values, REPO)
    name = f"hf:{REPO}"
    for command in (["show", name, "L0N1"], ["search", name, "river"], ["check", name], ["compare", name, name]):
        here = [str(tiny_gpt2_values.folder) if word == name else word for word in command]
        (code, out, err), expected = run(*command), run(*here)
        assert (code, out) == expected[:2], err
    assert memlens.open_index(name).manifest.content == tiny_gpt2_values.manifest.content
    asked = len(hub.requests)
    folder = memlens.open_index(name).folder
    assert len(hub.requests) == asked + 1  # is there a newer one?
    commit = hub.commits[REPO][-1][0]
    assert folder == memlens.open_index(f"{name}@{commit}").folder and len(hub.requests) == asked + 1
    hub.fail_at = len(hub.requests)
    assert memlens.open_index(name).folder == folder  # no connection


def test_labels_of_people_stay_here(hub: Hub, copy_of: Callable[..., Index], tiny_gpt2_index: Index) -> None:
    index = copy_of(tiny_gpt2_index)
    (index.folder / "annotations.jsonl").write_bytes(b"of people")
    memlens.push(index, REPO)
    assert "annotations.jsonl" not in hub.commits[REPO][-1][1]


def test_what_cannot_be_pushed_or_pulled_is_one_line(
    hub: Hub, copy_of: Callable[..., Index], tiny_gpt2_index: Index, tmp_path: Path, refused: Callable[..., str]
) -> None:
    index = copy_of(tiny_gpt2_index)
    out = tmp_path / "out"
    assert "no dataset repository me/nothing" in refused("pull", "me/nothing", "-o", out)
    assert not out.exists()
    hub.commit("me/other", {"data.csv": b"1"})
    assert "not part of an index" in refused("push", index.folder, "me/other")
    assert "does not contain a complete index" in refused("pull", "me/other", "-o", out)
    assert not out.exists()
    for name in ("name", "a/b/c", "me/x@", "", "me/../x"):
        assert "not a repository" in refused("pull", name, "-o", out)
    memlens.push(index, REPO)
    assert "no branch, tag or commit" in refused("pull", f"{REPO}@{'0' * 40}", "-o", out)
    hub.status = 403
    assert "hf auth login" in refused("push", index.folder, REPO)
    hub.status = None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    assert "diary.txt" in refused("pull", REPO, "-o", tmp_path / "mine")
    assert list(contents(tmp_path / "mine")) == ["diary.txt"]
    with (index.folder / "triggers.parquet").open("ab") as handle:
        handle.write(b"x")
    assert "damaged" in refused("push", index.folder, REPO)


def test_a_repository_is_written_in_one_way() -> None:
    assert Repository.parse("hf:me/x@v1") == Repository("me/x", "v1") == Repository.parse("me/x@v1")
    assert Repository.parse("me/x").revision == "main"
    with pytest.raises(SettingError):
        memlens_hub.copy_of("hf:nothing")
