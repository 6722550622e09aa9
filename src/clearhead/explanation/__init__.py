"""A call of attention in words: its steps from the inputs to the output, and what is wrong with it."""

from clearhead.explanation.diagnosis.diagnose import diagnose as diagnose
from clearhead.explanation.diagnosis.diagnosis import Diagnosis as Diagnosis
from clearhead.explanation.diagnosis.diagnosis import Finding as Finding
from clearhead.explanation.explain import explain as explain
from clearhead.explanation.explanation import Explanation as Explanation
