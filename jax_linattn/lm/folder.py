"""A run's folder: what lies in it, and whether a run may start, continue or be replaced there.

runs/NAME/config.json     options, as the run was started with
          metrics.jsonl   one JSON object a line: what was measured at a step
          loss.png        the curves
          sample.txt      what the model writes at the end
          checkpoints/    see `checkpoint`
          lock            held by the process that trains there
"""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from jax_linattn.checks import require
from jax_linattn.lm import report

CONFIG, METRICS, PLOT, SAMPLE, CHECKPOINTS = "config.json", "metrics.jsonl", "loss.png", "sample.txt", "checkpoints"
LOCK = "lock"
# Options that may differ when a run goes on. What the corpus holds may not, wherever it lies.
NO_PART_OF_A_RUN = ("overwrite", "keep_checkpoints", "corpus")

Plan = Literal["start", "continue", "replace"]


def run_folder(parent: str | Path, name: str) -> Path:
    """The folder of the run of this name.

    Raises:
      ValueError: if the name is not that of a folder just below the parent.
    """
    require(name not in ("", ".", "..") and Path(name).name == name, f"name must be that of a folder, got {name!r}")
    return Path(parent) / name


def plan(folder: Path, options: dict[str, Any], *, overwrite: bool) -> Plan:
    """What a run with these options does with the folder. Reads only.

    Raises:
      ValueError: if it holds another run, or what is no run, and overwrite is False.
    """
    present = [name for name in (CONFIG, METRICS, PLOT, SAMPLE, CHECKPOINTS) if (folder / name).exists()]
    if not present:
        return "start"
    try:
        different = changes(_stored_options(folder), options)
        finished = is_finished(folder)
    except ValueError as error:
        obstacle = str(error)
    else:
        if not different:
            return "replace" if overwrite and finished else "continue"
        obstacle = f"{folder} holds a run with other options: {'; '.join(different)}"
    if overwrite:
        return "replace"
    raise ValueError(
        f"{obstacle}. Choose another name with --config.name=NAME, remove the folder, or replace what is there "
        f"({', '.join(present)}) with --config.overwrite=True"
    )


def lock(folder: Path) -> FileLock:
    """A lock on the folder, made if need be, held until it is released or the process ends.

    Raises:
      ValueError: if another run holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / LOCK)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{folder} is being trained in by another process: wait for it, or choose another name") from None
    return held


def is_finished(folder: Path) -> bool:
    return any("summary" in line for line in report.read_metrics(folder / METRICS))


def carry_out(plan: Plan, folder: Path, options: dict[str, Any]) -> None:
    """Makes the folder ready. Only what a run leaves is ever removed."""
    if plan == "continue":
        return
    for name in (CONFIG, METRICS, PLOT, SAMPLE, CHECKPOINTS):  # options first: what is left then is nobody's run
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    report.write_whole(folder / CONFIG, json.dumps(options, indent=2) + "\n")


def _stored_options(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    require(path.exists(), f"{folder} holds files of a run, but no {CONFIG}")
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    require(isinstance(options, dict), f"{path} is damaged (no options in it)")
    return options


def changes(earlier: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """What differs, as "option: earlier → now"."""
    before, now = flat(earlier), flat(json.loads(json.dumps(options)))
    names = sorted((before | now).keys() - set(NO_PART_OF_A_RUN))
    return [
        f"{name}: {before.get(name, '(none)')!r} → {now.get(name, '(none)')!r}"
        for name in names
        if name not in before or name not in now or before[name] != now[name]
    ]


def flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"width": 1}} as {"model.width": 1}."""
    result = {}
    for name, value in options.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result
