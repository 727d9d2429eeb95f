"""reasoning-gym tasks as prompts of a few characters.

Nothing here imports jax: the scoring process runs this file.
"""

import dataclasses
import functools
import random
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import reasoning_gym
from reasoning_gym import factory


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


def _expression(entry):
  return entry["metadata"]["expression"].replace(" ", "")


def _numbers(name):
  # Named, or a model of both could not tell gcd from lcm.
  return lambda entry: " ".join(map(str, [name, *entry["metadata"]["numbers"]]))


# Named as reasoning-gym names them.
TASKS = {
    "chain_sum": Task(_expression),
    "products": Task(_expression),
    "gcd": Task(_numbers("gcd")),
    "lcm": Task(_numbers("lcm")),
    # Counting needs no base conversion first: the prompt is in binary.
    "count_bits": Task(lambda entry: entry["metadata"]["binary"]),
    "spell_backward": Task(
        lambda entry: entry["metadata"]["word"].lower(), ends_with=">"),
    "palindrome_generation": Task(
        lambda entry: "".join(entry["metadata"]["letters"]), ends_with="<"),
}


def wrong_digit(rng: random.Random, example: Example) -> str:
  """The answer with one digit replaced by another, never by a leading zero."""
  answer = example.answer
  places = [i for i, char in enumerate(answer) if char.isdigit()]
  if not places:
    raise ValueError(
        f"corruption 'wrong_digit' needs digits, and {example.prompt!r} has the"
        f" answer {answer!r}: use 'copied_forward'")
  at = rng.choice(places)
  leads = at == places[0] and len(places) > 1
  digit = rng.choice([
      d for d in "0123456789" if d != answer[at] and not (leads and d == "0")])
  return answer[:at] + digit + answer[at + 1:]


def wrong_letter(rng: random.Random, example: Example) -> str:
  """The answer with one character replaced by a letter that is not it."""
  answer = example.answer
  at = rng.randrange(len(answer))
  letter = rng.choice([c for c in string.ascii_lowercase if c != answer[at]])
  return answer[:at] + letter + answer[at + 1:]


def dropped_letter(rng: random.Random, example: Example) -> str:
  """The answer without its last character: right so far, ended too soon."""
  del rng
  return example.answer[:-1]


def dropped_carry(rng: random.Random, example: Example) -> str:
  """The sum column by column, no carry or borrow; a slip where that is right.

  Of 47+38 it makes 75, of 52-38 it makes 24.
  """
  terms = example.entry["metadata"].get("expression", "").split()
  if not {"+", "-"}.issuperset(terms[1::2]) or len(terms) < 3:
    raise ValueError(
        f"corruption 'dropped_carry' needs a sum, not {example.prompt!r}: use"
        f" another of {sorted(CORRUPTIONS)}")
  total = int(terms[0])
  for sign, term in zip(terms[1::2], terms[2::2], strict=True):
    total = _columns(total, int(term) if sign == "+" else -int(term))
  wrong = str(total)
  return wrong if wrong != example.answer else wrong_digit(rng, example)


def _columns(a, b):
  """a + b, each column by itself modulo ten."""
  large, small = sorted((a, b), key=abs, reverse=True)
  sign = 1 if large * small >= 0 else -1
  total, place = 0, 1
  while place <= abs(large):
    digit = abs(large) // place + sign * (abs(small) // place)
    total += digit % 10 * place
    place *= 10
  return total if large >= 0 else -total


def copied_forward(rng: random.Random, example: Example) -> str:
  """The prompt without its ending; where that is right, less a letter."""
  del rng
  copied = example.prompt[:-1]
  return copied if copied != example.answer else copied[1:]


# (random stream, example) -> a wrong answer: two slips and three rules.
CORRUPTIONS = {
    "wrong_digit": wrong_digit,
    "wrong_letter": wrong_letter,
    "dropped_letter": dropped_letter,
    "dropped_carry": dropped_carry,
    "copied_forward": copied_forward,
}


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
  known = {field.name for field in dataclasses.fields(
      factory.DATASETS[name][1])} - {"size", "seed"}
  if not known.issuperset(params):
    raise ValueError(
        f"task {name!r} has no parameters {sorted(set(params) - known)}: choose"
        f" from {sorted(known)}")
  try:
    # Item i is drawn from Random(seed + i): nearby seeds share their items.
    entries = list(reasoning_gym.create_dataset(
        name, size=size, seed=seed * 10_000_019, **params))
  except (TypeError, ValueError, AssertionError, IndexError) as error:
    raise ValueError(
        f"task {name!r} refuses the parameters {dict(params)} with size {size}:"
        f" {error}; change them") from error
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
    examples: to divide; of a repeated prompt the last counts.
    held_out: how many to hold out.
    seed: of the choice.

  Returns:
    The two lists; the order of distinct `examples` does not matter.

  Raises:
    ValueError: if no training example would be left.
  """
  distinct = {example.prompt: example for example in examples}
  if not 0 <= held_out < len(distinct):
    raise ValueError(
        f"cannot hold out {held_out} of {len(distinct)} distinct prompts: lower"
        " data.held_out, raise data.examples or widen the task's parameters")
  ordered = [distinct[prompt] for prompt in sorted(distinct)]
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


def score(task: str, entry: Mapping[str, Any], completion: str) -> float:
  """reasoning-gym's own score of a completion, in [0, 1].

  Args:
    task: its name, a key of `TASKS`.
    entry: the item as the data set made it.
    completion: the model's answer; space around it does not count.

  Returns:
    The score. Below 1 it is no measure of rightness: an answer of many digits
    with the right ones among them scores.

  Example:
    >>> from logra_jax.data import tasks
    >>> example, = tasks.generate("products", {}, size=1, seed=0)
    >>> tasks.score(example.task, example.entry, example.answer)
    1.0
  """
  return float(_dataset(task).score_answer(completion.strip(), entry))


@functools.cache
def _dataset(task):
  return reasoning_gym.create_dataset(task, size=1, seed=0)
