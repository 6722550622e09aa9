"""What the exercises check an answer with: there is one function for each exercise.

A check says `right`, or raises an error that says what is wrong with the answer. It knows frequent mistakes by what
they give, and names them; it does not say the right number. An answer that was left as it was is "not answered yet".
"""

from inspect import isfunction

from checks.averages import a_rule_of_your_own as a_rule_of_your_own
from checks.averages import box_kernel as box_kernel
from checks.averages import dot_product_attention as dot_product_attention
from checks.averages import first_by_product as first_by_product
from checks.averages import leave_one_out as leave_one_out
from checks.averages import length_of_keys as length_of_keys
from checks.averages import loss_with_padding as loss_with_padding
from checks.averages import masked_softmax as masked_softmax
from checks.averages import moved as moved
from checks.averages import nearest_words as nearest_words
from checks.averages import of_a_masked_key as of_a_masked_key
from checks.averages import scale_of as scale_of
from checks.averages import two_ends as two_ends
from checks.layers import additive_attention as additive_attention
from checks.layers import both_positions as both_positions
from checks.layers import contributions_of_heads as contributions_of_heads
from checks.layers import count_of_parameters as count_of_parameters
from checks.layers import places_by_a_mask as places_by_a_mask
from checks.layers import sequences_apart as sequences_apart
from checks.layers import shares_by_format as shares_by_format
from checks.layers import split_and_merge as split_and_merge
from checks.layers import turned as turned
from checks.layers import waves as waves
from checks.layers import without_tanh as without_tanh
from checks.models import a_look_ahead as a_look_ahead
from checks.models import arrived_by_rollout as arrived_by_rollout
from checks.models import causal_blocks as causal_blocks
from checks.models import cut_keys as cut_keys
from checks.models import head_of_itself as head_of_itself
from checks.models import induction_score as induction_score
from checks.models import merge_by_hand as merge_by_hand
from checks.models import one_layer as one_layer
from checks.models import rank_correlation as rank_correlation
from checks.models import stream_of_a_block as stream_of_a_block
from checks.models import without_the_largest as without_the_largest
from checks.parts import angle as angle
from checks.parts import growing as growing
from checks.parts import lowered_angle as lowered_angle
from clearhead.exercises.answers import WrongAnswer as WrongAnswer
from clearhead.exercises.answers import alone
from clearhead.exercises.answers import close as close
from clearhead.exercises.answers import true as true

globals().update({name: alone(check) for name, check in list(globals().items()) if isfunction(check)})
del alone, isfunction
