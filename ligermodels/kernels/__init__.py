"""Fused ops, one op a file. Knows torch and triton; must not know models."""
