"""A decoder-only transformer: stacked layers under one scan.

The layers of the model are one `Block` whose weights have a leading layer
axis. Weights travel as a plain nested dict (`nnx.to_pure_dict`), in which a
kernel may be a `taps.Tapped`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from logra_jax import sharding
from logra_jax import taps
from logra_jax.models import cache as cache_lib
from logra_jax.models import config as config_lib

KVCache = cache_lib.KVCache


class Linear(nnx.Module):
  """`x W` with an optional tap. [..., n_in] -> [..., n_out]."""

  def __init__(self, n_in, n_out, config, *, rngs):
    init = nnx.initializers.lecun_normal()
    self.kernel = nnx.Param(
        init(rngs.params(), (n_in, n_out), config.param_dtype))

  def __call__(self, x):
    return taps.linear(x, self.kernel.get_value())


class RMSNorm(nnx.Module):
  """`x / rms(x) * scale`, in float32. [..., d] -> [..., d]."""

  def __init__(self, d, config):
    self.scale = nnx.Param(jnp.ones((d,), config.param_dtype))
    self.eps = config.norm_eps

  def __call__(self, x):
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), -1, keepdims=True)
    normed = x32 * jax.lax.rsqrt(mean_square + self.eps)
    return (normed * self.scale.get_value()).astype(x.dtype)


class Embedding(nnx.Module):
  """Token ids to vectors, and back where the head is tied."""

  def __init__(self, config, *, rngs):
    init = nnx.initializers.normal(config.embed_dim ** -0.5)
    self.embedding = nnx.Param(init(
        rngs.params(), (config.vocab_size, config.embed_dim),
        config.param_dtype))
    self.dtype = config.dtype

  def __call__(self, tokens):
    # Scaled so that the residual stream starts at unit variance.
    table = self.embedding.get_value()
    return table[tokens].astype(self.dtype) * table.shape[-1] ** 0.5

  def attend(self, x):
    return x @ self.embedding.get_value().astype(x.dtype).T


class Attention(nnx.Module):
  """Grouped-query attention with rotary positions. [B, T, d] -> [B, T, d]."""

  def __init__(self, config, *, rngs):
    self.config = config
    heads, kv_heads = config.num_heads, config.num_kv_heads
    d, h = config.embed_dim, config.head_dim
    self.q_proj = Linear(d, heads * h, config, rngs=rngs)
    self.k_proj = Linear(d, kv_heads * h, config, rngs=rngs)
    self.v_proj = Linear(d, kv_heads * h, config, rngs=rngs)
    self.o_proj = Linear(heads * h, d, config, rngs=rngs)

  def __call__(self, x, positions, attend, cache, start):
    b, t, _ = x.shape
    c = self.config
    split = lambda y: y.reshape(b, t, -1, c.head_dim)
    q = _rope(split(self.q_proj(x)), positions, c.rope_theta)
    k = _rope(split(self.k_proj(x)), positions, c.rope_theta)
    v = split(self.v_proj(x))
    if cache is not None:
      k = cache_lib.write(cache.k, k, start)
      v = cache_lib.write(cache.v, v, start)
      cache = KVCache(k, v)
    q = q.reshape(b, t, c.num_kv_heads, -1, c.head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * c.head_dim ** -0.5
    scores = jnp.where(attend[:, None, None], scores.astype(jnp.float32), -1e30)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return self.o_proj(out.reshape(b, t, -1)), cache


class MLP(nnx.Module):
  """`down(silu(gate(x)) * up(x))`. [..., d] -> [..., d]."""

  def __init__(self, config, *, rngs):
    d, hidden = config.embed_dim, config.mlp_dim
    self.gate_proj = Linear(d, hidden, config, rngs=rngs)
    self.up_proj = Linear(d, hidden, config, rngs=rngs)
    self.down_proj = Linear(hidden, d, config, rngs=rngs)

  def __call__(self, x):
    return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
  """Pre-norm attention and MLP. [B, T, d] -> [B, T, d]."""

  def __init__(self, config, *, rngs):
    self.attn_norm = RMSNorm(config.embed_dim, config)
    self.attn = Attention(config, rngs=rngs)
    self.mlp_norm = RMSNorm(config.embed_dim, config)
    self.mlp = MLP(config, rngs=rngs)

  def __call__(self, x, positions, attend, cache, start):
    out, cache = self.attn(self.attn_norm(x), positions, attend, cache, start)
    x = x + out
    x = x + self.mlp(self.mlp_norm(x))
    return sharding.constrain(x, "activation"), cache


class Decoder(nnx.Module):
  """Tokens to the hidden states before the head, and those to logits."""

  def __init__(self, config: config_lib.DecoderConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.embed = Embedding(config, rngs=rngs)
    block = nnx.vmap(lambda key: Block(config, rngs=nnx.Rngs(params=key)))
    self.layers = block(
        jax.random.split(rngs.params(), config.num_layers))
    self.final_norm = RMSNorm(config.embed_dim, config)
    if not config.tied_head:
      self.lm_head = Linear(
          config.embed_dim, config.vocab_size, config, rngs=rngs)

  def __call__(
      self,
      tokens: jax.Array,
      valid: jax.Array,
      cache: KVCache | None = None,
      start: jax.Array | int = 0,
  ) -> tuple[jax.Array, KVCache | None]:
    """Hidden states of tokens at slots start.. . [B, T] -> [B, T, d].

    Args:
      tokens: [B, T] int32.
      valid: [B, S] bool, which slots hold real tokens; S = T without a cache.
      cache: of the S slots, or None.
      start: slot of the first token.

    Returns:
      (normed hidden states [B, T, d], the cache with these tokens in it).
    """
    t, slots = tokens.shape[1], valid.shape[1]
    # A token's position counts the real tokens before it, so padding on the
    # left changes nothing.
    positions = jnp.cumsum(valid, -1) - 1
    positions = jax.lax.dynamic_slice_in_dim(positions, start, t, axis=1)
    causal = jnp.arange(slots)[None] <= (start + jnp.arange(t))[:, None]
    attend = causal[None] & valid[:, None, :]
    x = sharding.constrain(self.embed(tokens), "activation")
    graph, weights = nnx.split(self.layers)

    def body(x, layer):
      weights, cache = layer
      return nnx.merge(graph, weights)(x, positions, attend, cache, start)

    if self.config.remat:
      body = jax.checkpoint(body)
    x, cache = jax.lax.scan(body, x, (weights, cache))
    return self.final_norm(x), cache

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Scores of the next token. [..., d] -> [..., vocab_size]."""
    if self.config.tied_head:
      return self.embed.attend(hidden)
    return self.lm_head(hidden)


def init(
    config: config_lib.DecoderConfig, key: jax.Array
) -> tuple[nnx.GraphDef, dict[str, Any]]:
  """A decoder's structure and its randomly initialised weights.

  Args:
    config: the sizes.
    key: a typed PRNG key.

  Returns:
    (graph, params): `nnx.merge(graph, params)` is the model; params are a
    nested dict of arrays, those of layers with a leading layer axis.

  Example:
    >>> import jax
    >>> from logra_jax.models import config, transformer
    >>> sizes = config.DecoderConfig(
    ...     vocab_size=16, num_layers=2, embed_dim=8, num_heads=2,
    ...     num_kv_heads=1, head_dim=4, mlp_dim=16)
    >>> graph, params = transformer.init(sizes, jax.random.key(0))
    >>> params["layers"]["attn"]["q_proj"]["kernel"].shape
    (2, 8, 8)
  """
  graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(params=key)))
  return graph, nnx.to_pure_dict(state)


def abstract(
    config: config_lib.DecoderConfig,
) -> tuple[nnx.GraphDef, dict[str, Any]]:
  """A decoder's structure and the shapes of its weights, nothing computed.

  Args:
    config: the sizes.

  Returns:
    (graph, shapes): as `init`, with ShapeDtypeStructs for arrays.
  """
  graphs = []
  def make():
    graph, params = init(config, jax.random.key(0))
    graphs.append(graph)  # static, so it cannot be an output of the trace
    return params
  shapes = jax.eval_shape(make)
  return graphs[0], shapes


def completion_logits(
    graph: nnx.GraphDef,
    params: Any,
    tokens: jax.Array,
    mask: jax.Array,
    width: int,
) -> jax.Array:
  """Logits that predict the last `width` tokens. [N, S + T] -> [N, T, V].

  Args:
    graph: the decoder's structure.
    params: its weights, taps attached or not.
    tokens: [N, S + T] int32.
    mask: [N, S + T] bool, real tokens.
    width: T.
  """
  model = nnx.merge(graph, params)
  hidden, _ = model(tokens, mask)
  return model.logits(hidden[:, -width - 1:-1])


def decode(
    graph: nnx.GraphDef,
    params: Any,
    tokens: jax.Array,
    valid: jax.Array,
    cache: KVCache,
    start: jax.Array | int,
) -> tuple[jax.Array, KVCache]:
  """Logits of the token after the last. [N, t] -> [N, V].

  Args:
    graph: the decoder's structure.
    params: its weights.
    tokens: [N, t] int32, at slots start.. .
    valid: [N, slots] bool, real tokens.
    cache: of all slots.
    start: slot of the first token.

  Returns:
    (logits, the cache with these tokens in it).
  """
  model = nnx.merge(graph, params)
  hidden, cache = model(tokens, valid, cache, start)
  return model.logits(hidden[:, -1]), cache


def _rope(x, positions, theta):
  """Rotates the two halves of each head. [B, T, heads, h] -> same."""
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None, None].astype(jnp.float32) * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x.dtype)
