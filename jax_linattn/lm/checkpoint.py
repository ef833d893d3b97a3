"""A run's folder, and the checkpoints in it.

    runs/NAME/config.json     options, as the run was started with
              metrics.jsonl   one JSON object a line: what was measured at a step
              loss.png        the curves
              sample.txt      what the model writes at the end
              checkpoints/STEP/{params, optimizer, meta}

A checkpoint stands by itself: `meta` holds the options, the vocabulary, the step and the position in the data. orbax
writes it beside its place and renames it when complete, so that there is never half a one.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from jax_linattn.checks import require
from jax_linattn.lm.data import Vocabulary
from jax_linattn.lm.model import Decoder, ModelConfig

CONFIG, METRICS, PLOT, SAMPLE, CHECKPOINTS = "config.json", "metrics.jsonl", "loss.png", "sample.txt", "checkpoints"


def run_folder(parent: str | Path, name: str) -> Path:
    """The folder of the run of this name.

    Raises:
      ValueError: if the name is not that of a folder just below the parent.
    """
    require(name not in ("", ".", "..") and Path(name).name == name, f"name must be that of a folder, got {name!r}")
    return Path(parent) / name


def claim_folder(folder: Path, *, overwrite: bool) -> None:
    """Makes the folder, without an earlier run in it.

    Raises:
      ValueError: if it holds one and overwrite is False. Only what a run leaves is ever removed.
    """
    present = [name for name in (CONFIG, METRICS, PLOT, SAMPLE, CHECKPOINTS) if (folder / name).exists()]
    require(
        overwrite or not present,
        f"{folder} already holds a {'finished' if SAMPLE in present else 'started'} run ({', '.join(present)}): choose "
        "another name with --config.name=NAME, remove the folder, or replace the run with --config.overwrite=True",
    )
    for name in present:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    folder.mkdir(parents=True, exist_ok=True)


def open_checkpoints(folder: Path, *, keep: int = 2) -> ocp.CheckpointManager:
    """The last `keep` checkpoints of a run; use it in a `with`, and `save` to add one."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
    return ocp.CheckpointManager((folder / CHECKPOINTS).absolute(), options=options)


def save(manager: ocp.CheckpointManager, step: int, *, params, opt_state, meta: dict[str, Any]) -> None:
    """Writes a checkpoint. `meta` is plain JSON: {"config", "vocabulary", "data"}."""
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(params),
        optimizer=ocp.args.StandardSave(opt_state),
        meta=ocp.args.JsonSave({"step": step, **meta}),
    )
    manager.save(step, args=items)


def restore(manager: ocp.CheckpointManager, step: int, *, params, opt_state) -> tuple[Any, Any, dict[str, Any]]:
    """(params, opt_state, meta) of a step; params and opt_state say what they look like, as arrays or shapes."""
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, opt_state))
    items = ocp.args.Composite(
        params=ocp.args.StandardRestore(abstract[0]),
        optimizer=ocp.args.StandardRestore(abstract[1]),
        meta=ocp.args.JsonRestore(),
    )
    restored = manager.restore(step, args=items)
    return restored["params"], restored["optimizer"], restored["meta"]


def load_model(folder: str | Path) -> tuple[Decoder, Vocabulary]:
    """The model of a run's newest checkpoint, and the characters that it knows.

    Args:
      folder: the run's, such as runs/small.

    Raises:
      ValueError: if there is no checkpoint.
    """
    folder = Path(folder)
    require((folder / CHECKPOINTS).is_dir(), f"{folder} holds no checkpoints; give the folder of a run, as runs/NAME")
    with open_checkpoints(folder) as manager:
        step = manager.latest_step()
        require(step is not None, f"{folder / CHECKPOINTS} holds no complete checkpoint")
        meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        vocabulary = Vocabulary(meta["vocabulary"])
        config = ModelConfig(vocabulary_size=vocabulary.size, **meta["config"]["model"])
        abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
        graphdef, params = nnx.split(abstract, nnx.Param)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(params))
        args = ocp.args.Composite(params=ocp.args.StandardRestore(shapes))
        params = manager.restore(step, args=args)["params"]
    return nnx.merge(graphdef, nnx.State(params)), vocabulary
