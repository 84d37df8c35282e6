"""Shared segments: how they are allocated and lent within a byte limit, and how batches lie in them."""
