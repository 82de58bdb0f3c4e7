"""The gated delta rule, Mamba-2's scan, and the convolution in front of them."""
