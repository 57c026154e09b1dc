"""Tables of experiments that do not fit their schema or the index are refused, whoever wrote them."""

import pyarrow as pa
import pytest

from memlens.cli import main
from memlens.errors import IndexFolderError
from memlens.experiments.experiment import read_table
from memlens.experiments.prefixes import LAYERS, LAYERS_SCHEMA, PREFIXES, PREFIXES_SCHEMA
from memlens.experiments.run import all_tables
from memlens.reports.sections import Tables

SCHEMAS = {f"experiments/{table.name}": table.schema for _, table in all_tables()}
SCHEMAS |= {PREFIXES: PREFIXES_SCHEMA, LAYERS: LAYERS_SCHEMA}


def write(index, name, table):
    """A table with a valid checksum."""
    index.write({name: (table.schema, [table])}, dict)


@pytest.fixture
def index(tiny_gpt2_values, copy_of):
    return copy_of(tiny_gpt2_values)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_column_of_every_table_is_required_with_its_type(index, name):
    schema = SCHEMAS[name]
    write(index, name, schema.empty_table())
    assert read_table(index, name, schema).num_rows == 0
    for column in schema:
        write(index, name, schema.empty_table().drop_columns([column.name]))
        with pytest.raises(IndexFolderError, match=f"no column '{column.name}' of type"):
            read_table(index, name, schema)
        other = pa.string() if column.type != pa.string() else pa.int64()
        place = schema.get_field_index(column.name)
        write(index, name, schema.set(place, pa.field(column.name, other)).empty_table())
        with pytest.raises(IndexFolderError, match=f"no column '{column.name}' of type"):
            read_table(index, name, schema)


@pytest.mark.parametrize(
    ("layer", "memory", "problem"),
    [(None, 0, "'layer' has missing values"), (0, None, "'memory' has missing values"), (9, 0, "refers to layer 9"),
     (1, 40, "refers to memory 40 of layer 1"), (1, -1, "refers to memory -1 of layer 1")],
)  # fmt: skip
def test_layers_and_memories_must_exist(index, layer, memory, problem):
    schema = SCHEMAS["experiments/vetoes"]
    rows = [{"layer": 0, "memory": 39}, {"layer": layer, "memory": memory}]
    write(index, "experiments/vetoes", pa.Table.from_pylist(rows, schema))
    with pytest.raises(IndexFolderError, match=problem):
        Tables(index).rows("vetoes")


@pytest.mark.parametrize("column", ["final_token", "token"])
@pytest.mark.parametrize("token", [-1, 10**6])
def test_tokens_that_are_shown_must_exist(index, column, token):
    name = {"final_token": "experiments/prefixes", "token": "experiments/predictive-values"}[column]
    rows = [{"layer": 0, "memory": 0, column: 0}, {"layer": 0, "memory": 0, column: token}]
    write(index, name, pa.Table.from_pylist(rows, SCHEMAS[name]))
    with pytest.raises(IndexFolderError, match=f"refers to token {token}, which does not exist"):
        read_table(index, name, SCHEMAS[name])


def test_a_report_of_such_a_table_is_refused_in_one_line(index, capsys):
    write(index, "experiments/rank", SCHEMAS["experiments/rank"].empty_table().drop_columns(["median"]))
    assert main(["report", str(index.folder)]) == 2
    error = capsys.readouterr().err.strip()
    assert "no column 'median'" in error and "memlens experiment" in error and "\n" not in error
