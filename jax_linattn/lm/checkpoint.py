"""Checkpoints of a run: checkpoints/STEP/{params, rest, meta} in its folder, the newest few.

One stands by itself: `params` are the model's, `rest` is what else training needs, and `meta` holds the options, the
vocabulary, the corpus' fingerprint, the position in the data and what was measured since the last line of metrics. orbax
writes it beside its place and renames it when complete, so that there is never half a one.
"""

import contextlib
import gc
import itertools
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax import Array, lax

from jax_linattn.checks import require
from jax_linattn.lm.data import Vocabulary
from jax_linattn.lm.folder import CHECKPOINTS
from jax_linattn.lm.model import Decoder, ModelConfig
from jax_linattn.lm.step import TrainState

FORMAT = "jax_linattn.lm 1"  # what `meta` says of itself; another number, another layout


def open_checkpoints(folder: Path, *, keep: int | None = None) -> ocp.CheckpointManager:
    """The checkpoints of a run; use it in a `with`. With `keep`, to `save` into and keep so many; else to read alone."""
    writes = keep is not None
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=writes,
        read_only=not writes,
        cleanup_tmp_directories=writes,
        enable_async_checkpointing=False,
    )
    return ocp.CheckpointManager((folder / CHECKPOINTS).absolute(), options=options)


def save(manager: ocp.CheckpointManager, state: TrainState, meta: dict[str, Any]) -> None:
    """Writes a checkpoint of the state. `meta` is plain JSON."""
    params, rest = _parts(state)
    step = int(state.step)
    about = {"format": FORMAT, "step": step, "checksum": {"params": checksum(params), "rest": checksum(rest)}}
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(params),
        rest=ocp.args.StandardSave(rest),
        meta=ocp.args.JsonSave(about | meta),
    )
    require(manager.save(step, args=items), f"{manager.directory / str(step)} could not be written: is it there already?")


def restore(manager: ocp.CheckpointManager, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """(state, meta) of a step.

    Args:
      like: a state of the same structure, shapes and dtypes; what is restored is placed on the devices as it is.

    Raises:
      ValueError: if the checkpoint is damaged, or none of this program's.
    """
    meta = read_meta(manager, step)
    params, rest = (_read(manager, step, name, part) for name, part in zip(("params", "rest"), _parts(like), strict=True))
    _check(manager, step, meta, params=params, rest=rest)
    return TrainState(params=params, **rest), meta


def restore_newest(folder: Path, like: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
    """What `restore` gives of a run's newest checkpoint; None if there is none."""
    if not (folder / CHECKPOINTS).is_dir():
        return None
    with open_checkpoints(folder) as manager:
        step = manager.latest_step()
        return None if step is None else restore(manager, step, like)


def read_meta(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    meta = _restore_item(manager, step, "meta", ocp.args.JsonRestore())
    found = meta.get("format") if isinstance(meta, dict) else None
    require(found == FORMAT, f"{manager.directory / str(step)} is no checkpoint of {FORMAT!r}: it says {found!r}")
    return meta


def load_model(path: str | Path) -> tuple[Decoder, Vocabulary]:
    """The model of a checkpoint, and the characters that it knows.

    Args:
      path: a run's folder, such as runs/small, for its newest checkpoint; or a checkpoint's, runs/small/checkpoints/1000.

    Raises:
      ValueError: if there is no checkpoint, or it is damaged.
    """
    path = Path(path).resolve()
    chosen = int(path.name) if path.parent.name == CHECKPOINTS and path.name.isdecimal() else None
    folder = path if chosen is None else path.parent.parent
    require(
        (folder / CHECKPOINTS).is_dir(),
        f"{path} holds no checkpoints; give the folder of a run, as runs/NAME, or of one, as runs/NAME/{CHECKPOINTS}/STEP",
    )
    with open_checkpoints(folder) as manager:
        step = manager.latest_step() if chosen is None else chosen
        steps = manager.all_steps()
        require(step in steps, f"{folder / CHECKPOINTS} holds no complete checkpoint {step or ''}: there are {steps}")
        meta = read_meta(manager, step)
        vocabulary = Vocabulary(meta["vocabulary"])
        config = _model_config(manager.directory / str(step), vocabulary, meta["config"]["model"])
        abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
        graphdef, params = nnx.split(abstract, nnx.Param)
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), nnx.to_pure_dict(params))
        params = _read(manager, step, "params", like)
        _check(manager, step, meta, params=params)
    on_no_device_in_particular = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)
    return nnx.merge(graphdef, nnx.State(on_no_device_in_particular)), vocabulary


def _model_config(where: Any, vocabulary: Vocabulary, options: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(vocabulary_size=vocabulary.size, **options)
    except TypeError as error:
        raise ValueError(f"{where} is of a model with other options than this version has ({error})") from error


def all_finite(tree: Any) -> bool:
    """Whether no float in any array is NaN or infinite."""
    return bool(_all_finite(tree))


@jax.jit
def _all_finite(tree: Any) -> Array:
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()


def checksum(tree: Any) -> int:
    """A number of the bits of all arrays, 32-bit words weighted by their place; the same on any devices."""
    return int(_checksum(tree))


@jax.jit
def _checksum(tree: Any) -> Array:
    total = jnp.zeros((), jnp.uint32)
    weights = itertools.count(1, 2)
    for leaf in jax.tree.leaves(tree):
        if leaf.size:
            total += jnp.uint32(next(weights)) * _weighted_words(leaf)
    return total


def _weighted_words(leaf: Array) -> Array:
    """Σ_i (2 i₁ + 1) · … · word_i mod 2³²: odd factors, so that no flipped bit is lost."""
    words = lax.bitcast_convert_type(leaf, jnp.uint32)
    for axis in range(words.ndim):
        words = words * (2 * lax.broadcasted_iota(jnp.uint32, words.shape, axis) + 1)
    return jnp.sum(words, dtype=jnp.uint32)


def _parts(state: TrainState) -> tuple[Any, dict[str, Any]]:
    rest = state._asdict()
    return rest.pop("params"), rest


def _read(manager: ocp.CheckpointManager, step: int, name: str, like: Any) -> Any:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    return _restore_item(manager, step, name, ocp.args.StandardRestore(abstract))


def _restore_item(manager: ocp.CheckpointManager, step: int, name: str, args: Any) -> Any:
    with _without_echoes():
        try:
            return manager.restore(step, args=ocp.args.Composite(**{name: args}))[name]
        except (MemoryError, PermissionError):
            raise
        except Exception as error:  # whatever orbax makes of a damaged file
            first_line = next(iter(str(error).splitlines()), "")
            reason = f"{type(error).__name__}: {first_line[:200]}"
        gc.collect()  # so that what is dropped says so now
    raise _unreadable(manager, step, reason)


@contextlib.contextmanager
def _without_echoes() -> Iterator[None]:
    """When orbax fails, it drops what else it had begun to read, and each piece would say so on its own, at length."""
    logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
    was_disabled = logger.disabled
    logger.disabled, sys.unraisablehook = True, lambda _: None
    try:
        yield
    finally:
        logger.disabled, sys.unraisablehook = was_disabled, hook


def _check(manager: ocp.CheckpointManager, step: int, meta: dict[str, Any], **parts: Any) -> None:
    for name, part in parts.items():
        found, expected = checksum(part), meta["checksum"][name]
        if found != expected:
            raise _unreadable(manager, step, f"checksum of {name} is {found}, not {expected}")


def _unreadable(manager: ocp.CheckpointManager, step: int, reason: str) -> ValueError:
    earlier = [other for other in manager.all_steps() if other < step]
    remedy = f"from step {max(earlier)}" if earlier else "from the beginning"
    return ValueError(
        f"{manager.directory / str(step)} cannot be read as a checkpoint of this model ({reason}); "
        f"to go on {remedy}, remove that folder"
    )
