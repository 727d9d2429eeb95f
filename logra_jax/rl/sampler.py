"""Rollouts: one prefill, then one while loop over the tokens to come."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from logra_jax.rl import types

# (params, tokens [N, t], valid [N, slots], cache, start) -> (logits of the last
# token [N, V], cache)
Decode = Callable[..., tuple[jax.Array, Any]]
# (rows, slots) -> an empty cache
NewCache = Callable[[int, int], Any]


class _Loop(NamedTuple):
  t: jax.Array  # [] int32, tokens sampled so far
  tokens: jax.Array  # [N, S + T] int32
  mask: jax.Array  # [N, S + T] bool
  logprobs: jax.Array  # [N, T] float32
  done: jax.Array  # [N] bool
  logits: jax.Array  # [N, V] of the next token
  cache: Any


def sample(
    decode: Decode,
    new_cache: NewCache,
    params: Any,
    prompts: types.PromptBatch,
    key: jax.Array,
    temperature: jax.Array | float,
    *,
    group_size: int,
    max_new_tokens: int,
    eos_id: jax.Array | int,
) -> types.Rollout:
  """Samples a group of completions of every prompt. [P, S] -> [P * G, S + T].

  Each row draws from a stream of its own, so a completion depends on its batch
  position and the key only. Sampling stops for a row at EOS, which stays in the
  completion, and for all when every row has ended. Temperature and EOS may be
  traced: changing them compiles nothing.

  Args:
    decode: the model, one call for the prompts and one for every token.
    new_cache: makes its cache.
    params: weights for `decode`.
    prompts: padded on the left.
    key: of this rollout.
    temperature: of the softmax; 0 takes the best token.
    group_size: G, completions of each prompt.
    max_new_tokens: T.
    eos_id: the token that ends a completion.

  Returns:
    The rollout, with log-probabilities under the distribution sampled from.
  """
  repeat = lambda x: jnp.repeat(x, group_size, axis=0)
  tokens, mask = repeat(prompts.tokens), repeat(prompts.mask)
  rows, width = tokens.shape
  pad = ((0, 0), (0, max_new_tokens))
  tokens, mask = jnp.pad(tokens, pad), jnp.pad(mask, pad)
  row_keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(rows))
  logits, cache = decode(
      params, tokens[:, :width], mask, new_cache(rows, width + max_new_tokens),
      0)

  def body(loop):
    token, logprob = _draw(row_keys, loop.t, loop.logits, temperature)
    alive = ~loop.done
    token = jnp.where(alive, token, 0)
    put = lambda buffer, column, at: jax.lax.dynamic_update_slice_in_dim(
        buffer, column[:, None].astype(buffer.dtype), at, axis=1)
    mask = put(loop.mask, alive, width + loop.t)
    logits, cache = decode(
        params, token[:, None], mask, loop.cache, width + loop.t)
    return _Loop(
        t=loop.t + 1,
        tokens=put(loop.tokens, token, width + loop.t),
        mask=mask,
        logprobs=put(loop.logprobs, jnp.where(alive, logprob, 0.0), loop.t),
        done=loop.done | (alive & (token == eos_id)),
        logits=logits,
        cache=cache)

  loop = jax.lax.while_loop(
      lambda loop: (loop.t < max_new_tokens) & ~jnp.all(loop.done),
      body,
      _Loop(
          t=jnp.zeros([], jnp.int32),
          tokens=tokens,
          mask=mask,
          logprobs=jnp.zeros((rows, max_new_tokens), jnp.float32),
          done=jnp.zeros(rows, bool),
          logits=logits,
          cache=cache))
  return types.Rollout(
      loop.tokens, loop.mask, loop.mask[:, width:], loop.logprobs, loop.done)


def _draw(row_keys, t, logits, temperature):
  """The next token of each row and its log-probability. [N, V] -> [N], [N]."""
  greedy = jnp.asarray(temperature) <= 0.0
  scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)
  keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, t)
  token = jnp.where(
      greedy, jnp.argmax(scaled, -1), jax.vmap(jax.random.categorical)(
          keys, scaled))
  logprobs = jax.nn.log_softmax(scaled)
  return token, jnp.take_along_axis(logprobs, token[:, None], -1)[:, 0]
