"""From one CPU to many GPUs: ranks and shards, compilation, float8, and what memory allows."""
