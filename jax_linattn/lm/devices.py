"""All devices that JAX sees as one mesh, the batch split over them; one process or several.

With several processes (`jax.distributed.initialize`) all run the same program on the same folder: each reads its share of
a batch, and the first alone writes what is not a checkpoint.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_linattn.checks import require

AXIS = "data"


def mesh_of(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of one axis; None = of all devices, those of other processes included."""
    return Mesh(np.asarray(jax.devices() if devices is None else devices), (AXIS,))


def is_first_process() -> bool:
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def agree(options: Any, problem: ValueError | None) -> None:
    """Goes on in all processes or in none.

    Args:
      options: plain JSON, which must be the same in all of them.
      problem: why this one cannot go on, or None.

    Raises:
      ValueError: the problem; in a process that has none, that another has one, or that the options differ.
    """
    if jax.process_count() > 1:
        digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).digest()
        row = np.frombuffer(bytes([problem is not None]) + digest, np.uint8)
        rows = multihost_utils.process_allgather(row)
        failed = [number for number, row in enumerate(rows) if row[0]]
        if problem is None:
            require(not failed, f"process(es) {failed} cannot go on, and say why")
            require(
                all(np.array_equal(row, other) for other in rows),
                "processes must have the same options and the same text; they differ: start all by one command",
            )
    if problem is not None:
        raise problem


def check_batch_size(mesh: Mesh, batch_size: int, accumulation: int) -> None:
    """Raises ValueError unless every device has the same number of sequences in every part of a batch."""
    require(
        batch_size % (mesh.size * accumulation) == 0,
        f"batch_size must be a multiple of the number of devices times accumulation, {mesh.size} * {accumulation}, "
        f"got {batch_size}",
    )


def split_batch(mesh: Mesh, batch: Any) -> Any:
    """Arrays [B / processes, ...], one share a process, as arrays [B, ...] split over the devices."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda share: jax.make_array_from_process_local_data(sharding, share), batch)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(AXIS))


def placement(mesh: Mesh, tree: Any, *, shard: bool) -> Any:
    """The sharding of each array: a copy on every device, or with `shard` its longest axis that they divide split."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _spec(leaf.shape, mesh.size) if shard else PartitionSpec()), tree)


def _spec(shape: tuple[int, ...], parts: int) -> PartitionSpec:
    divisible = [axis for axis, size in enumerate(shape) if size and size % parts == 0]
    if not divisible:
        return PartitionSpec()
    axis = max(divisible, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * axis, AXIS)


def gather(mesh: Mesh, tree: Any) -> Any:
    """A whole copy of arrays, on the first device of this process. All processes call it together."""
    whole = NamedSharding(mesh, PartitionSpec())
    copies = jax.jit(lambda arrays: arrays, out_shardings=whole)(tree)
    return jax.tree.map(_local_copy, copies)


def _local_copy(array: Array) -> Array:
    return array.addressable_data(0)
