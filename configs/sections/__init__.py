"""The parts of a run's configuration; configs/schema.py puts them together."""
