"""NCCL communicators: taken down before a checkpoint and made again after it, unseen by the job (docs/nccl-cut.md)."""
