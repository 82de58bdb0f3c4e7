"""A step of generation: the cache, linears of few rows, drawing a token."""
