"""The contract between all processes: trajectories, their wire format, and the queue with its lag bound and ledger.

Invariant: nothing here imports torch, and no other package talks to Redis by itself.
"""
