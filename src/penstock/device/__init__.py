"""From the arena to the accelerator: page-locking slots, fences around their reuse, copying ahead."""
