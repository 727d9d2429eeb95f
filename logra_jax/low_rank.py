"""Leaf types of updates: what a bare array cannot carry.

  * `Sketch` marks a gradient that is a sketch already (at r = n_in a shape
    cannot tell). It holds floats only, so clipping or scaling a tree with
    sketches in it works as on dense gradients.
  * `LowRank` is an update `V U - decay W`. It carries the key that V is drawn
    from, not V, so arithmetic that does not know it raises instead of scaling
    the wrong thing.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from logra_jax import bases
from logra_jax import keys


@jax.tree_util.register_pytree_with_keys_class
class Sketch:
  """A gradient sketch `S = V^T G`. [*batch, r, n_out]."""

  def __init__(self, value: Any):
    self.value = value

  def tree_flatten_with_keys(self):
    return [(jax.tree_util.GetAttrKey("value"), self.value)], None

  @classmethod
  def tree_unflatten(cls, aux, children):
    del aux
    return cls(*children)

  def __repr__(self):
    return f"Sketch({self.value!r})"


@jax.tree_util.register_pytree_with_keys_class
class LowRank:
  """An update `V U - decay W` of a weight, V redrawn from its key.

  Attributes:
    factor: `U [*batch, r, n_out]`.
    decay: [] float32, the share of W that is taken off.
    key: [] typed PRNG key of `V`.
    law: the basis law, static.
    n: rows of V, static.
  """

  def __init__(self, factor, decay, key, law: bases.Law, n: int):
    self.factor, self.decay, self.key = factor, decay, key
    self.law, self.n = law, n

  def tree_flatten_with_keys(self):
    names = ("factor", "decay", "key")
    keyed = [(jax.tree_util.GetAttrKey(k), getattr(self, k)) for k in names]
    return keyed, (self.law, self.n)

  @classmethod
  def tree_unflatten(cls, aux, children):
    return cls(*children, *aux)

  @property
  def basis(self) -> jax.Array:
    """V drawn again, all batch elements at once. [*batch, n, r]."""
    *batch, r, _ = self.factor.shape
    return self.law(self.key, self.n, r, batch=tuple(batch))

  def replace(self, **fields) -> "LowRank":
    """A copy with other arrays."""
    arrays = dict(factor=self.factor, decay=self.decay, key=self.key)
    return LowRank(**(arrays | fields), law=self.law, n=self.n)

  def __repr__(self):
    return f"LowRank({self.law.__name__}, n={self.n}, U={self.factor!r})"


def is_node(x: Any) -> bool:
  """Whether x is a leaf type of this module (an `is_leaf` for tree maps)."""
  return isinstance(x, Sketch | LowRank)


def is_masked(x: Any) -> bool:
  """Whether x is optax's stand-in for a leaf that is not its business."""
  return isinstance(x, optax.MaskedNode)


def lift(basis: jax.Array, factor: jax.Array) -> jax.Array:
  """V U. [*batch, n, r], [*batch, r, n_out] -> [*batch, n, n_out].

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import low_rank
    >>> low_rank.lift(jnp.ones((4, 2)), jnp.ones((2, 5))).shape
    (4, 5)
  """
  return basis.astype(factor.dtype) @ factor


def scale(updates: optax.Updates, factor: jax.Array) -> optax.Updates:
  """Multiplies every update by a number, low-rank ones with their decay.

  Args:
    updates: arrays and `LowRank` leaves.
    factor: [] multiplier.

  Returns:
    The scaled tree; leaf dtypes are kept.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import low_rank
    >>> low_rank.scale({"w": jnp.ones(2)}, 3.0)["w"].tolist()
    [3.0, 3.0]
  """
  times = lambda u: (u * factor).astype(u.dtype)
  def one(u):
    if isinstance(u, LowRank):
      return u.replace(factor=times(u.factor), decay=times(u.decay))
    return times(u)
  return jax.tree.map(one, updates, is_leaf=is_node)


def squared_norm(x: Any) -> jax.Array:
  """Squared Frobenius norm of an array or of a lifted `V U`. -> [] float32.

  Where `V^T V = (n/r) I` the lifted norm is `(n/r) |U|^2`; for other laws it is
  `<U, (V^T V) U>` and V is drawn again.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import low_rank
    >>> float(low_rank.squared_norm(jnp.full((2, 2), 3.0)))
    36.0
  """
  if not isinstance(x, LowRank):
    return jnp.sum(jnp.square(x.astype(jnp.float32)))
  factor = x.factor.astype(jnp.float32)
  r = factor.shape[-2]
  if x.law in bases.ORTHONORMAL:
    return (x.n / r) * jnp.sum(jnp.square(factor))
  basis = x.basis
  gram = jnp.swapaxes(basis, -1, -2) @ basis
  return jnp.sum(factor * (gram @ factor))


def apply_updates(
    params: optax.Params, updates: optax.Updates
) -> optax.Params:
  """Adds updates to params, low-rank ones as `(1 - decay) W + V U`.

  Like `optax.apply_updates`, and for `LowRank` leaves layer by layer: one layer
  of `V` and of `V U` exists at a time, and under donation the weights are
  written in place.

  Args:
    params: a tree of weights.
    updates: a tree of the same structure; `None` and masked leaves are passed
      over.

  Returns:
    New params in the dtypes of the old.

  Example:
    >>> import jax, jax.numpy as jnp, optax, logra_jax
    >>> w = jnp.zeros((8, 2))
    >>> tx = logra_jax.sketched(optax.sgd(1.0), rank=4)
    >>> s = logra_jax.Sketch(jnp.ones((4, 2)))
    >>> updates, state = tx.update(s, tx.init(w), w)
    >>> logra_jax.apply_updates(w, updates).shape
    (8, 2)
  """
  skip = lambda u: u is None or is_masked(u)
  def one(update, param):
    if skip(update):
      return param
    if isinstance(update, LowRank):
      return _merge(param, update)
    return _add(param, update).astype(param.dtype)
  return jax.tree.map(
      one, updates, params, is_leaf=lambda u: is_node(u) or skip(u))


def _add(weight, delta):
  """A sum in which a delta of 0 leaves even -0 as it was: nothing moved."""
  return jnp.where(delta == 0, weight, weight + delta)


def _merge(param, update):
  *batch, r, n_out = update.factor.shape
  def layer(weight, factor, key):
    basis = update.law(key, update.n, r)
    delta = lift(basis, factor.astype(jnp.float32))
    kept = (1.0 - update.decay) * weight.astype(jnp.float32)
    # Without the barrier a compiler may contract product and sum into one
    # rounding, and trainer and worker then differ in the last bit.
    kept, delta = jax.lax.optimization_barrier((kept, delta))
    return _add(kept, delta).astype(param.dtype)

  if not batch:
    merged = layer(
        param.reshape(update.n, n_out), update.factor, update.key)
    return merged.reshape(param.shape)
  flat = math.prod(batch)
  weights = param.reshape(flat, update.n, n_out)
  factors = update.factor.reshape(flat, r, n_out)
  layer_keys = keys.batch_keys(update.key, batch).reshape(flat)

  def body(i, weights):
    merged = layer(weights[i], factors[i], layer_keys[i])
    return jax.lax.dynamic_update_index_in_dim(weights, merged, i, 0)

  # A scan from weights to weights would hold a second copy of them.
  return jax.lax.fori_loop(0, flat, body, weights).reshape(param.shape)
