"""TrainConfig, its fields, their values and files."""
