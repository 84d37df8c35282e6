"""The front door: DataLoader, and the pipeline that is put together behind it."""
