"""The index: a plain folder of Parquet files with all results about the memories of a model."""
