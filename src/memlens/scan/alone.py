"""Alone: every piece in this process, one after another, with the model that is loaded already."""

from __future__ import annotations

from memlens.corpus.batches import Batch
from memlens.scan.work import Saver, ScanJob, Worker


class Alone:
    """The executor without workers."""

    def run(self, job: ScanJob) -> None:
        worker = Worker(job.model, job.settings, job.layers)
        saver = Saver(job.keeper, job.keeper.new_name(), worker, job.save_seconds)

        def after_batch(batch: Batch) -> None:
            job.on_tokens(int(batch.lengths.sum()))
            if job.stop.stopped:
                saver.save()
            job.stop.check()
            saver.save_if_due()

        for piece in job.pieces:
            worker.scan(piece, job.windows.window, after_batch)
        saver.save()
