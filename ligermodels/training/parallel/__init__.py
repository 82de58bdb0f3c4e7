"""From one CPU to many GPUs: FSDP2, activation checkpointing, torch.compile, float8 and memory limits."""
