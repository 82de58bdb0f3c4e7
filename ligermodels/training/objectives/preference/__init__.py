"""Learning from pairs and judged completions, and reward models."""
