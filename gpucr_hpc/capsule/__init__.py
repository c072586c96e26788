"""Namespaces of one job on one node: their creation, network, cgroup, processes and end."""

from gpucr_hpc.capsule.capsule import Capsule, build
from gpucr_hpc.capsule.network import Geometry
from gpucr_hpc.capsule.processes import Process, namespace_processes
from gpucr_hpc.capsule.rundir import RunDir

__all__ = ["Capsule", "Geometry", "Process", "RunDir", "build", "namespace_processes"]
