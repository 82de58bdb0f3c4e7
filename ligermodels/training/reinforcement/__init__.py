"""Reinforcement learning: rewards, sampled completions, and the updates that they give. Must not know the loop."""
