"""What a new basis does to the moments that were kept in the old one.

Moments are known by the name of their field in the transform's state, as optax
names them. A count beside moments is their bias-correction count and goes with
them: resetting moments alone makes the next step 3.2 or 0.1 times too large.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

MODES = ("keep", "reset", "rotate")
FIRST_MOMENTS = ("mu", "trace")
SECOND_MOMENTS = ("nu",)
# Per output unit, hence independent of the basis; see `row_adam`.
UNAFFECTED = ("nu_per_output",)
# Arrays of a transform's own, such as Muon's Newton-Schulz coefficients.
NOT_MOMENTS = ("ns_coeffs",)


def check(state: Any, sketches: Any, mode: str, refresh_every: int) -> None:
  """Refuses a state that `mode` cannot treat; warns of a known bad pair.

  Args:
    state: the inner transform's state on sketched leaves.
    sketches: the tree of (empty) sketches it was made from.
    mode: "keep", "reset" or "rotate".
    refresh_every: updates until a refresh.

  Raises:
    ValueError: naming the state field and the remedy.
  """
  structure: Any = _structure(sketches)
  if mode == "keep" or not jax.tree.leaves(sketches):
    return
  known = FIRST_MOMENTS + SECOND_MOMENTS + UNAFFECTED
  fields = list(_fields(state))
  for owner, name, value in fields:
    arrays = jax.tree.leaves(value)
    per_leaf = arrays and _structure(value) == structure and all(
        x.ndim for x in arrays)
    if per_leaf and name not in known + NOT_MOMENTS:
      raise ValueError(
          f"carry={mode!r} does not know state field {name!r} of {owner}: use"
          f" carry='keep', or a transform whose moments are among {known}")
  # A masked branch has the field and nothing in it.
  has_second = any(
      name in SECOND_MOMENTS and jax.tree.leaves(value)
      for _, name, value in fields)
  if mode == "rotate" and has_second:
    raise ValueError(
        "carry='rotate' is undefined for second moments ('nu'), which share"
        " their count with the first: use carry='reset', or a transform with"
        " first moments (trace, Lion) or moments per output (RowAdam) only")
  if has_second and refresh_every == 1:
    warnings.warn(
        "second moments with refresh_every=1 and carry='reset' are for ever at"
        " their first step (4.3 times Adam's steady size): raise refresh_every"
        " or use scale_by_row_adam", stacklevel=4)


def move(
    state: Any, fresh: Any, mode: str, rotate: Callable[[Any], Any]
) -> Any:
  """The inner transform's state in a new basis.

  Args:
    state: the state on sketched leaves.
    fresh: a newly initialised state of the same structure.
    mode: "keep", "reset" or "rotate".
    rotate: maps a tree of first moments to the new basis.

  Returns:
    A state of the same structure and dtypes.
  """
  if mode == "keep":
    return state
  if _is_namedtuple(state):
    has_moments = any(
        name in FIRST_MOMENTS + SECOND_MOMENTS for name in state._fields)
    def field(name, old, new):
      if name in FIRST_MOMENTS and mode == "rotate":
        return rotate(old)
      resets = name in FIRST_MOMENTS + SECOND_MOMENTS or (
          name == "count" and has_moments and mode == "reset")
      return new if resets else move(old, new, mode, rotate)
    return type(state)(*map(field, state._fields, state, fresh))
  if isinstance(state, dict):
    return {k: move(v, fresh[k], mode, rotate) for k, v in state.items()}
  if isinstance(state, list | tuple):
    return type(state)(
        move(old, new, mode, rotate)
        for old, new in zip(state, fresh, strict=True))
  return state


def _fields(state: Any) -> Iterator[tuple[str, str, Any]]:
  """(owner, field name, value) of every NamedTuple in a state."""
  if _is_namedtuple(state):
    for name, value in zip(state._fields, state, strict=True):
      yield type(state).__name__, name, value
      yield from _fields(value)
  elif isinstance(state, dict):
    for value in state.values():
      yield from _fields(value)
  elif isinstance(state, list | tuple):
    for value in state:
      yield from _fields(value)


def _structure(tree: Any) -> Any:
  """Structure of a tree in which a missing or masked leaf is a leaf."""
  return jax.tree.structure(
      tree, is_leaf=lambda x: x is None or isinstance(x, optax.MaskedNode))


def _is_namedtuple(x: Any) -> bool:
  return isinstance(x, tuple) and hasattr(x, "_fields")
