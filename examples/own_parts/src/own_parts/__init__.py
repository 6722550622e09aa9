"""Parts for clearhead, from outside it."""

from own_parts.dilated import Dilated as Dilated
from own_parts.einsum import Einsum as Einsum
from own_parts.manhattan import Manhattan as Manhattan
from own_parts.recency import Recency as Recency
