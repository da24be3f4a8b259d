"""The queue on the command line: `lagrange queue`, `lagrange groups`, `lagrange replay`.

Invariant: only `groups requeue` changes a run, and every figure that is shown together comes from one atomic snapshot.
"""
