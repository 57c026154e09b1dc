"""Export of an index in the layout that Neuronpedia imports: one folder per model and source.

    MODEL/3-memlens/features/batch-0.jsonl.gz      one line per memory of layer 3, 1,024 to a file
    MODEL/3-memlens/activations/batch-0.jsonl.gz   their top triggers, with the coefficient at every token of an excerpt
    MODEL/3-memlens/explanations/batch-0.jsonl.gz  their names, if `memlens patterns` was run
    MODEL/3-memlens/{model,release,sourceset,source}.jsonl

The layout follows docs.neuronpedia.org/api-and-data/exports. Fields have the names that Neuronpedia's converter and
SAEDashboard 0.8.0 use. For each memory:

    maxActApprox, frac_nonzero       the highest coefficient; the activation frequency
    freq_hist_data_bar_values        centers of the histogram's bins, which double in width outward, and the number of
    freq_hist_data_bar_heights       sampled prefixes in each, from the first filled bin to the last
    pos_str, pos_values, neg_*       top and bottom tokens with ln(p * vocabulary), the logit relative to a uniform
                                     distribution; empty without `memlens values`
    values, maxValue, minValue       coefficients computed by the model, rounded to four digits; those of triggers are
                                       taken from the index
    qualifyingTokenIndex             the position of the trigger; maxValue may belong to another token of the excerpt
    binMin, binMax, binContains      -1, the highest coefficient, -1: SAEDashboard's mark of top activations

The layout has no bottom triggers. Fields about sparse autoencoders, or about facts that an index does not contain, are
empty. Timestamps are left to Neuronpedia's database, so that repeated exports of an index are identical.
"""

import gzip
import hashlib
import json
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memlens import __version__
from memlens.errors import SettingError
from memlens.files import explain_os_errors, prepare_output_folder, replacing
from memlens.index.export import escaped
from memlens.index.memory import Excerpts, read_coefficients, token_texts
from memlens.index.reader import Index
from memlens.models.memory_model import MemoryModel
from memlens.progress import Progress, no_progress

SET = "memlens"  # name of the source set, which has one source per layer
TOP = 20  # top activations per memory, as in SAEDashboard
_BEFORE, _AFTER = 64, 16  # tokens of an excerpt before and after its trigger
_MEMORIES_PER_FILE = 1024
_TOKENS = 10  # tokens at each end of a value, as on Neuronpedia's pages
_LEAST_P = 1.1754944e-38  # smallest normal float32, in place of a probability of 0
_CREATOR = "clkht01d40000jv08hvalcvly"  # Neuronpedia's account for imports without an author

_UNKNOWN = (
    *("topkCosSimIndices", "topkCosSimValues", "decoder_weights_dist", "vector"),
    *(f"neuron_alignment_{part}" for part in ("indices", "values", "l1")),
    *(f"correlated_{what}_{part}" for what in ("neurons", "features") for part in ("indices", "pearson", "l1")),
    *("logits_hist_data_bar_heights", "logits_hist_data_bar_values"),
)
_TRIGGERS = f"""
SELECT layer, memory, coefficient, sentence, position::BIGINT AS position,
       CASE WHEN position < 0 THEN -1 ELSE greatest(position - {_BEFORE}, 0) END AS first,
       least(position + 1 + {_AFTER}, len(tokens)) AS stop,
       first_value(coefficient) OVER (PARTITION BY layer, memory ORDER BY rank) AS highest
FROM {{triggers}} t JOIN {{corpus}} c USING (sentence) WHERE "end" = 'top' AND rank < $1 ORDER BY layer, memory, rank
"""
_PART = "layer = $1 AND memory >= $2 AND memory < $3 ORDER BY memory"
_FACTS = f"SELECT memory, max, min, frequency, histogram FROM {{memories}} WHERE {_PART}"
_VALUES = f"SELECT memory, tokens, p, bottom_tokens, bottom_p FROM {{values}} WHERE {_PART}"
_NAMES = f"SELECT memory, name FROM {{names}} WHERE {_PART}"


def export_neuronpedia(
    index: Index,
    out: Path,
    model: MemoryModel,
    *,
    top: int = TOP,
    force: bool = False,
    progress: Progress = no_progress,
) -> int:
    """Write all scanned layers to a folder. Returns the number of memories.

    Args:
        index: The index.
        out: The folder.
        model: The model that was scanned.
        top: Number of triggers per memory.
        force: Write to a folder that holds other files.
        progress: Called with stage, exported memories and total.
    """
    if top < 1:
        raise SettingError(f"--top is {top}; it must be 1 or more")
    export = _Export(index, model, top, progress)
    prepare_output_folder(out, force=force, replaced=[export.model_id])
    with explain_os_errors(out):
        return export.write(out / export.model_id)


class _Export:
    def __init__(self, index: Index, model: MemoryModel, top: int, progress: Progress) -> None:
        self.index, self.model, self.progress = index, model, progress
        name = index.manifest.model.name.rstrip("/").rpartition("/")[2]
        self.model_id = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".") or "model"
        self.triggers = index.arrays(_TRIGGERS, [top])

    @cached_property
    def edges(self) -> NDArray[np.int64]:
        """The offset of each memory's first trigger in the list of all triggers, and the number of triggers."""
        firsts = np.cumsum([0, *map(self.index.memories, self.index.layers)])
        place = firsts[np.searchsorted(self.index.layers, self.triggers["layer"])] + self.triggers["memory"]
        return np.searchsorted(place, np.arange(firsts[-1] + 1))

    def write(self, folder: Path) -> int:
        columns = (self.triggers[name].astype(np.int64) for name in ("layer", "memory", "sentence", "first", "stop"))
        excerpts = Excerpts(*columns)
        folder.mkdir()
        with tempfile.TemporaryFile(dir=folder) as file:  # on disk, because a million memories take 6 GB
            file.truncate(4 * max(len(excerpts.layer) * excerpts.longest, 1))  # a memory map cannot be empty
            coefficients = np.memmap(file, np.float32)[: len(excerpts.layer) * excerpts.longest]
            coefficients = coefficients.reshape(len(excerpts.layer), excerpts.longest)
            read_coefficients(self.index, self.model, excerpts, coefficients, self.progress)
            first = 0
            for layer in self.index.layers:
                self.write_source(folder, layer, first, coefficients)
                first += self.index.memories(layer)
        return first

    def write_source(self, folder: Path, layer: int, first: int, coefficients: NDArray[np.float32]) -> None:
        source = folder / self.source_id(layer)
        for begin in range(0, self.index.memories(layer), _MEMORIES_PER_FILE):
            part = [layer, begin, begin + _MEMORIES_PER_FILE]
            facts = self.index.sql(_FACTS, part)
            values = {row["memory"]: row for row in self.index.sql(_VALUES, part)} if self.index.has("values") else {}
            names = self.index.sql(_NAMES, part) if self.index.has("names") else []
            edges = self.edges[first + begin : first + begin + len(facts) + 1]
            file = f"batch-{begin // _MEMORIES_PER_FILE}.jsonl.gz"
            _write_lines(source / "features" / file, (self.feature(layer, row, values) for row in facts))
            _write_lines(source / "activations" / file, self.activations(edges, coefficients))
            if names:
                _write_lines(source / "explanations" / file, (self.explanation(layer, row) for row in names))
            self.progress("export", first + begin + len(facts), len(self.edges) - 1)
        for name, record in self.records(layer).items():  # written last, because it marks a complete folder
            _write_lines(source / f"{name}.jsonl", [record])

    def source_id(self, layer: int) -> str:
        return f"{layer}-{SET}"

    def address_of(self, layer: int, memory: int) -> dict[str, Any]:
        """Return the fields that identify a memory."""
        return {"modelId": self.model_id, "layer": self.source_id(layer), "index": str(memory)}

    def id_of(self, *parts: object) -> str:
        """Return an id that is the same in every export of one scan."""
        key = json.dumps([self.index.manifest.generation, *map(str, parts)])
        return "c" + hashlib.sha256(key.encode()).hexdigest()[:24]

    def records(self, layer: int) -> dict[str, dict[str, Any]]:
        """Return the records of the model, the release, the set of sources and the source."""
        scanned, counts = self.index.manifest.model, self.index.manifest.counts
        release, title = f"{SET}-{self.model_id}", f"Feed-forward memories of {scanned.name}"
        common = {"creatorId": _CREATOR, "visibility": "PUBLIC"}
        model = {"displayName": scanned.name, "displayNameShort": self.model_id, "instruct": False}
        model |= {"layers": len(scanned.memories), "neuronsPerLayer": max(scanned.memories.values())}
        whole = {"description": title, "creatorName": SET}
        return {
            "model": {"id": self.model_id, **common, **model, "dimension": scanned.width, "inferenceEnabled": False},
            "release": {"name": release, **common, **whole, "descriptionShort": title, "creatorNameShort": SET},
            "sourceset": {"modelId": self.model_id, "name": SET, **common, **whole, "releaseName": release},
            "source": {
                **{"id": self.source_id(layer), "modelId": self.model_id, "setName": SET, **common},
                **{"hasDashboards": True, "inferenceEnabled": False, "num_prompts": counts.sentences},
                "notes": f"coefficients of layer {layer}, {counts.tokens:,} tokens, by memlens {__version__}",
            },
        }

    def feature(self, layer: int, facts: dict[str, Any], values: dict[int, dict[str, Any]]) -> dict[str, Any]:
        return {
            **self.address_of(layer, facts["memory"]),
            **{"creatorId": _CREATOR, "sourceSetName": SET},
            **{"hasVector": False, "vectorLabel": None, "vectorDefaultSteerStrength": None, "hookName": None},
            "maxActApprox": facts["max"],
            "frac_nonzero": facts["frequency"],
            **_histogram(facts, self.index.manifest.histogram_edges),
            **self.top_tokens(values.get(facts["memory"])),
            **{field: [] for field in _UNKNOWN},
        }

    def top_tokens(self, row: dict[str, Any] | None) -> dict[str, list[Any]]:
        """Return the tokens that a value promotes and demotes, with their logits."""
        if row is None:
            return {"pos_str": [], "pos_values": [], "neg_str": [], "neg_values": []}
        vocabulary = self.index.vocabulary

        def texts(tokens: list[int]) -> list[str]:
            return [vocabulary[token] for token in tokens[:_TOKENS]]

        def logits(p: list[float]) -> list[float]:
            return [math.log(max(share, _LEAST_P) * self.index.manifest.value_tokens) for share in p[:_TOKENS]]

        top, bottom = (row["tokens"], row["p"]), (row["bottom_tokens"], row["bottom_p"])
        return {
            **{"pos_str": texts(top[0]), "pos_values": logits(top[1])},
            **{"neg_str": texts(bottom[0]), "neg_values": logits(bottom[1])},
        }

    def activations(self, edges: NDArray[np.int64], computed: NDArray[np.float32]) -> Iterator[dict[str, Any]]:
        """Yield the record of each trigger from `edges[0]` to `edges[-1]`, with its computed coefficients."""
        triggers = {name: column[edges[0] : edges[-1]] for name, column in self.triggers.items()}
        sentences = self.index.sentences(np.unique(triggers["sentence"]).tolist())
        coefficients = np.array(computed[edges[0] : edges[-1]], np.float64)
        coefficients[np.arange(len(coefficients)), triggers["position"] - triggers["first"]] = triggers["coefficient"]
        columns = ("layer", "memory", "sentence", "position", "first", "stop", "highest")
        rounded = _round_to_four_digits(coefficients).tolist()
        rows = zip(rounded, *(triggers[name].tolist() for name in columns), strict=True)
        for along, layer, memory, sentence, position, first, stop, highest in rows:
            values = along[: stop - first]
            yield {
                "id": self.id_of(layer, memory, sentence, position),
                **self.address_of(layer, memory),
                "creatorId": _CREATOR,
                "tokens": token_texts(sentences[sentence], first, stop),
                "values": values,
                "maxValue": max(values),
                "maxValueTokenIndex": values.index(max(values)),
                "minValue": min(values),
                "qualifyingTokenIndex": position - first,
                **{"binMin": -1, "binMax": highest, "binContains": -1},
                **{"dataSource": None, "dataIndex": None, "lossValues": [], "logitContributions": None},
                **{"dfaValues": [], "dfaTargetIndex": None, "dfaMaxValue": None},
            }

    def explanation(self, layer: int, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id_of(layer, row["memory"], "name"),
            **self.address_of(layer, row["memory"]),
            **{"authorId": _CREATOR, "description": row["name"], "notes": "by `memlens patterns`"},
            **{"embedding": None, "triggeredById": None, "typeName": None, "explanationModelName": None},
        }


def _round_to_four_digits(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to four significant digits. Three decimals, as in Neuronpedia's exporters, would lose small numbers."""
    size = np.abs(numbers, where=numbers != 0, out=np.ones_like(numbers))
    unit = 10.0 ** (3 - np.floor(np.log10(size)))
    return np.rint(numbers * unit) / unit


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (escaped(json.dumps(record, ensure_ascii=False, allow_nan=False)) for record in records)
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
    with replacing(path) as beside:
        beside.write_bytes(gzip.compress(text, 5, mtime=0) if path.suffix == ".gz" else text)


def _histogram(facts: dict[str, Any], edges: Sequence[float]) -> dict[str, list[float]]:
    """Return the bins from the first filled one to the last. The outermost bins end at the extreme coefficients."""
    counts = facts["histogram"]
    filled = [place for place, count in enumerate(counts) if count]
    shown = range(filled[0], filled[-1] + 1) if filled else range(0)
    whole = [min(facts["min"], edges[0]), *edges, max(facts["max"], edges[-1])] if edges else []
    middles = [(whole[place] + whole[place + 1]) / 2 for place in shown] if whole else []
    return {
        "freq_hist_data_bar_values": middles,
        "freq_hist_data_bar_heights": [counts[place] for place in shown][: len(middles)],
    }
