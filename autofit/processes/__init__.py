"""Children, seen from the parent: started, watched, timed, and judged by what they said and how they ended.

`process` is the runner that is real; `protocol` and `channel` are what both sides say to each other; `failure` and `judgement` decide
what an ending means. What runs inside a child is in `children`, `workload` and `tracing`.
"""
