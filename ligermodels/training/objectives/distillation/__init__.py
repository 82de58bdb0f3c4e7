"""Learning from a teacher's distribution, or from its samples."""
