"""Tests of the queue on a real Redis."""
