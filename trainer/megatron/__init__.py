"""Megatron-core as this project uses it: build, load, score, train, save and export one policy model.

Invariant: nothing outside this package imports megatron; the rest of the trainer sees `policy.PolicyModel`,
`parallel.Parallel` and `checkpoint`.
"""
