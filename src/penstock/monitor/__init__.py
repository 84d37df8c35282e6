"""The monitor: what a run does, written down while it runs and shown to people."""
