"""Fold an alanine peptide in implicit solvent with OpenMM; equal runs give equal coordinates, bit for bit.

The Reference platform is used, since it is deterministic by design (OpenMM User Guide, "Platform-Specific
Properties"); the CPU platform sums forces in the order in which its threads end.
"""

import hashlib
import sys

import numpy as np
import openmm
from openmm import app, unit


def peptide(residues: int) -> app.Modeller:
    """An extended chain of alanines, with capping groups, built from the force field's own templates."""
    topology, positions = app.Topology(), []
    chain = topology.addChain()
    atoms = {
        "ACE": [("CH3", "C", (0.0, 0.0, 0.0)), ("C", "C", (0.15, 0.0, 0.0)), ("O", "O", (0.21, 0.10, 0.0))],
        "ALA": [
            ("N", "N", (0.0, 0.0, 0.0)),
            ("CA", "C", (0.12, 0.08, 0.0)),
            ("CB", "C", (0.12, 0.17, 0.12)),
            ("C", "C", (0.25, 0.0, 0.0)),
            ("O", "O", (0.25, -0.12, 0.0)),
        ],
        "NME": [("N", "N", (0.0, 0.0, 0.0)), ("C", "C", (0.12, 0.08, 0.0))],
    }
    offset, previous = np.zeros(3), None
    for number, name in enumerate(["ACE", *["ALA"] * residues, "NME"]):
        residue = topology.addResidue(name, chain)
        placed = {}
        for atom, element, place in atoms[name]:
            placed[atom] = topology.addAtom(atom, app.Element.getBySymbol(element), residue)
            flip = np.array([1.0, -1.0 if number % 2 else 1.0, 1.0])
            positions.append(offset + np.array(place) * flip)
        if previous is not None:
            topology.addBond(previous, placed["N"])
        previous = placed.get("C") if name != "NME" else None
        offset = offset + np.array([0.34, 0.05 if number % 2 else -0.05, 0.0])
    topology.createStandardBonds()
    return app.Modeller(topology, positions * unit.nanometer)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    field = app.ForceField("amber14-all.xml", "implicit/gbn2.xml")
    model = peptide(8)
    model.addHydrogens(field)
    system = field.createSystem(model.topology, constraints=app.HBonds)
    integrator = openmm.LangevinMiddleIntegrator(300, 1.0, 0.002)
    integrator.setRandomNumberSeed(11)
    simulation = app.Simulation(model.topology, system, integrator, openmm.Platform.getPlatformByName("Reference"))
    simulation.context.setPositions(model.positions)
    simulation.minimizeEnergy(maxIterations=200)
    simulation.context.setVelocitiesToTemperature(300, 11)
    for done in range(0, steps, 50):
        simulation.step(50)
        energy = simulation.context.getState(getEnergy=True).getPotentialEnergy()
        print(f"step {done + 50} of {steps}, potential energy {energy}", flush=True)
    state = simulation.context.getState(getPositions=True, getVelocities=True)
    numbers = np.concatenate([state.getPositions(asNumpy=True), state.getVelocities(asNumpy=True)])
    print("RESULT", hashlib.sha256(numbers.tobytes()).hexdigest())


if __name__ == "__main__":
    main()
