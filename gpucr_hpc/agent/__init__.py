"""The root daemon of one node: capsules, checkpoints and restores of the protected jobs that run there."""
