"""Checks for the exercises of a course: an answer is right, or the error says what is wrong and not what is right.

>>> from clearhead import exercises
>>> exercises.close([0.25, 0.75], [0.25, 0.75], "the weights")
right: the weights

The checks of clearhead's own course are made of these. A notebook shows the message of a failed check alone.
"""

from clearhead.base.public_names import publish as _publish
from clearhead.exercises.answers import WrongAnswer as WrongAnswer
from clearhead.exercises.answers import close as close
from clearhead.exercises.answers import tried as tried
from clearhead.exercises.answers import true as true

__all__ = _publish(globals())
