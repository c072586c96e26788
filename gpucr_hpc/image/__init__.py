"""Encrypted images of capsules: chunks in packs, an index, a signed manifest. Format: docs/format.md.

Knows nothing of Slurm, CUDA, CRIU or root and starts no program; the files come from two callables.
"""
