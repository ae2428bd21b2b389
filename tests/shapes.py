"""The sizes that every kernel must meet, each with the reason it is here. A test takes the lists its kernel can see."""

from __future__ import annotations

import pytest

NUM_TOKENS = (
    pytest.param(0, id="T0-nothing-to-do"),
    pytest.param(1, id="T1-one-decode"),
    pytest.param(127, id="T127-one-below-a-tile"),
    pytest.param(128, id="T128-a-whole-tile"),
    pytest.param(129, id="T129-one-above-a-tile"),
)

NUM_EXPERTS = (
    pytest.param(1, id="E1-no-choice"),
    pytest.param(3, id="E3-far-from-a-power-of-two"),
    pytest.param(60, id="E60-Qwen2-MoE"),
    pytest.param(160, id="E160-DeepSeek-V2"),
    pytest.param(257, id="E257-one-above-a-power-of-two"),
    pytest.param(384, id="E384-Kimi-K2"),
)

HIDDEN = (
    pytest.param(96, id="D96-below-a-tile"),
    pytest.param(2880, id="D2880-GPT-OSS-22.5-tiles"),
)

INTERMEDIATE = (pytest.param(40, id="F40-not-a-multiple-of-16"),)

WILD_INDEX = 2**30
"""What unused index entries hold in tests: reading through one leaves every buffer."""
