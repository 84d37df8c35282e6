"""The way from the arena to the accelerator: page-locked segments, fences before segments are reused, and copies made
before they are needed."""
