#!/bin/bash
#SBATCH --job-name=reduce
#SBATCH --checkpoint-on-preempt
#SBATCH --nodes=2 --ntasks-per-node=2
#SBATCH --output=reduce-%j.out
#
# mpi4py on two nodes by Open MPI's own launcher, or by $MPIRUN: `srun --mpi=pmi2` if mpi4py uses MPICH.
# usage: sbatch reduce.sh [ITERATIONS [SECONDS_PER_ITERATION]]
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}" || exit
read -ra launcher <<< "${MPIRUN:-mpirun}"
"${launcher[@]}" -n "$SLURM_NTASKS" python3 reduce.py "$@"
status=$?
echo "${launcher[0]} ended with $status"
exit "$status"
