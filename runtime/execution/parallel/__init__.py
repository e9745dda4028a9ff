"""One job on several GPUs: a process for each, led by the one that runs the job."""
