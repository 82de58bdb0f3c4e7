"""Modules that own parameters and call kernels."""
