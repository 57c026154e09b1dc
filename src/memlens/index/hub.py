"""The Hub: an index pushed to a dataset repository of Hugging Face, pulled from one, or used in place as hf:REPO.

A push is one commit: whoever pulls gets all of an index, or all of what was there before. A pull takes every file from
one commit into INDEX/partial, compares it with its size and checksum in the manifest, moves all of them up and writes
the manifest last, byte for byte; killed at any moment, the same command continues. hf:REPO and hf:REPO@REVISION stand
for a folder below HF_HOME, one for each commit, that is pulled when it is first used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memlens import __version__
from memlens.errors import HubError, IndexFolderError, MemlensError, SettingError
from memlens.files import (
    explain_os_errors,
    is_as_noted,
    lock_for_writing,
    read_json,
    replacing,
    sync_file,
    sync_folder,
    write_json,
)
from memlens.index.format import (
    DERIVED_TABLES,
    EXPERIMENTS,
    LOCK,
    MANIFEST,
    OPTIONAL_TABLES,
    PARTIAL,
    PULL,
    REPORT,
    SCAN_TABLES,
    Manifest,
    is_complete,
)
from memlens.index.staging import (
    can_continue,
    refuse_annotations,
    refuse_foreign,
    remove_if_empty,
    take_manifest_away,
    throw_partial_away,
)
from memlens.parallel import Progress, no_progress
from memlens.settings import HUB, option_name
from memlens.text import size, visible

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from memlens.index.reader import Index

CARD = "README.md"
_KIND = "dataset"
_ARRIVED = "hub"  # in partial/: what was downloaded and not yet compared with the manifest
_TABLE = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)?\.parquet")
# The Hub's rule: parts of 96 signs at most that do not begin or end with - or ., no -- or .., no .git at the end
_PART = r"\w(?:[\w.-]{0,94}\w)?"
_REPOSITORY = re.compile(rf"(?!.*(?:--|\.\.|\.git$)){_PART}/{_PART}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SILENCE = 120.0  # seconds that the Hub may say nothing; its client would wait for ever
_OWN = {CARD, ".gitattributes"}  # what a repository may hold besides an index


@dataclass(frozen=True)
class Repository:
    """A dataset repository of the Hub, and the branch, tag or commit that is meant."""

    name: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> Repository:
        """REPO or REPO@REVISION, with or without the hf: before it."""
        name, at, revision = text.removeprefix(HUB).partition("@")
        if not _REPOSITORY.fullmatch(name) or (at and not revision):
            raise SettingError(f"'{text}' is not a repository of the Hub; write OWNER/NAME or OWNER/NAME@REVISION")
        return cls(name, revision or "main")


@dataclass(frozen=True)
class PushResult:
    """The result of a push: repository, commit, address, files and bytes."""

    repository: str
    commit: str
    address: str
    files: int
    bytes: int


def push(index: Index, repo: str, *, private: bool = False, progress: Progress = no_progress) -> PushResult:
    """Put an index into a dataset repository, which is made if there is none, with a card that says what it is."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    where, files = Repository.parse(repo), index.manifest.files
    index.reload()
    for name in files:
        index.path(name.removesuffix(".parquet"))  # refuses one that is damaged
    sent: dict[str, Path | bytes] = {name: index.folder / name for name in sorted(files)}
    sent |= {MANIFEST: (index.folder / MANIFEST).read_bytes(), CARD: write_card(index, where.name).encode()}
    if (index.folder / REPORT).is_file():
        sent[REPORT] = index.folder / REPORT
    progress("push", 0, None)
    with _hub(where) as api:
        api.create_repo(where.name, repo_type=_KIND, private=private, exist_ok=True)
        before = api.dataset_info(where.name, revision=where.revision, timeout=_SILENCE)
        there = {file.rfilename for file in before.siblings or []}
        if MANIFEST not in there and there - _OWN:
            raise HubError(f"{where.name} holds '{min(there - _OWN)}', which is no index; name another repository")
        old = [name for name in sorted(there) if name not in sent and (_TABLE.fullmatch(name) or name == REPORT)]
        done = api.create_commit(
            where.name,
            [
                *(
                    CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
                    for name, content in sent.items()
                ),
                *(CommitOperationDelete(name) for name in old),
            ],
            commit_message=f"Index of {index.manifest.model.name}, by memlens {__version__}",
            repo_type=_KIND,
            revision=where.revision,
            parent_commit=before.sha,  # refused if somebody else has pushed meanwhile
        )
    if (index.folder / MANIFEST).read_bytes() != sent[MANIFEST]:
        raise IndexFolderError(f"{index.folder} was changed while it was pushed; push it again")
    total = sum(facts.bytes for facts in files.values())
    return PushResult(where.name, done.oid, f"{api.endpoint}/datasets/{where.name}", len(files), total)


def pull(repo: str, out: Path, *, resume: bool = True, progress: Progress = no_progress) -> Path:
    """Copy an index from the Hub into a folder, which comes back; every file is as its manifest says, or refused.

    `resume` False puts it in the place of another index that is there.
    """
    where = Repository.parse(repo)
    with _hub(where) as api:
        commit = _commit_of(api, where)
    with explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        refuse_foreign(out)  # before anything, the lock's file too, is written there
        with lock_for_writing(out / LOCK):
            _pull(where, commit, out, resume, progress)
    return out


def _pull(where: Repository, commit: str, out: Path, resume: bool, progress: Progress) -> None:
    if can_continue(out):
        raise IndexFolderError(f"{out} holds an unfinished scan; finish it, or choose another folder with -o")
    partial = out / PARTIAL
    wanted = {"repository": where.name, "commit": commit}
    if not (partial / PULL).is_file() or read_json(partial / PULL) != wanted:
        throw_partial_away(out)
        partial.mkdir()
        write_json(partial / PULL, wanted)
    with _nothing_left_of_none(out), _hub(where) as api:
        manifest = _read_manifest(where, _download(api, where, commit, MANIFEST, partial))
    with _hub(where) as api:
        if is_complete(out) and _is_the_same(out, partial / _ARRIVED, manifest):
            throw_partial_away(out)
            return
        if is_complete(out) and resume:
            throw_partial_away(out)
            raise IndexFolderError(
                f"{out} holds another index than {where.name}; choose another folder with -o, or replace that one with "
                "--fresh"
            )
        refuse_annotations(out)
        total, done = sum(facts.bytes for facts in manifest.files.values()), 0
        for name, facts in manifest.files.items():
            progress("pull", done, total)
            moved_up = not is_complete(out) and is_as_noted(out / name, facts)
            if not moved_up and not is_as_noted(partial / name, facts):
                arrived = _download(api, where, commit, name, partial)
                if not is_as_noted(arrived, facts):
                    arrived.unlink()
                    raise HubError(
                        f"{name} of {where.name} is not what its manifest says: it was damaged or changed; "
                        "ask who pushed it to push again"
                    )
                sync_file(arrived)
                (partial / name).parent.mkdir(exist_ok=True)
                arrived.replace(partial / name)
            done += facts.bytes
        progress("pull", done, total)
    _publish(out, (partial / _ARRIVED / MANIFEST).read_bytes(), manifest)


@contextmanager
def _nothing_left_of_none(out: Path) -> Iterator[None]:
    """Take away what was begun if there is no index to pull, unless tables have arrived before."""
    try:
        yield
    except MemlensError:
        if next((out / PARTIAL).rglob("*.parquet"), None) is None:
            throw_partial_away(out)
            remove_if_empty(out)
        raise


def _publish(out: Path, content: bytes, manifest: Manifest) -> None:
    """Move the tables up; from here until the manifest is written this is no index."""
    take_manifest_away(out)
    old = [
        *(out / name for name in (*DERIVED_TABLES, *OPTIONAL_TABLES, REPORT)),
        *(out / EXPERIMENTS).glob("*.parquet"),
    ]
    for path in old:
        if path.relative_to(out).as_posix() not in manifest.files:
            path.unlink(missing_ok=True)
    for name in manifest.files:
        (out / name).parent.mkdir(exist_ok=True)
        if (out / PARTIAL / name).exists():  # else a call that was killed here has moved it already
            (out / PARTIAL / name).replace(out / name)
    for folder in {(out / name).parent for name in manifest.files}:
        sync_folder(folder)
    with replacing(out / MANIFEST) as beside:
        beside.write_bytes(content)
    throw_partial_away(out)


def _download(api: HfApi, where: Repository, commit: str, name: str, partial: Path) -> Path:
    return Path(api.hf_hub_download(where.name, name, repo_type=_KIND, revision=commit, local_dir=partial / _ARRIVED))


def _read_manifest(where: Repository, path: Path) -> Manifest:
    """The manifest that has arrived; one that is not as it was written, or that names odd files, is refused."""
    try:
        manifest = Manifest.read(path.parent, "ask who pushed it to push again")
    except IndexFolderError as error:
        path.unlink()  # else the next pull would look at the same one
        why = str(error).replace(str(path), "its manifest").replace(str(path.parent), "it")  # where it lies only now
        raise HubError(f"the index in {where.name} cannot be read: {why}") from error
    for name in manifest.files:
        if not _TABLE.fullmatch(name):
            raise HubError(f"the index in {where.name} names the file '{name}', which no index has; do not use it")
    return manifest


def _is_the_same(out: Path, arrived: Path, manifest: Manifest) -> bool:
    is_known = (out / MANIFEST).read_bytes() == (arrived / MANIFEST).read_bytes()
    return is_known and all(is_as_noted(out / name, facts) for name, facts in manifest.files.items())


def copy_of(repo: str) -> Path:
    """The folder that hf:REPO stands for, pulled if need be; without a connection the commit that was used last."""
    from huggingface_hub import constants

    where = Repository.parse(repo)
    home = Path(constants.HF_HOME) / "memlens" / where.name.replace("/", "--")
    latest = home / "latest.json"
    known = read_json(latest) if latest.is_file() else {}
    try:
        with _hub(where) as api:
            commit = where.revision if _COMMIT.fullmatch(where.revision) else _commit_of(api, where)
    except HubError as error:
        last = known.get(where.revision)
        if not (isinstance(last, str) and _is_unreachable(error.__cause__) and is_complete(home / last)):
            raise
        return home / last
    if not is_complete(home / commit):
        pull(f"{where.name}@{commit}", home / commit)
    if known.get(where.revision) != commit:
        write_json(latest, known | {where.revision: commit})
    return home / commit


def _commit_of(api: HfApi, where: Repository) -> str:
    return str(api.dataset_info(where.name, revision=where.revision, timeout=_SILENCE).sha)


@contextmanager
def _hub(where: Repository) -> Iterator[HfApi]:
    """The Hub's API; its errors become one line each, and its silence, too."""
    from huggingface_hub import HfApi, errors

    try:
        with _quiet(), _impatient():
            yield HfApi(library_name="memlens", library_version=__version__)
    except MemlensError:
        raise
    except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
        raise HubError(
            f"there is no dataset repository {where.name} that you may read; check its name, or log in with "
            "`hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{where.name} has no branch, tag or commit '{where.revision}'; leave it out for main"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise HubError(f"{where.name} does not hold a whole index; ask who pushed it to push again") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        advice = "log in with `hf auth login`" if status in (401, 403) else "try again in a moment"
        raise HubError(f"the Hub refused this for {where.name} ({status}); {advice}") from error
    except Exception as error:
        if not _is_unreachable(error):
            raise
        raise HubError(f"the Hub cannot be reached for {where.name}; check the network and run it again") from error


def _is_unreachable(error: BaseException | None) -> bool:
    """Is it the connection? The library that the Hub's client talks with has errors of its own."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while error is not None:
        library = type(error).__module__.partition(".")[0]
        is_connection = isinstance(error, (ConnectionError, TimeoutError, LocalEntryNotFoundError))
        if is_connection or library in ("httpx", "httpx2", "requests"):
            return True
        error = error.__cause__  # an upload of one file of many is reported as something else
    return False


@contextmanager
def _impatient() -> Iterator[None]:
    """Inside the `with` calls of the client end after _SILENCE seconds without news; some take no time limit."""
    from huggingface_hub import get_session

    session = get_session()
    before, session.timeout = session.timeout, _SILENCE
    try:
        yield
    finally:
        session.timeout = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the client's own bars and warnings: what happens is told by memlens."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    level, were_disabled = logging.get_verbosity(), are_progress_bars_disabled()
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if not were_disabled:
            enable_progress_bars()


_ABOUT = {
    "corpus": "the sentences that were read: text, tokens",
    "vocabulary": "the text of every token",
    "triggers": "the prefixes with the highest (and most negative) coefficients of every memory",
    "memories": "one row for each memory: statistics over all prefixes",
    "ordinary": "random prefixes on which a memory fires",
    "counts": "how often every memory fires by position, and in each sign quadrant where it has a gate",
    "quadrants": "the top prefixes of each sign quadrant of gated memories",
    "values": "the tokens that every value promotes and demotes",
    "keys": "the tokens that every key matches on its own",
    "patterns": "what the triggers of a memory have in common",
    "lower_patterns": "what the prefixes with the most negative coefficients of a memory have in common",
    "names": "each memory in one line",
    "roles": "what every memory is for, with the numbers behind it",
    "effects": "what silencing the memories of a role changed, beside random groups",
    "tokens": "every token: its count in the corpus, whether it was trained, its classes",
    "experts": "how often every expert is chosen",
    "routing": "prefixes that are sent to an expert",
    "routers": "the tokens that every router's row matches on its own",
}


def write_card(index: Index, repo: str) -> str:
    """README.md of the repository: everything in it comes from the manifest and the table of memories."""
    from memlens.index.memory import summarize

    manifest, summary = index.manifest, summarize(index)
    model, counts = manifest.model, manifest.counts
    facts = {
        "model": model.name,
        "family": model.family,
        "activation": f"{model.activation}{', gated' if model.gated else ''}",
        "numbers": model.dtype,
        "layers": f"{len(index.layers)} of {len(model.memories)}",
        "memories": f"{summary['memories']:,}",
        "memories that never fire": f"{sum(summary['dead'].values()):,}",
        "sentences": f"{counts.sentences:,}",
        "tokens": f"{counts.tokens:,}",
        "prefixes": f"{counts.prefixes:,}",
        "experiments": ", ".join(sorted(manifest.experiments)) or "none",
    }
    options = [
        f"{option_name(name)} {value}" for name, value in sorted(summary["settings"].items()) if value is not None
    ]
    makers = sorted({(maker["memlens"], maker["torch"], maker["processor"]) for maker in _makers(index)})
    rows = [
        f"| `{name}` | {_about(name)} | {size(entry.bytes)} | `{entry.sha256[:16]}` |"
        for name, entry in sorted(manifest.files.items())
    ]
    return "\n".join(
        [
            *_front_matter(index),
            f"# Memories of {visible(model.name)}",
            "",
            "Every feed-forward layer of this language model read as key-value memories "
            "([Geva et al. 2021](https://arxiv.org/abs/2012.14913)): for each hidden dimension the prefixes that drive "
            "it most, and what its value promotes. Made with memlens.",
            "",
            "```",
            f"memlens pull {repo}                  # every file is compared with its checksum",
            f"memlens show hf:{repo} {index.names.name(index.layers[0], 0)}",
            f"memlens serve hf:{repo}",
            "```",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {visible(str(fact))} |" for name, fact in facts.items()),
            "",
            "## How it was made",
            "",
            f"`memlens scan` with {', '.join(f'`{option}`' for option in options)}.",
            *(f"memlens {memlens}, torch {torch}, {processor}." for memlens, torch, processor in makers),
            "",
            "## Files",
            "",
            "| file | what it holds | size | sha256 begins |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            f"`manifest.json` has whole checksums and every setting; this card was written by memlens {__version__}.",
            "",
        ]
    )


def _front_matter(index: Index) -> list[str]:
    """The metadata that the Hub reads: tags, and the tables that its viewer can show."""
    tables = [name for name in (*SCAN_TABLES, *OPTIONAL_TABLES, *DERIVED_TABLES) if name in index.manifest.files]
    lines = ["---", f"pretty_name: {json.dumps('Memories of ' + visible(index.manifest.model.name))}"]
    lines += ["tags:", "- memlens", "- interpretability", "- feed-forward", "configs:"]
    for name in tables:
        lines += [f"- config_name: {name.removesuffix('.parquet')}", f"  data_files: {name}"]
    return [*lines, "---", ""]


def _about(name: str) -> str:
    folder, _, table = name.removesuffix(".parquet").rpartition("/")
    return f"the experiment {table}" if folder else _ABOUT[table]


def _makers(index: Index) -> list[dict[str, str]]:
    """The versions and processors with which files were made, as far as the manifest notes them."""
    noted = [entry.get("made_with") for entry in index.manifest.content["files"].values()]
    return [{"memlens": "?", "torch": "?", "processor": "?"} | maker for maker in noted if isinstance(maker, dict)]
