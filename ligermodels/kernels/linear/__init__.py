"""Linears with LoRA, fused with the norm or activation before them."""
