"""Activations, with a gate and without."""
