"""Writes what a run leaves behind: metrics, a summary, plots, one page to read."""
