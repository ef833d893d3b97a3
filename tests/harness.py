"""How the tests call jax: float64 for a while, one compiled call for values and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import MAPS, Case, Form, Problem, draw

import jax_linattn
from jax_linattn import LinearAttentionState


def x64(enabled: bool = True):
    """float64 inside this context; older versions of jax have it elsewhere."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    return jax.experimental.enable_x64(enabled)


_compilations: list[str] = []


def _count_compilation(event: str, duration: float, **_):
    del duration
    if event.endswith("backend_compile_duration"):
        _compilations.append(event)


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


def count_compilations(function, *args) -> int:
    """How many programs are compiled while the function runs."""
    before = len(_compilations)
    jax.block_until_ready(function(*args))
    return len(_compilations) - before


def state_of(kv, key_sum) -> LinearAttentionState:
    return LinearAttentionState(kv, key_sum, jnp.zeros(key_sum.shape[:2], key_sum.dtype))


def attend(form: Form, is_causal: bool, feature_map, rule: dict, arguments, hiding: dict):
    """(output, kv, key_sum) of the causal function, (output,) of the other, as the oracle gives them."""
    options = {**form.options(), **rule, **hiding, "feature_map": feature_map}
    query, key, value, *sums = arguments
    if not is_causal:
        return (jax_linattn.linear_attention(query, key, value, **options),)
    state = state_of(*sums) if sums else None
    state, output = jax_linattn.causal_linear_attention(query, key, value, state=state, **options)
    return output, state.kv, state.key_sum


def results_and_gradients(case: Case, form: Form, dtype="float64"):
    """What `cases.expected` gives, from the package: in one compiled function."""
    problem = draw(case, dtype)
    return run(problem, form, case.is_causal, MAPS[case.feature_map][0])


def run(problem: Problem, form: Form, is_causal: bool, feature_map=MAPS["elu_plus_one"][0]):
    """(results, gradients) of a problem."""

    def loss(arguments, hiding, cotangents):
        results = attend(form, is_causal, feature_map, problem.rule, arguments, hiding)
        products = [jnp.sum(y.astype(_wide(y)) * w.astype(_wide(w))) for y, w in zip(results, cotangents, strict=True)]
        return sum(products), results

    arguments, hiding, cotangents = jax.tree.map(jnp.asarray, (problem.arguments, problem.hiding, problem.cotangents))
    (_, results), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arguments, hiding, cotangents)
    return list(results), list(gradients)


def _wide(x):
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def normal(seed: int, *shapes, dtype=np.float32) -> list[np.ndarray]:
    """Standard normal arrays."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]
