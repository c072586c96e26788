#!/bin/bash
#SBATCH --job-name=counter
#SBATCH --checkpoint-on-preempt
#SBATCH --nodes=1 --ntasks=1
#SBATCH --output=counter-%j.out
#
# Counts in bash, with a child behind a pipe and one in the background, and checks the sum at the end.
# usage: sbatch counter.sh [STEPS [SECONDS_PER_STEP]]
steps=${1:-300} pause=${2:-0.1}

(trap 'exit 0' TERM; while :; do sleep 1; done) &
background=$!

sum=$(
    for ((i = 1; i <= steps; i++)); do
        echo "$i"
        echo "step $i" >&2
        sleep "$pause"
    done | { total=0; while read -r n; do total=$((total + n)); done; echo "$total"; }
)
kill "$background" && wait "$background"
echo "background child ended with $?"
echo "RESULT $sum"
[ "$sum" -eq $((steps * (steps + 1) / 2)) ] || { echo "wrong sum" >&2; exit 1; }
