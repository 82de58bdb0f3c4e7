"""Modules that own parameters and call kernels. Must not know any architecture or file format."""
