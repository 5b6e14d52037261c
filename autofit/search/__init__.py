"""The search itself. `tuning` is the whole way from a question to an answer; `scene` sets the place, `session` puts study, sampler and
`search` together, `assemble` makes the result. The rest are the parts of a search: baselines, budget, play-off, epilogue.
"""
