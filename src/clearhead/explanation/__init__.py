"""A call of attention in words: its steps from the inputs to the output, and what is wrong with it."""

from clearhead.base.output.pages import Frame as Frame
from clearhead.base.public_names import publish as _publish
from clearhead.explanation.diagnosis.diagnose import diagnose as diagnose
from clearhead.explanation.diagnosis.diagnosis import Diagnosis as Diagnosis
from clearhead.explanation.diagnosis.diagnosis import Finding as Finding
from clearhead.explanation.explain import explain as explain
from clearhead.explanation.explanation import Explanation as Explanation
from clearhead.explanation.motion import Motion as Motion
from clearhead.explanation.motion import Picture as Picture
from clearhead.explanation.plan import plan as plan

__all__ = _publish(globals())
