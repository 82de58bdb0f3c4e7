"""GGUF, llama.cpp's format: one file with a model's weights, configuration and tokenizer. Read and written here.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
