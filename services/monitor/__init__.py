"""The monitor: queue, staleness, ledger and a verdict over HTTP, each answer from one snapshot."""
