"""Fused ops, one op a file. Knows torch and triton."""
