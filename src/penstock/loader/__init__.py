"""The DataLoader, and the engine that delivers its batches."""
