"""How a computation came about: its steps, with shapes, numbers and formulas."""

from clearhead.explanation.explain import explain as explain
from clearhead.explanation.explanation import Explanation as Explanation
