"""The index: a plain folder of Parquet files with everything that is known about the memories of a model."""
