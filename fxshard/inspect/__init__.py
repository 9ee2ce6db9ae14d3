"""Showing what the pipeline did: the canonical printer and dumps."""
