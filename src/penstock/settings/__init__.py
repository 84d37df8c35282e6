"""The teams' own settings files, and ours, to arguments of the loader, and back into files of the same layout.

In:  YAML, TOML or JSON files, or mappings.
Out: ``Settings``; files.
Runs in: trainer, command line. Does not import torch.
"""

from penstock.settings.loaded import Entry, Explanation, Settings
from penstock.settings.reading import load
from penstock.settings.writing import write_like

__all__ = ["Entry", "Explanation", "Settings", "load", "write_like"]
