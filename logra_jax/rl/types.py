"""Records that cross from one stage of the walk to the next.

Shapes: P prompts, G samples of each, N = P G rows in the order of prompts; S
slots of a prompt, T of a completion.
"""

from typing import Any, NamedTuple

import jax


class PromptBatch(NamedTuple):
  """Prompts padded on the left to one width."""
  tokens: jax.Array  # [P, S] int32
  mask: jax.Array  # [P, S] bool, True on real tokens


class Rollout(NamedTuple):
  """Prompts and their sampled completions."""
  tokens: jax.Array  # [N, S + T] int32, prompt then completion
  mask: jax.Array  # [N, S + T] bool, True on real tokens
  completion_mask: jax.Array  # [N, T] bool, sampled tokens, EOS included
  behavior_logprobs: jax.Array  # [N, T] float32, of the policy sampled from
  finished: jax.Array  # [N] bool, the completion ended in EOS


class TrainState(NamedTuple):
  """All that the trainer keeps from one update to the next."""
  step: jax.Array  # [] int32, updates attempted
  version: jax.Array  # [] int32, updates applied
  params: Any
  opt_state: Any


class PolicyDelta(NamedTuple):
  """What a rollout worker needs to follow one update."""
  version: jax.Array  # [] int32, after the update
  parent: jax.Array  # [] int32, before it; equal to version if refused
  leaves: Any  # LowRank with U in wire dtype, whole dense leaves, or None


class Worker(NamedTuple):
  """A rollout worker's own copy of the policy."""
  version: jax.Array  # [] int32
  params: Any
