"""The two doors of a child: `forkserver`, which has imported torch and forks, and `worker`, which serves one request.

They are started by name in processes of their own, and import what a request needs (`workload`, `tracing`) when it is there.
"""
