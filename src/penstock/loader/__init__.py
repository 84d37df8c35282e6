"""The front door: DataLoader, and the pipeline that is put together behind it."""

from penstock.loader.dataloader import DataLoader
from penstock.loader.stats import LoaderStats, StageTimes

__all__ = ["DataLoader", "LoaderStats", "StageTimes"]
