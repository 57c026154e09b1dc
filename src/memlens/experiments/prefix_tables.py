"""The two tables of the pass over sampled prefixes: their columns, and how the parts of a pass become one table.

Knows columns; what the numbers are is layer_look's business, where the tables lie aggregate's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memlens.experiments.layer_look import Columns
from memlens.experiments.prefixes import Prefixes

PREFIXES_SCHEMA = pa.schema(
    [
        ("prefix", pa.int32()),
        ("sentence", pa.int64()),
        ("position", pa.int32()),  # -1 is BOS alone
        ("text", pa.string()),  # null where only tokens were given
        ("target", pa.int32()),  # the token that really follows; null at the end of a sentence
        ("stop_word", pa.bool_()),  # is the target one?
        ("final_token", pa.int32()),  # top(o_L), what the model predicts
        ("logit", pa.float64()),  # of the final token, before soft-capping
        ("logit_embedding", pa.float64()),  # what the embedding put into it
        ("logit_constant", pa.float64()),  # what biases after the last layer put into it
        ("above_mean", pa.float64()),  # the logit less the mean of all logits
        ("embedding", pa.float64()),  # what the embedding put into that
        ("constant", pa.float64()),
    ]
)
LAYERS_SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("prefix", pa.int32()),
        ("residual_token", pa.int32()),  # top(r)
        ("ffn_token", pa.int32()),  # top(y)
        ("output_token", pa.int32()),  # top(o)
        ("p_final", pa.float64()),  # softmax(r E)[final token]
        ("rank_final", pa.int32()),  # 1 + tokens that r scores strictly higher than the final one
        ("active", pa.int32()),  # memories with m > 0
        ("effective", pa.float64()),  # participation ratio of |m| ||v||
        ("promoted", pa.bool_()),  # is top(y) the top of any value of the layer?
        ("promoted_active", pa.bool_()),  # of any whose m > 0?
        ("ffn_logit", pa.float64()),  # what went into the final token's logit
        ("attention_logit", pa.float64()),
        ("ffn_above", pa.float64()),  # the same beside the mean of all logits
        ("attention_above", pa.float64()),
        ("top1", pa.float64()),  # what the strongest memories gave, beside the mean
        ("top10", pa.float64()),
        ("top100", pa.float64()),
        ("vetoes", pa.list_(pa.int32())),  # where o is a composition: memories that took most from top(r)
        ("veto_pushes", pa.list_(pa.float32())),
        ("pushers", pa.list_(pa.int32())),  # the same in the last layer: memories that gave most to top(o) over top(r)
        ("pushes", pa.list_(pa.float32())),
        ("cosine", pa.float32()),  # of the two tokens' output embeddings
    ]
)


def prefix_table(prefixes: Prefixes, stops: list[bool | None] | None, columns: Columns) -> pa.Table:
    targets = prefixes.targets
    own = {
        "prefix": np.arange(len(prefixes)),
        "sentence": np.array([prefixes.sentences[row].id for row in prefixes.rows]),
        "position": prefixes.positions,
        "text": prefixes.texts,
        "target": pa.array(targets, pa.int32(), mask=targets < 0),
        "stop_word": [None] * len(prefixes) if stops is None else stops,
    }
    return _table(own | columns, PREFIXES_SCHEMA)


def layer_table(layer: int, columns: Columns) -> pa.Table:
    count = len(columns["active"])
    return _table({"layer": np.full(count, layer), "prefix": np.arange(count)} | columns, LAYERS_SCHEMA)


def _table(columns: Columns, schema: pa.Schema) -> pa.Table:
    def typed(column: Any, kind: pa.DataType) -> pa.Array:
        return column if isinstance(column, pa.Array) else pa.array(column, kind)

    return pa.table({field.name: typed(columns[field.name], field.type) for field in schema}, schema)


def joined(parts: list[Columns], order: NDArray[np.int64]) -> Columns:
    whole: Columns = {}
    for name, first in parts[0].items():
        if isinstance(first, list):
            entries = [entry for part in parts for entry in part[name]]
            whole[name] = [entries[i] for i in order]
        else:
            whole[name] = np.concatenate([part[name] for part in parts])[order]
    return whole
