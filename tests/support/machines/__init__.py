"""Machines made of files, for tests that read them through ``Roots``."""
