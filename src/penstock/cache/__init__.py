"""A cache of samples: one per node, bounded in bytes, and shared by every worker and rank."""
