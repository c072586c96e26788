"""Transparent checkpoint, requeue and restore of Slurm jobs."""

__version__ = "0.1.0"
