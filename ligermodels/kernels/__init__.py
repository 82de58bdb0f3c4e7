"""Fused ops, one a file. Knows torch and triton, nothing of models."""
