"""Laws of the decoder: cache, padding, causality, attention, sharding."""

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

RNG = np.random.default_rng()
SIZES = dict(vocab_size=14, num_layers=2, embed_dim=24, num_heads=4,
             num_kv_heads=2, head_dim=6, mlp_dim=40, tied_head=False)


@functools.lru_cache
def structure(**options):
  """(config, graph, shapes of the weights) without a compilation."""
  config = config_lib.DecoderConfig(**(SIZES | options))
  return config, *transformer.abstract(config)


def random_params(shapes):
  """Weights of the initialiser's size, all different in every layer."""
  def one(path, p):
    noise = RNG.standard_normal(p.shape)
    if keys.leaf_path(path).endswith("scale"):
      return jnp.asarray(1.0 + 0.3 * noise, p.dtype)
    axis = -1 if keys.leaf_path(path).endswith("embedding") else -2
    return jnp.asarray(noise * p.shape[axis] ** -0.5, p.dtype)
  return jax.tree.map_with_path(one, shapes)


def padded(rows, slots, lengths=None):
  """Random tokens with padding on the left."""
  if lengths is None:
    lengths = RNG.integers(1, slots + 1, rows)
  tokens = RNG.integers(0, SIZES["vocab_size"], (rows, slots))
  mask = np.arange(slots) >= slots - np.asarray(lengths)[:, None]
  return jnp.asarray(tokens, jnp.int32), jnp.asarray(mask)


def all_logits(graph, params, tokens, mask):
  """[N, S] -> [N, S, V]: completion_logits leaves out the last slot."""
  pad = lambda x, value: jnp.pad(x, ((0, 0), (0, 1)), constant_values=value)
  return transformer.completion_logits(
      graph, params, pad(tokens, 0), pad(mask, False), tokens.shape[1])


@functools.lru_cache
def program(**options):
  _, graph, _ = structure(**options)
  return jax.jit(functools.partial(all_logits, graph))


def close(found, expected, tolerance=1e-5):
  scale = max(1.0, float(np.abs(expected).max()))
  np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("tied_head", [False, True])
def test_logits_with_a_cache_are_those_without(tied_head):
  config, graph, shapes = structure(tied_head=tied_head)
  params = random_params(shapes)
  width, slots = 5, 9
  tokens, mask = padded(3, slots, [slots, slots - 2, slots - width + 1])
  whole = program(tied_head=tied_head)(params, tokens, mask)
  decode = jax.jit(functools.partial(transformer.decode, graph))
  logits, cache = decode(
      params, tokens[:, :width], mask, cache_lib.init(config, 3, slots), 0)
  close(logits, whole[:, width - 1])
  for t in range(width, slots):
    # Slots to come are not valid yet, as in the sampler.
    valid = mask & (jnp.arange(slots) <= t)
    logits, cache = decode(params, tokens[:, t:t + 1], valid, cache, t)
    close(logits, whole[:, t])
  assert decode._cache_size() == 2  # the prompt, and any token


def test_padding_on_the_left_changes_nothing():
  params = random_params(structure()[2])
  tokens, mask = padded(3, 9, [4, 4, 4])
  long = program()(params, tokens, mask)[:, 5:]
  short = program()(params, tokens[:, 5:], mask[:, 5:])
  close(long, short)
  # Nor does what the padding holds.
  other = jnp.where(mask, tokens, (tokens + 3) % SIZES["vocab_size"])
  assert (program()(params, other, mask)[:, 5:] == long).all()


def test_no_token_sees_a_later_one():
  params = random_params(structure()[2])
  tokens, mask = padded(2, 9, [9, 6])
  before = program()(params, tokens, mask)
  for t in (4, 8):
    changed = tokens.at[:, t].set((tokens[:, t] + 1) % SIZES["vocab_size"])
    after = program()(params, changed, mask)
    # What stands at padding is nobody's input.
    same = (after == before).all(-1) | ~mask
    assert same[:, :t].all()
    assert (jnp.abs(after[:, t:] - before[:, t:]).max((0, 2)) > 1e-3).all()


def reference_logits(params, tokens, mask, config):
  """The decoder in NumPy float64, keys and values repeated for each head."""
  w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  tokens, mask = np.asarray(tokens), np.asarray(mask)
  heads, h = config.num_heads, config.head_dim
  group = heads // config.num_kv_heads
  norm = lambda x, scale: x / np.sqrt(
      np.mean(x ** 2, -1, keepdims=True) + config.norm_eps) * scale
  out = []
  for row, real in zip(tokens, mask, strict=True):
    table = w["embed"]["embedding"]
    ids = row[real]
    x = table[ids] * np.sqrt(config.embed_dim)
    angle = np.arange(len(ids))[:, None] * config.rope_theta ** (
        -np.arange(h // 2) / (h // 2))
    turn = np.exp(1j * angle)[:, None]  # [t, 1, h/2]
    def rope(y, turn=turn):
      z = (y[..., :h // 2] + 1j * y[..., h // 2:]) * turn
      return np.concatenate([z.real, z.imag], -1)
    for i in range(config.num_layers):
      layer = jax.tree.map(lambda p, i=i: p[i], w["layers"])
      attn, mlp = layer["attn"], layer["mlp"]
      y = norm(x, layer["attn_norm"]["scale"])
      q, k, v = ((y @ attn[f"{name}_proj"]["kernel"]).reshape(len(y), -1, h)
                 for name in "qkv")
      q, k = rope(q), rope(k)
      k, v = (np.repeat(z, group, axis=1) for z in (k, v))
      mixed = np.zeros_like(q)
      for head in range(heads):
        score = q[:, head] @ k[:, head].T / np.sqrt(h)
        score[np.triu_indices(len(ids), 1)] = -np.inf
        weight = np.exp(score - score.max(-1, keepdims=True))
        mixed[:, head] = weight @ v[:, head] / weight.sum(-1, keepdims=True)
      x = x + mixed.reshape(len(ids), -1) @ attn["o_proj"]["kernel"]
      y = norm(x, layer["mlp_norm"]["scale"])
      gate, up = (y @ mlp[f"{name}_proj"]["kernel"] for name in ("gate", "up"))
      x = x + (gate / (1 + np.exp(-gate)) * up) @ mlp["down_proj"]["kernel"]
    x = norm(x, w["final_norm"]["scale"])
    head = table.T if config.tied_head else w["lm_head"]["kernel"]
    out.append(x @ head)
  return out


@pytest.mark.parametrize("options", [
    dict(),  # two queries to a key
    dict(tied_head=True, num_kv_heads=4),
    dict(num_kv_heads=1, rope_theta=50.0, norm_eps=0.1, head_dim=10)])
def test_the_decoder_is_its_float64_transcript(options):
  config, _, shapes = structure(**options)
  params = random_params(shapes)
  tokens, mask = padded(3, 8, [8, 5, 1])
  found = program(**options)(params, tokens, mask)
  for row, real, expected in zip(
      found, mask, reference_logits(params, tokens, mask, config),
      strict=True):
    close(row[real], expected)


def test_remat_changes_neither_value_nor_gradient():
  shapes = structure()[2]
  params = random_params(shapes)
  tokens, mask = padded(3, 8)
  results = []
  for remat in (True, False):
    _, graph, _ = structure(remat=remat)
    loss = lambda p, graph=graph: jnp.sum(jnp.sin(
        all_logits(graph, p, tokens, mask)) * mask[..., None])
    results.append(jax.jit(jax.value_and_grad(loss))(params))
  jax.tree.map(close, *results)


def test_eight_devices_compute_what_one_does():
  _, graph, shapes = structure()
  params = random_params(shapes)
  tokens, mask = padded(8, 9)
  expected = program()(params, tokens, mask)
  mesh = sharding.make_mesh({"data": 4, "model": 2})
  rows = jax.NamedSharding(mesh, jax.P(sharding.BATCH))
  specs = sharding.named(sharding.param_specs(params, mesh), mesh)
  with jax.set_mesh(mesh):
    found = jax.jit(functools.partial(all_logits, graph))(
        jax.device_put(params, specs), *jax.device_put((tokens, mask), rows))
  assert len(found.sharding.device_set) == 8
  close(jnp.where(mask[..., None], found, 0.0),
        np.where(mask[..., None], expected, 0.0))


def test_bfloat16_activations_stay_so_and_are_near_float32():
  config, graph, shapes = structure(dtype=jnp.bfloat16)
  params = random_params(shapes)
  tokens, mask = padded(2, 7, [7, 4])
  found = program(dtype=jnp.bfloat16)(params, tokens, mask)
  assert found.dtype == jnp.bfloat16
  assert cache_lib.init(config, 2, 7).k.dtype == jnp.bfloat16
  expected = program()(params, tokens, mask)
  real = np.asarray(mask)
  # Eight bits of mantissa, through two layers.
  close(found.astype(jnp.float32)[real], expected[real], 0.05)


def test_completion_logits_predict_the_last_tokens():
  _, graph, shapes = structure()
  params = random_params(shapes)
  tokens, mask = padded(2, 7, [7, 5])
  whole = program()(params, tokens, mask)
  found = jax.jit(functools.partial(
      transformer.completion_logits, graph), static_argnums=3)(
          params, tokens, mask, 3)
  close(found, whole[:, 3:6])


def test_the_initialiser_is_keyed_and_of_unit_variance():
  config, _, shapes = structure(embed_dim=64, vocab_size=64)
  make = jax.jit(
      lambda seed: transformer.init(config, jax.random.key(seed))[1])
  params, same, other = make(1), make(1), make(2)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
      lambda x: (x.shape, x.dtype), shapes)
  for path, leaf in jax.tree.leaves_with_path(params):
    name = keys.leaf_path(path)
    get = lambda tree, path=path: functools.reduce(
        lambda t, k: t[k.key], path, tree)
    assert (leaf == get(same)).all(), name
    if name.endswith("scale"):
      assert (leaf == 1).all()
      continue
    assert not (leaf == get(other)).any(), name
    fan_in = leaf.shape[-1 if name.endswith("embedding") else -2]
    np.testing.assert_allclose(leaf.std(), fan_in ** -0.5, rtol=0.15)
    if name.startswith("layers"):
      assert not (leaf[0] == leaf[1]).any(), name


@pytest.mark.parametrize("field, value, message", [
    *((name, 0, f"model.{name} 0 is below 1") for name in SIZES
      if name != "tied_head"),
    ("num_layers", -2, "model.num_layers -2 is below 1"),
    ("num_kv_heads", 3, "num_heads 4 is no multiple of.*num_kv_heads 3"),
    ("head_dim", 5, "model.head_dim 5 is odd"),
])
def test_sizes_that_make_no_decoder_are_refused(field, value, message):
  with pytest.raises(ValueError, match=message):
    config_lib.DecoderConfig(**(SIZES | {field: value}))
