"""The frameworks people already use, one per file; none is needed to import penstock."""
