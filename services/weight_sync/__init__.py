"""The weight-sync service: carries each published version to every engine, and claims none that was not confirmed."""
