"""Whole jobs built on the engine, each a module with a `main`: `python -m batchkv.recipes.label --help`."""
