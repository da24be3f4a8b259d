"""The HTTP services, the command line and the local orchestration.

Invariant: importing this package imports neither torch nor a service: a command loads only what it runs.
"""
