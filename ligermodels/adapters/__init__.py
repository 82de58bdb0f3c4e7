"""LoRA on a built model, PEFT's files of it, and modules that are trained as a whole; quantising a built model."""
