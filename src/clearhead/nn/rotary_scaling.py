"""Slower rotations, for sequences longer than those of the training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count, check_flag, check_positive


class RotaryScaling(ABC):
    """How a `RotaryEmbedding` slows its rotations, so that a model takes sequences longer than those of its training.

    >>> from clearhead.nn import RotaryEmbedding, RotaryScaling
    >>> RotaryEmbedding(128, base=5e5, scaling=RotaryScaling.llama3(factor=8, original_length=8192))
    RotaryEmbedding(dim=128, base=500000, interleaved=False, scaling=llama3(factor=8.0, original_length=8192))

    Formula: without it the pair n of D / 2 pairs turns by θ_n = base^(−2n/D) at each step. Each of `linear`, `dynamic`,
    `yarn` and `llama3` gives its own θ_n; yarn multiplies cosines and sines by one number too. The classes have
    transformers' numbers for the same settings: its rope_theta is `base` here, `factor` is `factor`, and
    original_max_position_embeddings is `original_length` (of "dynamic" it is max_position_embeddings). NTK-aware
    scaling by a fixed factor is a larger base alone: RotaryEmbedding(D, base=base * factor ** (D / (D - 2))).
    """

    magnitude: float = 1.0  # multiplies the cosines and the sines
    by_length = False  # whether the speeds depend on the length of the sequence

    @abstractmethod
    def speeds(self, plain: Tensor, base: float, length: Tensor) -> Tensor:
        """The angle of each pair at each step, (dim / 2,) in float64, from those without scaling.

        `length`: how long the sequence is, one whole number.
        """

    @staticmethod
    def linear(factor: float) -> RotaryScaling:
        """Every rotation `factor` times slower: position interpolation.

        >>> from clearhead.nn import RotaryScaling
        >>> RotaryScaling.linear(4)
        linear(factor=4.0)

        Formula: θ_n / factor. `factor`: the new length over the length of the training, 1 or more.
        Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation".
        """
        return _Linear(_factor(factor))

    @staticmethod
    def dynamic(factor: float, original_length: int) -> RotaryScaling:
        """A larger base, which grows with the sequence: dynamic NTK scaling.

        >>> from clearhead.nn import RotaryScaling
        >>> RotaryScaling.dynamic(2, original_length=4096)
        dynamic(factor=2.0, original_length=4096)

        Formula: base' = base · (factor · n / original_length − (factor − 1))^(D / (D − 2)), with n the largest of
        original_length and 1 + the largest position of the call. So a call within original_length is as without
        scaling. Keys in a cache keep the angles of the call that made them, as in transformers.
        `original_length`: the length of the training. Cost: no table is kept; each call computes its cosines.
        Source: bloc97 and emozilla 2023, "NTK-Aware Scaled RoPE"; Peng et al. 2023, "YaRN", appendix B.
        """
        return _Dynamic(_factor(factor), check_count(original_length, 1, "original_length"))

    @staticmethod
    def yarn(
        factor: float,
        original_length: int,
        *,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
        truncate: bool = True,
    ) -> RotaryScaling:
        """Fast rotations as they are, slow ones `factor` times slower, and a ramp between: YaRN.

        >>> from clearhead.nn import RotaryScaling
        >>> RotaryScaling.yarn(4, original_length=32768)
        yarn(factor=4.0, original_length=32768)

        Formula: θ_n (1 − r_n + r_n / factor), with the ramp r_n = (n − a) / (b − a), bounded to 0 and 1. a and b are
        the pairs that turn `beta_fast` and `beta_slow` times within `original_length`, real numbers; with `truncate`
        they are rounded down and up. Cosines and sines are multiplied by `attention_factor`; None is
        0.1 · ln(factor) + 1. DeepSeek's mscale and mscale_all_dim are the attention factor
        (0.1 · mscale · ln(factor) + 1) / (0.1 · mscale_all_dim · ln(factor) + 1).
        Source: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models".
        """
        fast, slow = check_positive(beta_fast, "beta_fast"), check_positive(beta_slow, "beta_slow")
        if fast <= slow:
            raise ClearheadError(f"beta_fast is {fast:g} and beta_slow {slow:g}: fast pairs turn more often than slow.")
        given = None if attention_factor is None else check_positive(attention_factor, "attention_factor")
        original = check_count(original_length, 1, "original_length")
        return _Yarn(_factor(factor), original, fast, slow, given, check_flag(truncate, "truncate"))

    @staticmethod
    def llama3(
        factor: float, original_length: int, *, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0
    ) -> RotaryScaling:
        """Fast rotations as they are, slow ones `factor` times slower, by the turns of a pair: Llama 3.1.

        >>> from clearhead.nn import RotaryScaling
        >>> RotaryScaling.llama3(8, original_length=8192)
        llama3(factor=8.0, original_length=8192)

        Formula: θ_n (r_n + (1 − r_n) / factor), with r_n = (t_n − low_freq_factor) / (high_freq_factor −
        low_freq_factor), bounded to 0 and 1, and t_n = original_length · θ_n / 2π, the turns within original_length.
        Source: Llama Team 2024, "The Llama 3 Herd of Models", and the code of Llama 3.1.
        """
        low = check_positive(low_freq_factor, "low_freq_factor")
        high = check_positive(high_freq_factor, "high_freq_factor")
        if high <= low:
            raise ClearheadError(f"low_freq_factor is {low:g} and high_freq_factor {high:g}: the high one is above it.")
        return _Llama3(_factor(factor), check_count(original_length, 1, "original_length"), low, high)

    def __repr__(self) -> str:
        """The call that makes it, without the arguments that have their usual values."""
        shown = ((field, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        told = ", ".join(f"{field.name}={value}" for field, value in shown if value != field.default)
        return f"{type(self).__name__.removeprefix('_').lower()}({told})"


@dataclass(frozen=True, repr=False)
class _Linear(RotaryScaling):
    factor: float

    def speeds(self, plain: Tensor, base: float, length: Tensor) -> Tensor:
        return plain / self.factor


@dataclass(frozen=True, repr=False)
class _Dynamic(RotaryScaling):
    factor: float
    original_length: int
    by_length = True

    def speeds(self, plain: Tensor, base: float, length: Tensor) -> Tensor:
        width = 2 * plain.shape[0]
        stretch = self.factor * length.clamp(min=self.original_length) / self.original_length - (self.factor - 1)
        steps = torch.arange(0, width, 2, dtype=plain.dtype, device=plain.device)
        return plain * stretch.to(plain) ** (-steps / (width - 2))


@dataclass(frozen=True, repr=False)
class _Yarn(RotaryScaling):
    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:  # type: ignore[override]
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def speeds(self, plain: Tensor, base: float, length: Tensor) -> Tensor:
        pairs = plain.shape[0]
        low, high = (
            pairs * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(base)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        high = high + 0.001 if high == low else high
        ramp = ((torch.arange(pairs, dtype=plain.dtype, device=plain.device) - low) / (high - low)).clamp(0, 1)
        return plain * (1 - ramp + ramp / self.factor)


@dataclass(frozen=True, repr=False)
class _Llama3(RotaryScaling):
    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def speeds(self, plain: Tensor, base: float, length: Tensor) -> Tensor:
        turns = self.original_length * plain / (2 * math.pi)
        ramp = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * (ramp + (1 - ramp) / self.factor)


def _factor(factor: float) -> float:
    number = check_positive(factor, "factor")
    if number < 1:
        raise ClearheadError(f"factor is {factor:g}; expected the new length over that of the training, 1 or more.")
    return number
