"""What train.py is made of. Knows models by their interface only: forward with labels, `config`, `model.layers`."""
