"""gpucr agent."""

from __future__ import annotations


def agent() -> None:
    """Run the node's daemon in the foreground (root; started by systemd)."""
    from gpucr_hpc.agent.daemon import main

    main()
