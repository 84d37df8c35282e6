"""Datasets of tests, at module level so that spawned workers can import them."""
