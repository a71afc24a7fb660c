"""Builds the shipped corpus and questions from four packages; run ``python -m llds.data.build --help``."""
