"""Attention over paged KV: one contract (`attention`); implementations that must agree (the others)."""
