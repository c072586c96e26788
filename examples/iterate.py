"""Iterate a chaotic map over a large array: one wrong bit anywhere changes the digest at the end."""

import hashlib
import sys
import time

import numpy as np


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    megabytes = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.2

    state = np.random.default_rng(7).random(megabytes * (1 << 20) // 8)
    for step in range(steps):
        np.multiply(3.999 * state, 1.0 - state, out=state)
        time.sleep(pause_s)
        if step % 5 == 0:
            print(f"step {step} of {steps}, mean {state.mean():.12f}", flush=True)
    print("RESULT", hashlib.sha256(state.tobytes()).hexdigest())


if __name__ == "__main__":
    main()
