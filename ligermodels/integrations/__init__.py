"""Faces of our models for other libraries. A module here imports its library, and is imported only by its users."""
