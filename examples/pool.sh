#!/bin/bash
#SBATCH --job-name=pool
#SBATCH --checkpoint-on-preempt
#SBATCH --nodes=1 --ntasks=1
#SBATCH --output=pool-%j.out
#
# Several processes with queues, semaphores, shared memory and a pool; the result is checked.
# usage: sbatch pool.sh [TASKS [SECONDS_PER_TASK]]
python3 "${SLURM_SUBMIT_DIR:-$(dirname "$0")}/pool.py" "$@"
