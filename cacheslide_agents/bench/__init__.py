"""`cacheslide bench`: what reuse saves and what it costs in accuracy, on a person's own prompts.

`quality` is the command; `comparison` measures, `summary` takes means and medians, `table`, `files` and `picture` show
them. The repository's `benchmarks/` are built on the same parts.
"""
