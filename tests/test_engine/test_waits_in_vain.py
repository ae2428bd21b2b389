"""A wait for another rank that the device gave up ends the step that was read, with the rank's number."""

from __future__ import annotations

import pytest

from expert_parallel.choice import Dispatchers
from expert_parallel.dispatcher import LocalDispatcher
from moe import LLM, SamplingParams
from moe.engine.engine import StepError
from moe.model.causal_lm import CausalLM


class Abandoned(LocalDispatcher):
    """As one_sided is after a wait in vain."""

    def check(self) -> None:
        raise RuntimeError("one_sided: rank 0 waited 5 s (parallel.timeout_s) for the rows of rank 3 in round 7")


def test_C44_the_step_ends_with_the_rank_that_was_waited_for() -> None:
    with LLM("demo", max_num_seqs=2) as llm:
        network = llm.engine.parts.network
        assert isinstance(network, CausalLM)
        fine = network.dispatchers.prefill
        assert isinstance(fine, LocalDispatcher)
        network.dispatchers = Dispatchers(fine, Abandoned(fine.slot_of_E, fine.num_slots))
        with pytest.raises(StepError, match=r"stage 'wait' failed .* rank 0 waited 5 s .* for the rows of rank 3"):
            llm.generate(["Hello"], SamplingParams(max_tokens=3, temperature=0.0))
