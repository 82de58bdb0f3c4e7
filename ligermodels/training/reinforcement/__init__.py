"""Reinforcement learning: rewards, sampled completions, and the updates that they give."""
