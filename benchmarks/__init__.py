"""Compares batchkv with its peers on the same job files."""
