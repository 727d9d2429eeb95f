"""Policy synchronisation: the worker's bits are the trainer's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import bases
from logra_jax import fingerprint
from logra_jax import low_rank
from logra_jax import optimizers
from logra_jax import sharding
from logra_jax.rl import sync
from logra_jax.rl import types

RNG = np.random.default_rng()
RANK = 4


def normal(*shape):
  return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def make_params():
  """Stacked and single kernels, a norm, an embedding that is the head too."""
  shapes = {
      "embed": {"embedding": (12, 16)},
      "layers": {
          "q_proj": {"kernel": (3, 16, 20)},
          "norm": {"scale": (3, 16)}},
      "o_proj": {"kernel": (20, 16)},
  }
  return jax.tree.map(
      lambda shape: 0.3 * normal(*shape), shapes,
      is_leaf=lambda x: isinstance(x, tuple))


def logits(params):
  """A reader of every weight; the embedding is read twice."""
  table, layers = params["embed"]["embedding"], params["layers"]
  x = table
  for scale, kernel in zip(
      layers["norm"]["scale"], layers["q_proj"]["kernel"], strict=True):
    x = x + jnp.tanh((x * scale) @ kernel) @ params["o_proj"]["kernel"]
  return x @ table.T


def train_embeddings_too(path, leaf):
  del path, leaf
  return False


def random_gradients(params, groups):
  """Sketches of kernels, dense gradients of the rest, None of the frozen."""
  def one(p, group):
    if group == "sketched":
      return low_rank.Sketch(normal(*p.shape[:-2], RANK, p.shape[-1]))
    return normal(*p.shape) if group == "dense" else None
  return jax.tree.map(one, params, groups)


class Pair:
  """A trainer on random gradients and a worker, on one mesh."""

  def __init__(self, law, frozen, sizes):
    self.mesh = sharding.make_mesh(sizes)
    params = make_params()
    self.groups = optimizers.groups(params, frozen=frozen)
    self.tx = optimizers.logra(
        0.01, rank=RANK, basis=law, weight_decay=0.5, kl_budget=1e-3,
        frozen=frozen)
    whole = jax.NamedSharding(self.mesh, jax.P())
    named = lambda specs: sharding.named(specs, self.mesh)
    model = named(sharding.param_specs(params, self.mesh))
    # Placed anew for the worker: both give their buffers away.
    host = jax.tree.map(np.array, params)
    place = lambda: jax.device_put(host, model)
    init = lambda params: types.TrainState(
        jnp.int32(0), jnp.int32(0), params, self.tx.init(self.trained(params)))
    shapes = jax.eval_shape(init, params)
    states = types.TrainState(whole, whole, model, named(
        sharding.state_specs(shapes.opt_state, params, self.mesh)))
    self.state = jax.jit(init, out_shardings=states)(place())
    self.worker = types.Worker(jax.device_put(jnp.int32(0), whole), place())
    self.update = jax.jit(
        self._update, donate_argnums=0, out_shardings=(states, None, whole))
    self.follow = jax.jit(
        sync.apply, donate_argnums=0, out_shardings=types.Worker(whole, model))
    self.fingerprint = jax.jit(fingerprint.fingerprint)

  def trained(self, params):
    return jax.tree.map(
        lambda p, g: None if g == "frozen" else p, params, self.groups)

  def _update(self, state, gradients, predicted):
    updates, opt_state = self.tx.update(
        gradients, state.opt_state, self.trained(state.params),
        predict_kl=lambda updates: predicted)
    updates = sync.round_factors(updates)
    params = low_rank.apply_updates(state.params, updates)
    version = state.version + (~opt_state.last_refused).astype(jnp.int32)
    delta = sync.encode(updates, params, version, state.version)
    # A reader of the new weights, as the trainer measures them.
    return types.TrainState(
        state.step + 1, version, params, opt_state), delta, logits(params)

  def step(self, predicted=1e-3):
    gradients = random_gradients(self.state.params, self.groups)
    with jax.set_mesh(self.mesh):
      self.state, self.delta, self.seen = self.update(
          self.state, gradients, predicted)
      self.worker = self.follow(self.worker, self.delta)


def bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("law, frozen, sizes", [
    (bases.hadamard, optimizers.embeddings_and_head, {"data": 4, "model": 2}),
    (bases.stiefel, train_embeddings_too, {"fsdp": 4, "model": 2})])
def test_fifty_factor_syncs_give_the_trainers_bits(law, frozen, sizes):
  pair = Pair(law, frozen, sizes)
  before = bits(pair.worker.params)
  for i in range(50):
    pair.step()
    assert int(pair.worker.version) == int(pair.state.version) == i + 1
    if i % 10 == 9:
      ours, theirs = (
          int(pair.fingerprint(x.params)) for x in (pair.state, pair.worker))
      assert ours == theirs, i
  assert bits(pair.worker.params) == bits(pair.state.params)
  changed = [a != b for a, b in zip(
      before, bits(pair.worker.params), strict=True)]
  assert changed == [g != "frozen" for g in jax.tree.leaves(pair.groups)]

  # Tied: the one embedding reaches both of its uses.
  seen = jax.jit(logits)(pair.worker.params)
  np.testing.assert_allclose(
      seen, pair.seen, rtol=0, atol=1e-5 * np.abs(pair.seen).max())

  # A refused update travels as one that changes nothing.
  last = bits(pair.worker)
  pair.step(predicted=jnp.nan)
  assert int(pair.delta.version) == int(pair.delta.parent) == 50
  assert bits(pair.worker) == last
  assert bits(pair.state.params) == bits(pair.worker.params)


def test_merges_apply_decay_to_the_workers_weights():
  w = {"kernel": normal(8, 3)}
  node = low_rank.LowRank(
      jnp.zeros((2, 3)), jnp.float32(0.25), jax.random.key(0),
      bases.rademacher, 8)
  delta = types.PolicyDelta(jnp.int32(1), jnp.int32(0), {"kernel": node})
  worker = sync.apply(types.Worker(jnp.int32(0), w), delta)
  np.testing.assert_allclose(worker.params["kernel"], 0.75 * w["kernel"])
  assert int(worker.version) == 1


def random_update(key=0):
  return low_rank.LowRank(
      normal(2, 3, 5), jnp.float32(0.1), jax.random.key(key), bases.hadamard, 8)


def test_dense_leaves_travel_whole_and_frozen_ones_not():
  params = {"kernel": normal(2, 8, 5), "scale": normal(5), "head": normal(4)}
  updates = {"kernel": random_update(), "scale": normal(5), "head": None}
  rounded = sync.round_factors(updates)
  assert rounded["kernel"].factor.dtype == jnp.bfloat16
  assert bool(rounded["kernel"].key == updates["kernel"].key)
  assert rounded["scale"] is updates["scale"] and rounded["head"] is None
  new = low_rank.apply_updates(params, rounded)
  delta = sync.encode(rounded, new, jnp.int32(4), jnp.int32(3))
  assert isinstance(delta.leaves["kernel"], low_rank.LowRank)
  assert delta.leaves["scale"] is new["scale"] and delta.leaves["head"] is None
  # U in two bytes, decay and key; the dense leaf; version and parent.
  assert sync.message_bytes(delta) == (
      2 * 2 * 3 * 5 + 4 + 8) + 4 * 5 + 4 + 4
  assert sync.message_bytes(params) == 4 * (2 * 8 * 5 + 5 + 4)
  # A worker whose dense leaf went astray is set right.
  stray = params | {"scale": params["scale"] + 1.0}
  worker = sync.apply(types.Worker(jnp.int32(3), stray), delta)
  assert bits(worker.params) == bits(new) and int(worker.version) == 4
