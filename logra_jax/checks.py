"""Checks of hyperparameters when a transform is made."""

from collections.abc import Callable
from typing import Any

import jax


def require(value: Any, rule: Callable[[Any], Any], message: str) -> None:
  """Raises unless a number obeys its rule; NaN obeys none.

  A traced number, as from `optax.inject_hyperparams` under jit, has no value
  to check yet and passes.

  Args:
    value: a hyperparameter.
    rule: from the number to a truth value.
    message: what is wrong with it and what to do.

  Raises:
    ValueError: with the message.

  Example:
    >>> from logra_jax import checks
    >>> checks.require(0.5, lambda b2: 0.0 <= b2 < 1.0, "b2 0.5 is no decay")
  """
  if not isinstance(value, jax.core.Tracer) and not rule(value):
    raise ValueError(message)
