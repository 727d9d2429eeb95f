"""Taps: sketches as gradients, and logit changes as tangents, of a zero.

A tapped linear computes `y = x W` and has the derivative of
`y = x W + (x V) B` at `B = 0`:

  * reverse mode by `B` is the sketch `V^T G`; the `[n_in, n_out]` gradient is
    never formed;
  * forward mode along `U` is the change of `y` under the update `W + V U`.

`B` is always zero: its value is ignored and every update is merged into `W`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from logra_jax import low_rank


@jax.custom_jvp
def tapped_linear(
    x: jax.Array, kernel: jax.Array, basis: jax.Array, tap: jax.Array
) -> jax.Array:
  """`x W` with the derivative of `x W + (x V) B`. [..., n_in] -> [..., n_out].

  Use it in place of `x @ kernel` in any JAX or Linen model and differentiate by
  the tap:

    dy = dx W + (x V) dB

  Args:
    x: [..., n_in].
    kernel: W [n_in, n_out].
    basis: V [n_in, r].
    tap: B [r, n_out], zeros.

  Returns:
    `x W`.

  Raises:
    TypeError: when differentiated by the kernel or the basis, whose gradient
      would silently be zero.

  Example:
    >>> import jax, jax.numpy as jnp, logra_jax
    >>> x, w = jnp.ones((3, 4)), jnp.ones((4, 2))
    >>> v = logra_jax.bases.stiefel(jax.random.key(0), 4, 1)
    >>> b = jnp.zeros((1, 2))
    >>> loss = lambda w, b: logra_jax.tapped_linear(x, w, v, b).sum()
    >>> s = jax.grad(loss, argnums=1)(w, b)
    >>> g = jax.grad(lambda w: (x @ w).sum())(w)
    >>> bool(jnp.allclose(s, v.T @ g, atol=1e-5))
    True

  Source: this project; the sketch is arXiv 2610.06647's.
  """
  del basis, tap
  return x @ kernel


@functools.partial(tapped_linear.defjvp, symbolic_zeros=True)
def _tapped_linear_jvp(primals, tangents):
  x, kernel, basis, _ = primals
  dx, dkernel, dbasis, dtap = tangents
  for name, tangent in (("kernel", dkernel), ("basis", dbasis)):
    if not isinstance(tangent, SymbolicZero):
      raise TypeError(
          f"the {name} of a tapped linear has no gradient by construction:"
          " differentiate by its tap, or by the kernel of an untapped model")
  y = x @ kernel
  dy = jnp.zeros_like(y)
  if not isinstance(dx, SymbolicZero):
    dy += dx @ kernel
  if not isinstance(dtap, SymbolicZero):
    dy += (x @ basis.astype(x.dtype)) @ dtap.astype(x.dtype)
  return y, dy


@jax.tree_util.register_pytree_with_keys_class
class Tapped:
  """A kernel with its tap; stands where the kernel stood in the params.

  Attributes:
    kernel: W, in the leaf's own shape.
    basis: V [*batch, n_in, r].
    tap: B [*batch, r, n_out], zeros.
    decay: zeros [*batch]; its tangent is the share of W taken off.
  """

  def __init__(self, kernel, basis, tap, decay):
    self.kernel, self.basis, self.tap = kernel, basis, tap
    self.decay = decay

  def tree_flatten_with_keys(self):
    names = ("kernel", "basis", "tap", "decay")
    keyed = [(jax.tree_util.GetAttrKey(k), getattr(self, k)) for k in names]
    return keyed, None

  @classmethod
  def tree_unflatten(cls, aux, children):
    del aux
    return cls(*children)


def linear(x: jax.Array, kernel: Any) -> jax.Array:
  """`x W` for a plain or a `Tapped` kernel. [..., n_in] -> [..., n_out].

  Args:
    x: inputs.
    kernel: W [n_in, n_out], or a `Tapped` with no batch axes left.

  Returns:
    The product in x's dtype.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import taps
    >>> taps.linear(jnp.ones((3, 4)), jnp.ones((4, 2))).shape
    (3, 2)
  """
  if not isinstance(kernel, Tapped):
    return x @ kernel.astype(x.dtype)
  y = tapped_linear(x, kernel.kernel.astype(x.dtype), kernel.basis, kernel.tap)
  return y * (1.0 - kernel.decay).astype(x.dtype)


def attach(params: Any, basis: Any, taps: Any, decays: Any = None) -> Any:
  """Params with every kernel that has a basis replaced by a `Tapped`.

  Args:
    params: a tree of weights.
    basis: V by leaf, `None` or masked where there is none; see
      `sketch.find_basis`.
    taps: B by leaf, as from `zeros`.
    decays: [] by leaf, or None for zeros.

  Returns:
    A tree for a model whose linear layers call `taps.linear`.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import taps
    >>> params, basis = {"w": jnp.ones((4, 2))}, {"w": jnp.ones((4, 1))}
    >>> tapped = taps.attach(params, basis, taps.zeros(params, basis))
    >>> type(tapped["w"]).__name__
    'Tapped'
  """
  def one(kernel, v, tap, decay):
    if v is None:
      return kernel
    return Tapped(kernel, v, tap, jnp.broadcast_to(
        jnp.asarray(0.0 if decay is None else decay, jnp.float32),
        v.shape[:-2]))
  basis = plain(params, basis)
  if decays is None:
    decays = jax.tree.map(lambda _: None, params)
  return jax.tree.map(one, params, basis, taps, decays)


def zeros(params: Any, basis: Any) -> Any:
  """The taps of a tree, all zero. [*batch, r, n_out] float32 by leaf.

  Args:
    params: a tree of weights.
    basis: V by leaf, `None` or masked where there is none.

  Returns:
    Zeros where there is a basis, `None` elsewhere.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import taps
    >>> taps.zeros({"w": jnp.ones((4, 2))}, {"w": jnp.ones((4, 1))})["w"].shape
    (1, 2)
  """
  def one(w, v):
    if v is None:
      return None
    n_out = w.size // math.prod(v.shape[:-1])
    return jnp.zeros((*v.shape[:-2], v.shape[-1], n_out), jnp.float32)
  return jax.tree.map(one, params, plain(params, basis))


def plain(params: Any, tree: Any) -> Any:
  """A tree over params with masked or missing leaves as `None`."""
  is_array = lambda x: hasattr(x, "ndim")
  return jax.tree.map(lambda _, x: x if is_array(x) else None, params, tree)


def value_and_grad(
    loss: Callable[..., tuple[jax.Array, Any]],
    params: Any,
    basis: Any,
    trainable: Any,
) -> Callable[..., tuple[tuple[jax.Array, Any], Any]]:
  """Gradients as an optimiser with sketches takes them.

  Args:
    loss: `(params, *args) -> (value [], aux)`.
    params: a tree of weights.
    basis: V by leaf; leaves with one get a `Sketch`.
    trainable: bool by leaf; others without a basis that are trainable get a
      dense gradient, the rest `None`.

  Returns:
    `(*args) -> ((value, aux), gradients)`.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from logra_jax import taps
    >>> params, basis = {"w": jnp.ones((4, 2))}, {"w": jnp.ones((4, 1))}
    >>> loss = lambda p, x: (taps.linear(x, p["w"]).sum(), None)
    >>> grad = taps.value_and_grad(loss, params, basis, {"w": False})
    >>> _, gradients = grad(jnp.ones((3, 4)))
    >>> gradients["w"]
    Sketch(Array([[12., 12.]], dtype=float32))
  """
  basis = plain(params, basis)
  free = jax.tree.map(
      lambda p, v, t: p if t and v is None else None, params, basis, trainable)

  def fn(diff, *args):
    taps, dense = diff
    merged = jax.tree.map(
        lambda p, d: p if d is None else d, params, dense)
    return loss(attach(merged, basis, taps), *args)

  def call(*args):
    grad = jax.value_and_grad(fn, has_aux=True)
    value, (sketches, dense) = grad((zeros(params, basis), free), *args)
    gradients = jax.tree.map(
        lambda p, s, d: d if s is None else low_rank.Sketch(s),
        params, sketches, dense)
    return value, gradients

  return call


def jvp(
    fn: Callable[[Any], jax.Array], params: Any, basis: Any, updates: Any
) -> tuple[jax.Array, jax.Array]:
  """A function of the params and its change along an update, in one pass.

  Args:
    fn: a function of the params.
    params: a tree of weights.
    basis: V by leaf.
    updates: `LowRank` where there is a basis; arrays or `None` elsewhere.

  Returns:
    (value, tangent): the tangent is the derivative of `fn(params + s updates)`
    by s at 0, decay included.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import taps
    >>> value, tangent = taps.jvp(
    ...     lambda p: p["b"] ** 2, {"b": jnp.array(3.0)}, {"b": None},
    ...     {"b": jnp.array(0.5)})
    >>> float(value), float(tangent)
    (9.0, 3.0)
  """
  basis = plain(params, basis)
  factored = jax.tree.map(
      lambda p, u: u if isinstance(u, low_rank.LowRank) else None,
      params, updates)
  pick = lambda name: jax.tree.map(
      lambda p, u: None if u is None else getattr(u, name), params, factored)
  d_dense = jax.tree.map(
      lambda p, u: u.astype(p.dtype) if hasattr(u, "ndim") else None,
      params, updates)
  dense = jax.tree.map(lambda p, d: None if d is None else p, params, d_dense)
  d_taps = jax.tree.map(lambda u: u.astype(jnp.float32), pick("factor"))
  decays = jax.tree.map(jnp.zeros_like, pick("decay"))

  def along(taps, decays, dense):
    merged = jax.tree.map(lambda p, d: p if d is None else d, params, dense)
    return fn(attach(merged, basis, taps, decays))

  return jax.jvp(
      along, (zeros(params, basis), decays, dense),
      (d_taps, pick("decay"), d_dense))
