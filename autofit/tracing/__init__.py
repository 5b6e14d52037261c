"""Traces of real training steps on tensors that do not exist.

Everything here imports torch and transformers, patches both, and therefore runs in a child process only; the door for such a child is
`estimate_worker`. What it makes (`events`) and what it is asked (`request`) are data in `memory`.
"""
