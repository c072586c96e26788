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
