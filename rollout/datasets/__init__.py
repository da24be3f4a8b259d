"""Rows of prompts: read, ordered and mixed (docs/add-a-task.md)."""

from rollout.datasets.mix import FiniteMixture, Mixture
from rollout.datasets.order import row_of
from rollout.datasets.rows import BadRow, Rows, read_rows

__all__ = ["BadRow", "FiniteMixture", "Mixture", "Rows", "read_rows", "row_of"]
