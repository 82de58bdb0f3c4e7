"""Attention, its masks, and what is done to heads before and after it."""
