"""Arithmetic about loaders: the memory they will take and how fast they will be, before anything runs."""
