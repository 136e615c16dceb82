"""TensorBoard: event files in the run folder, for `tensorboard --logdir runs`.

One chart per metric and site ("site_loss_received/north"); the step is the number of finished rounds. Each failed
site's reason is logged as text. It is displayed as code, because TensorBoard renders text as Markdown, through which
a site could load an image from elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from fedveil.sanitize import sanitize
from fedveil.server_app.metrics.samples import RoundMetrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from fedveil.server_app.metrics.sinks import SinkRunInfo

EXTRA, NEEDS = "tensorboard", "tensorboard"


@final
class TensorBoardSink:
    """Writes to <run folder>/tensorboard. A resumed run voids the earlier events of rounds that it repeats."""

    def __init__(self, about: SinkRunInfo) -> None:
        self._about = about
        self._writer: SummaryWriter | None = None

    def write(self, told: RoundMetrics) -> None:
        """Write and flush. Raises OSError if the folder or the disk fails."""
        writer = self._writer or self._opened(told.step)
        for figure in told.figures:
            writer.add_scalar(figure.path, figure.value, told.step)
        for site, reason in told.failed.items():
            writer.add_text(f"failed/{site}", f"    {sanitize(reason)}", told.step)
        writer.flush()

    def close(self, state: str) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self, step: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        first = step if self._about.is_resumed else None
        self._writer = SummaryWriter(str(self._about.folder / "tensorboard"), purge_step=first)
        return self._writer


def create(about: SinkRunInfo) -> TensorBoardSink:
    """Create the sink of a run."""
    return TensorBoardSink(about)
