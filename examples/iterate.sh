#!/bin/bash
#SBATCH --job-name=iterate
#SBATCH --checkpoint-on-preempt
#SBATCH --nodes=1 --ntasks=1
#SBATCH --output=iterate-%j.out
#
# A numpy iteration over an array that must survive bit for bit; then one more command of the script.
# usage: sbatch iterate.sh [STEPS [MEGABYTES [SECONDS_PER_STEP]]]
here=${SLURM_SUBMIT_DIR:-$(dirname "$0")}
python3 "$here/iterate.py" "$@" || exit
echo "the script goes on after the program, on line $LINENO"
