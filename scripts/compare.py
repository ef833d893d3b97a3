"""How finished runs ended, in a table: python scripts/compare.py runs/small runs/softmax"""

import argparse
import sys
from pathlib import Path

from jax_linattn.lm.folder import METRICS
from jax_linattn.lm.report import comparison, read_metrics, read_summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="folders of runs")
    folders = parser.parse_args().runs
    try:
        summaries = {folder: read_summary(read_metrics(Path(folder) / METRICS)) for folder in folders}
    except ValueError as error:
        sys.exit(f"error: {error}")
    unfinished = [folder for folder, summary in summaries.items() if summary is None]
    if unfinished:
        sys.exit(f"error: no finished run in {', '.join(unfinished)}")
    print(comparison([summary for summary in summaries.values() if summary is not None]))


if __name__ == "__main__":
    main()
