"""Several machines on Ray: a head with the queue and the results, and nodes that run its videos.

`head` claims jobs and is the only writer to the job store and the outputs folder; `remote_executor` executes them on
workers of nodes. `ray_process` runs Ray on a machine and ends it with Tandem. `node` joins a head and keeps trying; in
the actor `node_worker` a node runs jobs with the executor of a local worker. `placement` is what the scheduler learns
from runs, `sending` sends what a job needs. `transfer` names and verifies the files that are sent, `cluster_key` is the
secret of a cluster. Only this package imports ray.
"""
