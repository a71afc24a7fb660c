"""Readers of logs, one module per shape. Each turns text or bytes into rows: a step and numbers by key."""
