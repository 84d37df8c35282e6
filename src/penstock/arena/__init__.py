"""Shared segments: their allocation and lending within a byte limit, and the form of batches in them."""
