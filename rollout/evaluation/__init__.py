"""Evaluation: scores of one version, with what they are worth (docs/evaluate.md)."""
