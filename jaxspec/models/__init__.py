"""Decoder-only transformers: what they are made of, how they are computed, where they come from."""
