"""Parts of an edited model that gradient checkpoints compute again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils import checkpoint

from clearhead.base.errors import ClearheadError
from clearhead.base.torch_private import generator_of_checkpoints
from clearhead.models.tap.patch import replaced

if TYPE_CHECKING:
    from clearhead.models.use.edits.edit import Editor


class CheckpointedPart:
    """The function of a checkpoint, which runs it again in the backward pass.

    It raises where one of its calls was edited and the edit is over: the gradients would be those of another forward.
    """

    def __init__(self, editor: Editor, function: Callable[..., Any]) -> None:
        self._editor, self._function = editor, function
        self._before, self._edited = editor.changes, False

    def ran(self) -> None:
        """Note whether a call was edited since the part began."""
        self._edited = self._edited or self._editor.changes > self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._edited and self._editor.stack.over:
            raise ClearheadError(
                "edit: a gradient checkpoint computes layers again in the backward pass, and the `with` of the edit "
                "has ended, so they would be computed without it.\nCall backward() inside the `with`."
            )
        result = self._function(*args, **kwargs)
        self.ran()
        return result


@contextmanager
def following_checkpoints(editor: Editor) -> Iterator[None]:
    """Inside the `with`, the functions of checkpoints are `CheckpointedPart`s."""

    def reentrant(forward: Callable[..., Any]) -> Callable[..., Any]:
        def following(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
            return forward(ctx, CheckpointedPart(editor, function), *args)

        return following

    def generating(generator: Callable[..., Any]) -> Callable[..., Any]:
        def following(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
            part = CheckpointedPart(editor, function)
            yield from generator(part, *args, **kwargs)  # the function runs between its two steps
            part.ran()

        return following

    with ExitStack() as stack:
        stack.enter_context(replaced(checkpoint.CheckpointFunction, "forward", reentrant))
        stack.enter_context(replaced(checkpoint, generator_of_checkpoints(), generating))
        yield
