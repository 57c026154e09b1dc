"""The card of an index on the Hub: what it is of, how it was made, what it holds, and how to look at it."""

import json

from memlens import __version__
from memlens.index.layout import DERIVED_TABLES, OPTIONAL_TABLES, SCAN_TABLES
from memlens.index.memory import summarize
from memlens.index.reader import Index
from memlens.settings import option_name
from memlens.text import size, visible

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
