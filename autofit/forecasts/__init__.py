"""What can be said of memory and time before any trial: laws from traces (`laws`), for a whole space (`forecast`, `prediction`), for one
configuration (`estimation`, which is `autofit estimate`), for the largest batch (`largest`).
"""
