"""Optuna's side, and the only importer of it: the study on disk, and the samplers in its terms. `advice` is what the cost model proposes."""
