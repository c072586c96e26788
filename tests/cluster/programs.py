"""Programs that the tests run as jobs. Each one checks itself and prints what does not depend on time or place."""

# Everything of a process tree at once: a daemon (double fork, setsid), a pool, a pipe, children in the
# background, threads. argv: seconds to run. Every part counts; the daemon also writes its count to a file.
TREE = r'''
import multiprocessing, os, subprocess, sys, threading, time

def daemonise(path, until):
    """Double fork and setsid: the daemon's parent is gone, it is in nobody's session."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            count = 0
            while not os.path.exists(until):
                count += 1
                with open(path + ".new", "w") as file:
                    file.write(f"{os.getpid()} {count}\n")
                os.rename(path + ".new", path)
                time.sleep(0.02)
            with open(path + ".end", "w") as file:
                file.write(f"{os.getpid()} {count}\n")
            os._exit(0)
        os._exit(0)
    os.wait()

def work(n):
    time.sleep(0.01)
    return n * n

def main():
    stop, seconds = sys.argv[1], 300
    daemonise("daemon", stop)
    counts = [0] * 4
    def thread(i):
        while not os.path.exists(stop):
            counts[i] += 1
            time.sleep(0.02)
    threads = [threading.Thread(target=thread, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    total, rounds = 0, 0
    with multiprocessing.get_context("fork").Pool(2) as pool:
        while not os.path.exists(stop):
            total += sum(pool.map(work, range(10)))
            child.stdin.write(f"{rounds}\n")
            assert child.stdout.readline() == f"{rounds}\n"
            rounds += 1
            print(f"round {rounds}", flush=True)
    child.stdin.close()
    assert child.wait() == 0
    for t in threads:
        t.join()
    assert total == rounds * 285 and all(c > 10 for c in counts), (total, rounds, counts)
    print("threads, pool and pipe are right")

main()
'''

# Counts in bash until the file NAME.stop is there: a line for each number, and each number also into a file that
# is opened anew each time, so that a tree that ran twice would show.
COUNT = r"""#!/bin/bash
for ((i = 1; ; i++)); do
    echo "line $i"
    echo "$i" >> {name}.log
    [ -e {name}.stop ] && break
    sleep {pause}
done
echo "the last of $i lines"
exit {code}
"""


def count(name: str, pause: float = 0.1, code: int = 3) -> str:
    """A script that counts until it is told to stop."""
    text = COUNT
    for key, value in {"name": name, "pause": pause, "code": code}.items():
        text = text.replace("{" + key + "}", str(value))
    return text


# Two ranks of a step on two nodes that send each other blocks and check every byte, until the file NAME.stop is there.
# Each turn is a line of output and a line in a file of the rank that stays open. argv: NAME, host of rank 0.
PAIR = r"""
import os, socket, struct, sys, time

name, host, rank = sys.argv[1], sys.argv[2], int(os.environ["SLURM_PROCID"])
log = open(f"{name}.{rank}", "a", buffering=1)
END = 0

def block(turn):
    return struct.pack("<Q", turn) * 8192

def receive(conn, *turns):
    data = b""
    while len(data) < 65536:
        part = conn.recv(65536 - len(data))
        if not part:
            sys.exit(f"rank {rank}: the connection ended")
        data += part
    for turn in turns:
        if data == block(turn):
            return turn
    sys.exit(f"rank {rank}: wrong bytes, wanted {turns}, got {struct.unpack('<Q', data[:8])}")

if rank == 0:
    with socket.create_server(("", 5800)) as server:
        conn, _ = server.accept()
else:
    while True:
        try:
            conn = socket.create_connection((host, 5800))
            break
        except OSError:
            time.sleep(0.05)
turn = 0
while True:
    turn += 1
    if rank == 0:
        last = os.path.exists(f"{name}.stop")
        conn.sendall(block(END if last else turn))
        receive(conn, END if last else turn)
    else:
        last = receive(conn, turn, END) == END
        conn.sendall(block(END if last else turn))
    if last:
        break
    log.write(f"{turn}\n")
    print(f"rank {rank} turn {turn}", flush=True)
    if rank == 0:
        time.sleep(0.1)
print(f"rank {rank} good")
"""


def pair(name: str) -> str:
    """A batch script with a step of PAIR (pair.py) and one after it; exit code 3."""
    return f"srun -n 2 -N 2 python3 pair.py {name} $(hostname)\necho status $?\nsrun -n 2 -N 2 echo later\nexit 3\n"
