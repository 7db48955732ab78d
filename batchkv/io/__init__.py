"""Job files in, result files out."""
