"""What tests share: datasets, machines made of files, recorded runs, faults. No tests."""
