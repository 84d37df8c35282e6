"""A run afterwards: what it was like, what held it back and what to change, as one HTML file."""
