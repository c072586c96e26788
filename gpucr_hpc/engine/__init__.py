"""CRIU: what it needs of the host, what cannot be dumped, the dump, the restore, and its stream."""
