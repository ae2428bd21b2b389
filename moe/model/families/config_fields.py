"""Reading one config.json: fields under either of their names; errors say which field, its value and a way out.

Knows the spellings of transformers 4 and 5 for what all families share (rope, dtype, fp8, special tokens); knows
nothing of any one family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernels.routing import RoutingRule
from moe.model.config import RopeConfig
from moe.model.rope_table import attention_factor

_REQUIRED = object()
# Fields a nested text_config may leave to the outer config.
_OUTER_FIELDS = (
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
)
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ConfigFields:
    """One config.json, flat: a nested `text_config` is taken for the model, the outer fields fill its gaps."""

    values: Mapping[str, Any]
    where: str = "config.json"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ConfigFields:
        inner = config.get("text_config")
        if not isinstance(inner, Mapping):
            return cls(dict(config))
        outer = {name: config[name] for name in _OUTER_FIELDS if name in config}
        return cls(outer | dict(inner))

    def value(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The first of `names` that is present and not null; `default` if none is, ValueError without a default."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        if default is _REQUIRED:
            raise ValueError(
                f"{self.where} has no {' or '.join(names)}, which this model needs; "
                "is this the config.json that came with the weights?"
            )
        return default

    def integer(self, *names: str, default: Any = _REQUIRED, at_least: int = 1) -> int:
        value = self.value(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ValueError(
                f"{self.where}: {self._present(names)}={value!r} must be an integer of {at_least} or more; "
                "compare with the published config of this model."
            )
        return value

    def number(self, *names: str, default: Any = _REQUIRED, positive: bool = False) -> float:
        value = self.value(*names, default=default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (positive and value <= 0):
            raise ValueError(
                f"{self.where}: {self._present(names)}={value!r} must be a finite number"
                f"{' above 0' if positive else ''}; compare with the published config of this model."
            )
        return float(value)

    def section(self, *names: str) -> Mapping[str, Any] | None:
        """A nested object of fields; None where none of `names` is present."""
        value = self.value(*names, default=None)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(
                f"{self.where}: {self._present(names)}={value!r} must be an object of fields; "
                "compare with the published config of this model."
            )
        return value

    def flag(self, *names: str, default: bool) -> bool:
        value = self.value(*names, default=default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {self._present(names)}={value!r} must be true or false.")
        return value

    def only(self, name: str, supported: tuple[Any, ...], default: Any) -> Any:
        """A field of which this runtime knows some values only."""
        value = self.value(name, default=default)
        if value not in supported:
            raise ValueError(
                f"{self.where}: {name}={value!r} is not supported for model_type={self.values.get('model_type')!r}; "
                f"supported: {', '.join(repr(choice) for choice in supported)}."
            )
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """An id, a list of ids or null."""
        value = self.value(name, default=[])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise ValueError(f"{self.where}: {name}={value!r} must be a token id or a list of token ids.")
        return tuple(ids)

    def first_token_id(self, name: str) -> int | None:
        return next(iter(self.token_ids(name)), None)

    def dtype(self) -> str:
        """The stored dtype; where the file does not say, bfloat16, as all released checkpoints of these families."""
        value = str(self.value("dtype", "torch_dtype", default="bfloat16")).removeprefix("torch.")
        if value not in _DTYPES:
            raise ValueError(
                f"{self.where}: {self._present(('dtype', 'torch_dtype'))}={value!r} is not supported; "
                f"supported: {', '.join(_DTYPES)}."
            )
        return value

    def fp8_block(self) -> tuple[int, int] | None:
        """(rows, columns) of one weight scale; None where nothing is quantised; ValueError for other methods."""
        quantization = self.section("quantization_config", "compression_config")
        if quantization is None:
            return None
        method = quantization.get("quant_method")
        if method != "fp8":
            raise ValueError(
                f"config.json: quantization_config.quant_method={method!r} is not supported; supported: 'fp8' with "
                "weight_block_size. Use the unquantised checkpoint of this model."
            )
        fmt, block = quantization.get("fmt", "e4m3"), quantization.get("weight_block_size")
        if fmt != "e4m3":
            raise ValueError(f"config.json: quantization_config.fmt={fmt!r} is not supported; supported: 'e4m3'.")
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise ValueError(
                f"config.json: quantization_config.weight_block_size={block!r} is not supported; fp8 weights need "
                "[rows, columns] of one scale, as DeepSeek-V3 has [128, 128]."
            )
        return block[0], block[1]

    def rope(self, dim: int, *, max_positions: int, interleaved: bool = False, theta: float = 10000.0) -> RopeConfig:
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4). `theta`: where it is absent.

        The cos/sin factor is resolved here: for yarn, mscale(factor, mscale) / mscale(factor, mscale_all_dim) where
        both are given, else mscale(factor).
        """
        source = self._rope_source()
        scaling = ConfigFields(self.section(source) or {}, f"config.json: {source}")
        for name, value in scaling.values.items():
            if isinstance(value, Mapping):
                raise ValueError(
                    f"config.json: {source}.{name} is an object of its own; one rope for all layers is supported: give "
                    f"its fields in {source} itself."
                )
        kind = scaling.value("rope_type", "type", default="default")
        if kind not in ("default", "linear", "yarn"):
            raise ValueError(
                f"config.json: {source}.rope_type={kind!r} is not supported; supported: 'default', 'linear', 'yarn'."
            )
        partial = scaling.number("partial_rotary_factor", default=self.value("partial_rotary_factor", default=1.0))
        if partial != 1.0:
            raise ValueError(
                f"config.json: partial_rotary_factor={partial} is not supported for "
                f"model_type={self.values.get('model_type')!r}; supported: 1.0."
            )
        own_base = self.number("rope_theta", default=theta, positive=True)
        base = scaling.number("rope_theta", default=own_base, positive=True)
        if kind == "default":
            return RopeConfig(base, dim, interleaved=interleaved, attention_factor=1.0)
        mscale, all_dim = scaling.number("mscale", default=0.0), scaling.number("mscale_all_dim", default=0.0)
        if kind == "linear":
            factor = scaling.number("factor", positive=True)
            linear = RopeConfig(base, dim, "linear", factor, interleaved=interleaved, attention_factor=1.0)
            return replace(linear, mscale_all_dim=all_dim or None)
        original = scaling.value("original_max_position_embeddings", default=max_positions)
        original = self.integer("original_max_position_embeddings", default=original)
        factor = scaling.number("factor", default=max_positions / original, positive=True)
        rope = RopeConfig(
            theta=base,
            dim=dim,
            scaling="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=scaling.number("beta_fast", default=32.0, positive=True),
            beta_slow=scaling.number("beta_slow", default=1.0, positive=True),
            mscale=mscale or None,
            mscale_all_dim=all_dim or None,
            truncate=scaling.flag("truncate", default=True),
            interleaved=interleaved,
        )
        return replace(rope, attention_factor=scaling.number("attention_factor", default=attention_factor(rope)))

    def _rope_source(self) -> str:
        """The field with the rope's own fields: transformers 5 writes one, 4 the other, and whoever stretches a context
        adds the second to a file that has the first. ValueError where they say different things: no rule for which
        counts, and whose rope_theta, would be what was meant everywhere."""
        new, old = self.section("rope_parameters") or {}, self.section("rope_scaling") or {}
        if not new or not old:
            return "rope_scaling" if old else "rope_parameters"
        said = {"rope_type" if name == "type" else name: value for name, value in old.items()}
        differing = [name for name, value in said.items() if new.get(name) != value]
        if differing:
            raise ValueError(
                f"config.json has rope_parameters and rope_scaling, and they differ in {', '.join(differing)}; keep "
                "one: rope_parameters holds all of it, rope_type and rope_theta too."
            )
        return "rope_parameters"

    def _present(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self.values), names[0])


def check_rule(rule: RoutingRule, num_experts: int) -> RoutingRule:
    """The rule itself; ValueError where no router of `num_experts` experts can follow it."""
    try:
        rule.check(num_experts)
    except ValueError as error:
        raise ValueError(f"config.json: the router's fields do not fit together: {error}") from None
    return rule
