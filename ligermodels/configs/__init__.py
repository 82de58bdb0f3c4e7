"""config.json, read and validated."""
