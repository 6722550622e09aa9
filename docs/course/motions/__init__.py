"""The pictures of the course that move: each function takes the numbers of a chapter, and a cell ends with it.

    motions.scores_to_weights(query, key, mask=ch.Lengths([3]))

A function computes every frame with clearhead, and gives a `Motion`: a page with a player, in a frame. `Picture` and
`Motion` of `clearhead.explanation.motion` say by example how a motion of your own is made.
"""

from motions.averages import bandwidth as bandwidth
from motions.averages import scores_to_weights as scores_to_weights
from motions.blocks import online_softmax as online_softmax
from motions.checkpoints import induction as induction
from motions.heads import rotary as rotary
from motions.heads import split_heads as split_heads
