"""LoGRA as one optax transformation, in both published forms."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from logra_jax import bases
from logra_jax import checks
from logra_jax import keys
from logra_jax import low_rank
from logra_jax import row_adam
from logra_jax import sketch
from logra_jax import step_control

# 2e-4 nats per token at the first update, 2e-5 at the 300th.
PUBLISHED_BUDGET = optax.cosine_decay_schedule(2e-4, 299, alpha=0.1)

_NOT_PROJECTIONS = re.compile(r"embed|head|norm|router")


def projection_kernels(path: str, leaf: jax.Array) -> bool:
  """Whether a leaf is a projection: a `kernel` outside embeddings and head.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import optimizers
    >>> optimizers.projection_kernels("layers/q/kernel", jnp.ones((2, 2)))
    True
    >>> optimizers.projection_kernels("lm_head/kernel", jnp.ones((2, 2)))
    False
  """
  *parents, name = path.split("/")
  return name == "kernel" and leaf.ndim >= 2 and not any(
      _NOT_PROJECTIONS.search(p) for p in parents)


def embeddings_and_head(path: str, leaf: jax.Array) -> bool:
  """Whether a leaf belongs to the embeddings or the output head.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import optimizers
    >>> optimizers.embeddings_and_head("embed/embedding", jnp.ones((2, 2)))
    True
  """
  del leaf
  return re.search(r"embed|head", path) is not None


def everything(path: str, leaf: jax.Array) -> bool:
  """True: the ratio form freezes every leaf that it does not sketch."""
  del path, leaf
  return True


def default_frozen(learning_rate: object) -> sketch.Where:
  """What is frozen: all that is not sketched, in the ratio form."""
  return everything if learning_rate is None else embeddings_and_head


def groups(
    params: optax.Params,
    where: sketch.Where = projection_kernels,
    frozen: sketch.Where = embeddings_and_head,
) -> optax.Params:
  """The group of each leaf: "sketched", "dense" or "frozen".

  Args:
    params: a tree of weights or gradients; a `Sketch` is sketched.
    where: `(path, leaf) -> bool`, which leaves to sketch.
    frozen: `(path, leaf) -> bool`, which of the others not to train.

  Returns:
    A tree of labels, as `optax.partition` takes it.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import optimizers
    >>> params = {"q": {"kernel": jnp.ones((8, 8))}, "scale": jnp.ones(8)}
    >>> optimizers.groups(params)
    {'q': {'kernel': 'sketched'}, 'scale': 'dense'}
  """
  def label(path, leaf):
    path = keys.leaf_path(path)
    if isinstance(leaf, low_rank.Sketch) or where(path, leaf):
      return "sketched"
    return "frozen" if frozen(path, leaf) else "dense"
  return jax.tree.map_with_path(label, params, is_leaf=low_rank.is_node)


def logra(
    learning_rate: optax.ScalarOrSchedule | None = None,
    *,
    rank: int = 256,
    basis: bases.Law = bases.hadamard,
    refresh_every: int = 1,
    kl_budget: float | step_control.Schedule | None = PUBLISHED_BUDGET,
    max_scale: float = 3.0,
    weight_ratio: float = 6e-5,
    weight_decay: float = 0.01,
    max_norm: float | None = 1.0,
    b2: float = 0.95,
    seed: int = 0,
    where: sketch.Where = projection_kernels,
    frozen: sketch.Where = embeddings_and_head,
    axes: sketch.Axes | None = None,
) -> optax.GradientTransformationExtraArgs:
  """LoGRA: RowAdam in gradient sketches, under predicted-KL step control.

  Without a learning rate, the *ratio form* of the main experiments: RowAdam's
  relative weighting, `|V U| = weight_ratio |W|` over all sketched leaves, and
  every other leaf frozen. With one, the *learning-rate form*: joint clipping,
  `W <- (1 - lr wd) W - lr V D` on sketched leaves and AdamW (0.9, 0.999, 1e-8)
  on the others that are not frozen. In both, the whole update is then scaled
  to the KL budget, and an update that is not finite, or whose predicted KL is
  not, is refused: weights and state stay as they were and `refused` counts it.

  Args:
    learning_rate: a float or schedule for the learning-rate form (published:
      5e-6 after 50 warm-up steps from a tenth), None for the ratio form.
    rank: r of the sketches.
    basis: a law of `logra_jax.bases`.
    refresh_every: updates until a basis is redrawn.
    kl_budget: nats per token, a schedule, or None for no step control (then
      `update` needs no `predict_kl`).
    max_scale: upper bound of the step scale.
    weight_ratio: step size of the ratio form.
    weight_decay: decoupled, learning-rate form only.
    max_norm: of all gradients jointly, a sketch counting by its own norm (the
      unbiased estimate of its gradient's), learning-rate form only; None or 0
      for no clipping.
    b2: RowAdam's decay.
    seed: of the bases.
    where: `(path, leaf) -> bool`, which leaves to sketch; default, every
      `kernel` outside embeddings, head and routers.
    frozen: which of the others not to train; default embeddings and head.
    axes: input and output axes of kernels with more than two; see `sketched`.

  Returns:
    The gradient transformation.

  Raises:
    ValueError: for non-positive sizes, or if `where` matches no leaf.

  Example:
    >>> import jax, jax.numpy as jnp, logra_jax
    >>> params = {"dense": {"kernel": jnp.ones((64, 8))}}
    >>> tx = logra_jax.logra(rank=16, kl_budget=1e-4)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(
    ...     params, state, params, predict_kl=lambda updates: 4e-4)
    >>> params = logra_jax.apply_updates(params, updates)

  Source: LoGRA, arXiv 2610.06647.
  """
  if learning_rate is None:
    frozen = default_frozen(learning_rate)
    sketch_chain = lambda inner: optax.chain(
        inner, row_adam.scale_to_weight_ratio(weight_ratio))
    inner = row_adam.scale_by_row_adam(b2, restore_norm=True)
    dense = optax.set_to_zero()
  else:
    sketch_chain = lambda inner: inner
    inner = optax.chain(
        row_adam.scale_by_row_adam(b2),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate))
    dense = optax.adamw(learning_rate, weight_decay=weight_decay)
  label = lambda tree: _require_match(groups(tree, where, frozen))
  is_frozen = lambda tree: jax.tree.map(lambda g: g == "frozen", label(tree))
  parts = [optax.partition({
      "sketched": sketch_chain(sketch.sketched(
          inner, rank=rank, basis=basis, refresh_every=refresh_every,
          seed=seed, axes=axes)),
      "dense": dense,
      "frozen": optax.set_to_zero(),
  }, label)]
  clips = isinstance(max_norm, jax.core.Tracer) or bool(max_norm)
  if learning_rate is not None and max_norm is not None and clips:
    # Frozen gradients are zeroed first, or they would count in the norm.
    parts = [optax.masked(optax.set_to_zero(), is_frozen),
             clip_by_global_norm(max_norm), *parts]
  if kl_budget is not None:
    parts.append(step_control.scale_by_predicted_kl(kl_budget, max_scale))
  return refuse_invalid(optax.chain(*parts))


def clip_by_global_norm(
    max_norm: float,
) -> optax.GradientTransformationExtraArgs:
  """Multiplies by `min(1, max_norm / (norm + 1e-6))`, the norm of all leaves.

  A `Sketch` counts by `|V^T G|^2`, the unbiased estimate of `|G|^2`.

  Args:
    max_norm: the bound; 0 means no clipping.

  Returns:
    The gradient transformation.

  Raises:
    ValueError: if max_norm is negative.

  Example:
    >>> import jax.numpy as jnp
    >>> from logra_jax import optimizers
    >>> tx = optimizers.clip_by_global_norm(1.0)
    >>> g = jnp.array([3.0, 4.0])
    >>> print(jnp.round(tx.update(g, tx.init(g))[0], 3))
    [0.6 0.8]

  Source: LoGRA's learning-rate form, arXiv 2610.06647.
  """
  checks.require(
      max_norm, lambda x: x >= 0.0,
      f"max_norm {max_norm} is negative: None means no clipping")

  def update(updates, state, params=None, **extra_args):
    del params, extra_args
    norm = optax.tree.norm(updates)
    factor = jnp.where(
        max_norm > 0.0, jnp.minimum(1.0, max_norm / (norm + 1e-6)), 1.0)
    return jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates), state

  return optax.GradientTransformationExtraArgs(
      lambda params: optax.EmptyState(), update)


class RefusalState(NamedTuple):
  """State of `refuse_invalid`; only these counters move on a refusal."""
  inner_state: optax.OptState
  refused: jax.Array  # [] int32, updates refused so far
  last_refused: jax.Array  # [] bool


def refuse_invalid(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Leaves weights and state alone when an update cannot be trusted.

  An update is refused if a gradient or a proposed update is not finite, or if
  `scale_by_predicted_kl` inside gave a step scale of 0. The updates are then
  zeros and the inner state is the old one, bitwise. A scale transform at the
  end of a chain could not do this: it cannot undo its siblings.

  Args:
    inner: the whole chain.

  Returns:
    The gradient transformation.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> from logra_jax import optimizers
    >>> tx = optimizers.refuse_invalid(optax.adam(0.1))
    >>> g = jnp.array([jnp.nan, 1.0])
    >>> update, state = tx.update(g, tx.init(g))
    >>> update.tolist(), int(state.refused), int(state.inner_state[0].count)
    ([0.0, 0.0], 1, 0)
  """
  inner = optax.with_extra_args_support(inner)

  def init(params):
    return RefusalState(
        inner.init(params), jnp.zeros([], jnp.int32), jnp.zeros([], bool))

  def update(updates, state, params=None, **extra_args):
    proposed, new_state = inner.update(
        updates, state.inner_state, params, **extra_args)
    controls = [
        s for s in jax.tree.leaves(new_state, is_leaf=_is_control)
        if _is_control(s)]
    ok = _all_finite(updates) & _all_finite(proposed)
    for control in controls:
      ok &= control.step_scale > 0.0
    kept = jax.tree.map(
        lambda new, old: jnp.where(ok, new, old), new_state, state.inner_state)
    safe = jax.tree.map(
        lambda u: jnp.where(ok, u, 0) if _is_float(u) else u, proposed)
    safe = jax.tree.map(_as_gradient, updates, safe, is_leaf=low_rank.is_node)
    refused = state.refused + (~ok).astype(jnp.int32)
    return safe, RefusalState(kept, refused, ~ok)

  return optax.GradientTransformationExtraArgs(init, update)


def _as_gradient(gradient, update):
  """A dense update in its gradient's dtype, whatever the learning rate's."""
  dense = not low_rank.is_node(gradient)
  return update.astype(gradient.dtype) if dense else update


def _is_control(x):
  return isinstance(x, step_control.PredictedKLState)


def _is_float(x):
  return jnp.issubdtype(x.dtype, jnp.floating)


def _all_finite(tree):
  ok = jnp.ones([], bool)
  for leaf in jax.tree.leaves(tree):
    if _is_float(leaf):
      ok &= jnp.all(jnp.isfinite(leaf))
  return ok


def _require_match(labels):
  if "sketched" not in jax.tree.leaves(labels):
    paths = [keys.leaf_path(p) for p, _ in jax.tree.leaves_with_path(labels)]
    raise ValueError(
        f"`where` matches none of the leaves {paths[:8]}: pass"
        " where=lambda path, leaf: ... that names the weights to sketch")
  return labels
