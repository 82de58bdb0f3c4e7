"""Data that needs no file, and the tokenizers of new models."""
