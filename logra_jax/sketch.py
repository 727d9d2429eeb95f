"""Gradient sketches: project, run any optax transform in the sketch, lift.

A weight `W [n_in, n_out]` is used as `y = x W`, its gradient `G` is kept only
as `S = V^T G [r, n_out]` with a random basis `V [n_in, r]`, and its update is
`V U`.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from logra_jax import bases
from logra_jax import carry as carry_lib
from logra_jax import keys
from logra_jax import low_rank

Where = Callable[[str, jax.Array], bool]
Axes = Callable[[str, jax.Array], tuple[int, int]]


class GroupStates(NamedTuple):
  """States of the inner transform: one in the sketch, one for dense leaves.

  They are apart because a refresh resets the bias-correction count of sketched
  moments and must leave the count of dense moments alone.
  """
  sketched: optax.OptState
  dense: optax.OptState


class SketchState(NamedTuple):
  """State of `sketched`; the basis is the one the next gradient needs."""
  count: jax.Array  # type: ignore[assignment]  # [] int32, applied updates
  key: jax.Array  # [] typed key of the seed, constant
  basis: optax.Updates  # [*batch, n_in, r] a sketched leaf, None elsewhere
  inner: GroupStates


def project(basis: jax.Array, gradient: jax.Array) -> jax.Array:
  """V^T G. [*batch, n, r], dense leaf of n * n_out elements -> [*batch, r, ·]

  Args:
    basis: V.
    gradient: G in the leaf's own shape; batch axes lead.

  Returns:
    The sketch in float32.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import sketch
    >>> sketch.project(jnp.ones((4, 2)), jnp.ones((4, 3, 5))).shape
    (2, 15)
  """
  batch, n = basis.shape[:-2], basis.shape[-2]
  matrix = gradient.astype(jnp.float32).reshape(*batch, n, -1)
  return jnp.swapaxes(basis, -1, -2).astype(jnp.float32) @ matrix


def find_basis(state: optax.OptState) -> optax.Updates:
  """The basis tree held by a `sketched` somewhere inside an optimiser state.

  Args:
    state: the state of any chain with exactly one `sketched` in it.

  Returns:
    V where a leaf is sketched; elsewhere `None`, or optax's masked node.

  Raises:
    ValueError: if there is no `sketched`, or more than one.

  Example:
    >>> import jax.numpy as jnp, optax, logra_jax
    >>> from logra_jax import sketch
    >>> tx = optax.chain(logra_jax.sketched(optax.sgd(1.0), rank=2))
    >>> sketch.find_basis(tx.init({"w": jnp.ones((8, 3))}))["w"].shape
    (8, 2)
  """
  is_state = lambda x: isinstance(x, SketchState)
  found = [s for s in jax.tree.leaves(state, is_leaf=is_state) if is_state(s)]
  if len(found) != 1:
    raise ValueError(
        f"found {len(found)} sketched(...) states in the optimiser state,"
        " need exactly one: chain one sketched(...)")
  return found[0].basis


def sketched(
    inner: optax.GradientTransformation,
    *,
    rank: int = 256,
    basis: bases.Law = bases.stiefel,
    refresh_every: int = 1,
    carry: Literal["keep", "reset", "rotate"] = "reset",
    seed: int = 0,
    where: Where | None = None,
    axes: Axes | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Runs an optax transform on `[r, n_out]` sketches of `[n_in, n_out]` leaves.

    S = V^T G,    U = inner(S),    update = V U

  Dense gradients are projected and the result is lifted, so the transform can
  stand wherever `inner` could. `Sketch` leaves are taken as they are and give
  `LowRank` updates; apply those with `logra_jax.apply_updates`.

  Decoupled weight decay in `inner` (AdamW, Lion) acts on the dense weight,
  once, and never on `V V^T W`: on sketched leaves `inner` is given weights of
  zero, and its derivative by the weight is the decay. A transform that reads a
  weight's norm sees 0. `inner` runs once on sketched leaves, once on others.

  Args:
    inner: any optax transform whose state is moments by name (`mu`, `trace`,
      `nu`, `nu_per_output`), or any at all with `carry="keep"`.
    rank: r; a leaf with n_in <= rank is passed to `inner` densely, which is
      exact.
    basis: a law of `logra_jax.bases`.
    refresh_every: updates until the basis is redrawn.
    carry: what a refresh does to moments of sketched leaves: "reset" zeroes
      them with their bias-correction count, "rotate" maps first moments by
      `(r/n) V_new^T V_old` (transforms without second moments only), "keep"
      leaves them in the old coordinates. Moments per output always stay.
    seed: of the bases.
    where: `(path, leaf) -> bool`, which leaves to sketch; default, all of two
      or more dimensions.
    axes: `(path, leaf) -> (in, out)`, how many of the last axes are input and
      output axes, the rest being batch; default `(1, 1)`. A head-split
      `[d, h, k]` kernel has `(1, 2)`, `[h, k, d]` has `(2, 1)`.

  Returns:
    The gradient transformation.

  Raises:
    ValueError: for a rank or refresh_every below 1, an unknown `carry`, or a
      state that `carry` cannot treat.

  Example:
    >>> import jax.numpy as jnp, optax, logra_jax
    >>> params = {"w": jnp.ones((512, 8)), "b": jnp.ones(8)}
    >>> tx = logra_jax.sketched(optax.sgd(0.1), rank=16)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(params, state, params)
    >>> updates["w"].shape, state.basis["w"].shape, state.basis["b"]
    ((512, 8), (512, 16), None)

  Source: arXiv 2610.06647, arXiv 2603.20632.
  """
  _check_arguments(rank, refresh_every, carry)
  inner = optax.with_extra_args_support(inner)
  layout = lambda path, leaf: _layout(
      keys.leaf_path(path), leaf, where, axes)

  def matrix(path, leaf, v):
    """A leaf without a basis as `inner` sees it, else None."""
    if v is not None:
      return None
    shape = layout(path, leaf)
    return leaf if shape is None else leaf.reshape(shape)

  def dense_group(tree, vs):
    return jax.tree.map_with_path(matrix, tree, vs, is_leaf=low_rank.is_node)

  def init(params):
    key = jax.random.key(seed)
    def draw(path, leaf):
      shape = layout(path, leaf)
      if shape is None or shape[-2] <= rank:
        return None
      *batch, n, _ = shape
      leaf_key = keys.leaf_key(key, 0, keys.leaf_path(path))
      return basis(leaf_key, n, rank, batch=tuple(batch))
    def empty_sketch(path, leaf, v):
      return None if v is None else jnp.zeros(
          (*v.shape[:-2], rank, layout(path, leaf)[-1]), jnp.float32)
    vs = jax.tree.map_with_path(draw, params)
    sketches = jax.tree.map_with_path(empty_sketch, params, vs)
    states = GroupStates(
        inner.init(sketches), inner.init(dense_group(params, vs)))
    carry_lib.check(states.sketched, sketches, carry, refresh_every)
    return SketchState(jnp.zeros([], jnp.int32), key, vs, states)

  def update(updates, state, params=None, **extra_args):
    sketches = jax.tree.map_with_path(
        _to_sketch, updates, state.basis,
        updates if params is None else params, is_leaf=low_rank.is_node)
    factors, decays, sketched_state = _run_in_sketch(
        inner, sketches, state.inner.sketched, params is not None, extra_args)
    dense_params = None if params is None else dense_group(
        params, state.basis)
    dense_out = dense_group(updates, state.basis)
    dense_state = state.inner.dense
    if jax.tree.leaves(dense_out):
      dense_out, dense_state = inner.update(
          dense_out, dense_state, dense_params, **extra_args)

    index = state.count // refresh_every
    def to_update(path, u, v, factor, decay, dense, param):
      if v is None:
        # A learning rate in a float32 array would widen a bfloat16 update.
        return jax.tree.map(
            lambda x: x.reshape(u.shape).astype(u.dtype), dense)
      if isinstance(u, low_rank.Sketch):
        key = keys.leaf_key(state.key, index, keys.leaf_path(path))
        return low_rank.LowRank(factor, decay, key, basis, v.shape[-2])
      lifted = low_rank.lift(v, factor).reshape(u.shape)
      if params is not None:
        lifted = lifted - decay * param
      return lifted.astype(u.dtype)
    out = jax.tree.map_with_path(
        to_update, updates, state.basis, factors, decays, dense_out,
        updates if params is None else params, is_leaf=low_rank.is_node)
    count = optax.safe_increment(state.count)
    vs, sketched_state = _refresh(
        state, sketched_state, sketches, count, inner, basis, refresh_every,
        carry)
    return out, SketchState(
        count, state.key, vs, GroupStates(sketched_state, dense_state))

  return optax.GradientTransformationExtraArgs(init, update)


def _run_in_sketch(inner, sketches, state, has_params, extra_args):
  """U, the decay of each weight, and the state of the inner transform.

  The transform is given weights of zero, so decoupled decay cannot act on
  `V V^T W`; its derivative by the weight is the decay, for the dense weight.
  """
  zero = lambda s: jnp.zeros([], jnp.float32)
  if not jax.tree.leaves(sketches):
    return sketches, sketches, state
  if not has_params:
    factors, state = inner.update(sketches, state, None, **extra_args)
    return factors, jax.tree.map(zero, sketches), state
  run = lambda weights: inner.update(sketches, state, weights, **extra_args)
  factors, slopes, state = jax.jvp(
      run, (jax.tree.map(jnp.zeros_like, sketches),),
      (jax.tree.map(jnp.ones_like, sketches),), has_aux=True)
  # A norm has no slope at zero; what reads one decays nothing.
  decays = jax.tree.map(
      lambda t: -jnp.nan_to_num(t.ravel()[0].astype(jnp.float32)), slopes)
  return factors, decays, state


def _refresh(
    state, inner_state, sketches, count, inner, law, refresh_every, carry):
  """The next basis and the moments moved to it, where a refresh is due."""
  is_none = lambda x: x is None

  def redraw():
    def draw(path, v):
      if v is None:
        return None
      *batch, n, r = v.shape
      key = keys.leaf_key(
          state.key, count // refresh_every, keys.leaf_path(path))
      return law(key, n, r, v.dtype, tuple(batch))
    vs = jax.tree.map_with_path(draw, state.basis, is_leaf=is_none)
    rotate = lambda moments: jax.tree.map(
        _rotate, moments, state.basis, vs, is_leaf=low_rank.is_masked)
    return vs, carry_lib.move(
        inner_state, inner.init(sketches), carry, rotate)

  if refresh_every == 1:
    return redraw()
  return jax.lax.cond(
      count % refresh_every == 0, redraw, lambda: (state.basis, inner_state))


def _rotate(moment, old, new):
  """(r/n) V_new^T V_old m; without the factor it grows sqrt(n/r) a refresh."""
  if low_rank.is_masked(moment):
    return moment
  n, r = old.shape[-2:]
  turned = jnp.swapaxes(new, -1, -2) @ (old @ moment)
  return ((r / n) * turned).astype(moment.dtype)


def _to_sketch(path, u, v, param):
  """The sketch of one leaf's gradient; None where there is no basis."""
  if not isinstance(u, low_rank.Sketch):
    return None if v is None else project(v, u)
  got = u.value.shape
  if v is None:
    raise ValueError(
        f"leaf {keys.leaf_path(path)!r} has no basis and got a Sketch of shape"
        f" {got}: give its dense gradient, or sketch it with where=")
  n_out = got[-1]
  if not low_rank.is_node(param):
    n_out = param.size // math.prod(v.shape[:-1])
  wanted = (*v.shape[:-2], v.shape[-1], n_out)
  if got != wanted:
    raise ValueError(
        f"the Sketch of leaf {keys.leaf_path(path)!r} has shape {got} and its"
        f" basis needs {wanted}: project with the basis of this state")
  return u.value


def _layout(path, leaf, where, axes):
  """(*batch, n_in, n_out) of a leaf that is selected, else None."""
  if leaf.ndim < 2 or (where is not None and not where(path, leaf)):
    return None
  num_in, num_out = (1, 1) if axes is None else axes(path, leaf)
  if min(num_in, num_out) < 1 or num_in + num_out > leaf.ndim:
    raise ValueError(
        f"axes {(num_in, num_out)} do not fit leaf {path!r} of shape"
        f" {leaf.shape}: return (input axes, output axes), each at least 1")
  split = leaf.ndim - num_in - num_out
  batch, rest = leaf.shape[:split], leaf.shape[split:]
  n_in, n_out = math.prod(rest[:num_in]), math.prod(rest[num_in:])
  return (*batch, n_in, n_out)


def _check_arguments(rank, refresh_every, carry):
  if rank < 1:
    raise ValueError(f"rank {rank} is below 1: choose e.g. 256")
  if refresh_every < 1:
    raise ValueError(
        f"refresh_every {refresh_every} is below 1: 1 redraws the basis every"
        " update")
  if carry not in carry_lib.MODES:
    raise ValueError(f"carry {carry!r} is unknown: choose {carry_lib.MODES}")
