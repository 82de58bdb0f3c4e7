"""Loads and exports checkpoint folders. Knows torch and safetensors; must not know layers, architectures or the Hub."""
