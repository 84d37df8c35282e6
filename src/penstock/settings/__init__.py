"""A team's own settings file is converted to arguments of the loader, and is written back in the same layout.

In:  YAML, TOML or JSON files, or mappings.
Out: ``Settings``; files.
Runs in: trainer, command line. Does not import torch.
"""

from penstock.settings.reader import load
from penstock.settings.settings import Settings, SettingsEntry, SettingsTable
from penstock.settings.writer import write_like

__all__ = ["Settings", "SettingsEntry", "SettingsTable", "load", "write_like"]
