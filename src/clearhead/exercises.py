"""Checks for the exercises of a course: an answer is right, or the error says what is wrong and not what is right.

>>> from clearhead import exercises
>>> exercises.close([0.25, 0.75], [0.25, 0.75], "the weights")
right: the weights

The checks of clearhead's own course are made of these. A notebook shows the message of a failed check alone.
"""

from clearhead.base.answers import WrongAnswer as WrongAnswer
from clearhead.base.answers import close as close
from clearhead.base.answers import tried as tried
from clearhead.base.answers import true as true
from clearhead.base.public_names import publish as _publish

__all__ = _publish(globals())
