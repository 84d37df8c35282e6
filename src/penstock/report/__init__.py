"""The report of a run as one HTML file: its figures over time, its bottleneck, and what to change."""
