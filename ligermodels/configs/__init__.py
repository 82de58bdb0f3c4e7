"""config.json, read and checked: fields, RoPE in both spellings, what several families share."""
