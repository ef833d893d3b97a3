"""The depthwise causal short convolution that linear layers use as their sense of position: no maximum length.

Masked tokens are taken out before the taps see the sequence and put back, as zeros, after: a pad is no token, so it
neither fills a tap nor moves its neighbours apart. Packed documents stay apart: a tap reaches into no other run of ids.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_linattn.checks import integers, key_mask, require
from jax_linattn.compaction import compact_tokens
from jax_linattn.dtypes import accumulator_dtype
from jax_linattn.forms.tokens import count_runs
from jax_linattn.state import vary_with


def causal_convolution(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    state: Array | None = None,
    mask: Array | None = None,
    segment_ids: Array | None = None,
) -> tuple[Array, Array]:
    """Each channel's last W tokens, weighted: depthwise, causal, and continued from a state.

        y_t = bias + Σ_{j < W} kernel_{W-1-j} ⊙ x_{t-j}

    where t counts tokens that the mask leaves; what precedes the first token is the state, zeros without one. Splitting
    a sequence anywhere and carrying the state changes nothing. Sums are float32 (float64 for float64 inputs).

    Args:
      x: [B, T, D], T >= 0.
      kernel: [W, D]; the last row weighs the token itself.
      bias: [D].
      state: [B, W-1, D] in the dtype of x, the last W-1 tokens so far, from an earlier call or
        `init_convolution_state`; None = zeros.
      mask: bool, True = a real token: [B, T] or [B or 1, 1, 1, T]. A masked token's output is 0; what it holds, NaN
        included, changes nothing, and its gradient is 0.
      segment_ids: int [B, T], runs of equal ids: a tap sees tokens of its own run alone, zeros in place of others. The ids
        of masked tokens count, as in `linear_attention`; a carried state belongs to the first token's run, and the state
        that is returned to the last token's: zeros in place of earlier runs.

    Returns:
      (state after the last real token [B, W-1, D], y [B, T, D]), both in the dtype of x.

    Raises:
      ValueError: naming the argument, what it got and what would be right.

    Example:
      >>> x = jnp.arange(1.0, 5.0).reshape(1, 4, 1)
      >>> _, y = causal_convolution(x, jnp.array([[1.0], [10.0]]))
      >>> y.ravel()
      Array([10., 21., 32., 43.], dtype=float32)
    """
    _check(x, kernel, bias, state)
    batch, length, _ = x.shape
    width = kernel.shape[0]
    mask = key_mask(mask, batch, length)
    runs = None
    if segment_ids is not None and length:
        ids = integers("segment_ids", segment_ids, (batch, length), "[B, T]")
        runs = count_runs(ids, ids[:, 0])
    if state is None:
        state = init_convolution_state(x, width)
    compact = compact_tokens(mask)
    history = jnp.concatenate([state, compact.gather(x)], axis=1)
    if runs is None:
        return compact.last(history, width - 1), compact.restore(_weigh(history, kernel, bias))
    history_runs = jnp.pad(compact.gather(runs), [(0, 0), (width - 1, 0)])  # run 0 is the state's
    y = compact.restore(_weigh(history, kernel, bias, history_runs))
    is_current = compact.last(history_runs, width - 1) == runs[:, -1:]
    return jnp.where(is_current[..., None], compact.last(history, width - 1), 0), y


def init_convolution_state(x: Any, width: int) -> Array:
    """The state before any token: zeros [B, W-1, D] in the dtype of x.

    Args:
      x: [B, D] or [B, T, D], an array or `jax.ShapeDtypeStruct`; of arrays the varying axes of `shard_map` are taken
        over.
      width: W.

    Raises:
      ValueError: on another rank, or a width below 1.
    """
    require(len(x.shape) in (2, 3), f"x must be [B, D] or [B, T, D], got shape {x.shape}")
    require(width >= 1, f"width must be at least 1, got {width}")
    return vary_with(jnp.zeros((x.shape[0], width - 1, x.shape[-1]), x.dtype), x)


def _weigh(history: Array, kernel: Array, bias: Array | None, runs: Array | None = None) -> Array:
    """history [B, W-1+T, D] -> [B, T, D], as W shifted products: a handful of fused additions, forward and backward.

    With runs [B, W-1+T] a product counts where the tap's run is that of the token.
    """
    width = kernel.shape[0]
    length = history.shape[1] - (width - 1)
    dtype = accumulator_dtype(history.dtype)
    inputs, kernel = history.astype(dtype), kernel.astype(dtype)
    y = jnp.zeros((), dtype) if bias is None else bias.astype(dtype)[None, None]
    for tap in range(width):
        seen = inputs[:, tap : tap + length]
        if runs is not None:
            seen = jnp.where((runs[:, tap : tap + length] == runs[:, width - 1 :])[..., None], seen, 0)
        y = y + seen * kernel[None, None, tap]
    return y.astype(history.dtype)


def _check(x, kernel, bias, state) -> None:
    require(
        hasattr(x, "dtype") and np.ndim(x) == 3 and jnp.issubdtype(x.dtype, jnp.floating),
        f"x must be a floating-point array [B, T, D], got {_described(x)}",
    )
    batch, _, dim = x.shape
    require(
        np.ndim(kernel) == 2 and kernel.shape[0] >= 1 and kernel.shape[1] == dim,
        f"kernel must be [W, D] with W >= 1 and D = {dim}, got {_described(kernel)}",
    )
    require(bias is None or np.shape(bias) == (dim,), f"bias must be [D] = ({dim},), got {_described(bias)}")
    want = (batch, kernel.shape[0] - 1, dim)
    require(
        state is None or (np.shape(state) == want and state.dtype == x.dtype),
        f"state must be {x.dtype} [B, W-1, D] = {want}, got {_described(state)}",
    )


def _described(x) -> str:
    return f"{getattr(x, 'dtype', type(x).__name__)} {np.shape(x)}"
