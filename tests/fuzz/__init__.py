"""Mutated job files through the readers: `python -m tests.fuzz --help`."""
