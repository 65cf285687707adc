"""Work in a process of its own: a fresh memory, a store opened by nobody else."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from h3kv.core.errors import H3Error, InternalError
from h3kv.supervisor.launch import tie

Given = TypeVar("Given")
Found = TypeVar("Found")


def in_child(work: Callable[[Given], Found], given: Given) -> Found:
    """Call a function in a new process, with as many threads as here. It writes its progress to the same stderr,
    and ends with the thread that called this.

    Args:
        work: of a module, so that the new process finds it by name.
        given: its argument; like the result, something that can be pickled.

    Raises:
        H3Error: what the child raised.
        InternalError: the child ended without an answer.
    """
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_answer, args=(sender, work, given, torch.get_num_threads()), daemon=True)
    process.start()
    sender.close()
    try:
        is_well, outcome = receiver.recv()
    except EOFError as error:
        process.join()
        raise InternalError(f"a child process ended with exit code {process.exitcode}, without an answer") from error
    except BaseException:
        process.terminate()
        raise
    finally:
        receiver.close()
        process.join()
    if not is_well:
        kind, message, context = outcome
        raise _rebuilt(kind, message, context)
    found: Found = outcome
    return found


def tell(line: str) -> None:
    """Progress of a child."""
    print(line, file=sys.stderr, flush=True)


def _answer(sender: Connection, work: Callable[[Any], object], given: object, threads: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None, "spawned by in_child"
    tie(parent.pid)
    torch.set_num_threads(threads)
    try:
        sender.send((True, work(given)))
    except H3Error as error:
        # An error does not pickle by itself: its context is given by keywords.
        sender.send((False, (type(error), str(error), vars(error))))
    except Exception:
        traceback.print_exc()
        raise
    finally:
        sender.close()


def _rebuilt(kind: type[H3Error], message: str, context: Mapping[str, object]) -> H3Error:
    """The child's error, of its own class."""
    error = kind.__new__(kind, message)
    error.args = (message,)
    vars(error).update(context)
    return error
