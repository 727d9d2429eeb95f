"""`logra` against a NumPy float64 transcript of its formulas, and refusal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import bases
from logra_jax import keys
from logra_jax import low_rank
from logra_jax import optimizers
from logra_jax import sketch

RNG = np.random.default_rng()
RANK = 4
KERNELS = ("layers/q/kernel", "out/kernel")
DENSE = ("layers/norm/scale", "out/bias")
FROZEN = ("embed/embedding", "lm_head/kernel")


def normal(*shape, scale=1.0):
  return (scale * RNG.standard_normal(shape)).astype(np.float32)


def make_params():
  """Two stacked layers, a plain kernel, dense and frozen leaves."""
  return jax.tree.map(jnp.asarray, {
      "layers": {
          "q": {"kernel": normal(2, 8, 5)},
          "norm": {"scale": normal(2, 8)}},
      "out": {"kernel": normal(6, 4), "bias": normal(4)},
      "embed": {"embedding": normal(7, 8)},
      "lm_head": {"kernel": normal(8, 7)},
  })


def cosines(key, n, r, dtype=jnp.float32, batch=()):
  """A fixed basis, which compiles fast: laws and keys have their own tests."""
  del key
  angle = jnp.square(jnp.arange(1.0, n + 1))[:, None] * jnp.arange(1.0, r + 1)
  return jnp.broadcast_to(jnp.cos(angle).astype(dtype), (*batch, n, r))


def flat(tree):
  return {
      keys.leaf_path(path): leaf for path, leaf in jax.tree.leaves_with_path(
          tree, is_leaf=low_rank.is_node)}


def dense_gradients(params, size=0.1):
  return jax.tree.map(lambda p: normal(*p.shape, scale=size), params)


def as_sketches(gradients, state):
  """Sketches of kernels, None for frozen leaves: what taps hand over."""
  basis = jax.device_get(flat(sketch.find_basis(state)))
  def one(path, g):
    path = keys.leaf_path(path)
    if path in basis:
      return low_rank.Sketch(np.swapaxes(basis[path], -1, -2) @ g)
    return None if path in FROZEN else g
  return jax.tree.map_with_path(one, gradients)


def without_frozen(params):
  return jax.tree.map_with_path(
      lambda path, p: None if keys.leaf_path(path) in FROZEN else p, params)


def predict(updates):
  """A stand-in for the KL: a quadratic of the updates, frozen leaves too."""
  return 0.5 * sum(
      jnp.sum(jnp.square(u.factor if isinstance(u, low_rank.LowRank) else u))
      for u in jax.tree.leaves(updates, is_leaf=low_rank.is_node))


class Reference:
  """Section 3 of the method in float64, one object a run."""

  def __init__(self, params, learning_rate=None, max_norm=None, decay=0.0,
               ratio=None, budget=None):
    self.w = {k: np.asarray(v, np.float64) for k, v in flat(params).items()}
    self.lr, self.max_norm, self.decay = learning_rate, max_norm, decay
    self.ratio, self.budget, self.t = ratio, budget, 0
    self.v, self.clipped = dict.fromkeys(KERNELS, 0.0), set()
    self.adam = dict.fromkeys(DENSE, (0.0, 0.0))

  def update(self, g, basis, lifted_norms):
    """One update in place from gradients and this update's bases."""
    g = {k: np.asarray(x, np.float64) for k, x in g.items()}
    basis = {k: np.asarray(x, np.float64) for k, x in basis.items()}
    s = {k: np.swapaxes(basis[k], -1, -2) @ g[k] for k in KERNELS}
    self.t += 1
    if self.lr is None:
      factors, dense, shrink = self._ratio_form(s, basis), {}, 0.0
    else:
      lr = self.lr(self.t - 1)
      s, d = self._clip(s, g, lifted_norms)
      factors = {k: -lr * x / (self._root(k, x) + 1e-8) for k, x in s.items()}
      dense = {k: -lr * (self._adam(k, d[k]) + self.decay * self.w[k])
               for k in DENSE}
      shrink = lr * self.decay
    alpha = 1.0
    if self.budget is not None:
      seen = [basis[k] @ f - shrink * self.w[k] if lifted_norms else f
              for k, f in factors.items()]
      predicted = 0.5 * sum(np.sum(x ** 2) for x in (*seen, *dense.values()))
      alpha = min(3.0, np.sqrt(self.budget(self.t - 1) / predicted))
    for k, f in factors.items():
      self.w[k] = (1 - alpha * shrink) * self.w[k] + alpha * (basis[k] @ f)
    for k, u in dense.items():
      self.w[k] = self.w[k] + alpha * u
    return alpha

  def _root(self, k, s):
    self.v[k] = 0.95 * self.v[k] + 0.05 * np.mean(s ** 2, -2, keepdims=True)
    return np.sqrt(self.v[k] / (1 - 0.95 ** self.t))

  def _ratio_form(self, s, basis):
    out = {}
    for k, x in s.items():
      root = self._root(k, x)
      floor = np.maximum(
          1e-8 * root.mean(-1, keepdims=True), np.finfo(np.float32).tiny)
      d = x / (root + floor)
      size = lambda m: np.sqrt(np.sum(m ** 2, (-2, -1), keepdims=True))
      out[k] = d * size(x) / np.where(size(d) > 0, size(d), 1.0)
    whole = lambda ms: np.sqrt(sum(np.sum(m ** 2) for m in ms))
    share = self.ratio * whole(self.w[k] for k in KERNELS) / whole(
        basis[k] @ u for k, u in out.items())
    return {k: -share * u for k, u in out.items()}

  def _clip(self, s, g, lifted_norms):
    dense = {k: g[k] for k in DENSE}
    kernels = {k: g[k] for k in KERNELS} if lifted_norms else s
    norm = np.sqrt(sum(
        np.sum(x ** 2) for x in (*kernels.values(), *dense.values())))
    factor = min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm else 1.0
    self.clipped.add(factor < 1.0)
    return ({k: factor * x for k, x in tree.items()} for tree in (s, dense))

  def _adam(self, k, g):
    m, v = self.adam[k]
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g ** 2
    self.adam[k] = m, v
    return m / (1 - 0.9 ** self.t) / (
        np.sqrt(v / (1 - 0.999 ** self.t)) + 1e-8)


def compiled(tx):
  """`init` and a donated `(params, state, gradients, KL scale)` step."""
  def step(params, state, gradients, kl):
    trained = jax.tree.map(
        lambda p, g: None if g is None else p, params, gradients)
    updates, state = tx.update(
        gradients, state, trained, predict_kl=lambda u: kl * predict(u))
    return logra_jax.apply_updates(params, updates), state
  return jax.jit(tx.init), jax.jit(step, donate_argnums=(0, 1))


def check_run(tx, reference, params, sketches):
  """Weights are the reference's after gradients of several sizes, or none."""
  init, step = compiled(tx)
  state = init(without_frozen(params) if sketches else params)
  first = jax.tree.map(np.array, params)  # params are donated
  for size in (0.1, 0.01, 1.0, 0.01):
    gradients = dense_gradients(first, size)
    if size >= 0.1:
      gradients["layers"]["q"]["kernel"][1] = 0.0
    basis = jax.device_get(flat(sketch.find_basis(state)))
    given = as_sketches(gradients, state) if sketches else gradients
    params, state = step(params, state, given, 1.0)
    before = dict(reference.w)
    alpha = reference.update(flat(gradients), basis, not sketches)
    for path, leaf in flat(jax.device_get(params)).items():
      moved = reference.w[path] - before[path]
      if path in FROZEN:
        assert (leaf == flat(first)[path]).all(), path
      # A weight of size 1 is known to 6e-8.
      np.testing.assert_allclose(
          leaf, reference.w[path], rtol=1e-6,
          atol=1e-5 * np.abs(moved).max() + 3e-7, err_msg=path)
    if reference.budget is not None:
      np.testing.assert_allclose(
          optax.tree.get(state, "step_scale"), alpha, rtol=1e-4)
    assert not bool(state.last_refused)
  assert step._cache_size() == 1


@pytest.mark.parametrize("law, sketches, budget", [
    (bases.hadamard, True, lambda t: 0.01 / (1.0 + t)),
    (cosines, False, None)])
def test_ratio_form_follows_its_formulas(law, sketches, budget):
  params = make_params()
  ratio = 0.05  # a step that float32 weights show to four digits
  tx = optimizers.logra(
      rank=RANK, basis=law, weight_ratio=ratio, kl_budget=budget)
  check_run(
      tx, Reference(params, ratio=ratio, budget=budget), params, sketches)


@pytest.mark.parametrize("max_norm, sketches", [
    (0.3, True), (0.3, False), (None, True)])
def test_learning_rate_form_follows_its_formulas(max_norm, sketches):
  params = make_params()
  warm_up = optax.linear_schedule(0.002, 0.02, 3)
  budget = lambda t: 1e-3 / (1.0 + t)
  tx = optimizers.logra(
      warm_up, rank=RANK, basis=cosines, weight_decay=0.5,
      max_norm=max_norm, kl_budget=budget)
  reference = Reference(
      params, lambda t: 0.002 + 0.006 * min(t, 3), max_norm, 0.5,
      budget=budget)
  check_run(tx, reference, params, sketches)
  # With a bound, gradients of both sizes were met.
  assert reference.clipped == ({True, False} if max_norm else {False})


def test_a_clipping_norm_of_zero_is_none():
  params = {"kernel": normal(6, 3)}
  def program(max_norm):
    tx = optimizers.logra(0.1, rank=RANK, kl_budget=None, max_norm=max_norm)
    return str(jax.make_jaxpr(lambda p: tx.update(p, tx.init(p), p))(params))
  assert program(0) == program(None) != program(1.0)


@pytest.mark.parametrize("t", [0, 100, 299, 400])
def test_published_budget_is_the_papers(t):
  budget = 2e-5 + 0.5 * 1.8e-4 * (1 + np.cos(np.pi * min(t / 299, 1)))
  found = optimizers.PUBLISHED_BUDGET(jnp.int32(t))
  np.testing.assert_allclose(found, budget, rtol=1e-5)


def test_groups_sketch_projections_and_freeze_embeddings_and_head():
  found = flat(optimizers.groups(make_params()))
  assert found == {
      **dict.fromkeys(KERNELS, "sketched"), **dict.fromkeys(DENSE, "dense"),
      **dict.fromkeys(FROZEN, "frozen")}
  head = lambda path, leaf: path == "lm_head/kernel"
  found = flat(optimizers.groups(make_params(), head, optimizers.everything))
  assert {k for k, v in found.items() if v != "frozen"} == {"lm_head/kernel"}
  marked = {"embedding": low_rank.Sketch(normal(2, 3))}
  assert optimizers.groups(marked) == {"embedding": "sketched"}


def test_without_a_budget_no_prediction_is_needed():
  params = {"kernel": normal(6, 3)}
  run = lambda tx: jax.eval_shape(
      lambda p: tx.update(p, tx.init(p), p), params)
  for learning_rate in (None, 0.1):
    run(optimizers.logra(learning_rate, rank=RANK, kl_budget=None))
    with pytest.raises(TypeError, match="predict_kl"):
      run(optimizers.logra(learning_rate, rank=RANK))


def test_where_that_matches_nothing_names_the_leaves():
  tx = optimizers.logra(rank=RANK, where=lambda path, leaf: False)
  with pytest.raises(ValueError, match="where.*out/bias.*pass where="):
    tx.init(make_params())


def test_clipping_adds_its_epsilon_to_the_norm():
  clip = optimizers.clip_by_global_norm(1e-6).update
  assert abs(clip(jnp.float32(1e-6), ())[0] / 5e-7 - 1.0) < 1e-5


def test_a_negative_clipping_norm_is_refused():
  with pytest.raises(ValueError, match="max_norm -1.0.*None"):
    optimizers.logra(0.1, max_norm=-1.0)


def bits(tree):
  raw = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(
      x.dtype, jax.dtypes.prng_key) else x
  return [np.asarray(raw(x)).tobytes() for x in jax.tree.leaves(tree)]


def spoil(gradients, path, value):
  def one(p, g):
    hit = keys.leaf_path(p).removesuffix("/value") == path
    return np.where(np.arange(g.size).reshape(g.shape), g, value
                    ).astype(g.dtype) if hit else g
  return jax.tree.map_with_path(one, gradients)


@functools.lru_cache
def refusing(learning_rate):
  law = bases.rademacher if learning_rate is None else cosines
  return compiled(optimizers.logra(
      learning_rate, rank=RANK, basis=law, kl_budget=1e-3))


REASONS = [
    ("layers/q/kernel", np.nan, 1.0), ("out/bias", np.inf, 1.0),
    ("layers/norm/scale", -np.inf, 1.0), ("", 0.0, np.nan),
    ("", 0.0, np.inf), ("", 0.0, -1.0)]


@pytest.mark.parametrize("learning_rate", [None, 0.01])
def test_a_refused_update_leaves_every_bit_and_the_next_one_works(
    learning_rate):
  init, step = refusing(learning_rate)
  params = make_params()
  state = init(without_frozen(params))
  good = lambda: as_sketches(dense_gradients(params), state)
  params, state = step(params, state, good(), 1.0)
  for i, (path, value, kl) in enumerate(REASONS):
    before = bits((params, state.inner_state))
    params, state = step(params, state, spoil(good(), path, value), kl)
    assert bits((params, state.inner_state)) == before, (path, value, kl)
    assert int(state.refused) == i + 1 and bool(state.last_refused)
  # As if the refused updates had never been.
  gradients, old = good(), bits(params)
  copy = jax.tree.map(jnp.copy, (params, state))
  params, state = step(params, state, gradients, 1.0)
  assert int(state.refused) == len(REASONS) and not bool(state.last_refused)
  assert bits(params) != old
  fresh = copy[1]._replace(
      refused=jnp.int32(0), last_refused=jnp.array(False))
  again, _ = step(copy[0], fresh, gradients, 1.0)
  assert bits(again) == bits(params)
  assert step._cache_size() == 1


def test_a_refused_update_leaves_negative_zeros():
  init, step = refusing(0.01)
  params = jax.tree.map(lambda p: jnp.full_like(p, -0.0), make_params())
  state = init(without_frozen(params))
  gradients = as_sketches(dense_gradients(params), state)
  before = bits(params)
  params, _ = step(params, state, gradients, np.nan)
  assert bits(params) == before


def test_an_update_that_overflows_is_refused():
  tx = optimizers.refuse_invalid(optax.scale(1e38))
  for size, refused in ((1.0, 0), (1e3, 1), (np.nan, 1)):
    update, state = tx.update(jnp.float32(size), tx.init(0.0))
    assert int(state.refused) == refused and bool(jnp.isfinite(update))


@pytest.mark.parametrize("learning_rate", [None, 0.01])
def test_a_state_made_outside_jit_can_be_donated(learning_rate):
  tx = optimizers.logra(learning_rate, rank=RANK, basis=cosines)
  jax.jit(lambda s: s, donate_argnums=0)(tx.init({"kernel": normal(6, 3)}))
