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
  integers, data movement     0, as random bits, int8 dots, host callbacks
  ==========================  =============================================

for m >= n. A complex operation counts as one.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval


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
    The count, a Python integer.

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
  visible = _visible_trips(eqn)
  trips = while_trips if visible is None else visible
  if trips is None:
    raise ValueError(
        "the trip count of a `while` is not visible in the jaxpr: pass"
        " while_trips=, or write it as a scan or a fori_loop with static bounds"
    )
  test = _jaxpr_flops(eqn.params["cond_jaxpr"], while_trips)
  body = _jaxpr_flops(eqn.params["body_jaxpr"], while_trips)
  return trips * body + (trips + 1) * test


def _visible_trips(eqn: Any) -> int | None:
  """`len(range(lower, upper, step))` if literals show all three, or None."""
  cond = eqn.params["cond_jaxpr"].jaxpr
  body = eqn.params["body_jaxpr"].jaxpr
  n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
  init, carry = eqn.invars[n_cond + n_body :], body.invars[n_body:]
  if [e.primitive.name for e in cond.eqns] != ["lt"]:
    return None
  counter, bound = cond.eqns[0].invars
  places = {v: i - n_cond for i, v in enumerate(cond.invars)}
  if isinstance(counter, core.Literal) or (place := places[counter]) < 0:
    return None
  lower = _literal(init[place])
  step = _step(body, carry[place], body.outvars[place])
  upper = _literal(bound)
  if not isinstance(bound, core.Literal):
    at = places[bound]
    if at < 0:
      upper = _literal(eqn.invars[at + n_cond])
    elif body.outvars[at] is carry[at]:  # else the body moves its own bound
      upper = _literal(init[at])
  if lower is None or upper is None or step is None or step < 1:
    return None
  return len(range(lower, upper, step))


def _step(body: Any, before: Any, after: Any) -> int | None:
  """`step` if the body computes `after = before + step`, or None."""
  for eqn in body.eqns:
    if eqn.primitive.name == "add" and eqn.outvars[0] is after:
      steps = [v for v in eqn.invars if v is not before]
      return _literal(steps[0]) if len(steps) == 1 else None
  return None


def _literal(var: Any) -> int | None:
  """The value of an integer scalar written in the jaxpr, or None."""
  if not isinstance(var, core.Literal) or _shape(var):
    return None
  integer = jnp.issubdtype(jnp.result_type(var.val), jnp.integer)
  return int(var.val) if integer else None


def _cond(eqn: Any, while_trips: int | None) -> int:
  return max(_jaxpr_flops(j, while_trips) for j in eqn.params["branches"])


def _shard_map(eqn: Any, while_trips: int | None) -> int:
  # Inside, shapes are per device along the manual axes, global along the rest.
  params = eqn.params
  name = "newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"
  devices = math.prod(params["mesh"].shape[axis] for axis in params[name])
  return devices * _jaxpr_flops(params["jaxpr"], while_trips)


def _linear_solve(eqn: Any, while_trips: int | None) -> int:
  # Its products and its transposed solve serve differentiation only.
  return _jaxpr_flops(eqn.params["jaxprs"].solve, while_trips)


def _pallas_call(eqn: Any, while_trips: int | None) -> int:
  programs = math.prod(eqn.params["grid_mapping"].grid)
  return programs * _jaxpr_flops(eqn.params["jaxpr"], while_trips)


_CONTROL: dict[str, Callable[[Any, int | None], int]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "custom_linear_solve": _linear_solve,
    "pallas_call": _pallas_call,
}


# Arithmetic: eqn -> flops.


def _elementwise(eqn: Any) -> int:
  # New versions bring new elementwise primitives, so they are known by shape;
  # what only looks like one is named in _NO_RULE.
  name, outputs = eqn.primitive.name, {_shape(v) for v in eqn.outvars}
  known = len(outputs) == 1 and not name.startswith(_NO_RULE)
  if not known or not all(_broadcasts(_shape(v), *outputs) for v in eqn.invars):
    raise ValueError(
        f"no FLOP rule for the primitive {name!r}: count the function without"
        " it and add its cost by hand"
    )
  return sum(_size(v) for v in eqn.outvars)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
  same = len(shape) == len(to)
  return not shape or same and all(map(lambda n, m: n in (1, m), shape, to))


def _dot(eqn: Any) -> int:
  # Every lhs element meets every free column of the rhs once. This form holds
  # for ragged dots too, where a row meets one group's columns only.
  ragged = eqn.params.get("ragged_dot_dimension_numbers")
  if ragged is None:
    (_, contract), (_, batch) = eqn.params["dimension_numbers"]
    groups = ()
  else:
    (_, contract), (_, batch) = ragged.dot_dimension_numbers
    groups = ragged.rhs_group_dimensions
  lhs, rhs = eqn.invars[:2]
  bound = {*contract, *batch, *groups}
  free = [n for axis, n in enumerate(_shape(rhs)) if axis not in bound]
  return 2 * _size(lhs) * math.prod(free)


def _conv(eqn: Any) -> int:
  kernel = eqn.invars[1]
  features = _shape(kernel)[eqn.params["dimension_numbers"].rhs_spec[0]]
  return 2 * _size(eqn.outvars[0]) * _size(kernel) // features


def _sort(eqn: Any) -> int:
  # A sort compares within its axis, a top_k with the k best so far.
  keys, params = eqn.invars[0], eqn.params
  among = params["k"] if "k" in params else _shape(keys)[params["dimension"]]
  return _size(keys) * math.ceil(math.log2(max(2, among)))


def _matrices(var: Any) -> tuple[int, int, int]:
  """(number of matrices, longer side, shorter side)."""
  *batch, rows, columns = _shape(var)
  return math.prod(batch), max(rows, columns), min(rows, columns)


def _cholesky(eqn: Any) -> int:
  batch, n, _ = _matrices(eqn.invars[0])
  return batch * n**3 // 3


def _lu(eqn: Any) -> int:
  batch, m, n = _matrices(eqn.invars[0])
  return batch * (3 * m * n**2 - n**3) // 3


def _triangular_solve(eqn: Any) -> int:
  return _size(eqn.invars[1]) * _shape(eqn.invars[0])[-1]


def _qr(eqn: Any) -> int:
  batch, m, k = _matrices(eqn.invars[0])
  rows, columns = _shape(eqn.outvars[0])[-2:]
  reflectors = 6 * m * k**2 - 2 * k**3
  product = 12 * rows * columns * k - 6 * (rows + columns) * k**2 + 4 * k**3
  return batch * (reflectors + product) // 3


def _eigh(eqn: Any) -> int:
  batch, n, _ = _matrices(eqn.invars[0])
  return 9 * batch * n**3


def _svd(eqn: Any) -> int:
  batch, m, n = _matrices(eqn.invars[0])
  return batch * (14 * m * n**2 + 8 * n**3)


_FREE = """
  all_gather all_gather_invariant all_gather_reduced all_to_all
  bitcast_convert_type broadcast_in_dim complex concatenate conj
  convert_element_type copy copy_p debug_callback debug_print device_put
  dynamic_slice dynamic_update_slice empty empty2 gather get imag
  inspect_sharding io_callback iota layout_constraint masked_load masked_swap
  name optimization_barrier pad pbroadcast pcast ppermute preduced pure_callback
  pvary ragged_all_to_all random_wrap real reduce_precision
  reduced_vary_cast reduced_vary_cast_p reshape reshard rev scatter select_n
  sharding_constraint slice split squeeze stack stop_gradient swap tile
  transpose unstack vary_unreduced_cast vary_unreduced_cast_p
""".split()

_INPUTS = """
  argmax argmin pmax pmin psum psum_invariant reduce reduce_max reduce_min
  reduce_prod reduce_scatter reduce_sum unreduced_psum unreduced_reduce_scatter
""".split()

_UPDATES = "scatter-add scatter-max scatter-min scatter-mul scatter-sub".split()

_RULES: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(_FREE, lambda eqn: 0),
    **dict.fromkeys(_INPUTS, lambda eqn: sum(map(_size, eqn.invars))),
    **dict.fromkeys(_UPDATES, lambda eqn: _size(eqn.invars[2])),
    "dot_general": _dot,
    "ragged_dot_general": _dot,
    "conv_general_dilated": _conv,
    "sort": _sort,
    "top_k": _sort,
    "cholesky": _cholesky,
    "lu": _lu,
    "triangular_solve": _triangular_solve,
    "qr": _qr,
    "eigh": _eigh,
    "svd": _svd,
}

# Prefixes: some of these map equal shapes to equal shapes.
_NO_RULE = tuple(
    """
    approx_top_k call_exported cholesky_update cudnn dot_product_attention eig
    ffi_call fft geq hessenberg householder ormqr reduce_window scaled schur
    select_and symmetric_product tridiagonal
    """.split()
)
