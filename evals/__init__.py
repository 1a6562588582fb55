"""Measurements of the cache, run as ``python -m evals.<name>`` from the root of the project."""
