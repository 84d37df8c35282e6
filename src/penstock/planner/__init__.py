"""Predictions about loaders before they run: how much memory they will take and how fast they will be."""
