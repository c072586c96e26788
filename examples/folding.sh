#!/bin/bash
#SBATCH --job-name=folding
#SBATCH --checkpoint-on-preempt
#SBATCH --nodes=1 --ntasks=1
#SBATCH --output=folding-%j.out
#
# Folds a small peptide with OpenMM, deterministically.
# usage: sbatch folding.sh [STEPS]                            on the CPU
#        sbatch --gres=gpu:1 folding.sh STEPS CUDA            on a GPU
export OPENMM_CPU_THREADS=1
python3 "${SLURM_SUBMIT_DIR:-$(dirname "$0")}/folding.py" "$@"
