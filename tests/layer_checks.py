"""What every named layer is held to. A test file has a table of rows, and calls each check with a row's `make`.

`make(**options)` builds the layer, features FEATURES, with `options` such as dtype passed on to its constructor; it must
draw its parameters so that none is at a point where it has no influence. `reference(params, x)` is the layer's paper in
NumPy float64: params are the layer's own arrays as a nested dict, x [T, FEATURES] is one sequence without pads, and it
returns [T, FEATURES].
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import x64
from tolerance import assert_close, relative_rms

from jax_linattn.nnx.cache import get_value

FEATURES, HEADS, LENGTH = 8, 2, 9


def inputs(*leading: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((*leading, FEATURES)).astype(dtype)


def quick_normal(key, shape, dtype=np.float32):
    """A normal initialiser of about fan-in size that compiles nothing; what it gives depends on the key."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jnp.asarray(rng.standard_normal(shape) * 0.4, dtype)


def pure(state) -> dict:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state))


def params_of(module) -> dict:
    """Its parameters as a nested dict of float64 arrays, named as the attributes are."""
    return jax.tree.map(lambda x: x.astype(np.float64), pure(nnx.state(module, nnx.Param)))


def call(module, x, *, decode: bool = False, **arrays):
    """module(x, …) in one compiled function; what the module keeps moves on."""
    graphdef, state = nnx.split(module)
    state, output = _call(graphdef, decode, state, jnp.asarray(x), jax.tree.map(jnp.asarray, arrays))
    nnx.update(module, state)
    return np.asarray(output)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(graphdef, decode, state, x, arrays):
    module = nnx.merge(graphdef, state)
    output = module(x, decode=decode, **arrays)
    return nnx.state(module), output


def check_values(make, reference) -> None:
    """The output is the paper's, in float32 and, to find wrong algebra, in float64."""
    module, x = make(), inputs(2, LENGTH)
    output = call(module, x)
    assert output.dtype == np.float32
    expected = np.stack([reference(params_of(module), row.astype(np.float64)) for row in x])
    error = relative_rms(output, expected)
    assert error <= 1e-5, f"float32: relative RMS error {error:.3g}"
    with x64():
        module, x = make(dtype=jnp.float64, param_dtype=jnp.float64), inputs(1, LENGTH, dtype=np.float64)
        error = relative_rms(call(module, x), reference(params_of(module), x[0])[None])
    assert error <= 1e-11, f"float64: relative RMS error {error:.3g}"


def check_decoding(make) -> None:
    """A prompt in one call and then single tokens give the whole; so do left-padded prompts, and an emptied cache."""
    module, x = make(), inputs(2, LENGTH)
    whole = call(module, x)
    for pads in (0, 3):
        prompt, mask = x[:, :5].copy(), np.ones((2, 5), bool)
        if pads:  # the second row is shorter by its pads, and its tokens stand at the right
            mask[1, :pads] = False
            prompt[1] = np.concatenate([np.full((pads, FEATURES), np.nan, np.float32), x[1, : 5 - pads]])
        module.init_cache(x.shape)
        outputs = [call(module, prompt, mask=mask, decode=True)]
        rows = [x[:, t : t + 1].copy() for t in range(5, LENGTH)]
        for t, token in enumerate(rows, start=5):
            token[1] = x[1, t - pads : t - pads + 1]
            outputs.append(call(module, token, decode=True))
        output = np.concatenate(outputs, axis=1)
        assert_close(output[0], whole[0], what=f"decoding, {pads} pads, first row")
        assert_close(output[1, pads:], whole[1, : LENGTH - pads], what=f"decoding, {pads} pads, second row")
        assert not np.any(output[1, :pads])


def check_pads(make) -> None:
    """Pads of NaN on the left, in the middle and on the right: outputs are 0 there and else those of the row alone."""
    module, x = make(), inputs(2, LENGTH)
    alone = call(module, x)
    for mask in _masks():
        output = call(module, _with_pads(x, mask), mask=mask)
        assert_close(output[mask], alone.reshape(-1, FEATURES), what="pads")
        assert not np.any(output[~mask])


def _masks() -> list[np.ndarray]:
    """[2, LENGTH + 3] with LENGTH tokens a row: on the left in one row and in the middle of the other; on the right."""
    first, second = np.ones((2, LENGTH + 3), bool), np.ones((2, LENGTH + 3), bool)
    first[0, :3] = first[1, [2, 4, 5]] = False
    second[:, -3:] = False
    return [first, second]


def _with_pads(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    padded = np.full((*mask.shape, FEATURES), np.nan, x.dtype)
    padded[mask] = x.reshape(-1, FEATURES)
    return padded


def check_segments(make) -> None:
    """A packed row gives what its documents give apart."""
    module, x = make(), inputs(2, LENGTH)
    apart = call(module, x)
    packed = call(module, x.reshape(1, -1, FEATURES), segment_ids=np.repeat([[7, 3]], LENGTH, axis=1))
    assert_close(packed.reshape(apart.shape), apart, what="segments")


def check_empty(make) -> None:
    """No tokens, or no rows, give no output, and are no error."""
    module = make()
    for shape in [(2, 0, FEATURES), (0, 3, FEATURES)]:
        assert jax.eval_shape(module, jnp.zeros(shape, jnp.float32)).shape == shape


def check_gradients(make) -> None:
    """Finite, not zero for any parameter, and the same with pads of NaN between tokens as with pads after them."""
    module, x, (between, after) = make(), inputs(2, LENGTH), _masks()
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    @jax.jit
    @jax.grad
    def gradients(params, x, mask):
        output = nnx.merge(graphdef, params, rest)(x, mask=mask)
        return jnp.sum(jnp.sin(jnp.where(mask[..., None], output, 0)))

    alone, padded = (
        _flat(gradients(params, jnp.asarray(_with_pads(x, mask)), jnp.asarray(mask))) for mask in (after, between)
    )
    for name, gradient in alone.items():
        assert np.all(np.isfinite(gradient)), f"gradient of {name} is not finite"
        assert np.any(np.abs(gradient) > 1e-7), f"gradient of {name} is zero"
        error = relative_rms(padded[name], gradient)
        assert error <= 1e-5, f"gradient of {name} with pads: relative RMS error {error:.3g}"


def _flat(state) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(pure(state))}


def check_bfloat16(make) -> None:
    """It computes in bfloat16, near the float32 result, and keeps its sums in float32."""
    x = inputs(2, LENGTH)
    exact, module = call(make(), x), make(dtype=jnp.bfloat16)
    output = call(module, x.astype(jnp.bfloat16))
    assert output.dtype == jnp.bfloat16
    error = relative_rms(output, exact)
    assert error <= 0.03, f"bfloat16: relative RMS error {error:.3g}"
    module.init_cache(x.shape, jnp.bfloat16)
    assert_close(call(module, x[:, :4].astype(jnp.bfloat16), decode=True), output[:, :4], what="decoding in bfloat16")
    if getattr(module, "cached_state", None) is not None:
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(get_value(module.cached_state)))
