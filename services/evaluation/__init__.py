"""Commands that evaluate: `lagrange eval` alone, `lagrange evaluator` beside a run (docs/evaluate.md)."""
