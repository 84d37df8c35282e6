"""The way from the arena to the accelerator: page-locked segments, fences before their reuse, copies ahead of need."""
