"""Laws of the tasks: short prompts, right answers, wrong ones on demand."""

import random
import re

import pytest

from logra_jax.data import tasks
from logra_jax.data import tokenizer

PARAMS = {
    "chain_sum": dict(min_terms=2, max_terms=2, min_digits=2, max_digits=3),
    "products": dict(max_digits=2),
    "gcd": dict(max_value=999),
    "lcm": dict(max_numbers=2, max_value=99),
    "count_bits": dict(max_n=2047),
    "spell_backward": dict(min_word_len=3, max_word_len=8),
    "palindrome_generation": dict(min_length=3, max_length=6),
}
LETTERS = ("wrong_letter", "dropped_letter", "copied_forward")
SEED = random.randrange(10**6)
CHARS = tokenizer.CharTokenizer("0123456789abcdefghijklmnopqrstuvwxyz +-*=<>")


def _sum(expression):
  return tasks.Example(
      "chain_sum", expression.replace(" ", "") + "=", str(eval(expression)),
      {"metadata": {"expression": expression}})


def _word(word):
  return tasks.Example(
      "spell_backward", f"{word}>", word[::-1], {"answer": word[::-1]})


def test_every_task_is_tried_here():
  assert set(PARAMS) == set(tasks.TASKS)


@pytest.mark.parametrize("name", tasks.TASKS)
def test_prompts_are_short_and_distinct_and_answers_right(name):
  examples = tasks.generate(name, PARAMS[name], 200, SEED)
  assert len({e.prompt for e in examples}) == len(examples) > 100
  for e in examples:
    assert e.task == name
    assert len(e.prompt) <= 14 and len(e.answer) <= 10
    CHARS.encode(e.prompt + e.answer)
    assert tasks.score(name, e.entry, e.answer) == 1.0


@pytest.mark.parametrize("name, prompt, answer", [
    ("chain_sum", r"\d{2,3}[+-]\d{2,3}=", eval),
    ("products", r"\d{1,2}\*\d{1,2}=", eval),
    ("count_bits", r"[01]+=", lambda n: n.count("1")),
    ("spell_backward", r"[a-z0-9]+>", lambda word: word[::-1]),
])
def test_the_prompt_alone_decides_the_answer(name, prompt, answer):
  for e in tasks.generate(name, PARAMS[name], 50, SEED):
    assert re.fullmatch(prompt, e.prompt)
    assert str(answer(e.prompt[:-1])) == e.answer


def test_one_seed_gives_one_list_and_the_next_seed_another():
  params = dict(max_digits=5, min_digits=5)
  prompts = lambda seed: [
      e.prompt for e in tasks.generate("chain_sum", params, 300, seed)]
  assert prompts(SEED) == prompts(SEED)
  # reasoning-gym's own streams of two adjacent seeds differ in one item.
  assert not set(prompts(SEED)) & set(prompts(SEED + 1))


@pytest.mark.parametrize("name, params, message", [
    ("sums", {}, "task 'sums' is unknown.*chain_sum"),
    ("chain_sum", {"digits": 2}, r"no parameters \['digits'\].*max_digits"),
    ("chain_sum", {"seed": 2}, r"no parameters \['seed'\]"),
    ("chain_sum", {"min_terms": 0}, "min_terms.*positive"),
    ("chain_sum", {"min_terms": "2"}, "'min_terms': '2'"),
    ("spell_backward", {"min_word_len": 90, "max_word_len": 99}, "word_len"),
])
def test_wrong_names_and_parameters_are_refused_in_one_line(
    name, params, message):
  with pytest.raises(ValueError, match=message) as error:
    tasks.generate(name, params, 10, 0)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("name, corruption", [
    (name, corruption) for name in tasks.TASKS for corruption in
    tasks.CORRUPTIONS if corruption in {
        "chain_sum": tasks.CORRUPTIONS, "spell_backward": LETTERS,
        "palindrome_generation": LETTERS[:2]}.get(name, ("wrong_digit",))])
def test_a_corrupted_answer_is_never_right(name, corruption):
  examples = tasks.generate(name, PARAMS[name], 300, SEED)
  rng = random.Random(SEED)
  for e in examples:
    wrong = tasks.CORRUPTIONS[corruption](rng, e)
    assert tasks.score(name, e.entry, wrong) < 1.0, (e.prompt, wrong)
    assert len(wrong) <= 10
    CHARS.encode(wrong)


@pytest.mark.parametrize("answer", ["0", "7", "-5", "10", "-381", "9000"])
def test_a_wrong_digit_is_one_other_digit_and_no_leading_zero(answer):
  rng = random.Random(SEED)
  example = tasks.Example("", "", answer, {})
  for _ in range(100):
    wrong = tasks.wrong_digit(rng, example)
    assert sum(a != b for a, b in zip(wrong, answer, strict=True)) == 1
    assert str(int(wrong)) == wrong or wrong == "-0"


@pytest.mark.parametrize("expression, wrong", [
    ("47 + 38", "75"), ("52 - 38", "24"), ("38 - 52", "-24"), ("60 + 70", "30"),
    ("99 + 2", "91"), ("105 - 7", "108"), ("-5 - 6", "-1"), ("8 + 5 + 9", "2"),
    ("8 - -5", "3"),
])
def test_a_dropped_carry_adds_column_by_column(expression, wrong):
  assert tasks.dropped_carry(random.Random(0), _sum(expression)) == wrong


def test_a_sum_without_carries_gets_a_wrong_digit():
  example = _sum("12 + 34")
  wrong = tasks.dropped_carry(random.Random(SEED), example)
  assert sum(a != b for a, b in zip(wrong, "46", strict=True)) == 1


@pytest.mark.parametrize("word, wrong", [
    ("sun", "sun"), ("level", "evel"), ("aaa", "aa")])
def test_a_word_copied_forward_is_wrong_even_for_palindromes(word, wrong):
  assert tasks.copied_forward(random.Random(0), _word(word)) == wrong


@pytest.mark.parametrize("corruption, example", [
    ("wrong_digit", tasks.Example("", "sun>", "nus", {})),
    ("dropped_carry", tasks.Example("", "6=", "2", {"metadata": {}})),
    ("dropped_carry", _sum("6 * 7")),
])
def test_a_corruption_that_does_not_fit_the_task_is_refused(
    corruption, example):
  with pytest.raises(ValueError, match=f"'{corruption}' needs"):
    tasks.demonstrations([example], 1.0, corruption, 0)


def test_a_split_is_disjoint_complete_and_blind_to_order():
  examples = tasks.generate("products", PARAMS["products"], 100, SEED)
  train, held_out = tasks.split(examples, 30, seed=3)
  prompts = [e.prompt for e in train + held_out]
  assert len(held_out) == 30 and len(prompts) == len(examples)
  assert set(prompts) == {e.prompt for e in examples}
  shuffled = random.sample(examples, len(examples))
  assert tasks.split(shuffled, 30, seed=3) == (train, held_out)
  assert tasks.split(examples, 30, seed=4)[1] != held_out


def test_a_repeated_prompt_is_on_one_side_of_a_split():
  examples = [_word(word) for word in ("ab", "cd", "ab", "ab", "cd")]
  train, held_out = tasks.split(examples, 1, SEED)
  assert len(train) == len(held_out) == 1
  assert train[0].prompt != held_out[0].prompt


@pytest.mark.parametrize("held_out", [-1, 2, 3])
def test_too_few_examples_to_split_are_counted(held_out):
  with pytest.raises(ValueError, match=f"hold out {held_out} of 2 .*examples"):
    tasks.split([_word("ab"), _word("cd"), _word("cd")], held_out, 0)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6, 1.0])
def test_the_corrupted_share_is_exact(share):
  examples = tasks.generate("chain_sum", PARAMS["chain_sum"], 90, SEED)
  args = examples, share, "dropped_carry"
  pairs = tasks.demonstrations(*args, seed=SEED)
  assert [prompt for prompt, _ in pairs] == [e.prompt for e in examples]
  wrong = [e.answer != a for e, (_, a) in zip(examples, pairs, strict=True)]
  assert sum(wrong) == round(share * len(examples))
  assert pairs == tasks.demonstrations(*args, seed=SEED)
  if 0 < share < 1:
    assert pairs != tasks.demonstrations(*args, seed=SEED + 1)


@pytest.mark.parametrize("share, corruption, message", [
    (1.1, "wrong_digit", "1.1 is not in"), (-0.1, "wrong_digit", "-0.1 is not"),
    (0.5, "typo", "'typo' is unknown.*wrong_digit")])
def test_an_impossible_corruption_is_refused(share, corruption, message):
  with pytest.raises(ValueError, match=message):
    tasks.demonstrations([_word("ab")], share, corruption, 0)
