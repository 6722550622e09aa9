"""docs/audited_models.md: what the audits of the architectures found."""

from __future__ import annotations

from zoo import document
from zoo.registry import names


def list_built() -> list[str]:
    """The architectures that docs/models.md says are built, and those that it does not name."""
    _, outcomes = document.read()
    return [name for name in names() if not outcomes.get(name, "").startswith("not built")]
