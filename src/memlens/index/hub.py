"""The Hugging Face Hub: push an index to a dataset repository, pull it from one, or use it in place as hf:REPO.

A push is one commit, so a pull never mixes two versions. A pull downloads all files of one commit to INDEX/partial,
checks them like `memlens check`, moves the tables into place and writes the manifest last. The same command resumes an
interrupted pull. hf:REPO and hf:REPO@REVISION stand for a folder below HF_HOME, one per commit, that is pulled on first
use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlens import __version__
from memlens.errors import FilesError, HubError, IndexFolderError, MemlensError, SettingError
from memlens.files import (
    explain_os_errors,
    is_intact,
    lock_for_writing,
    read_json,
    replacing,
    sync_file,
    write_json,
)
from memlens.index.check import check_index
from memlens.index.format import (
    BACKUP,
    DERIVED_TABLES,
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
    check_no_annotations,
    check_only_index_files,
    has_resumable_scan,
    remove_if_empty,
    remove_partial,
    replace_tables,
)
from memlens.progress import Progress, no_progress
from memlens.settings import HUB, option_name
from memlens.text import size, visible

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from memlens.index.reader import Index

CARD = "README.md"
_KIND = "dataset"
_DOWNLOAD = "hub"  # folder in partial/: the downloaded files
# The Hub allows at most 96 characters per part, no - or . at either end, no -- or .., and no .git at the end.
_PART = r"\w(?:[\w.-]{0,94}\w)?"
_REPOSITORY = re.compile(rf"(?!.*(?:--|\.\.|\.git$)){_PART}/{_PART}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SILENCE = 120.0  # seconds until an unanswered request fails; the client sets no limit
_OTHER_FILES = {CARD, ".gitattributes"}  # files of a repository that are not part of the index


@dataclass(frozen=True)
class Repository:
    """A dataset repository of the Hub at a branch, tag or commit."""

    name: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str) -> Repository:
        """Parse REPO or REPO@REVISION, with or without a leading hf:."""
        name, at, revision = text.removeprefix(HUB).partition("@")
        if not _REPOSITORY.fullmatch(name) or (at and not revision):
            raise SettingError(f"'{text}' is not a repository of the Hub; write OWNER/NAME or OWNER/NAME@REVISION")
        return cls(name, revision or "main")


@dataclass(frozen=True)
class PushResult:
    """The result of a push: repository, commit, address, and the number of files and bytes."""

    repository: str
    commit: str
    address: str
    files: int
    bytes: int


def push(index: Index, repo: str, *, private: bool = False, progress: Progress = no_progress) -> PushResult:
    """Upload an index with a card to a dataset repository, which is created if it does not exist."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    where = Repository.parse(repo)
    index.reload()
    files, content = index.manifest.files, (index.folder / MANIFEST).read_bytes()
    for name in files:
        index.path(name.removesuffix(".parquet"))  # raises if the table is damaged
    sources: dict[str, Path | bytes] = {name: index.folder / name for name in files}
    if (index.folder / REPORT).is_file():
        sources[REPORT] = index.folder / REPORT
    sources |= {MANIFEST: content, CARD: write_card(index, where.name).encode()}
    progress("push", 0, None)
    with _hub(where) as api:
        api.create_repo(where.name, repo_type=_KIND, private=private, exist_ok=True)
        before = api.dataset_info(where.name, revision=where.revision, timeout=_SILENCE)
        present = {file.rfilename for file in before.siblings or []}
        if MANIFEST not in present and (foreign := present - _OTHER_FILES):
            raise HubError(
                f"{where.name} holds '{min(foreign)}', which is not part of an index; name another repository"
            )
        outdated = {name for name in present - sources.keys() if name.endswith(".parquet") or name == REPORT}
        # upload_folder() may split an upload into several commits, and lists the repository without a timeout
        commit = api.create_commit(
            where.name,
            [
                *(CommitOperationDelete(name) for name in sorted(outdated)),
                *(CommitOperationAdd(name, source) for name, source in sources.items()),
            ],
            repo_type=_KIND,
            revision=where.revision,
            commit_message=f"Index of {index.manifest.model.name}, by memlens {__version__}",
            parent_commit=before.sha,  # the push fails if another push came first
        )
    if (index.folder / MANIFEST).read_bytes() != content:
        raise IndexFolderError(f"{index.folder} was changed while it was pushed; push it again")
    total = sum(facts.bytes for facts in files.values())
    return PushResult(where.name, commit.oid, f"{api.endpoint}/datasets/{where.name}", len(files), total)


def pull(repo: str, out: Path, *, resume: bool = True, progress: Progress = no_progress) -> Path:
    """Copy an index from the Hub into the folder `out` and return the folder.

    Args:
        repo: OWNER/NAME or OWNER/NAME@REVISION.
        out: The folder to write.
        resume: Resume an unfinished pull; False replaces an index in that folder.
        progress: Called with stage, work done and total.

    Raises:
        HubError: The Hub cannot be reached, or the repository does not contain a complete index.
        IndexFolderError: The folder holds another index or other files.
    """
    where = Repository.parse(repo)
    with _hub(where) as api:
        commit = _find_commit(api, where)
    with explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        check_only_index_files(out)  # before the lock file is created
        with lock_for_writing(out / LOCK):
            _pull(where, commit, out, resume, progress)
    return out


def _pull(where: Repository, commit: str, out: Path, resume: bool, progress: Progress) -> None:
    if has_resumable_scan(out):
        raise IndexFolderError(f"{out} holds an unfinished scan; finish it, or choose another folder with -o")
    partial = out / PARTIAL
    source = {"repository": where.name, "commit": commit}
    if not (partial / PULL).is_file() or read_json(partial / PULL) != source:
        remove_partial(out)
        partial.mkdir()
        write_json(partial / PULL, source)
    download = partial / _DOWNLOAD
    try:
        _download(where, commit, download, [MANIFEST])
        manifest = _read_manifest(where, download)
    except MemlensError:
        if next(partial.rglob("*.parquet"), None) is None:  # nothing to resume
            remove_partial(out)
            remove_if_empty(out)
        raise
    if is_complete(out):
        is_same = (out / MANIFEST).read_bytes() == (download / MANIFEST).read_bytes()
        if is_same and all(is_intact(out / name, facts) for name, facts in manifest.files.items()):
            remove_partial(out)
            return
        if resume:
            remove_partial(out)
            raise IndexFolderError(
                f"{out} holds a different index; choose another folder with -o, or replace it with --fresh"
            )
    check_no_annotations(out)
    progress("pull", 0, None)
    _download(where, commit, download, list(manifest.files))
    _check_download(where, download, progress)
    _publish(out, download, manifest)


def _download(where: Repository, commit: str, folder: Path, names: list[str]) -> None:
    """Download the named files of a commit, except those that are already complete."""
    from huggingface_hub import snapshot_download

    with _hub(where):
        snapshot_download(
            where.name, repo_type=_KIND, revision=commit, local_dir=folder, allow_patterns=names, max_workers=1
        )


def _read_manifest(where: Repository, download: Path) -> Manifest:
    path = download / MANIFEST
    if not path.is_file():
        raise HubError(f"{where.name} does not contain a complete index; ask its owner to push again")
    try:
        return Manifest.read(download, "ask its owner to push again")
    except IndexFolderError as error:
        path.unlink()  # otherwise the next pull would reuse this damaged file
        why = str(error).replace(str(path), "its manifest").replace(str(download), "it")
        raise HubError(f"the index in {where.name} cannot be read: {why}") from error


def _check_download(where: Repository, download: Path, progress: Progress) -> None:
    """Check the downloaded index. Damaged files are removed, so that the next pull downloads them again."""
    damaged = check_index(download, progress).damaged
    for finding in damaged:
        (download / finding.file).unlink(missing_ok=True)
    if damaged:
        raise HubError(
            f"{damaged[0].file} of {where.name} is damaged ({damaged[0].detail}); ask its owner to push again"
        )


def _publish(out: Path, download: Path, manifest: Manifest) -> None:
    """Move the tables into place and write the manifest last."""
    for name in manifest.files:
        sync_file(download / name)
    replace_tables(out, download, manifest.files)
    content = (download / MANIFEST).read_bytes()
    for name in (BACKUP, MANIFEST):
        with replacing(out / name) as temporary:
            temporary.write_bytes(content)
    remove_partial(out)


def copy_of(repo: str) -> Path:
    """Return the local copy of hf:REPO, and pull it first if necessary. Offline, use the commit that was used last."""
    from huggingface_hub import constants

    where = Repository.parse(repo)
    home = Path(constants.HF_HOME) / "memlens" / where.name.replace("/", "--")
    latest = home / "latest.json"
    commits = read_json(latest) if latest.is_file() else {}  # revision -> the commit that was used last
    try:
        with _hub(where) as api:
            commit = where.revision if _COMMIT.fullmatch(where.revision) else _find_commit(api, where)
    except HubError as error:
        last = commits.get(where.revision)
        if not (isinstance(last, str) and _is_unreachable(error.__cause__) and is_complete(home / last)):
            raise
        return home / last
    if not is_complete(home / commit):
        pull(f"{where.name}@{commit}", home / commit)
    if commits.get(where.revision) != commit:
        write_json(latest, commits | {where.revision: commit})
    return home / commit


def _find_commit(api: HfApi, where: Repository) -> str:
    return str(api.dataset_info(where.name, revision=where.revision, timeout=_SILENCE).sha)


@contextmanager
def _hub(where: Repository) -> Iterator[HfApi]:
    """Yield the API of the Hub, with errors and timeouts turned into a HubError."""
    from huggingface_hub import HfApi, errors

    try:
        with _silence_client(), _limit_waiting():
            yield HfApi(library_name="memlens", library_version=__version__)
    except MemlensError:
        raise
    except (errors.RepositoryNotFoundError, errors.GatedRepoError) as error:
        raise HubError(
            f"there is no dataset repository {where.name}, or you may not read it; check its name, or log in with "
            "`hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"{where.name} has no branch, tag or commit '{where.revision}'; leave it out for main"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise HubError(f"{where.name} does not contain a complete index; ask its owner to push again") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        advice = "log in with `hf auth login`" if status in (401, 403) else "try again in a moment"
        raise HubError(f"the Hub rejected the request for {where.name} ({status}); {advice}") from error
    except Exception as error:
        causes = _list_causes(error)
        if any(map(_is_unreachable, causes)):
            raise HubError(
                f"the Hub cannot be reached for {where.name}; check the network, then run the command again"
            ) from error
        for cause in causes[1:]:  # an error that is not wrapped may come from writing a download
            if isinstance(cause, OSError):
                raise FilesError(
                    f"{cause.filename or 'a file'} cannot be read ({cause.strerror}); check the disk, then run the "
                    "command again"
                ) from error
        raise


def _list_causes(error: BaseException) -> list[BaseException]:
    """Return an error and the chain of its causes. The client wraps an error that occurs while it uploads a file."""
    return [error, *(_list_causes(error.__cause__) if error.__cause__ else ())]


def _is_unreachable(error: BaseException | None) -> bool:
    """Return True if the error means that the connection failed."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    library = type(error).__module__.partition(".")[0]
    is_connection = isinstance(error, (ConnectionError, TimeoutError, LocalEntryNotFoundError))
    return is_connection or library in ("httpx", "httpx2", "requests")


@contextmanager
def _limit_waiting() -> Iterator[None]:
    """Make requests fail after _SILENCE seconds without an answer, even if the client opens a new session.

    The client lists the files of a repository with `timeout=None`, so a default timeout would not suffice.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    make_client = _http._GLOBAL_CLIENT_FACTORY  # the user may have set a factory

    def limit(request: Any) -> None:
        timeouts = request.extensions["timeout"]
        request.extensions["timeout"] = {step: min(timeouts[step] or _SILENCE, _SILENCE) for step in timeouts}

    def make_limited_client() -> Any:
        client = make_client()
        client.event_hooks["request"].append(limit)
        return client

    set_client_factory(make_limited_client)
    try:
        yield
    finally:
        set_client_factory(make_client)


@contextmanager
def _silence_client() -> Iterator[None]:
    """Turn off the client's progress bars and warnings, such as those about retries.

    Progress bars and warnings stay off after a KeyboardInterrupt, because an upload thread may still run.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    level, were_disabled, is_interrupted = logging.get_verbosity(), are_progress_bars_disabled(), False
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        yield
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        if not is_interrupted:
            logging.set_verbosity(level)
            if not were_disabled:
                enable_progress_bars()


_ABOUT = {
    "corpus": "the sentences of the corpus: text, tokens",
    "vocabulary": "the text of every token",
    "triggers": "the prefixes with the highest (and most negative) coefficients of every memory",
    "memories": "one row per memory: statistics over all prefixes",
    "ordinary": "random prefixes on which a memory is active",
    "counts": "how often every memory is active, by position and, for gated memories, by sign quadrant",
    "quadrants": "the top prefixes of each sign quadrant of gated memories",
    "values": "the tokens that every value promotes and demotes",
    "keys": "the tokens whose embedding alone matches a key",
    "patterns": "patterns that the triggers of a memory share",
    "lower_patterns": "patterns that the most negative triggers of a memory share",
    "names": "one line per memory",
    "roles": "the roles of every memory, with the numbers that determine them",
    "effects": "the effects of silencing the memories of a role, compared with random groups",
    "tokens": "one row per token: its count in the corpus, whether it was trained, its classes",
    "experts": "how often the router chooses each expert",
    "routing": "prefixes that are routed to an expert",
    "routers": "the tokens whose embedding alone matches a router row",
}


def write_card(index: Index, repo: str) -> str:
    """Return the README.md of the repository, made from the manifest and the table of memories."""
    from memlens.index.memory import summarize

    manifest, summary = index.manifest, summarize(index)
    model, counts = manifest.model, manifest.counts
    facts = {
        "model": model.name,
        "family": model.family,
        "activation": f"{model.activation}{', gated' if model.gated else ''}",
        "dtype": model.dtype,
        "layers": f"{len(index.layers)} of {len(model.memories)}",
        "memories": f"{summary['memories']:,}",
        "dead memories": f"{sum(summary['dead'].values()):,}",
        "sentences": f"{counts.sentences:,}",
        "tokens": f"{counts.tokens:,}",
        "prefixes": f"{counts.prefixes:,}",
        "experiments": ", ".join(sorted(manifest.experiments)) or "none",
    }
    options = [
        f"{option_name(name)} {value}" for name, value in sorted(summary["settings"].items()) if value is not None
    ]
    makers = sorted({(maker["memlens"], maker["torch"], maker["processor"]) for maker in _list_makers(index)})
    rows = [
        f"| `{name}` | {_describe_table(name)} | {size(entry.bytes)} | `{entry.sha256[:16]}` |"
        for name, entry in sorted(manifest.files.items())
    ]
    return "\n".join(
        [
            *_front_matter(index),
            f"# Memories of {visible(model.name)}",
            "",
            "The feed-forward layers of this language model, read as key-value memories "
            "([Geva et al. 2021](https://arxiv.org/abs/2012.14913)): for each hidden dimension, the prefixes with the "
            "highest coefficients and the tokens that its value promotes. Made with memlens.",
            "",
            "```",
            f"memlens pull {repo}                  # compares every file with its checksum",
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
            "| file | content | size | start of the SHA-256 |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            f"`manifest.json` contains complete checksums and all settings. memlens {__version__} wrote this card.",
            "",
        ]
    )


def _front_matter(index: Index) -> list[str]:
    """Return the card's metadata for the Hub: tags, and the tables that the Hub's viewer shows."""
    tables = [name for name in (*SCAN_TABLES, *OPTIONAL_TABLES, *DERIVED_TABLES) if name in index.manifest.files]
    lines = ["---", f"pretty_name: {json.dumps('Memories of ' + visible(index.manifest.model.name))}"]
    lines += ["tags:", "- memlens", "- interpretability", "- feed-forward", "configs:"]
    for name in tables:
        lines += [f"- config_name: {name.removesuffix('.parquet')}", f"  data_files: {name}"]
    return [*lines, "---", ""]


def _describe_table(name: str) -> str:
    folder, _, table = name.removesuffix(".parquet").rpartition("/")
    return f"the experiment {table}" if folder else _ABOUT[table]


def _list_makers(index: Index) -> list[dict[str, str]]:
    """Return the versions and processors with which the files were made."""
    makers = [entry.get("made_with") for entry in index.manifest.content["files"].values()]
    return [{"memlens": "?", "torch": "?", "processor": "?"} | maker for maker in makers if isinstance(maker, dict)]
