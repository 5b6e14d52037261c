"""What became of configurations: `measurement` (raw samples and their statistics), `trial` (the record that is stored), `estimates`
(what all runs of one configuration say together), `soundness` (when a run must not count).

`runner` is the seam between a search and its device; `replay` is a recorded `landscape` behind it.
"""
