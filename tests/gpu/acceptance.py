"""Run the cases on this machine, one after another, and print a table and JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpucr_hpc import log
from tests.gpu import base, cost, failures, fakes, nccl, single, smoke, speed, two
from tests.gpu.rig import install
from tests.gpu.speed import THP

__all__ = ["cost", "failures", "fakes", "nccl", "single", "speed", "two"]  # their cases are registered by the import


def in_own_mounts(argv: list[str]) -> None:
    """Run again with a private /run on tmpfs, where CRIU keeps what it has learned of the kernel."""
    if os.environ.get("GPUCR_ACCEPTANCE_INSIDE"):
        return
    script = 'mkdir -p /run && mount -t tmpfs tmpfs /run && exec "$0" -m tests.gpu.acceptance "$@"'
    env = dict(os.environ) | {"GPUCR_ACCEPTANCE_INSIDE": "1"}
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, sys.executable, *argv], env=env, check=False)
    raise SystemExit(done.returncode)


async def one(name: str, chosen: base.Case, args: argparse.Namespace, ends: float) -> dict[str, object]:
    """Run a case and say how it went; nothing of it is left behind."""
    result: dict[str, object] = {"case": name, "result": "no time", "seconds": 0}
    start = time.monotonic()
    if ends - start < 20:
        return result
    place = base.Place(Path(args.base), args.criu, name)
    place.cuda(stop_threads=not args.let_threads_run)
    try:
        async with asyncio.timeout(min(chosen.limit_s, ends - start)):
            result["facts"] = await chosen.work(place, args)
        result["result"] = "ok"
    except Exception as error:
        result["result"] = "FAILED"
        result["why"] = f"{type(error).__name__}: {error}"[:1500]
        if args.verbose:
            traceback.print_exc()
    finally:
        result["seconds"] = round(time.monotonic() - start, 1)
        await place.close()
    print(f"[{result['seconds']!s:>6} s] {name}: {result['result']} {result.get('why', '')}", flush=True)
    print("   ", json.dumps(result.get("facts")), flush=True)
    return result


async def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Cases that may run beside others first, all at once; then the others one by one."""
    ends = time.monotonic() + args.limit
    gpus = base.gpu_count() if not args.fake else 0
    wanted = {
        name: chosen
        for name, chosen in base.CASES.items()
        if (not args.only or any(part in name for part in args.only.split(",")))
        and not any(part in name for part in args.skip.split(",") if part)
        and (chosen.gpus == 0) == args.fake
        and chosen.gpus <= gpus
    }
    beside = [one(name, chosen, args, ends) for name, chosen in wanted.items() if chosen.beside]
    results = list(await asyncio.gather(*beside))
    for name, chosen in wanted.items():
        if not chosen.beside:
            results.append(await one(name, chosen, args, ends))
    return results


@contextmanager
def huge_pages(wanted: bool) -> Iterator[None]:
    """Transparent huge pages for all memory of this machine, as long as it lasts."""
    if not wanted:
        yield
        return
    kept = THP.read_text().split("[")[1].split("]")[0]
    THP.write_text("always")
    try:
        yield
    finally:
        THP.write_text(kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--criu", default="criu")
    parser.add_argument("--tools", default="", help="folder made by scripts/gpu_bundle, to be installed first")
    parser.add_argument("--base", default="/var/tmp/gpucr-acceptance", help="jobs and store; not below /tmp")
    parser.add_argument("--gib", type=float, default=20.0, help="GPU memory of the large case")
    parser.add_argument("--rounds", type=int, default=10, help="moves of the distributed job")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds for all")
    parser.add_argument("--only", default="", help="parts of names, with commas")
    parser.add_argument("--skip", default="", help="parts of names, with commas")
    parser.add_argument("--fake", action="store_true", help="the cases that need no card")
    parser.add_argument("--smoke", action="store_true", help="say first what the machine has")
    parser.add_argument("--huge-pages", action="store_true", help="transparent huge pages `always`, set back after")
    parser.add_argument("--let-threads-run", action="store_true", help="without cuda.stop_threads")
    parser.add_argument("--verbose", action="store_true", help="tracebacks")
    parser.add_argument("--log", default="warning", help="level of what the agent's code says on the way")
    parser.add_argument("--json", default="", help="write the results there, too")
    args = parser.parse_args()
    in_own_mounts(sys.argv[1:])
    log.setup(args.log)
    if args.tools:
        install(Path(args.tools))
    subprocess.run([args.criu, "check"], check=False, capture_output=True)
    shutil.rmtree(args.base, ignore_errors=True)
    Path(args.base).mkdir(parents=True)
    if args.smoke:
        smoke.main(args.criu, 0.5)
    with huge_pages(args.huge_pages):
        results = asyncio.run(run(args))
    print()
    width = max((len(str(r["case"])) for r in results), default=4)
    for result in results:
        print(f"{result['case']!s:<{width}}  {result['result']!s:<8} {result['seconds']!s:>6} s", end="")
        print(f"  {result.get('why', '')!s:.90}")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    return 0 if all(r["result"] == "ok" for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
