"""What memories promote and which tokens their keys match, as tables of an index, and how to search them.

compute_values(index)                values.parquet and keys.parquet
search_values(index, " Paris")       which memories promote a token
"""

from memlens.values.search import FoundToken, Promotion, search_values
from memlens.values.table import compute_values, default_reading

__all__ = ["FoundToken", "Promotion", "compute_values", "default_reading", "search_values"]
