"""Policy losses: a registry of pure functions on packed tokens (docs/losses.md).

Invariant: a loss is chosen by one word of the configuration; `catalogue` knows the words and imports without torch.
"""
