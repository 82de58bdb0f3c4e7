"""The types that matrices of a GGUF file can be written in: those that the package `gguf` encodes."""

GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4", "tq2_0", "tq1_0")
