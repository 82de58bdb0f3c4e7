"""Loads and exports checkpoint folders."""
