"""Modules that own parameters and call kernels. Knows kernels; must not know any architecture or file format."""
