"""Vision towers, projectors, and where images stand in a prompt."""
