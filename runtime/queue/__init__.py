"""The job queue: jobs in SQLite, and the processes that run them.

The web app submits and follows jobs through `job_queue`. Its `supervisor` starts one `worker` process per GPU. Whoever
claims a job from the `store` opens a `run`, has one of the `executors` execute it, and settles it: a worker, the command
line and the head of a cluster do the same. `views` read progress from the store, and `recovery` updates the jobs of
processes that died.
"""
