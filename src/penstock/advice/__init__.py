"""Rules that look at a machine, a settings file, a dataset or a run and end in ``Finding``s: what is wrong, with its
numbers, and what to change."""
