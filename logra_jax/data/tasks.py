"""reasoning-gym tasks as prompts of a few characters."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import reasoning_gym


class Example(NamedTuple):
  """One problem."""
  task: str
  prompt: str
  answer: str
  entry: dict[str, Any]  # what reasoning-gym's scorer needs


class Task(NamedTuple):
  """How a reasoning-gym data set becomes short prompts."""
  prompt: Callable[[dict[str, Any]], str]  # entry -> prompt
  ends_with: str = "="


def _numbers(entry):
  return ",".join(map(str, entry["metadata"]["numbers"]))


def _expression(entry):
  return entry["metadata"]["expression"].replace(" ", "")


# Named as reasoning-gym names them.
TASKS = {
    "chain_sum": Task(_expression),
    "products": Task(_expression),
    "gcd": Task(_numbers),
    "lcm": Task(_numbers),
    "count_bits": Task(lambda entry: str(entry["metadata"]["number"])),
    "spell_backward": Task(
        lambda entry: entry["metadata"]["word"].lower(), ends_with=">"),
}


def wrong_digit(rng: random.Random, example: Example) -> str:
  """The answer with one digit replaced by another."""
  answer = list(example.answer)
  at = rng.choice([i for i, char in enumerate(answer) if char.isdigit()])
  answer[at] = rng.choice([d for d in "0123456789" if d != answer[at]])
  return "".join(answer)


def copied_forward(rng: random.Random, example: Example) -> str:
  """The answer turned round again; a palindrome loses its first letter."""
  del rng
  copied = example.answer[::-1]
  return copied if copied != example.answer else copied[1:]


# (random stream, example) -> a wrong answer. One is a slip, the other a rule.
CORRUPTIONS = {"wrong_digit": wrong_digit, "copied_forward": copied_forward}


def generate(
    name: str, params: Mapping[str, Any], size: int, seed: int
) -> list[Example]:
  """Examples of a task, no prompt twice, at most size.

  Args:
    name: of the task, a key of `TASKS`.
    params: reasoning-gym's for the data set.
    size: how many to draw; repeated prompts are dropped.
    seed: of the draw; different seeds share no item.

  Returns:
    The examples.

  Raises:
    ValueError: for an unknown task, or parameters it does not take.

  Example:
    >>> from logra_jax.data import tasks
    >>> example, = tasks.generate("gcd", {"max_value": 9}, size=1, seed=0)
    >>> example.prompt.endswith("=")
    True
  """
  if name not in TASKS:
    raise ValueError(f"task {name!r} is unknown: choose from {sorted(TASKS)}")
  task = TASKS[name]
  try:
    # Item i is drawn from Random(seed + i): nearby seeds share their items.
    entries = reasoning_gym.create_dataset(
        name, size=size, seed=seed * 10_000_019, **params)
  except (TypeError, ValueError, AssertionError) as error:
    raise ValueError(
        f"task {name!r} refuses the parameters {dict(params)}: {error}"
    ) from error
  found: dict[str, Example] = {}
  for entry in entries:
    prompt = task.prompt(entry) + task.ends_with
    found.setdefault(
        prompt, Example(name, prompt, str(entry["answer"]).lower(), entry))
  return list(found.values())


def split(
    examples: Sequence[Example], held_out: int, seed: int
) -> tuple[list[Example], list[Example]]:
  """(training, held-out) examples, disjoint by prompt.

  Args:
    examples: without repeated prompts.
    held_out: how many to hold out.
    seed: of the choice.

  Returns:
    The two lists; the order of `examples` does not matter.

  Raises:
    ValueError: if no training example would be left.
  """
  if not 0 <= held_out < len(examples):
    raise ValueError(
        f"cannot hold out {held_out} of {len(examples)} distinct prompts: lower"
        " data.held_out, or widen the task's parameters")
  ordered = sorted(examples, key=lambda example: example.prompt)
  random.Random(seed).shuffle(ordered)
  return ordered[held_out:], ordered[:held_out]


def demonstrations(
    examples: Sequence[Example],
    corrupted_share: float,
    corruption: str,
    seed: int,
) -> list[tuple[str, str]]:
  """(prompt, answer) pairs, a share of the answers wrong.

  Args:
    examples: to demonstrate.
    corrupted_share: of wrong answers, in [0, 1], met exactly up to rounding.
    corruption: how they are wrong, a key of `CORRUPTIONS`.
    seed: of the choice.

  Returns:
    One pair an example, in order.

  Raises:
    ValueError: for an unknown corruption or a share outside [0, 1].
  """
  if corruption not in CORRUPTIONS:
    raise ValueError(
        f"corruption {corruption!r} is unknown: choose from"
        f" {sorted(CORRUPTIONS)}")
  if not 0.0 <= corrupted_share <= 1.0:
    raise ValueError(f"corrupted_share {corrupted_share} is not in [0, 1]")
  rng = random.Random(seed)
  count = round(corrupted_share * len(examples))
  wrong = set(rng.sample(range(len(examples)), count))
  corrupt = CORRUPTIONS[corruption]
  return [
      (e.prompt, corrupt(rng, e) if i in wrong else e.answer)
      for i, e in enumerate(examples)]
