"""Closing segments: a footer, written once no job uses the segment, lists the blocks in it.

A segment gets no footer if one of its writes failed: parts of a block may lie there, and a footer would hide them.
Without a footer, a later life looks at the frames themselves.
"""

from __future__ import annotations

from stepwell.block.layout import PAGE
from stepwell.tiers.disk.directory.base import Directory
from stepwell.tiers.disk.layout import Footer
from stepwell.tiers.disk.segment import Segment, SegmentPhase
from stepwell.tiers.disk.stream import blank, write_bytes


class Footers:
    """Writes the footers of one directory's segments."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def close_open(self) -> None:
        """Closes the open segment, if there is one."""
        segment, self._directory.open_segment = self._directory.open_segment, None
        if segment is not None:
            segment.phase = SegmentPhase.CLOSING
            self._directory.use(segment)  # `finish` then runs exactly once: in `ended`, here or at its last job's end
            self._directory.ended(segment)

    def finish(self, segment: Segment) -> None:
        """Completes a CLOSING segment that no job uses."""
        if not segment.records:
            self._directory.free_up(segment)
            return
        footer = segment.footer()
        segment.records, segment.commitments = [], {}
        if segment.torn:
            self._directory.closed(segment)
        else:
            self._write(segment, footer)

    def close_found(self, segment: Segment, footer: Footer) -> None:
        """Writes the footer of a segment that an earlier life left open, so that the next life finds it, if there is
        room for one. The footer would hide half-written blocks and misread headers, so every page that it does not
        list becomes zeros first."""
        if len(footer.records) and Footer.nbytes(len(footer.records)) <= _unused_end(segment, footer):
            segment.phase = SegmentPhase.CLOSING
            self._write(segment, footer, found=True)

    def _write(self, segment: Segment, footer: Footer, *, found: bool = False) -> None:
        """`found`: pages that the footer does not list become zeros first."""
        raw = footer.pack()
        written = [len(raw)]
        directory, shared = self._directory, self._directory.shared
        directory.use(segment)

        def job() -> None:
            with directory.handles.use(segment.name) as file:
                if found:
                    written.append(blank(file, footer.records, (segment.nbytes - len(raw)) // PAGE))
                write_bytes(file, raw, segment.nbytes - len(raw), shared.staging)

        def ended(error: BaseException | None) -> None:
            if error is not None:
                shared.trouble(directory.space.trouble(error), error)
            else:
                shared.counts.device_bytes += sum(written)
            if segment.phase is SegmentPhase.CLOSING:
                directory.closed(segment)
            directory.ended(segment)
            directory.wake()

        shared.executor.submit(job, ended)


def _unused_end(segment: Segment, footer: Footer) -> int:
    """Bytes behind the last block."""
    last = footer.records[-1]
    return segment.nbytes - (int(last["page"]) + int(last["pages"])) * PAGE
