"""Scoring a policy on held-out questions, with intervals."""
