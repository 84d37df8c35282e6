"""Samples kept near: one bounded cache per node, shared by every worker and rank."""
