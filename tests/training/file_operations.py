"""Counts the file operations of a run, and kills the process at one of them, as SIGKILL does."""

import itertools
import os
import signal
import sys

from ligermodels.training.reporting.metrics import Metrics

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "fcntl.flock"}


class FileOperations:
    """The operations of this process that change files of `folder`: each is counted, and the fatal one never happens.

    A file is opened for writing, locked, synced, renamed or removed; a folder is made or removed. A record of
    metrics.jsonl counts twice: before it is written, and when half of it is. fatal: the number of the operation, from
    1. seen: the number of operations so far.
    """

    def __init__(self, folder, fatal=None):
        self.folder, self.fatal, self.seen = os.path.abspath(folder), fatal, 0
        self.fsync, self.write = os.fsync, Metrics.write
        os.fsync = lambda descriptor: (self.count(), self.fsync(descriptor))
        Metrics.write = lambda metrics, record: self.write_record(metrics, record)
        sys.addaudithook(self.hear)

    def count(self, before_dying=None):
        self.seen += 1
        if self.seen == self.fatal:
            if before_dying:
                before_dying()
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(self, event, arguments):
        if event in CHANGES or (event == "open" and self.is_written(*arguments)):
            self.count()

    def is_written(self, path, mode, flags):
        inside = isinstance(path, str) and os.path.abspath(path).startswith(f"{self.folder}/")
        return inside and flags & (os.O_WRONLY | os.O_RDWR) != 0

    def write_record(self, metrics, record):
        if metrics.file:
            self.count()
            self.count(lambda: os.write(metrics.file.fileno(), b'{"step": 1, "lo'))
        self.write(metrics, record)


def kill_self_at_fsync(call):
    """Kills this process at the given call of fsync, counted from 1."""
    calls, fsync = itertools.count(1), os.fsync
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == call else fsync(descriptor)
