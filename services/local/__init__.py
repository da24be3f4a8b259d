"""Everything that runs a whole loop on one machine: `lagrange up`, its terminal view and its report.

Invariant: nothing here is needed by compose or Kubernetes; every process that `up` starts is a public command.
"""
