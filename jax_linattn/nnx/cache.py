"""Variables that hold a pytree, in old and new Flax."""


def get_value(variable):
    """The value of a Variable that is a pytree."""
    return variable.get_value() if hasattr(type(variable), "get_value") else variable.value


def set_value(variable, value) -> None:
    """Replaces the value of a Variable that is a pytree."""
    if hasattr(type(variable), "set_value"):
        variable.set_value(value)
    else:
        variable.value = value
