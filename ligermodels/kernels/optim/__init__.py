"""Steps of optimizers, and how updated parameters are rounded."""
