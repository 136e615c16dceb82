"""The ClientApp: check the site's policy, pass the message to the site's worker, and return the worker's upload.

It imports neither torch nor transformers, because Flower starts a new process for every message.

The site's log has the full text of every error. The server learns only an error's type, because its text may quote data
or paths. It gets the reason only for refusals by the site's policy or ledger and for malformed messages. If a
worker ended, it also gets the cause, such as too little memory, but no numbers.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from logging import ERROR, INFO
from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore import log

from fedveil import errors
from fedveil.client_app import failure_reason, secure_round
from fedveil.client_app.instruction import ClientAssignment
from fedveil.client_app.policy import decisions
from fedveil.client_app.state.client_state import ClientStateStore
from fedveil.client_app.worker import connection
from fedveil.client_app.worker.owner import owner_of_this_process
from fedveil.client_app.worker.registry import WorkerDiedError
from fedveil.client_app.worker.worker_round import run_round_in_worker
from fedveil.errors import BudgetError, OutOfMemoryError, PolicyError, WireError, WorkerError
from fedveil.federation.secagg.schema import MOST_BYTES
from fedveil.records import process_exit
from fedveil.wire import chunking, header, statement_envelope

if TYPE_CHECKING:
    from fedveil.contract.task import TrainingProgress, Watch

app = ClientApp()

_PUBLIC = (BudgetError.__name__, PolicyError.__name__, WireError.__name__)  # when raised in the worker
_ENDED = f"{WorkerError.__name__}: the site's worker ended"
_RAISED = 2  # Flower's ErrorCode.CLIENT_APP_RAISED_EXCEPTION


@app.train()
def train_app(message: Message, context: Context) -> Message:
    """Run one client round."""
    started = time.monotonic()
    try:
        upload = _take_part(message, context)
    except Exception as error:
        log(ERROR, "this site's client round failed", exc_info=error)
        failure_reason.note_failure(*private_reason(error))
        return Message(Error(_RAISED, public_reason(error)), reply_to=message)
    log(INFO, "client round of %.1f s, upload of %s bytes", time.monotonic() - started, sum(map(len, upload)))
    return _reply(message, upload)


@app.query("secure")
def secure_(message: Message, context: Context) -> Message:
    """Answer a secure-aggregation request for a key, a signature or shares, without a worker."""
    try:
        record, assignment = _records(message, context)
        answer = _answered(record, assignment)
    except Exception as error:
        log(ERROR, "this site could not answer", exc_info=error)
        failure_reason.note_failure(*private_reason(error))
        return Message(Error(_RAISED, public_reason(error)), reply_to=message)
    return _reply(message, list(chunking.slice_message([answer])))


def _answered(record: ArrayRecord, assignment: ClientAssignment) -> bytes:
    down_bytes = sum(len(array.data) for array in record.values())
    decisions.check_run(assignment, decisions.VerifiedBundle.from_environment(), down_bytes, serves=False)
    order, asked = assignment.order, b"".join(_drained(record))
    asked = statement_envelope.unpack_statement(asked, order.round, "down", order.address.of_broadcast, MOST_BYTES)
    with ClientStateStore.open(assignment.site.state_dir, order.run, assignment.name).in_turn():
        decisions.check_round(assignment, sys.maxsize)  # the run may have been purged in the meantime
        answer = statement_envelope.pack_statement(
            secure_round.answer_secagg_request(assignment, asked), order.round, "up", order.address
        )
    decisions.check_upload(assignment, down_bytes, len(answer), None)
    return answer


def _reply(message: Message, parts: list[bytes]) -> Message:
    arrays = {chunking.slice_key(i): Array("uint8", (len(part),), chunking.STYPE, part) for i, part in enumerate(parts)}
    return Message(RecordDict({"fedveil": ArrayRecord(arrays)}), reply_to=message)


def _records(message: Message, context: Context) -> tuple[ArrayRecord, ClientAssignment]:
    try:
        record = message.content.array_records["fedveil"]
        order = message.content.config_records["order"]
    except KeyError as error:
        raise WireError(f"message: the record {error} is missing; a message needs fedveil and order") from None
    app_digest = decisions.VerifiedBundle.from_environment().digest
    assignment = ClientAssignment.from_instruction(
        order, context.run_config, context.node_config, context.run_id, app_digest
    )
    return record, assignment


def _take_part(message: Message, context: Context) -> list[bytes]:
    record, assignment = _records(message, context)
    down_bytes = sum(len(array.data) for array in record.values())
    decisions.check_run(assignment, decisions.VerifiedBundle.from_environment(), down_bytes)
    with ClientStateStore.open(assignment.site.state_dir, assignment.order.run, assignment.name).in_turn():
        decisions.count_round(assignment)
        try:
            upload = _trained(record, assignment)
        except Exception:
            decisions.open_replay_guard(assignment).give_back(assignment.order.round)
            raise
    upload_header = header.header_of_slices(upload)
    decisions.check_upload(
        assignment, down_bytes, sum(map(len, upload)), upload_header["num_examples"], upload_header["report"]
    )
    return upload


def _trained(record: ArrayRecord, assignment: ClientAssignment) -> list[bytes]:
    owner = owner_of_this_process() if assignment.config.client.worker else None
    if owner is None:
        return _in_this_process(_drained(record), assignment)
    return run_round_in_worker(_drained(record), assignment, owner)


def _in_this_process(message: Iterator[bytes], assignment: ClientAssignment) -> list[bytes]:
    """Run the client round in this process, because the run config requires it or this is the simulation engine."""
    # Imported here because a process that passes the message to a worker must not pay for importing torch.
    from fedveil.client_app.client_session import ClientSession

    with contextlib.closing(ClientSession()) as session:
        turn = session.run_round(lambda: b"".join(message), assignment, _until(assignment.order.seconds))
    return list(chunking.slice_message(chunking.drain_parts(turn.parts)))


def _until(seconds: float) -> Watch:
    """Return a watch that ends the client round at the first step after `seconds` have passed."""
    end = time.monotonic() + seconds

    def watch(step: TrainingProgress) -> None:
        if time.monotonic() > end:
            raise WorkerError(connection.deadline_reason(seconds))

    return watch


def _drained(record: ArrayRecord) -> Iterator[bytes]:
    """Yield the message's slices, removing each one from the record first."""
    for name in chunking.order_slices(list(record)):
        yield record.pop(name).data


def private_reason(error: Exception) -> tuple[str, str]:
    """Return an error's type and text for the site's own log; unexpected errors also name the traceback file."""
    if not isinstance(error, connection.ClientRoundError):
        return type(error).__name__, str(error)
    ours = error.trace is None or hasattr(errors, error.kind)
    return error.kind, str(error) if ours else f"{str(error)[:500]}; its traceback is in {error.trace}"


def public_reason(error: Exception) -> str:
    """Return the part of a site's error that the server may learn."""
    kind = error.kind if isinstance(error, connection.ClientRoundError) else type(error).__name__
    if isinstance(error, WorkerDiedError):
        return f"{_ENDED}: {error.cause}"
    if kind == OutOfMemoryError.__name__ or process_exit.is_out_of_memory(error):
        return f"{_ENDED}: {process_exit.ExitCause.MEMORY}"
    if isinstance(error, PolicyError | WireError) or kind in _PUBLIC:
        return f"{kind}: {error}"
    return f"{kind} at the site; see the site's log"
