"""The lab: `from gpucr_hpc.lab.cluster import Lab`. Nothing is imported here, since PID 1 of each node passes by."""
