"""Where checkpoints lie: a protocol (base), a directory (posix), memory for tests (memory)."""
