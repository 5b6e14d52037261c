"""One time-boxed, resumable command that records on a CUDA machine what the claims of this project rest on.

`python -m benchmarks.evidence --out DIR --minutes 25` runs the stages, `--summarise DIR` turns what they wrote into a dated report, and `--dry-run`
goes through all of it on a CPU with tiny models. `benchmarks/README.md` says what a report holds.
"""
