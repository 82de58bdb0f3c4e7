"""What one sees of a run: numbers, curves, traces, validation and skill."""
