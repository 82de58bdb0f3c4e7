"""Mixture of experts: tokens permuted by expert, grouped products, exchange between ranks."""
