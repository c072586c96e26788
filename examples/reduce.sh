#!/bin/bash
#SBATCH --job-name=reduce
#SBATCH --checkpoint-on-preempt
#SBATCH --nodes=2 --ntasks-per-node=2
#SBATCH --output=reduce-%j.out
#
# mpi4py on two nodes by Open MPI's own launcher. usage: sbatch reduce.sh [ITERATIONS [SECONDS_PER_ITERATION]]
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}" || exit
"${MPIRUN:-mpirun}" -n "$SLURM_NTASKS" python3 reduce.py "$@"
status=$?
echo "mpirun ended with $status"
exit "$status"
