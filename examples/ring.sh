#!/bin/bash
#SBATCH --job-name=ring
#SBATCH --checkpoint-on-preempt
#SBATCH --nodes=2 --ntasks-per-node=2
#SBATCH --output=ring-%j.out
#
# MPI ranks on two nodes, started by srun; then more steps on whatever nodes the job has by then.
# usage: sbatch ring.sh [ITERATIONS [MICROSECONDS_PER_ITERATION [DOUBLES_PER_MESSAGE]]]
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}" || exit
program=$(mktemp -p . ring.XXXXXX) || exit
mpicc -O2 -o "$program" ring.c || exit
srun --mpi=pmi2 "$program" "$@" | cat
status=${PIPESTATUS[0]}
rm -f "$program"
echo "srun ended with $status"
srun --ntasks=2 sh -c 'echo "a later step, task $SLURM_PROCID"'
exit "$status"
