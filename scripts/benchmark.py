"""Time and memory of linear attention beside what one would use instead, on this machine.

    python scripts/benchmark.py                  everything, half an hour or so on 2 cores; then the plots
    python scripts/benchmark.py shapes decays    some of the comparisons
    python scripts/benchmark.py --plot-only      the plots again, from the figures that are there

Each comparison is a process of its own. Its contestants are checked against the formula, compiled, and timed in turn, and
the least time of several rounds counts, so that noise hits all alike: read ratios. Figures go to OUT/NAME.jsonl, one
line each; the first tells the machine and the versions. Peers that are not installed are named (`make benchmark` makes an
environment with all of them).
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
from benchmarks import plots
from benchmarks.comparisons import COMPARISONS
from benchmarks.measure import Machine

PACKAGES = ("jax", "flax", "mamba2-jax", "jax-linear-attention", "mlstm-kernels", "torch")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def run(name: str, folder: Path, rounds: int) -> None:
    """One comparison in this process."""
    machine = Machine.measure()
    print(f"{name}: {COMPARISONS[name].__doc__}")
    print(f"{', '.join(f'{package} {version}' for package, version in versions().items())}; {jax.default_backend()}")
    print(f"the machine: {machine.flops / 1e9:.0f} GFLOP/s in a float32 product, {machine.bytes / 1e9:.1f} GB/s in a copy")
    with (folder / f"{name}.jsonl").open("w") as file:
        first = {"comparison": name, "versions": versions(), "flops": machine.flops, "bytes": machine.bytes}
        for row in itertools.chain([first], COMPARISONS[name](machine, rounds)):
            print(json.dumps(row), file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", nargs="*", metavar="COMPARISON", help=f"of {', '.join(COMPARISONS)}; none = all")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder of figures and plots")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plot-only", action="store_true", help="measure nothing")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.comparisons:
        if name not in COMPARISONS:
            parser.error(f"no comparison is named {name!r}: choose from {', '.join(COMPARISONS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.in_process:
        return run(options.comparisons[0], options.out, options.rounds)
    names = [] if options.plot_only else options.comparisons or list(COMPARISONS)
    for name in names:
        command = [sys.executable, __file__, name, "--in-process", f"--out={options.out}", f"--rounds={options.rounds}"]
        subprocess.run(command, check=True, env=os.environ | {"OMP_WAIT_POLICY": "passive"})  # torch's threads do not spin
        print()
    for path in plots.draw(options.out):
        print(path)


if __name__ == "__main__":
    main()
