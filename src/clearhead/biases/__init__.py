"""Biases, which are added to the scores, one idea in each file."""

from clearhead.biases.alibi import ALiBi as ALiBi
from clearhead.biases.base import Added as Added
from clearhead.biases.base import Bias as Bias
from clearhead.biases.bias_function import BiasFunction as BiasFunction
from clearhead.biases.dense import DenseBias as DenseBias
from clearhead.biases.relative import RelativeBias as RelativeBias
