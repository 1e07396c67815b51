#!/bin/bash
# Machines that come and go, from this folder, on each of them:
#
#   bash start.sh lighthouse                        on one machine that stays, reached as 10.0.0.1 by the others
#   RANKS=4 bash start.sh rank 0 10.0.0.1           on the first machine
#   RANKS=4 bash start.sh rank 1 10.0.0.1           on the second, and so on
#
# Under SLURM: srun --no-kill --kill-on-bad-exit=0 bash -c 'RANKS=$SLURM_NTASKS bash start.sh rank $SLURM_PROCID host'
# Under Kubernetes: the last command without its loop, with `restartPolicy: OnFailure`.
set -u
PORT=${PORT:-29510}

case $1 in
lighthouse)
    # An exchange waits 10 seconds for a rank that is alive, and 2 seconds for one that is not heard of.
    exec torchft_lighthouse --bind "[::]:$PORT" --min_replicas 1 --join_timeout_ms 10000 --heartbeat_timeout_ms 2000
    ;;
rank)
    export NODE_RANK=$2 LOCAL_RANK=0 TORCHFT_LIGHTHOUSE="http://$3:$PORT"
    until python train.py; do
        echo "Rank $NODE_RANK has ended early, and starts again." >&2
        sleep 1
    done
    ;;
esac
