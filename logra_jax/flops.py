"""FLOPs of a JAX function, loop bodies times their trip counts.

XLA's `cost_analysis()` counts a loop body once, whatever its trip count, and
counts nothing at all on some backends. Here the count is read from the jaxpr,
so it needs neither a device nor a compile. One operation is

  ==========================  =============================================
  dot_general, ragged_dot     2 batch M N K
  conv_general_dilated        2 output kernel / output features
  elementwise, cumulative     1 an output element, transcendental or not
  reduction, collective sum   1 an input element
  scatter-add and its kin     1 an update element
  sort, top_k                 1 an input element, times log2 of the axis or k
  cholesky, lu                n^3 / 3, m n^2 - n^3 / 3
  triangular_solve            n^2 a right-hand side
  qr (Householder, with Q)    4 m n^2 - 4 n^3 / 3
  svd, eigh                   14 m n^2 + 8 n^3, 9 n^3
  integers, data movement     0, so random bits and quantised dots are free
  ==========================  =============================================

for m >= n. A complex operation counts as one.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval
import jax.numpy as jnp


def count(
    fn: Callable[..., Any],
    *args: Any,
    while_trips: int | None = None,
    **kwargs: Any,
) -> int:
  """FLOPs of `fn(*args, **kwargs)` summed over devices. pytrees -> flops.

  A `scan` is its length times its body, a `cond` its dearest branch, a
  `shard_map` its body times the devices it maps over. A `fori_loop` with
  static bounds shows its trip count; any other `while` takes `while_trips`.
  Work whose result is unused is not counted, as XLA removes it;
  rematerialised work is counted, as it runs again.

  Args:
    fn: a function of arrays; bind anything else with `functools.partial`.
    *args: arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes are read.
    while_trips: trips of every `while` whose count the jaxpr does not show,
      such as the token budget of a sampler.
    **kwargs: as args.

  Returns:
    The count, an exact integer: no trip count overflows it.

  Raises:
    ValueError: if a `while` has no visible trip count and `while_trips` is not
      given or is negative, or if a primitive has no rule.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from logra_jax import flops
    >>> a = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    >>> b = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    >>> flops.count(jnp.matmul, a, b)  # 2 m n k
    60
    >>> flops.count(lambda x: jax.lax.fori_loop(0, 7, lambda _, y: 2 * y, x), a)
    42

  Source: Golub and Van Loan, Matrix Computations, for the factorisations.
  """
  if while_trips is not None and while_trips < 0:
    raise ValueError(f"while_trips={while_trips}: give a count of trips >= 0")
  jaxpr = jax.make_jaxpr(fn)(*args, **kwargs).jaxpr
  live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  return _jaxpr_flops(live, while_trips)


def _jaxpr_flops(jaxpr: Any, while_trips: int | None) -> int:
  # Some parameters hold a closed jaxpr, others a bare one, by JAX version.
  eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
  return sum(_eqn_flops(eqn, while_trips) for eqn in eqns)


def _eqn_flops(eqn: Any, while_trips: int | None) -> int:
  name = eqn.primitive.name
  if name in _CONTROL:
    return _CONTROL[name](eqn, while_trips)
  if name in _RULES:
    return _RULES[name](eqn) if _has_floats(eqn) else 0
  # Names of calls differ by version (pjit, jit; remat2, checkpoint), so they
  # are known by what they hold.
  inner = [j for value in eqn.params.values() for j in _jaxprs(value)]
  if inner:
    return sum(_jaxpr_flops(jaxpr, while_trips) for jaxpr in inner)
  return _elementwise(eqn) if _has_floats(eqn) else 0


def _jaxprs(value: Any) -> Iterator[Any]:
  if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
    yield value
  elif isinstance(value, (tuple, list)):
    for item in value:
      yield from _jaxprs(item)


def _has_floats(eqn: Any) -> bool:
  dtypes = (getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars))
  return any(d is not None and jnp.issubdtype(d, jnp.inexact) for d in dtypes)


def _shape(var: Any) -> tuple[int, ...]:
  return getattr(var.aval, "shape", ())


def _size(var: Any) -> int:
  return math.prod(_shape(var))


# Control flow: (eqn, while_trips) -> flops.


def _scan(eqn: Any, while_trips: int | None) -> int:
  return eqn.params["length"] * _jaxpr_flops(eqn.params["jaxpr"], while_trips)


def _while(eqn: Any, while_trips: int | None) -> int:
  trips = _visible_trips(eqn)
  if trips is None:
    trips = while_trips
  if trips is None:
    raise ValueError(
        "the trip count of a `while` is not visible in the jaxpr: pass"
        " while_trips=, or write it as a scan or a fori_loop with static bounds"
    )
  test = _jaxpr_flops(eqn.params["cond_jaxpr"], while_trips)
  body = _jaxpr_flops(eqn.params["body_jaxpr"], while_trips)
  return trips * body + (trips + 1) * test


def _visible_trips(eqn: Any) -> int | None:
  """len(range(lower, upper, step)) if the loop is one, with literal bounds."""
  cond = eqn.params["cond_jaxpr"].jaxpr
  body = eqn.params["body_jaxpr"].jaxpr
  cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
  init = eqn.invars[cond_consts + body_consts :]
  carry_in, carry_out = body.invars[body_consts:], body.outvars
  if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt":
    return None
  counter, bound = cond.eqns[0].invars

  def carry_index(var: Any) -> int:
    """Place in the carry; -1 for a literal or a constant of the condition."""
    where = [i for i, v in enumerate(cond.invars[cond_consts:]) if v is var]
    return where[0] if where else -1

  i = carry_index(counter)
  if i < 0:
    return None
  if (j := carry_index(bound)) >= 0:
    bound = init[j] if carry_out[j] is carry_in[j] else None
  elif bound in cond.invars[:cond_consts]:
    bound = eqn.invars[cond.invars.index(bound)]
  step = _literal_step(body, carry_in[i], carry_out[i])
  lower, upper = _literal(init[i]), _literal(bound)
  if lower is None or upper is None or step is None or step < 1:
    return None
  return len(range(lower, upper, step))


def _literal_step(body: Any, before: Any, after: Any) -> int | None:
  """`step` if the body makes `after = before + step`."""
  for eqn in body.eqns:
    if eqn.outvars[0] is after and eqn.primitive.name == "add":
      steps = [v for v in eqn.invars if v is not before]
      return _literal(steps[0]) if len(steps) == 1 else None
  return None


def _literal(var: Any) -> int | None:
  if not isinstance(var, core.Literal) or _has_shape_or_float(var):
    return None
  return int(var.val)


def _has_shape_or_float(var: Any) -> bool:
  return _shape(var) != () or not jnp.issubdtype(var.aval.dtype, jnp.integer)


def _cond(eqn: Any, while_trips: int | None) -> int:
  return max(_jaxpr_flops(j, while_trips) for j in eqn.params["branches"])


def _shard_map(eqn: Any, while_trips: int | None) -> int:
  # Shapes inside are per device along the manual axes and global along others.
  mesh, axes = eqn.params["mesh"], eqn.params["newly_manual_axes"]
  devices = math.prod(mesh.shape[axis] for axis in axes)
  return devices * _jaxpr_flops(eqn.params["jaxpr"], while_trips)


def _linear_solve(eqn: Any, while_trips: int | None) -> int:
  # It also holds the products and the transposed solve, for differentiation.
  return _jaxpr_flops(eqn.params["jaxprs"].solve, while_trips)


def _pallas_call(eqn: Any, while_trips: int | None) -> int:
  steps = math.prod(eqn.params["grid_mapping"].grid)
  return steps * _jaxpr_flops(eqn.params["jaxpr"], while_trips)


_CONTROL: dict[str, Callable[[Any, int | None], int]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "custom_linear_solve": _linear_solve,
    "pallas_call": _pallas_call,
}


# Arithmetic: eqn -> flops.


def _dot(eqn: Any) -> int:
  # Each lhs element meets every free rhs column once; this form also holds for
  # ragged dots, where an output element sums over its own group only.
  params = eqn.params
  ragged = params.get("ragged_dot_dimension_numbers")
  dims = ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]
  groups = ragged.rhs_group_dimensions if ragged else ()
  (_, contract), (_, batch) = dims
  bound = {*contract, *batch, *groups}
  lhs, rhs = eqn.invars[:2]
  free = math.prod(n for d, n in enumerate(_shape(rhs)) if d not in bound)
  return 2 * _size(lhs) * free


def _conv(eqn: Any) -> int:
  kernel = eqn.invars[1]
  features = _shape(kernel)[eqn.params["dimension_numbers"].rhs_spec[0]]
  return 2 * _size(eqn.outvars[0]) * _size(kernel) // features


def _elementwise(eqn: Any) -> int:
  outputs = [v for v in eqn.outvars]
  shapes = {_shape(v) for v in (*eqn.invars, *eqn.outvars)} - {()}
  if eqn.primitive.name in _OPAQUE or len(shapes) > 1:
    raise ValueError(
        f"no FLOP rule for the primitive {eqn.primitive.name!r}: count the"
        " function without it and add its cost by hand"
    )
  return sum(_size(v) for v in outputs)


def _reduction(eqn: Any) -> int:
  return sum(_size(v) for v in eqn.invars)


def _window(eqn: Any) -> int:
  return _size(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"])
