"""Activation checkpointing: what blocks keep for backward, where, and in which tiles they compute."""
