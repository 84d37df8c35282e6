"""What batches of this pipeline look like and weigh, learnt from those that have been.

In:  finished batches.
Out: the template rows can be laid out by in advance, if samples agree; the bytes to expect of the next batch.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

from collections import deque

from penstock.arena.template import Template, layout_of

_RECENT = 8
_AGREE_AFTER_CHANGE = 3
"""After samples changed shape once, this many batches must agree before rows are laid out in advance again."""


class Shapes:
    def __init__(self) -> None:
        self.template: Template | None = None
        """What every sample is expected to look like; None while that is unknown or changing."""
        self._sizes: deque[int] = deque(maxlen=_RECENT)
        self._sample_sizes: deque[int] = deque([0], maxlen=_RECENT)
        self._last: Template | None = None
        self._agreeing = 0
        self._changed = False

    def note_match(self, template: Template, rows: int) -> None:
        """A batch was laid out by ``template`` and every sample fitted."""
        self.note_size(layout_of(template, rows).total_bytes)
        self._agreeing = self._agreeing + 1 if template == self._last else 1
        self._last = template
        if self.template is None and self._agreeing >= (_AGREE_AFTER_CHANGE if self._changed else 1):
            self.template = template

    def note_mismatch(self) -> None:
        """A batch had to go through torch's collate."""
        self._changed = True
        self.template = None
        self._agreeing = 0

    def note_size(self, batch_bytes: int) -> None:
        self._sizes.append(batch_bytes)

    def note_sample(self, sample_bytes: int) -> None:
        self._sample_sizes.append(sample_bytes)

    @property
    def sample_bytes(self) -> int:
        """What a worker holds while it makes one sample, as far as known. Where sizes vary the next may be larger."""
        largest = max(self._sample_sizes)
        return largest if self.template is not None else largest * 5 // 4

    def expected_bytes(self, rows: int) -> int | None:
        """What a batch of ``rows`` samples will weigh; None before anything is known."""
        if self.template is not None:
            return layout_of(self.template, rows).total_bytes
        return max(self._sizes) if self._sizes else None
