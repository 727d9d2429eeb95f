"""Laws of the sampler, on the real decoder and on tables of logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import keys
from logra_jax import sharding
from logra_jax.models import cache as cache_lib
from logra_jax.models import config as config_lib
from logra_jax.models import transformer
from logra_jax.rl import sampler
from logra_jax.rl import types

RNG = np.random.default_rng()
VOCAB, WIDTH, NEW, EOS = 12, 6, 7, 3


def fresh_key():
  return jax.random.key(RNG.integers(2**31))


@functools.lru_cache
def decoder():
  """(graph, shapes, sample): the decoder and its jitted sampler."""
  config = config_lib.DecoderConfig(
      vocab_size=VOCAB, num_layers=2, embed_dim=16, num_heads=4,
      num_kv_heads=2, head_dim=4, mlp_dim=24)
  graph, shapes = transformer.abstract(config)
  def sample(params, prompts, key, temperature, eos_id):
    return sampler.sample(
        functools.partial(transformer.decode, graph),
        functools.partial(cache_lib.init, config), params, prompts, key,
        temperature=temperature, group_size=2, max_new_tokens=NEW,
        eos_id=eos_id)
  return graph, shapes, jax.jit(sample)


def random_params(shapes):
  # Wide enough that the softmax is far from uniform.
  return jax.tree.map(
      lambda p: jnp.asarray(RNG.standard_normal(p.shape) * 0.4, p.dtype),
      shapes)


def prompts_of(lengths):
  mask = np.arange(WIDTH) >= WIDTH - np.asarray(lengths)[:, None]
  tokens = RNG.integers(1, VOCAB, mask.shape) * mask
  return types.PromptBatch(
      jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))


def by_table(params, tokens, valid, cache, start):
  """The next token depends on the last one only."""
  del valid, start
  return params[tokens[:, -1]], cache


def sample_table(table, prompts, key, temperature=1.0, group_size=1, new=NEW,
                 eos_id=EOS, decode=by_table):
  return sampler.sample(
      decode, lambda rows, slots: (), table, prompts, key,
      temperature=temperature, group_size=group_size, max_new_tokens=new,
      eos_id=eos_id)


def random_table(scale=1.0):
  return jnp.asarray(scale * RNG.standard_normal((VOCAB, VOCAB)), jnp.float32)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_are_those_of_the_trainer(temperature):
  graph, shapes, sample = decoder()
  params, prompts = random_params(shapes), prompts_of([6, 3, 1, 5])
  rollout = sample(params, prompts, fresh_key(), temperature, EOS)
  logits = jax.jit(functools.partial(
      transformer.completion_logits, graph), static_argnums=3)(
          params, rollout.tokens, rollout.mask, NEW)
  logprobs = jnp.take_along_axis(
      jax.nn.log_softmax(logits / temperature),
      rollout.tokens[:, WIDTH:, None], -1)[..., 0]
  mask = rollout.completion_mask
  np.testing.assert_allclose(
      rollout.behavior_logprobs[mask], logprobs[mask], rtol=0, atol=1e-5)
  assert not rollout.behavior_logprobs[~mask].any()
  assert rollout.behavior_logprobs[mask].std() > 0.1  # not all alike


def test_prompts_stay_and_stand_in_groups():
  prompts = prompts_of([6, 2, 4])
  rollout = sample_table(random_table(), prompts, fresh_key(), group_size=3)
  assert rollout.tokens.shape == rollout.mask.shape == (9, WIDTH + NEW)
  assert rollout.tokens.dtype == jnp.int32 and rollout.mask.dtype == bool
  for i in range(9):
    assert (rollout.tokens[i, :WIDTH] == prompts.tokens[i // 3]).all()
    assert (rollout.mask[i, :WIDTH] == prompts.mask[i // 3]).all()
  assert (rollout.mask[:, WIDTH:] == rollout.completion_mask).all()


def test_eos_is_kept_and_ends_a_row():
  table = random_table().at[:, EOS].set(0.5)  # about one in twelve
  rollout = jax.device_get(sample_table(
      table, prompts_of([2] * 40), fresh_key(), group_size=4))
  lengths = rollout.completion_mask.sum(1)
  assert set(lengths[rollout.finished]) >= {1, 2, 3}  # rows of every kind
  assert not rollout.finished.all()
  for tokens, mask, logprobs, finished in zip(
      rollout.tokens[:, WIDTH:], rollout.completion_mask,
      rollout.behavior_logprobs, rollout.finished, strict=True):
    length = mask.sum()
    assert mask[:length].all() and (logprobs[:length] < 0).all()
    assert not tokens[length:].any() and not logprobs[length:].any()
    assert EOS not in tokens[:length - 1]
    assert finished == (tokens[length - 1] == EOS)
    assert finished or length == NEW


@pytest.mark.parametrize("at", [1, 4, NEW, NEW + 1])
def test_finished_and_truncated_rows_are_told_apart(at):
  """A chain that reaches EOS as its at-th token."""
  table = np.full((VOCAB, VOCAB), -30.0)
  nodes = [1, *range(4, 3 + at), EOS]
  for last, following in zip(nodes, nodes[1:], strict=False):
    table[last, following] = 30.0
  prompts = types.PromptBatch(
      jnp.full((1, WIDTH), 1), jnp.ones((1, WIDTH), bool))
  rollout = sample_table(
      jnp.asarray(table, jnp.float32), prompts, fresh_key())
  assert bool(rollout.finished[0]) == (at <= NEW)
  assert int(rollout.completion_mask.sum()) == min(at, NEW)
  if at <= NEW:
    assert int(rollout.tokens[0, WIDTH + at - 1]) == EOS


def test_temperature_zero_takes_the_best_token():
  table, prompts = random_table(), prompts_of([3, 5])
  rollout = sample_table(table, prompts, fresh_key(), 0.0, group_size=2)
  best = np.argmax(table, -1)
  for row, mask in zip(
      np.asarray(rollout.tokens), rollout.completion_mask, strict=True):
    last = row[WIDTH - 1]
    for token in row[WIDTH:][np.asarray(mask)]:
      assert token == best[last]
      last = token
  assert np.isfinite(rollout.behavior_logprobs).all()


def test_the_best_token_is_the_limit_of_low_temperature():
  _, shapes, sample = decoder()
  params, prompts = random_params(shapes), prompts_of([4, 6, 2, 1])
  greedy = sample(params, prompts, fresh_key(), 0.0, EOS)
  cold = sample(params, prompts, fresh_key(), 1e-6, EOS)
  assert (greedy.tokens == cold.tokens).all()


def test_only_shapes_compile():
  _, shapes, sample = decoder()
  again = jax.jit(lambda *args: sample(*args))
  params = random_params(shapes)
  for lengths, temperature, eos in (
      ([6, 6], 1.0, 3), ([1, 4], 0.0, 3), ([2, 2], 0.3, 5), ([5, 1], 2.0, -1)):
    again(params, prompts_of(lengths), fresh_key(), temperature, eos)
  assert again._cache_size() == 1


def test_a_row_does_not_depend_on_the_content_of_the_others():
  _, shapes, sample = decoder()
  params, key = random_params(shapes), fresh_key()
  prompts, others = prompts_of([4, 6, 2, 5]), prompts_of([1, 3, 6, 5])
  mixed = jax.tree.map(lambda a, b: b.at[1].set(a[1]), prompts, others)
  first, second = (sample(params, p, key, 1.0, EOS) for p in (prompts, mixed))
  assert (first.tokens[2:4] == second.tokens[2:4]).all()
  np.testing.assert_allclose(
      first.behavior_logprobs[2:4], second.behavior_logprobs[2:4], atol=1e-6)
  assert (first.tokens[:2] != second.tokens[:2]).any()


def chi_square(counts, probabilities):
  """(statistic - mean) / deviation of a chi-square goodness of fit."""
  expected = counts.sum() * probabilities
  assert expected.min() > 5
  dof = counts.size - 1
  statistic = np.sum((counts - expected) ** 2 / expected)
  return (statistic - dof) / np.sqrt(2 * dof)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_tokens_are_as_frequent_as_the_softmax_says(temperature):
  size = 6
  table = jnp.asarray(RNG.uniform(-0.5, 0.5, (size, size)), jnp.float32)
  prompts = types.PromptBatch(
      jnp.full((1, 1), 2), jnp.ones((1, 1), bool))
  rollout = jax.jit(lambda key: sample_table(
      table, prompts, key, temperature, 20_000, 2, -1))(fresh_key())
  a, b = np.asarray(rollout.tokens[:, 1:]).T
  p = np.asarray(jax.nn.softmax(table / temperature), np.float64)
  count = lambda i, j: np.bincount(
      i * size + j, minlength=size ** 2).reshape(size, size)
  # One token given the last, and rows independent of each other.
  assert chi_square(count(a, b), p[2][:, None] * p) < 8
  assert chi_square(count(a[::2], a[1::2]), np.outer(p[2], p[2])) < 8
  wrong = np.asarray(jax.nn.softmax(table / (2 * temperature)))
  assert chi_square(count(a, b), wrong[2][:, None] * wrong) > 8


def test_workers_draw_different_streams_each_reproducible():
  table, prompts = random_table(0.1), prompts_of([3, 4, 5, 6])
  seed = int(RNG.integers(2**31))
  draw = jax.jit(lambda key: sample_table(
      table, prompts, key, 1.0, 4, eos_id=-1).tokens[:, WIDTH:])
  event = lambda step, worker: draw(
      keys.make(seed, "sample", step, worker=worker))
  streams = {(s, w): event(s, w) for s in (0, 1) for w in (0, 1)}
  for at, tokens in streams.items():
    assert (tokens == event(*at)).all()
    for other, theirs in streams.items():
      # 112 tokens of 12 nearly equal: 9 agree by chance.
      assert other == at or (tokens == theirs).mean() < 0.5
  rows = np.unique(np.concatenate(list(streams.values())), axis=0)
  assert len(rows) == 4 * 16


def test_no_step_is_made_after_every_row_has_ended():
  calls = []
  def counting(params, tokens, valid, cache, start):
    jax.debug.callback(lambda: calls.append(1))
    return by_table(params, tokens, valid, cache, start)
  table = random_table().at[:, EOS].add(2.0)
  rollout = sample_table(
      table, prompts_of([3, 4]), fresh_key(), new=200, decode=counting)
  jax.effects_barrier()
  longest = int(rollout.completion_mask.sum(1).max())
  assert rollout.finished.all() and longest < 200
  assert len(calls) <= 1 + longest  # the prompts, and one a token


def test_eight_devices_draw_what_one_does():
  _, shapes, sample = decoder()
  params, prompts = random_params(shapes), prompts_of([4, 6, 2, 5])
  key = fresh_key()
  expected = sample(params, prompts, key, 1.0, EOS)
  mesh = sharding.make_mesh({"data": 4, "model": 2})
  rows = jax.NamedSharding(mesh, jax.P(sharding.BATCH))
  specs = sharding.named(sharding.param_specs(params, mesh), mesh)
  with jax.set_mesh(mesh):
    found = sample(
        jax.device_put(params, specs), jax.device_put(prompts, rows), key, 1.0,
        EOS)
  assert (found.tokens == expected.tokens).all()
  assert (found.finished == expected.finished).all()
  np.testing.assert_allclose(
      found.behavior_logprobs, expected.behavior_logprobs, atol=1e-5)
