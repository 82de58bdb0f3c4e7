"""Frozen weights in few bits, and their linear."""
