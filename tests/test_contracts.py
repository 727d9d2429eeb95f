"""Every public transform obeys every law that optax's own obey.

A transform stands here with the hyperparameters that `inject_hyperparams` may
move; all are exact in bfloat16, so that moving them into it changes nothing.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import bases
from logra_jax import sharding
from tests.support import quick

# Muon has an Adam for leaves that are no matrices, reset at every refresh.
pytestmark = pytest.mark.filterwarnings("ignore:second moments with refresh")
RNG = np.random.default_rng()


class Case:
  """A transform: its factory, numbers to inject, and fixed arguments."""

  def __init__(self, factory, numbers, **fixed):
    self.factory, self.numbers, self.fixed = factory, numbers, fixed

  def make(self, **numbers):
    return self.factory(**(self.numbers | numbers), **self.fixed)

  def inject(self):
    """The same with `numbers` as arrays in the optimiser's state."""
    given = inspect.signature(self.factory).parameters
    static = [name for name in given if name not in self.numbers]
    return optax.inject_hyperparams(self.factory, static_args=static)(
        **self.numbers, **self.fixed)


def sketched(inner, refresh_every=1):
  # Rademacher is the quickest law to compile.
  return logra_jax.sketched(
      inner, rank=3, basis=bases.rademacher, refresh_every=refresh_every)


LOGRA = dict(rank=3, basis=bases.rademacher, frozen=lambda path, leaf: False)
RATE = {"learning_rate": 0.25}
B2, KL = {"b2": 0.75}, {"kl_budget": 2.0**-10}
CASES = {
    "sketched sgd": Case(
        lambda learning_rate: sketched(optax.sgd(learning_rate)), RATE),
    "sketched adamw": Case(
        lambda learning_rate, b2: sketched(
            optax.adamw(learning_rate, b2=b2, weight_decay=0.5), 2),
        RATE | B2),
    "sketched lion": Case(
        lambda learning_rate: sketched(optax.lion(learning_rate)), RATE),
    "sketched muon": Case(
        lambda learning_rate: sketched(
            optax.contrib.muon(learning_rate, ns_steps=2)), RATE),
    "sketched row_adam": Case(
        lambda b2: sketched(logra_jax.scale_by_row_adam(b2)), B2),
    "scale_by_row_adam": Case(
        logra_jax.scale_by_row_adam, B2 | {"eps": 2.0**-20}),
    "scale_by_row_adam restored": Case(
        logra_jax.scale_by_row_adam, B2 | {"eps": 2.0**-20},
        restore_norm=True),
    "scale_to_weight_ratio": Case(
        logra_jax.scale_to_weight_ratio, {"ratio": 2.0**-7}),
    "scale_by_predicted_kl": Case(
        logra_jax.scale_by_predicted_kl, KL | {"max_scale": 3.0}),
    "logra ratio form": Case(
        logra_jax.logra, B2 | KL | {"weight_ratio": 2.0**-7}, **LOGRA),
    "logra learning-rate form": Case(
        logra_jax.logra, RATE | B2 | KL | {"max_norm": 1.0}, **LOGRA),
}
every = pytest.mark.parametrize("name", CASES)
with_rate = pytest.mark.parametrize(
    "name", [n for n, c in CASES.items() if "learning_rate" in c.numbers])


def random_tree():
  """A leaf to sketch, a dense one, and one that is not there."""
  normal = lambda *shape: jnp.asarray(RNG.standard_normal(shape), jnp.float32)
  return {"q_proj": {"kernel": normal(8, 6)},
          "final_norm": {"scale": normal(8)}, "unused": None}


PARAMS, *GRADIENTS = (random_tree() for _ in range(4))
NAN = jax.tree.map(lambda g: g.at[..., 0].set(jnp.nan), GRADIENTS[0])


def predict_kl(updates):
  """A quadratic form, as a predicted KL is one."""
  return optax.tree.norm(cast(updates, jnp.float32), squared=True)


def extra(tx):
  """The transform, given the extra argument that one case requires."""
  if isinstance(tx, optax.GradientTransformation):
    tx = optax.with_extra_args_support(tx)
  return optax.GradientTransformationExtraArgs(
      tx.init, functools.partial(tx.update, predict_kl=predict_kl))


def unroll(tx, gradients, params):
  """(updates of each step, state before each step and after the last)."""
  tx = extra(tx)
  states, updates = [tx.init(params)], []
  for g in gradients:
    update, state = tx.update(g, states[-1], params)
    updates.append(update)
    states.append(state)
  return updates, states


def scan(tx, gradients, params):
  """(updates of all steps, stacked; last state)."""
  tx = extra(tx)
  def step(state, g):
    update, state = tx.update(g, state, params)
    return state, update
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *gradients)
  last, updates = jax.lax.scan(step, tx.init(params), stacked)
  return updates, last


def cast(tree, dtype):
  return jax.tree.map(lambda x: x.astype(dtype), tree)


def kernels(tree):
  return {"q_proj": tree["q_proj"], "unused": None}


def is_kernel(tree):
  return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def close(found, expected, rtol=1e-5):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  def one(a, b):
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    atol = rtol * np.abs(b).max(initial=0)
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)
  jax.tree.map(one, found, expected)


equal = functools.partial(close, rtol=0)


def avals(tree):
  return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def same_avals(new, old):
  """Weak types too: one that changes makes the next call compile again."""
  weak = lambda tree: [x.weak_type for x in jax.tree.leaves(tree)]
  return (jax.tree.structure(new) == jax.tree.structure(old)
          and avals(new) == avals(old) and weak(new) == weak(old))


# Inside optax's wrappers. One program holds all, for they share their draws.


@functools.cache
def wrapped(name):
  tx = CASES[name].make()
  stamp = optax.GradientTransformationExtraArgs(
      lambda params: optax.EmptyState(),
      lambda updates, state, params=None, *, predict_kl: (updates, state))
  labels = lambda tree: jax.tree.map(
      lambda kernel: "tx" if kernel else "zero", is_kernel(tree))
  mean = jax.tree.map(lambda a, b: (a + b) / 2, *GRADIENTS[:2])
  finite_then_nan = [*GRADIENTS[:2], NAN]
  def everything():
    return {
        "plain": unroll(tx, GRADIENTS[:2], PARAMS),
        "chain": unroll(
            optax.chain(stamp, tx, stamp), GRADIENTS[:2], PARAMS),
        "alone": unroll(
            tx, [kernels(g) for g in GRADIENTS[:2]], kernels(PARAMS)),
        "masked": unroll(optax.masked(tx, is_kernel), GRADIENTS[:2], PARAMS),
        "partition": unroll(
            optax.partition({"tx": tx, "zero": optax.set_to_zero()}, labels),
            GRADIENTS[:2], PARAMS),
        "finite": unroll(
            optax.apply_if_finite(tx, 5), finite_then_nan, PARAMS),
        "mean": unroll(tx, [mean], PARAMS),
        "multi": unroll(optax.MultiSteps(tx, 2), GRADIENTS[:2], PARAMS),
    }
  return quick(everything)()


@every
def test_a_chain_passes_extra_arguments_through(name):
  updates, states = wrapped(name)["chain"]
  expected, expected_states = wrapped(name)["plain"]
  equal(updates, expected)
  equal([state[1] for state in states], expected_states)


@every
def test_masked_leaves_pass_untouched_and_others_as_if_alone(name):
  updates, _ = wrapped(name)["masked"]
  expected, _ = wrapped(name)["alone"]
  for update, alone, g in zip(updates, expected, GRADIENTS, strict=False):
    close(kernels(update), alone)
    equal(update["final_norm"], g["final_norm"])


@every
def test_a_partition_gives_each_group_its_own_transform(name):
  updates, _ = wrapped(name)["partition"]
  expected, _ = wrapped(name)["alone"]
  for update, alone in zip(updates, expected, strict=True):
    close(kernels(update), alone)
    assert not update["final_norm"]["scale"].any()


@every
def test_apply_if_finite_lets_finite_gradients_pass_and_no_others(name):
  updates, states = wrapped(name)["finite"]
  expected, expected_states = wrapped(name)["plain"]
  close(updates[:2], expected)
  equal(updates[2], jax.tree.map(jnp.zeros_like, PARAMS))
  close([state.inner_state for state in states[:3]], expected_states)
  equal(states[3].inner_state, states[2].inner_state)


@every
def test_accumulated_gradients_are_one_update_with_their_mean(name):
  updates, states = wrapped(name)["multi"]
  expected, expected_states = wrapped(name)["mean"]
  equal(updates[0], jax.tree.map(jnp.zeros_like, PARAMS))
  close(updates[1], expected[0])
  equal(states[1].inner_opt_state, states[0].inner_opt_state)
  close(states[2].inner_opt_state, expected_states[1])


@every
def test_absent_leaves_stay_absent(name):
  for update in wrapped(name)["plain"][0]:
    assert jax.tree.structure(update) == jax.tree.structure(PARAMS)


# State.


@every
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_state_keeps_structure_shapes_and_dtypes(name, dtype):
  tx = extra(CASES[name].make())
  params, g = cast(PARAMS, dtype), cast(GRADIENTS[0], dtype)
  state = jax.eval_shape(tx.init, params)
  update, new = jax.eval_shape(tx.update, g, state, params)
  assert same_avals(new, state)
  assert [u.dtype for u in jax.tree.leaves(update)] == [dtype] * 2
  # A conditional update, as for a skipped step, wants all of that.
  skipped = lambda s: (jax.tree.map(jnp.zeros_like, g), s)
  conditional = lambda ok, s: jax.lax.cond(
      ok, lambda s: tx.update(g, s, params), skipped, s)
  jax.eval_shape(conditional, True, state)


@every
def test_abstract_init_is_init(name):
  tx = CASES[name].make()
  abstract = jax.eval_shape(tx.init, jax.eval_shape(lambda: PARAMS))
  concrete = wrapped(name)["plain"][1][0]
  assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
  assert avals(abstract) == avals(concrete)


@every
def test_state_sharded_as_its_weights_stays_so_and_compiles_once(name):
  tx = extra(CASES[name].make())
  mesh = sharding.make_mesh({"fsdp": 4, "model": 2})
  weights = sharding.named(sharding.param_specs(PARAMS, mesh), mesh)
  expected, states = wrapped(name)["plain"]
  specs = sharding.named(sharding.state_specs(states[0], PARAMS, mesh), mesh)
  update = quick(tx.update, out_shardings=(weights, specs))
  state, params = jax.device_put((states[0], PARAMS), (specs, weights))
  updates = []
  for g in GRADIENTS[:2]:
    u, state = update(jax.device_put(g, weights), state, params)
    updates.append(u)
  assert update._cache_size() == 1
  for (path, x), kept in zip(
      jax.tree.leaves_with_path(state), jax.tree.leaves(specs), strict=True):
    assert x.sharding.is_equivalent_to(kept, x.ndim)
    is_basis = "basis" in jax.tree_util.keystr(path)
    assert not (is_basis and x.sharding.is_fully_replicated)
  close(updates, expected)
  close(state, states[2])


@every
def test_injected_hyperparameters_change_nothing_in_a_bfloat16_model(name):
  params = cast(PARAMS, jnp.bfloat16)
  gradients = [cast(g, jnp.bfloat16) for g in GRADIENTS]
  plain, injected = CASES[name].make(), CASES[name].inject()
  (found, last), (expected, expected_last) = quick(lambda: [
      scan(tx, gradients, params) for tx in (injected, plain)])()
  assert all(bool(jnp.isfinite(u).all()) for u in jax.tree.leaves(found))
  # One spacing, where a fused product rounds the other way.
  close(found, expected, rtol=2.0**-7)
  assert avals(last.inner_state) == avals(expected_last)


@with_rate
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", [np.float32, np.float64, jnp.float32])
def test_the_kind_of_learning_rate_does_not_change_the_updates_dtype(
    name, dtype, kind):
  tx = extra(CASES[name].make(learning_rate=kind(0.25)))
  params, g = cast(PARAMS, dtype), cast(GRADIENTS[0], dtype)
  state = jax.eval_shape(tx.init, params)
  update, new = jax.eval_shape(tx.update, g, state, params)
  assert same_avals(new, state)
  assert [u.dtype for u in jax.tree.leaves(update)] == [dtype] * 2


@pytest.mark.parametrize("name", [n for n in CASES if "scale" not in n])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sketches_leave_the_state_as_dense_gradients_do(name, dtype):
  tx = optax.with_extra_args_support(CASES[name].make())
  tx_update = functools.partial(tx.update, predict_kl=lambda updates: 1e-3)
  params, g = cast(PARAMS, dtype), cast(GRADIENTS[0], dtype)
  g["q_proj"] = {"kernel": logra_jax.Sketch(jnp.ones((3, 6)))}
  state = jax.eval_shape(tx.init, params)
  update, new = jax.eval_shape(tx_update, g, state, params)
  assert same_avals(new, state)
  low = update["q_proj"]["kernel"]
  assert isinstance(low, logra_jax.LowRank) and low.n == 8
  assert (low.factor.shape, low.factor.dtype) == ((3, 6), jnp.float32)
  merged = jax.eval_shape(logra_jax.apply_updates, params, update)
  assert avals(merged) == avals(params)
