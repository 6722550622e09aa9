"""Scores, one formula in each file."""

from clearhead.scores.additive import Additive as Additive
from clearhead.scores.base import Pairwise as Pairwise
from clearhead.scores.base import Score as Score
from clearhead.scores.bilinear import Bilinear as Bilinear
from clearhead.scores.cosine import Cosine as Cosine
from clearhead.scores.dot import Dot as Dot
from clearhead.scores.gaussian import Gaussian as Gaussian
from clearhead.scores.score_function import ScoreFunction as ScoreFunction
