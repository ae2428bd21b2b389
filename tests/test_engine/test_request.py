"""Sampling parameters: what is refused and in which words, and how defaults are laid under them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from moe.engine.request import Request, SamplingParams, derive_seed

REFUSED = (
    ({"n": 0}, "n=0"),
    ({"n": True}, "n=True"),
    ({"n": None}, "n=None"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": 1.5}, "max_tokens=1.5"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 exceeds max_tokens=8"),
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"temperature": True}, "temperature=True"),
    ({"temperature": "1"}, "temperature='1'"),
    ({"temperature": 1e308}, "temperature=1e+308"),
    ({"temperature": 10**400}, "temperature=10000000000000000000... (401 digits)"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.01}, "top_p=1.01"),
    ({"top_k": -2}, "top_k=-2"),
    ({"top_k": False}, "top_k=False"),
    ({"top_k": 10**30}, f"top_k={10**30}"),
    ({"min_p": 1.5}, "min_p=1.5"),
    ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300"),
    ({"repetition_penalty": 1e300}, "repetition_penalty=1e+300"),
    ({"presence_penalty": 2.5}, "presence_penalty=2.5"),
    ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
    ({"seed": 2**64}, f"seed={2**64}"),
    ({"seed": 1.0}, "seed=1.0"),
    ({"logprobs": 129}, "logprobs=129"),
    ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
    ({"ignore_eos": 1}, "ignore_eos=1"),
    ({"stop": 3}, "stop=3"),
    ({"stop": ["a", 3]}, "stop has 3"),
    ({"stop_token_ids": 3}, "stop_token_ids=3"),
    ({"stop_token_ids": [True]}, "stop_token_ids=True"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
    ({"logit_bias": [1]}, "logit_bias=[1]"),
    ({"logit_bias": {"x": 1}}, "logit_bias has key 'x'"),
    ({"logit_bias": {3: 101}}, "logit_bias[3]=101"),
    ({"logit_bias": {3: math.nan}}, "logit_bias[3]=nan"),
    ({"logit_bias": {3: -(10**400)}}, "logit_bias[3]=-1"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias has key '9999999999999999999..., which is no token id"),
    ({"logit_bias": {"٣": 1}}, "logit_bias has key '٣'"),
    ({"logit_bias": {"3": 1, "03": 2}}, "logit_bias={'3': 1, '03': 2} names one token id twice"),
    ({"logit_bias": {"3": 1, 3: 2}}, "logit_bias={'3': 1, 3: 2} names one token id twice"),
)


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_wrong_values_are_refused_by_name_and_value(fields: dict, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**fields)
    assert words in str(caught.value)


def test_the_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"^top_p=1.01 is out of range; give a finite number above 0 to 1\.$"):
        SamplingParams(top_p=1.01)


def test_C19_empty_stop_strings_are_rejected() -> None:
    """Case C19: stop=['']."""
    for stop in ([""], "", ["a", ""]):
        with pytest.raises(ValueError, match="empty string"):
            SamplingParams(stop=stop)


def test_C19_stop_strings_without_text_are_rejected_not_ignored() -> None:
    with pytest.raises(ValueError, match=r"stop=\['DE'\] needs text, but detokenize=False"):
        SamplingParams(stop=["DE"], detokenize=False)
    assert SamplingParams(stop_token_ids=[4], detokenize=False).stop_token_ids == (4,)


def test_edges_that_are_allowed() -> None:
    SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=0, seed=2**64 - 1, logprobs=0, presence_penalty=-2)


def test_forms_are_made_one() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], logit_bias={"7": 1})
    assert params.stop == ("END",) and params.stop_token_ids == (1, 2) and params.logit_bias == {7: 1.0}
    assert dataclasses.replace(params, n=2).stop == ("END",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_what_can_be_read_once_is_kept() -> None:
    """A generator that only the check had read would end no answer."""
    params = SamplingParams(stop=(text for text in ("a", "b")), stop_token_ids=iter([3, 4]))  # pyright: ignore
    assert params.stop == ("a", "b") and params.stop_token_ids == (3, 4)
    with pytest.raises(ValueError, match="stop has 3"):
        SamplingParams(stop=iter(["a", 3]))  # pyright: ignore


def test_merged_fills_only_what_is_not_set() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "min_p": None}
    merged = SamplingParams(temperature=0.0).merged(defaults)
    assert (merged.temperature, merged.top_k, merged.min_p) == (0.0, 20, None)
    assert SamplingParams().merged({"temperature": None}) == SamplingParams()
    with pytest.raises(ValueError, match="'temprature' is no sampling parameter"):
        SamplingParams().merged({"temprature": 1})
    with pytest.raises(ValueError, match="top_p=7"):  # a checkpoint's nonsense is refused as well
        SamplingParams().merged({"top_p": 7})


def test_later_layers_win_and_none_sets_nothing() -> None:
    params = SamplingParams.from_layers(
        {"temperature": 0.6, "top_p": 0.9}, {"top_p": 0.5, "n": 2}, {"temperature": None}
    )
    assert (params.temperature, params.top_p, params.n) == (0.6, 0.5, 2)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    SamplingParams(stop_token_ids=[9], logit_bias={9: 1}).check_vocab(10)
    with pytest.raises(ValueError, match="stop_token_ids has 10"):
        SamplingParams(stop_token_ids=[10]).check_vocab(10)
    with pytest.raises(ValueError, match="logit_bias has id 10"):
        SamplingParams(logit_bias={10: 1}).check_vocab(10)
    SamplingParams(min_tokens=1, stop_token_ids=range(9)).check_vocab(10)
    SamplingParams(stop_token_ids=range(10)).check_vocab(10)
    with pytest.raises(ValueError, match="min_tokens=1 rules out stop_token_ids at first, and these are all 10 ids"):
        SamplingParams(min_tokens=1, stop_token_ids=[*range(10), 3]).check_vocab(10)


def test_seeds_of_samples_are_stable_and_differ() -> None:
    asked = Request("a", [1], SamplingParams(seed=5, n=2))
    assert asked.seed_of(0) == 5 and asked.seed_of(1) not in (5, 6)
    seeds = {Request(name, [1], job_seed=job).seed_of(i) for name in ("a", "b") for job in (0, 1) for i in (0, 1)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)
    assert Request("a", [1]).seed_of(0) == Request("a", [1]).seed_of(0) == 6143789144907546319
    assert derive_seed(0, "1") != derive_seed(0, 1)
