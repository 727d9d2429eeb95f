"""Laws of one compiled update, on a small causal model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import keys
from logra_jax import low_rank
from logra_jax import optimizers
from logra_jax import sharding
from logra_jax import sketch
from logra_jax import taps
from logra_jax.rl import losses
from logra_jax.rl import step as step_lib
from logra_jax.rl import sync
from logra_jax.rl import types

RNG = np.random.default_rng()
RANK, VOCAB, DIM, HIDDEN, LAYERS = 3, 10, 6, 8, 2
ROWS, PROMPT, NEW = 8, 3, 5
TEMPERATURE = 0.8


def normal(*shape, scale=1.0):
  return jnp.asarray(scale * RNG.standard_normal(shape), jnp.float32)


def cosines(key, n, r, dtype=jnp.float32, batch=()):
  """A basis law that compiles fast; what is drawn is not tested here."""
  del key
  angle = jnp.square(jnp.arange(1.0, n + 1))[:, None] * jnp.arange(1.0, r + 1)
  return jnp.broadcast_to(jnp.cos(angle).astype(dtype), (*batch, n, r))


def causal_logits(params, tokens, mask, width):
  """Tapped layers over a running sum of embeddings. [N, S] -> [N, T, V]."""
  x = params["embed"]["embedding"][tokens] * mask[..., None]
  x = jnp.cumsum(x, 1)[:, -width - 1:-1]
  x = taps.linear(x, params["up_proj"]["kernel"])
  def body(x, kernel):
    return x + jnp.tanh(taps.linear(x, kernel)), None
  x, _ = jax.lax.scan(body, x, params["layers"]["o_proj"]["kernel"])
  return (x * params["norm"]["scale"]) @ params["lm_head"]["kernel"]


def make_params():
  return {
      "embed": {"embedding": normal(VOCAB, DIM)},
      "up_proj": {"kernel": normal(DIM, HIDDEN, scale=0.4)},
      "layers": {"o_proj": {
          "kernel": normal(LAYERS, HIDDEN, HIDDEN, scale=0.4)}},
      "norm": {"scale": normal(HIDDEN)},
      "lm_head": {"kernel": normal(HIDDEN, VOCAB, scale=0.4)},
  }


def make_rollout(rows=ROWS, lengths=None, vocab=VOCAB):
  """Random completions of the given lengths; prompts padded on the left."""
  lengths = RNG.integers(1, NEW + 1, rows) if lengths is None else lengths
  completion = np.arange(NEW) < np.asarray(lengths)[:, None]
  prompt = np.arange(PROMPT) >= RNG.integers(0, PROMPT, (rows, 1))
  mask = np.concatenate([prompt, completion], 1)
  tokens = RNG.integers(1, vocab, mask.shape) * mask
  return types.Rollout(
      jnp.asarray(tokens, jnp.int32), jnp.asarray(mask),
      jnp.asarray(completion), normal(rows, NEW, scale=0.1) - 2.0,
      jnp.asarray(np.asarray(lengths) < NEW))


def pieces(microbatches=1, budget=1e-5, learning_rate=0.01):
  """(init, step); the step also returns the gradients its optimiser saw."""
  tx = optimizers.logra(
      learning_rate, rank=RANK, basis=cosines, kl_budget=budget, max_scale=1e6)
  groups = optimizers.groups(jax.eval_shape(make_params))
  trainable = jax.tree.map(lambda g: g != "frozen", groups)
  def init(params):
    trained = jax.tree.map(lambda p, t: p if t else None, params, trainable)
    return types.TrainState(
        jnp.int32(0), jnp.int32(0), params, tx.init(trained))
  def step(state, rollout, advantages):
    seen = []
    def spy(gradients, *args, **extra):
      seen.append(gradients)
      return tx.update(gradients, *args, **extra)
    # With a unit of rounding as room, any other ratio than 1 is clipped.
    out = step_lib.train_step(
        state, rollout, advantages, completion_logits=causal_logits,
        tx=tx._replace(update=spy), trainable=trainable,
        temperature=TEMPERATURE, microbatches=microbatches, probe_rows=4,
        clip_low=1e-7, clip_high=1e-7)
    return *out, seen[0]
  return init, step


def setup(microbatches=1, learning_rate=0.01):
  return compiled(microbatches, learning_rate)  # one cache entry a meaning


@functools.lru_cache
def compiled(microbatches, learning_rate):
  init, step = pieces(microbatches, learning_rate=learning_rate)
  return jax.jit(init), jax.jit(step, donate_argnums=0)


def run(rollout, advantages, params, **options):
  init, step = setup(**options)
  return step(init(jax.tree.map(jnp.copy, params)), rollout, advantages)


def flat(tree):
  return {keys.leaf_path(path): np.array(leaf)
          for path, leaf in jax.tree.leaves_with_path(tree)
          if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)}


def close(found, expected, tolerance):
  found, expected = flat(found), flat(expected)
  assert found.keys() == expected.keys()
  for name, leaf in expected.items():
    error = np.abs(found[name] - leaf).max()
    assert error <= tolerance * np.abs(leaf).max(), (name, error)


@pytest.mark.parametrize("lengths", [
    [1, NEW] * 4, [1, 1, 1, 1, NEW, NEW, NEW, NEW], [NEW] + [1] * 7])
def test_microbatches_of_any_size_give_the_unsplit_sketches(lengths):
  rollout, advantages = make_rollout(lengths=lengths), normal(ROWS)
  params = make_params()
  whole, _, metrics, gradients = run(rollout, advantages, params)
  assert not bool(metrics["refused"])
  for parts in (2, 4):
    state, _, split_metrics, split = run(
        rollout, advantages, params, microbatches=parts)
    # Float32 rounding: either is within 2e-6 of the gradient in float64, and
    # two splits differ by up to 3.2e-6 on fresh inputs.
    close(split, gradients, 1e-5)
    close(state.params, whole.params, 1e-5)
    for name, value in metrics.items():
      np.testing.assert_allclose(
          split_metrics[name], value, rtol=1e-3, atol=1e-7, err_msg=name)


def test_the_delta_turns_the_old_weights_into_the_new():
  params = make_params()
  state, delta, *_ = run(make_rollout(), normal(ROWS), params)
  worker = jax.jit(sync.apply)(types.Worker(jnp.int32(0), params), delta)
  assert bits(worker.params) == bits(state.params)
  assert int(worker.version) == int(state.version) == 1
  factor = delta.leaves["up_proj"]["kernel"].factor
  assert factor.dtype == jnp.bfloat16 and factor.any()
  assert delta.leaves["lm_head"]["kernel"] is None


def test_sketches_are_those_of_the_global_token_mean():
  rollout, advantages = make_rollout(), normal(ROWS)
  params = make_params()
  *_, gradients = run(rollout, advantages, params)
  def policy_loss(params):
    logprobs = jax.nn.log_softmax(causal_logits(
        params, rollout.tokens, rollout.mask, NEW) / TEMPERATURE)
    chosen = jnp.take_along_axis(
        logprobs, rollout.tokens[:, PROMPT:, None], -1)[..., 0]
    weight = jnp.minimum(2.0, jnp.exp(jax.lax.stop_gradient(
        chosen) - rollout.behavior_logprobs)) * rollout.completion_mask
    return -jnp.sum(weight * chosen * advantages[:, None]
                    ) / rollout.completion_mask.sum()
  dense = jax.jit(jax.grad(policy_loss))(params)
  basis = sketch.find_basis(setup()[0](params).opt_state)
  project = lambda v, g: jnp.swapaxes(v, -1, -2) @ g
  close(gradients["norm"], dense["norm"], 1e-5)
  for name in ("up_proj", "layers"):
    close(gradients[name],
          jax.tree.map(lambda v, g: low_rank.Sketch(project(v, g)),
                       basis[name], dense[name]), 1e-5)
  assert gradients["embed"]["embedding"] is None


def test_a_sketch_takes_four_bytes_times_rank_times_outputs():
  *_, gradients = run(make_rollout(), normal(ROWS), make_params())
  assert isinstance(gradients["up_proj"]["kernel"], low_rank.Sketch)
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  assert size(gradients["up_proj"]) == 4 * RANK * HIDDEN
  assert size(gradients["layers"]) == 4 * RANK * HIDDEN * LAYERS
  assert size(gradients) == (
      4 * RANK * HIDDEN * (1 + LAYERS) + 4 * HIDDEN)  # and the dense norm


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_the_ratio_is_exactly_one_on_policy(microbatches):
  rollout, advantages = make_rollout(), normal(ROWS)
  params = make_params()
  logits = causal_logits(params, rollout.tokens, rollout.mask, NEW)
  rollout = rollout._replace(behavior_logprobs=losses.token_logprobs(
      logits, rollout.tokens[:, PROMPT:], TEMPERATURE))
  _, _, metrics, *_ = run(
      rollout, advantages, params, microbatches=microbatches)
  assert float(metrics["clipped_share"]) == 0.0
  np.testing.assert_allclose(metrics["importance_mean"], 1.0, rtol=1e-5)
  lengths = np.asarray(rollout.completion_mask).sum(1)
  np.testing.assert_allclose(
      metrics["loss"], -np.sum(advantages * lengths) / lengths.sum(),
      rtol=1e-4, atol=1e-6)


def bits(tree):
  raw = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(
      x.dtype, jax.dtypes.prng_key) else x
  return [np.asarray(raw(x)).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_microbatch_that_is_not_finite_leaves_every_bit(microbatches, value):
  init, step = setup(microbatches=microbatches)
  rollout, advantages = make_rollout(), normal(ROWS)
  state = init(make_params())
  state, *_ = step(state, rollout, advantages)
  kept = lambda s: bits((s.version, s.params, s.opt_state.inner_state))
  before = kept(state)
  state, delta, metrics, *_ = step(
      state, rollout, advantages.at[5].set(value))
  assert kept(state) == before
  assert int(state.opt_state.refused) == 1 and bool(metrics["refused"])
  assert int(delta.version) == int(delta.parent) == int(state.version) == 1
  assert float(metrics["kl_realised"]) == 0.0 and int(state.step) == 2
  # Not the numbers of the update before.
  assert np.isnan(metrics["kl_predicted"]) and float(
      metrics["step_scale"]) == 0.0
  state, delta, metrics, *_ = step(state, rollout, advantages)
  assert kept(state) != before and not bool(metrics["refused"])
  assert (int(delta.parent), int(delta.version)) == (1, 2)
  assert step._cache_size() == 1


@pytest.mark.parametrize("learning_rate", [None, 0.01])
def test_realised_kl_is_near_the_predicted_and_the_budget(learning_rate):
  init, step = setup(learning_rate=learning_rate)
  state = init(make_params())
  for _ in range(3):
    state, _, metrics, *_ = step(
        state, make_rollout(lengths=[NEW] * ROWS), normal(ROWS))
    np.testing.assert_allclose(metrics["kl_predicted"], 1e-5, rtol=1e-4)
    np.testing.assert_allclose(metrics["kl_budget"], 1e-5, rtol=1e-6)
    np.testing.assert_allclose(metrics["kl_realised"], 1e-5, rtol=0.1)
  assert step._cache_size() == 1


@pytest.mark.parametrize("total, rows", [(24, 16), (8, 4), (7, 5), (3, 16)])
def test_probe_rows_are_spread_over_the_whole_batch(total, rows):
  rollout = make_rollout(total)._replace(tokens=jnp.arange(total)[:, None])
  chosen = np.asarray(step_lib._spread(rollout, rows).tokens[:, 0])
  assert len(chosen) == min(rows, total) and chosen[0] == 0
  gaps = np.diff([*chosen, total])
  assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


def test_without_control_the_step_reports_no_prediction():
  init, step = pieces(budget=None)
  _, _, metrics, *_ = jax.eval_shape(
      lambda params, *args: step(init(params), *args),
      make_params(), make_rollout(), normal(ROWS))
  assert "kl_predicted" not in metrics and "step_scale" not in metrics
  assert "kl_realised" in metrics


def test_eight_devices_update_as_one_does():
  # Shards of unequal token counts.
  rollout = make_rollout(lengths=[1, 1, NEW, NEW, 2, 1, NEW, 3])
  advantages, params = normal(ROWS), make_params()
  expected, _, measured, sketches = run(
      rollout, advantages, params, microbatches=2)

  init, step = pieces(microbatches=2)
  mesh = sharding.make_mesh({"data": 4, "model": 2})
  rows = jax.NamedSharding(mesh, jax.P(sharding.BATCH))
  whole = jax.NamedSharding(mesh, jax.P())
  named = lambda specs: sharding.named(specs, mesh)
  model = named(sharding.param_specs(params, mesh))
  states = types.TrainState(whole, whole, model, named(sharding.state_specs(
      jax.eval_shape(init, params).opt_state, params, mesh)))
  with jax.set_mesh(mesh):
    state = jax.jit(init, out_shardings=states)(jax.device_put(params, model))
    program = jax.jit(step, donate_argnums=0, in_shardings=(
        states, rows, rows), out_shardings=(states, None, whole, None))
    found, _, metrics, gradients = program(state, rollout, advantages)
    close(gradients, sketches, 1e-5)
    close(found.params, expected.params, 1e-5)
    for name, value in measured.items():
      np.testing.assert_allclose(
          metrics[name], value, rtol=1e-3, atol=1e-6, err_msg=name)
    assert found.params["up_proj"]["kernel"].sharding == (
        model["up_proj"]["kernel"])
    program(found, rollout, advantages)
  assert program._cache_size() == 1
