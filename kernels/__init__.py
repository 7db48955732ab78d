"""Attention over paged KV: one contract (`attention`), implementations that must agree (`reference`, `torch_cpu`)."""
