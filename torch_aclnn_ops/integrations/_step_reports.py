"""A report of the first training steps."""

import logging

from torch_aclnn_ops._report import Report

_logger = logging.getLogger("torch_aclnn_ops")


class StepReport:
    """Base class of trainer callbacks that count the calls of the first training steps, and log the table."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"ReportCallback: steps must be an int of at least 1, but it is {steps!r}")
        self.report = Report()
        self._steps, self._left, self._is_open = steps, 0, False

    def _begin_report(self) -> None:
        """Start counting."""
        self._end_report()
        self.report = Report()
        self._left, self._is_open = self._steps, True
        self.report.__enter__()

    def _end_step(self) -> None:
        """Count down a step, and end the report after the last one."""
        self._left -= 1
        if self._left == 0:
            self._end_report()

    def _end_report(self) -> None:
        """Stop counting, and log the table; a no-op if not counting."""
        if self._is_open:
            self._is_open = False
            self.report.__exit__()
            _logger.info("%d training steps:\n%s", self._steps - max(self._left, 0), self.report)
