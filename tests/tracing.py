"""Questions about the program that jax makes of a function."""

import math

import jax


def equations(jaxpr):
    """All equations, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(parameter):
                yield from equations(getattr(parameter, "jaxpr", parameter))


def _is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def program_size(function, *args) -> int:
    """The number of equations."""
    return sum(1 for _ in equations(jax.make_jaxpr(function)(*args).jaxpr))


def largest_array(function, *args) -> int:
    """The number of elements of the largest array in between."""
    program = jax.make_jaxpr(function)(*args).jaxpr
    return max(math.prod(variable.aval.shape) for equation in equations(program) for variable in equation.outvars)
