"""GPUs: the driver's checkpoint calls, made in worker processes; the agent itself never loads libcuda."""
