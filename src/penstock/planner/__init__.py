"""Arithmetic about loaders: what they will take and how fast they will be, before anything runs."""
