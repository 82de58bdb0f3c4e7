"""Checkpoint folders in and out. Knows torch and safetensors; must not know layers, architectures or the Hub."""
