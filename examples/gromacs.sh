#!/bin/bash
#SBATCH --job-name=gromacs
#SBATCH --checkpoint-on-preempt
#SBATCH --nodes=2 --ntasks-per-node=2
#SBATCH --output=gromacs-%j.out
#
# Molecular dynamics of a box of water with GROMACS on two nodes, in its reproducible mode: energies and coordinates at
# the end are those of an undisturbed run, to the last digit. usage: sbatch gromacs.sh [STEPS [BOX_NM]]
steps=${1:-20000} box=${2:-3}
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")}" || exit
mkdir -p "gromacs-$SLURM_JOB_ID" && cd "gromacs-$SLURM_JOB_ID" || exit
export GMX_MAXBACKUP=-1 OMP_NUM_THREADS=1

printf '%s\n' '#include "oplsaa.ff/forcefield.itp"' '#include "oplsaa.ff/spce.itp"' \
    '[ system ]' 'water' '[ molecules ]' >topol.top
cat >md.mdp <<END
integrator = md
dt = 0.001
nsteps = $steps
nstenergy = 100
nstlog = 1000
coulombtype = PME
rcoulomb = 0.9
rvdw = 0.9
tcoupl = v-rescale
tc-grps = System
tau-t = 0.1
ref-t = 300
ld-seed = 1
gen-vel = yes
gen-temp = 300
gen-seed = 1
constraints = h-bonds
END
{
    gmx solvate -cs spc216 -box "$box" "$box" "$box" -p topol.top -o water.gro &&
        gmx grompp -f md.mdp -c water.gro -p topol.top -o md.tpr -maxwarn 2
} >prepare.log 2>&1 || { tail -n 20 prepare.log; exit 1; }
echo "prepared: $(sed -n "2s, ,,gp" water.gro) atoms, $steps steps"

# stdout and stderr of mdrun tell how far it is; their lines have the wall clock in them.
"${MPIRUN:-mpirun}" -n "$SLURM_NTASKS" gmx_mpi mdrun -s md.tpr -deffnm md -reprod -ntomp 1 -nb cpu -pin off \
    -npme 0 -v >mdrun.log 2>&1
status=$?
echo "mdrun ended with $status"
[ "$status" = 0 ] || { tail -n 30 mdrun.log; exit "$status"; }
printf 'Potential\nKinetic-En.\nTotal-Energy\nTemperature\nPressure\n\n' |
    gmx energy -f md.edr -o energy.xvg -xvg none >energy.log 2>&1 || exit
tail -n 1 energy.xvg
echo "RESULT $(cat energy.xvg md.gro | sha256sum | cut -d ' ' -f 1)"
