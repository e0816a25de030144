"""What becomes of a command: an exit code and, from one rank, one line; never a hang, never a traceback for a user."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable

import torch
from transformers.utils.logging import disable_progress_bar

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.interrupt import Interrupt, Preempted, grace_seconds, listening_for_a_command
from gradiend_dist.distributed.launch import launched
from gradiend_dist.distributed.launcher import follow_the_launcher
from gradiend_dist.distributed.peers import PeerError, PeerLost, is_lost_peer
from gradiend_dist.errors import UserError, first_line, note_outcome, print_line


class Process:
    """One of the processes of a command."""

    def __init__(self, name: str, *, memory_remedy: str, kept: str) -> None:
        self.name = name
        """What its line starts with."""
        self.memory_remedy = memory_remedy
        """What to do when memory does not suffice."""
        self.kept = kept
        """What the same command goes on from after a stop that nothing was saved at."""
        self.comm = Comm()
        """Until the ranks have found each other, one of this process alone."""
        self.is_first = os.environ.get("RANK", "0") == "0"

    def set_up_logging(self) -> None:
        level = logging.INFO if self.is_first else logging.ERROR
        logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of torch and DeepSpeed
        logging.getLogger("httpx").setLevel(logging.WARNING)
        # What matters of its load report is an error of ours.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        if not torch.cuda.is_available():
            os.environ.setdefault(
                "DS_ACCELERATOR", "cpu"
            )  # DeepSpeed, which transformers imports, warns on stdout else
        if not sys.stderr.isatty():
            disable_progress_bar()  # of transformers; in a log file a bar is noise, as tqdm itself knows of ours

    def refuse(self, error: UserError) -> int:
        """Wrong arguments: every rank reads the same line, so the first one tells."""
        return self.end(2, f"error: {error}" if self.is_first else None, "refused")

    def run(self, work: Callable[[Interrupt], int], timeout: float) -> int:
        """Do the work among the ranks that were launched; a wrong input is one line and exit code 2, wherever found."""
        follow_the_launcher()  # where a script of a user's has not
        with listening_for_a_command(self._last_words) as interrupt:
            code, words, outcome = self._attempt(work, interrupt, timeout)
        return self.end(code, words, outcome)

    def _last_words(self, stop: Preempted) -> None:
        """Of a process that nobody could stop in order. Called in another thread than the one that works."""
        code, words, outcome = self._words_on_preemption(stop, self.comm)
        self.tell(code, words, outcome)

    def _attempt(
        self, work: Callable[[Interrupt], int], interrupt: Interrupt, timeout: float
    ) -> tuple[int, str | None, str]:
        """Whatever happens becomes an exit code, on one rank one line, and one word for the script that started it.

        Every rank runs its own.
        """
        try:
            self.comm = comm = launched(timeout).comm
            interrupt.grace = grace_seconds()
            code = work(interrupt)
            interrupt.ignore()  # the result is there: what comes now is too late to ask for another one
            comm.leave()
            return code, None, "finished" if comm.is_first else ""
        except UserError as error:
            interrupt.ignore()
            return 2, f"error: {error}" if self._may_report() else None, "refused"
        except PeerError:
            interrupt.ignore()
            return 1, None, ""
        except PeerLost as lost:
            interrupt.ignore()
            return 1, self.comm.peers.describe_loss(lost), "lost"
        except Preempted as stop:
            interrupt.ignore()
            return self._words_on_preemption(stop, self.comm)
        except (torch.OutOfMemoryError, MemoryError) as error:
            interrupt.ignore()
            words = f"out of memory ({first_line(error)}): {self.memory_remedy}"
            return 1, words if self._may_report() else None, "failed"
        except RuntimeError as error:
            if self.comm.is_alone or not is_lost_peer(error):
                self.comm.peers.may_report()
                raise
            interrupt.ignore()
            return 1, self.comm.peers.describe_loss(PeerLost("exchanging weights or gradients")), "lost"
        except BaseException:
            self.comm.peers.may_report()  # the traceback tells; the other ranks need not
            raise

    def _words_on_preemption(self, stop: Preempted, comm: Comm) -> tuple[int, str | None, str]:
        """Exit code and message: 0 where the state is saved and a scheduler asked for the stop."""
        name = signal.Signals(stop.signum).name
        by_user = stop.signum == signal.SIGINT
        if stop.step is None:
            words = f"{name}: {self.kept}"
            return stop.exit_code, words if self._may_report() else None, "stopped"
        comm.leave()
        words = f"{name}: the state after step {stop.step} is saved; the same command goes on from there"
        return (130 if by_user else 0), words if comm.is_first else None, "stopped"

    def _may_report(self) -> bool:
        """Is this the rank that speaks? The first that has something to say; of one that all have while they look for
        each other, rank 0."""
        if self.comm.is_alone and not self.is_first and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return False
        return self.comm.peers.may_report()

    def end(self, code: int, words: str | None, outcome: str) -> int:
        """One line from one rank. A rank that fails does not wait for the others: they may not answer any more."""
        self.tell(code, words, outcome)
        if torch.distributed.is_initialized():
            if code:
                sys.stdout.flush()
                os._exit(code)  # threads of a broken group would hold the process for their timeout
            torch.distributed.destroy_process_group()
        return code

    def tell(self, code: int, words: str | None, outcome: str) -> None:
        if words is not None:
            print_line(self.name, words)
        if words is not None or outcome == "finished":
            note_outcome(code, outcome)
