"""Fold an alanine peptide in implicit solvent with OpenMM; equal runs give equal coordinates, bit for bit.

    python3 folding.py [STEPS [PLATFORM]]

The Reference platform is the default, since it is deterministic by design (OpenMM User Guide, "Platform-Specific
Properties"), and CUDA can be made so; the CPU platform sums forces in the order in which its threads end.
"""

import hashlib
import random
import sys

import numpy as np
import openmm
from openmm import app, unit

SEED = 11
# Bond lengths in nm and angles in degrees of a peptide's backbone (Engh and Huber, 1991).
N_CA, CA_C, C_N, C_O, CA_CB = 0.1458, 0.1525, 0.1329, 0.1231, 0.1521
AT_N, AT_CA, AT_C, O_C, CB_CA = 121.7, 111.2, 116.2, 120.1, 110.4
PHI, PSI, OMEGA = -135.0, 140.0, 180.0  # an extended strand


def beside(a: np.ndarray, b: np.ndarray, c: np.ndarray, length: float, angle: float, torsion: float) -> np.ndarray:
    """The place of an atom bound to c: angle b-c-atom, torsion a-b-c-atom, in degrees."""
    bend, turn = np.radians(angle), np.radians(torsion)
    along = (c - b) / np.linalg.norm(c - b)
    normal = np.cross(b - a, along)
    normal /= np.linalg.norm(normal)
    return c + length * (
        -np.cos(bend) * along
        + np.sin(bend) * np.cos(turn) * np.cross(normal, along)
        + np.sin(bend) * np.sin(turn) * normal
    )


def peptide(residues: int) -> app.Modeller:
    """A chain of L-alanines between acetyl and N-methyl, without hydrogens."""
    topology, positions = app.Topology(), []
    chain = topology.addChain()

    def add(residue: app.topology.Residue, name: str, place: np.ndarray) -> np.ndarray:
        topology.addAtom(name, app.Element.getBySymbol(name[0]), residue)
        positions.append(place)
        return place

    first = topology.addResidue("ACE", chain)
    before = add(first, "CH3", np.zeros(3))
    c = add(first, "C", np.array([CA_C, 0.0, 0.0]))
    n = c + C_N * np.array([-np.cos(np.radians(AT_C)), np.sin(np.radians(AT_C)), 0.0])
    add(first, "O", beside(n, before, c, C_O, O_C, 180.0))
    for _ in range(residues):
        residue = topology.addResidue("ALA", chain)
        add(residue, "N", n)
        ca = add(residue, "CA", beside(before, c, n, N_CA, AT_N, OMEGA))
        end = beside(c, n, ca, CA_C, AT_CA, PHI)
        add(residue, "CB", beside(n, end, ca, CA_CB, CB_CA, 122.7))
        add(residue, "C", end)
        add(residue, "O", beside(n, ca, end, C_O, O_C, PSI + 180.0))
        before, c, n = ca, end, beside(n, ca, end, C_N, AT_C, PSI)
    last = topology.addResidue("NME", chain)
    add(last, "N", n)
    add(last, "C", beside(before, c, n, N_CA, AT_N, OMEGA))
    topology.createStandardBonds()
    return app.Modeller(topology, np.array(positions) * unit.nanometer)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    name = sys.argv[2] if len(sys.argv) > 2 else "Reference"
    random.seed(SEED)  # addHydrogens begins at random places
    reference = openmm.Platform.getPlatformByName("Reference")
    platform = openmm.Platform.getPlatformByName(name)
    properties = {"Precision": "mixed", "DeterministicForces": "true"} if name == "CUDA" else {}
    field = app.ForceField("amber14-all.xml", "implicit/gbn2.xml")
    model = peptide(8)
    model.addHydrogens(field, platform=reference)
    system = field.createSystem(model.topology, constraints=app.HBonds)
    relaxing = app.Simulation(model.topology, system, openmm.VerletIntegrator(0.001), reference)
    relaxing.context.setPositions(model.positions)
    relaxing.minimizeEnergy(maxIterations=200)
    integrator = openmm.LangevinMiddleIntegrator(300, 1.0, 0.002)
    integrator.setRandomNumberSeed(SEED)
    simulation = app.Simulation(model.topology, system, integrator, platform, properties)
    simulation.context.setPositions(relaxing.context.getState(getPositions=True).getPositions())
    simulation.context.setVelocitiesToTemperature(300, SEED)
    for done in range(0, steps, 50):
        simulation.step(50)
        energy = simulation.context.getState(getEnergy=True).getPotentialEnergy()
        print(f"step {done + 50} of {steps}, potential energy {energy}", flush=True)
    state = simulation.context.getState(getPositions=True, getVelocities=True)
    positions, velocities = state.getPositions(asNumpy=True), state.getVelocities(asNumpy=True)
    numbers = np.concatenate([positions.value_in_unit(unit.nanometer), velocities._value])
    if not np.isfinite(numbers).all():
        raise SystemExit("the simulation has blown up")
    print("RESULT", hashlib.sha256(np.ascontiguousarray(numbers).tobytes()).hexdigest())


if __name__ == "__main__":
    main()
