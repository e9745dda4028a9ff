"""The job queue: jobs in SQLite, and the processes that run them.

The web app submits and follows jobs through `job_queue`. Its `supervisor` starts one `worker` process per GPU. A worker
claims jobs from the `store` and runs them with `job_runner` (videos) or `task_runner` (work on the engine library); the
command line runs a video with `job_runner` in its own process. `views` read progress from the store, and `recovery`
updates the jobs of processes that died.
"""
