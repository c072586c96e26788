"""Namespaces of one job on one node: their creation, network, cgroup, processes and end."""
