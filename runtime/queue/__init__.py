"""The job queue: jobs in SQLite, and the processes that run them.

The web app submits and follows jobs through `job_queue`. Its `supervisor` starts one `worker` process per GPU. Workers,
the command line and the head of a cluster do the same with a job that they claim from the `store`: they open a `run`,
have one of the `executors` execute it, and settle it. `views` read progress from the store, and `recovery` updates the
jobs of processes that died.
"""
