"""config.json, read and validated. Must not know layers or any model family."""
