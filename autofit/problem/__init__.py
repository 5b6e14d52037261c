"""What is asked: the workload, the terms of the search, and the space with its points. Pure data; nothing here runs anything.

Start at `spec` (the question), `config` (one point) and `space` (all points that multiply out exactly). `numerics` says which
choices leave the mathematics alone, `capabilities` and `extras` why a choice cannot be used, `arguments` what a point is called in
TrainingArguments.
"""
